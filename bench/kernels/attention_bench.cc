// CPU attention, append and sampling. Counters: KV bytes per second for decode (the DRAM limit is
// in docs), FLOP/s for prefill.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "benchmark/benchmark.h"
#include "kernels/aligned_buffer.h"
#include "kernels/cpu/isa.h"
#include "kernels/kv_append.h"
#include "kernels/merge_partials.h"
#include "kernels/paged_attention.h"
#include "kernels/sampling.h"

namespace dovetail::kernels {
namespace {

// One attention op over `batch` sequences of `context` tokens, blocks scattered over one arena as
// after long service.
class Workload {
 public:
  Workload(const AttentionShape& shape, int kv_heads, int batch, int64_t context, int rows, int threads, Isa isa)
      : shape_(shape), pool_({.threads = threads}), context_{&pool_, &SelectOps(isa)} {
    const auto segments = static_cast<int32_t>((context + kSegmentTokens - 1) / kSegmentTokens);
    const size_t count = static_cast<size_t>(batch) * kv_heads * segments, bytes = shape.layout().bytes();
    arena_ = AlignedBuffer::Create(count * bytes).value();
    Fill(arena_.bytes());
    for (size_t i = 0; i < count; ++i) blocks_.push_back(arena_.data() + i * bytes);
    std::mt19937_64 random(1);
    std::shuffle(blocks_.begin(), blocks_.end(), random);
    const size_t q_row = static_cast<size_t>(kv_heads) * shape.group * shape.key_dim * SizeOf(shape.dtype);
    q_.resize(q_row * batch * rows);
    o_.resize(static_cast<size_t>(kv_heads) * shape.group * shape.value_dim * SizeOf(shape.dtype) * batch * rows);
    Fill(q_);
    for (int b = 0; b < batch; ++b) {
      items_.push_back({.q = q_.data() + b * rows * q_row,
                        .q_rows = rows,
                        .kv_heads = kv_heads,
                        .first_position = context - rows,
                        .token_begin = 0,
                        .token_end = context,
                        .blocks = {.blocks = blocks_.data() + static_cast<size_t>(b) * kv_heads * segments,
                                   .head_step = segments,
                                   .segments = segments},
                        .o = o_.data() + o_.size() / batch * b});
    }
    const size_t kv_row = static_cast<size_t>(kv_heads) * shape.key_dim * SizeOf(shape.dtype);
    kv_.resize(kv_row * batch);
    Fill(kv_);
    for (int b = 0; b < batch; ++b)
      appends_.push_back({.k = kv_.data() + b * kv_row,
                          .v = kv_.data() + b * kv_row,
                          .rows = 1,
                          .kv_heads = kv_heads,
                          .first_position = context - 1,
                          .blocks = items_[b].blocks});
    const AttentionLimits limits{
        .items = batch, .rows = int64_t{batch} * rows, .kv_heads = kv_heads, .tokens = context, .threads = threads};
    scratch_ = AlignedBuffer::Create(PagedAttentionScratchBytes(shape, limits)).value();
    kv_bytes_ = static_cast<double>(count) * bytes;
  }

  void Step() {
    auto op = PagedAttention::Begin(context_, shape_, items_, scratch_.bytes()).value();
    op.AttendRest();
    op.Finish();
  }
  // As an attention worker does it: q comes before k and v, which are appended.
  void StepOfWorker() {
    auto op = PagedAttention::Begin(context_, shape_, items_, scratch_.bytes()).value();
    op.AttendComplete();
    (void)KvAppend(context_, shape_.layout(), appends_);
    op.AttendRest();
    op.Finish();
  }
  double kv_bytes() const { return kv_bytes_; }

 private:
  void Fill(std::span<std::byte> bytes) const {
    std::mt19937_64 random(2);
    const size_t element = SizeOf(shape_.dtype);
    for (size_t i = 0; i + element <= bytes.size(); i += element) {
      KvBlockLayout::StoreElement(shape_.dtype, static_cast<float>(random() % 2001) * 1e-3f - 1, bytes.data() + i);
    }
  }

  AttentionShape shape_;
  ThreadPool pool_;
  OpContext context_;
  AlignedBuffer arena_, scratch_;
  std::vector<std::byte*> blocks_;
  std::vector<std::byte> q_, o_, kv_;
  std::vector<AttentionItem> items_;
  std::vector<KvAppendItem> appends_;
  double kv_bytes_ = 0;
};

Isa BestIsa() { return DetectIsa().value_or(Isa::kAvx2); }

AttentionShape Shape(int group, int dim, DType dtype) {
  return {.group = group,
          .key_dim = dim,
          .value_dim = dim,
          .scale = 1.0f / std::sqrt(static_cast<float>(dim)),
          .dtype = dtype};
}

// Arguments: group, KV heads, head dim, batch, context, threads, element type.
void BM_Decode(benchmark::State& state) {
  const auto dtype = static_cast<DType>(state.range(6));
  Workload work(Shape(state.range(0), state.range(2), dtype), state.range(1), state.range(3), state.range(4), 1,
                state.range(5), BestIsa());
  work.Step();  // touches the scratch
  for (auto _ : state) work.Step();
  state.counters["kv_B/s"] = benchmark::Counter(work.kv_bytes() * state.iterations(), benchmark::Counter::kIsRate);
}
BENCHMARK(BM_Decode)
    ->Args({4, 8, 128, 1, 256, 1, 2})
    ->Args({4, 8, 128, 1, 4096, 1, 2})
    ->Args({4, 8, 128, 1, 16384, 1, 2})
    ->Args({4, 8, 128, 1, 16384, 2, 2})
    ->Args({4, 8, 128, 16, 1024, 2, 2})
    ->Args({4, 8, 128, 1, 16384, 1, 1})
    ->Args({4, 8, 128, 1, 8192, 1, 0})
    ->Args({1, 8, 128, 1, 16384, 1, 2})
    ->Args({3, 3, 64, 1, 256, 1, 2})
    ->Args({3, 3, 64, 1, 256, 2, 2})
    ->Args({3, 3, 64, 1, 8192, 1, 2})
    ->Args({3, 3, 64, 1, 8192, 2, 2})
    ->Args({3, 3, 64, 64, 192, 2, 2})
    ->UseRealTime();

// One op of a step of decodes, bf16, head dim 128, all cores. Arguments: group, KV heads, batch, context.
void BM_DecodeStep(benchmark::State& state) {
  Workload work(Shape(state.range(0), 128, DType::kBF16), state.range(1), state.range(2), state.range(3), 1,
                UsableCores(), BestIsa());
  work.StepOfWorker();  // touches the scratch
  for (auto _ : state) work.StepOfWorker();
  state.counters["kv_B/s"] = benchmark::Counter(work.kv_bytes() * state.iterations(), benchmark::Counter::kIsRate);
}
BENCHMARK(BM_DecodeStep)
    ->Args({4, 8, 8, 256})
    ->Args({4, 8, 32, 512})
    ->Args({4, 8, 32, 4096})
    ->Args({4, 8, 1, 65536})
    ->Args({8, 4, 32, 4096})
    ->UseRealTime();

// Arguments: group, KV heads, head dim, rows of the chunk, context after it, threads, element type,
// ISA (0 AVX2, 1 AVX-512).
void BM_PrefillChunk(benchmark::State& state) {
  const int group = state.range(0), kv_heads = state.range(1), dim = state.range(2), rows = state.range(3);
  if (static_cast<Isa>(state.range(7)) > BestIsa()) return state.SkipWithError("this CPU has no AVX-512");
  Workload work(Shape(group, dim, static_cast<DType>(state.range(6))), kv_heads, 1, state.range(4), rows,
                state.range(5), static_cast<Isa>(state.range(7)));
  work.Step();  // touches the scratch
  for (auto _ : state) work.Step();
  const double pairs = rows * (state.range(4) - (rows - 1) / 2.0);
  state.counters["FLOP/s"] =
      benchmark::Counter(4.0 * pairs * group * kv_heads * dim * state.iterations(), benchmark::Counter::kIsRate);
}
BENCHMARK(BM_PrefillChunk)
    ->Args({3, 3, 64, 512, 512, 1, 2, 1})
    ->Args({3, 3, 64, 512, 512, 2, 2, 1})
    ->Args({3, 3, 64, 512, 2048, 1, 2, 1})
    ->Args({3, 3, 64, 512, 2048, 2, 2, 1})
    ->Args({4, 8, 128, 512, 2048, 1, 2, 1})
    ->Args({4, 8, 128, 512, 2048, 1, 1, 1})
    ->Args({4, 8, 128, 512, 2048, 1, 0, 1})
    ->Args({4, 8, 128, 512, 2048, 1, 2, 0})
    ->UseRealTime();

void BM_KvAppend(benchmark::State& state) {
  const KvBlockLayout layout{.key_dim = 128, .value_dim = 128, .dtype = DType::kBF16};
  const int rows = state.range(0), heads = 8;
  ThreadPool pool({.threads = 1});
  AlignedBuffer arena = AlignedBuffer::Create(size_t{16} * heads * layout.bytes()).value();
  std::vector<std::byte*> blocks;
  for (int i = 0; i < 16 * heads; ++i) blocks.push_back(arena.data() + i * layout.bytes());
  std::vector<std::byte> kv(static_cast<size_t>(rows) * heads * 256);
  const KvAppendItem item{.k = kv.data(),
                          .v = kv.data(),
                          .rows = rows,
                          .kv_heads = heads,
                          .first_position = 100,
                          .blocks = {.blocks = blocks.data(), .head_step = 16, .segments = 16}};
  for (auto _ : state) benchmark::DoNotOptimize(KvAppend({&pool, &SelectOps(BestIsa())}, layout, {&item, 1}).ok());
  state.SetItemsProcessed(state.iterations() * rows);
}
BENCHMARK(BM_KvAppend)->Arg(1)->Arg(512);

// Arguments: vocabulary, kind (0 greedy, 1 plain draw, 2 top_k 40, 3 top_p 0.95, 4 both and 20
// logprobs).
void BM_SampleRow(benchmark::State& state) {
  const int n = state.range(0);
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal(0, 2.5f);
  std::vector<float> logits(n);
  for (float& x : logits) x = normal(random);
  AlignedBuffer scratch = AlignedBuffer::Create(SamplingScratchBytes(n)).value();
  SamplingParams p{.seed = 1};
  const int kind = state.range(1);
  if (kind == 0) p.temperature = 0;
  if (kind == 2 || kind == 4) p.top_k = 40;
  if (kind == 3 || kind == 4) p.top_p = 0.95f;
  if (kind == 4) p.logprobs = 20;
  int64_t position = 0;
  for (auto _ : state)
    benchmark::DoNotOptimize(SampleRow(SelectOps(BestIsa()), logits, p, position++, scratch.bytes())->token);
}
BENCHMARK(BM_SampleRow)->ArgsProduct({{49152, 262144}, {0, 1, 2, 3, 4}});

}  // namespace
}  // namespace dovetail::kernels

BENCHMARK_MAIN();
