// Linear states on a GPU: 32 heads of 128 x 128 in f32, bf16 inputs. Decode: one token for each of a batch of sequences
// in one CUDA graph, at several places of the block of 64 and where a half of it ends; prefill: whole prompts in one
// call. Prints medians of microseconds.
//   state_cuda_bench [DEVICE]
//   state_cuda_bench --ask [DEVICE]   answers lines like "decode kda 64" and "prefill gdn 1 4096" with microseconds, so
//                                     that the kernels of others can be timed in turn (state_against_fla.py)

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "bench/kernels_cuda/cuda_bench.h"
#include "kernels/cuda/rows/row_ops.h"
#include "kernels/cuda/state/cuda_state.h"

namespace {

using namespace dovetail;
using namespace dovetail::kernels;
using namespace dovetail::kernels::cuda;

constexpr int kHeads = 32, kDim = 128, kRuns = 21;
constexpr double kWarmUpMs = 20;  // until the clocks are up

using bench::Must;

struct Family {
  const char* name;
  DecayForm decay;
  StateUpdate update;
  bool token_decay;
};
constexpr Family kFamilies[] = {
    {"lightning", DecayForm::kScalar, StateUpdate::kAdd, false},
    {"simple", DecayForm::kScalar, StateUpdate::kAdd, true},
    {"gdn", DecayForm::kScalar, StateUpdate::kDelta, true},
    {"kda", DecayForm::kVector, StateUpdate::kDelta, true},
};

class Bench {
 public:
  explicit Bench(CudaDevice& device) : device_(device), stream_(Must(device.CreateCudaStream())) {}

  void Copy() {
    const size_t bytes = size_t{1} << 30;
    const auto a = Must(device_.Allocate(bytes)), b = Must(device_.Allocate(bytes));
    const double us = Median([&] { Must(stream_->Copy(b->data(), a->data(), bytes)); });
    copy_ = 2 * static_cast<double>(bytes) / us * 1e-6;
    std::printf("copy limit %.2f TB/s\n", copy_);
  }

  // One token each, at place t of the block.
  double Decode(const Family& family, int batch, int t) {
    Prepare(family, batch, 1, 64 * 4 + t, /*all_kept=*/true);
    return Graphed([&] { Must(AppendStates(*stream_, launch_)); });
  }
  double Prefill(const Family& family, int batch, int tokens) {
    Prepare(family, batch, tokens, 0, /*all_kept=*/false);
    StateLaunch launch = launch_;
    const size_t bytes = StateWorkspaceBytes(launch, size_t{512} << 20);
    if (workspace_ == nullptr || workspace_->size_bytes() < bytes) workspace_ = Must(device_.Allocate(bytes));
    return Graphed([&] { Must(AppendStatesInChunks(*stream_, launch, {workspace_->data(), bytes})); });
  }
  double copy() const { return copy_; }

 private:
  template <typename Work>
  double Median(Work&& work) {
    auto begin = Must(device_.CreateEvent(true)), end = Must(device_.CreateEvent(true));
    std::vector<double> times;
    for (double warm = 0; times.size() < kRuns;) {
      Must(stream_->Record(begin));
      work();
      Must(stream_->Record(end));
      Must(end.Synchronize());
      const double ms = Must(end.MillisecondsSince(begin));
      if (warm >= kWarmUpMs) times.push_back(1e3 * ms);
      warm += ms;
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }
  template <typename Work>
  double Graphed(Work&& work) {
    work();
    Must(stream_->SynchronizeStatus());
    Must(stream_->BeginCapture());
    work();
    const CudaGraph graph = Must(stream_->EndCapture());
    return Median([&] { Must(stream_->Launch(graph)); });
  }

  template <typename T>
  std::unique_ptr<Buffer> Upload(const std::vector<T>& values) {
    auto buffer = Must(device_.Allocate(values.size() * sizeof(T)));
    Must(stream_->Copy(buffer->data(), values.data(), values.size() * sizeof(T)));
    Must(stream_->SynchronizeStatus());
    return buffer;
  }
  std::unique_ptr<Buffer> Random(WireType type, int64_t count, float range) {
    auto buffer = Must(device_.Allocate(count * (type == WireType::kF32 ? 4 : 2)));
    Must(FillRandom(*stream_, {.out = buffer->data(), .type = type, .range = range, .seed = 5, .count = count}));
    return buffer;
  }

  // Sequences that stand at `first` and get `tokens` more. Of prompts only the last block is kept.
  void Prepare(const Family& family, int batch, int tokens, int64_t first, bool all_kept) {
    const LinearStateShape shape{kDim, kDim, family.decay, family.update, DType::kF32};
    const size_t block_bytes = LinearStateLayout(shape).bytes();
    launch_ = Must(StateLaunchFor(shape, block_bytes, WireType::kBF16));
    launch_.token_decay = family.token_decay;
    launch_.token_rate = family.update == StateUpdate::kDelta;
    launch_.gates = (family.token_decay ? (launch_.vector_decay ? kDim : 1) : 0) + launch_.token_rate;
    launch_.heads = launch_.model_heads = kHeads;
    launch_.unit_count = batch * kHeads;
    launch_.even = 1;
    launch_.step = static_cast<int64_t>(block_bytes);
    const int64_t before = std::max<int64_t>(0, first / 64 - 1), last = (first + tokens - 1) / 64;
    const int64_t held = all_kept ? last - before + 1 : 1;
    const size_t arena_bytes = batch * held * kHeads * block_bytes;
    if (arena_ == nullptr || arena_->size_bytes() != arena_bytes) {
      arena_.reset();
      arena_ = Random(WireType::kBF16, static_cast<int64_t>(arena_bytes / 2), 0.01f);
    }
    const int64_t rows = int64_t{batch} * tokens * kHeads;
    query_ = Random(WireType::kBF16, rows * kDim, 0.15f);
    const int64_t vectors = rows * kDim * 2 * 2;
    key_value_ = Random(WireType::kBF16, (vectors + rows * launch_.gates * 4) / 2, 0.15f);
    const int64_t own = std::max(1, launch_.gates);
    std::vector<float> gates(std::min<int64_t>(rows * launch_.gates, (1 << 22) / own * own));
    for (size_t i = 0; i < gates.size(); ++i) {  // logarithms of decays, and a positive rate behind them
      const bool rate = launch_.token_rate != 0 && static_cast<int64_t>(i) % own == own - 1;
      gates[i] = static_cast<float>(i * 2654435761u % 1000) * (rate ? 1e-3f : -1e-3f);
    }
    for (int64_t at = 0; at < rows * launch_.gates; at += static_cast<int64_t>(gates.size()))
      Must(stream_->Copy(key_value_->data() + vectors + at * 4, gates.data(),
                         4 * std::min<int64_t>(gates.size(), rows * launch_.gates - at)));
    out_ = Must(device_.Allocate(rows * kDim * 2));
    log_decay_ = Upload(std::vector<float>(kHeads, -0.05f));
    std::vector<StateItem> items(batch);
    std::vector<const std::byte*> blocks;
    for (int b = 0; b < batch; ++b) {
      StateItem& item = items[b];
      const int64_t row = int64_t{b} * tokens * kHeads;
      item.query_offset = item.key_offset = item.out_offset = row * kDim * 2;
      item.value_offset = (rows + row) * kDim * 2;
      item.gate_offset = vectors + row * launch_.gates * 4;
      item.rows = tokens;
      item.heads = kHeads;
      item.first_position = first;
      item.first_block = before;
      item.table = static_cast<int64_t>(blocks.size());
      for (int64_t block = before; block <= last; ++block) {
        const int64_t at = all_kept ? block - before : 0;
        const bool kept = all_kept || block == last;
        blocks.push_back(kept ? arena_->data() + (b * held + at) * kHeads * block_bytes : nullptr);
      }
    }
    items_ = Upload(items);
    table_ = Upload(blocks);
    launch_.items = reinterpret_cast<const StateItem*>(items_->data());
    launch_.blocks = reinterpret_cast<const std::byte* const*>(table_->data());
    launch_.log_decay = reinterpret_cast<const float*>(log_decay_->data());
    launch_.query = query_->data();
    launch_.key_value = key_value_->data();
    launch_.out = out_->data();
    launch_.chunk_end = static_cast<int32_t>(last - first / 64 + 1);
  }

  CudaDevice& device_;
  const std::unique_ptr<CudaStream> stream_;
  double copy_ = 0;
  StateLaunch launch_;
  std::unique_ptr<Buffer> arena_, query_, key_value_, out_, log_decay_, items_, table_, workspace_;
};

struct DecodeTimes {
  std::vector<double> at;  // places in the block
  double end = 0, mean = 0;
};
// A block has two spans. The last token of its first one stands for both: it can be repeated as it is, while behind the
// block's last token S midway is gone.
constexpr int kPlaces[] = {0, 8, 16, 24, 30, 32, 40, 48, 56, 62};
DecodeTimes TimeDecode(Bench& bench, const Family& family, int batch) {
  DecodeTimes times;
  for (const int t : kPlaces) times.at.push_back(bench.Decode(family, batch, t));
  const double sum = std::accumulate(times.at.begin(), times.at.end(), 0.0);
  times.end = bench.Decode(family, batch, 31);
  times.mean = (62 * sum / static_cast<double>(times.at.size()) + 2 * times.end) / 64;
  return times;
}

void MeasureDecode(Bench& bench) {
  std::printf("decode, us: mean over the block; at 0, 30 and 62 tokens; where a half of it ends\n");
  for (const int batch : {1, 4, 16, 64, 256}) {
    for (const Family& family : kFamilies) {
      const auto [at, end, mean] = TimeDecode(bench, family, batch);
      // What reading and writing S once would move, as peers do it.
      const double bytes = 2.0 * batch * kHeads * kDim * kDim * 4;
      std::printf("decode  %-9s B%4d %8.1f us  (%.1f %.1f %.1f; %.1f)  %.3f of copy, had S been written\n", family.name,
                  batch, mean, at[0], at[4], at[9], end, bytes / mean * 1e-6 / bench.copy());
    }
  }
}

void MeasurePrefill(Bench& bench) {
  for (const auto& [batch, tokens] : {std::pair{1, 4096}, {1, 16384}, {1, 65536}, {8, 4096}}) {
    for (const Family& family : kFamilies) {
      const double us = bench.Prefill(family, batch, tokens);
      const double rows = static_cast<double>(batch) * tokens * kHeads;
      const double bytes = rows * kDim * (4 * 2 + (family.decay == DecayForm::kVector ? 4 : 0));
      std::printf("prefill %-9s B%d T%6d %9.1f us  %.3f of copy\n", family.name, batch, tokens, us,
                  bytes / us * 1e-6 / bench.copy());
    }
  }
}

// Lines until the end of the input: an answer each.
void Answer(Bench& bench) {
  char line[128];
  while (std::fgets(line, sizeof(line), stdin) != nullptr) {
    char what[32] = "", name[32] = "";
    int batch = 1, tokens = 1;
    std::sscanf(line, "%31s %31s %d %d", what, name, &batch, &tokens);
    const auto family = std::find_if(std::begin(kFamilies), std::end(kFamilies),
                                     [&](const Family& f) { return std::strcmp(f.name, name) == 0; });
    if (std::strcmp(what, "copy") == 0) {
      bench.Copy();
    } else if (family == std::end(kFamilies) || batch < 1 || tokens < 1) {
      std::printf("unknown\n");
    } else if (std::strcmp(what, "decode") == 0) {
      const DecodeTimes times = TimeDecode(bench, *family, batch);
      std::printf("%.2f %.2f %.2f %.2f %.2f\n", times.mean, times.at[0], times.at[4], times.at[9], times.end);
    } else {
      std::printf("%.2f\n", bench.Prefill(*family, batch, tokens));
    }
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const bool ask = argc > 1 && std::strcmp(argv[1], "--ask") == 0;
  const int index = argc > 1 + ask ? std::atoi(argv[1 + ask]) : 0;
  auto device = Must(CudaDevice::Create(Must(CudaLibrary::Open()), {.index = index}));
  std::printf("%s\n", device->info().name);
  std::fflush(stdout);
  Bench bench(*device);
  if (ask) {
    Answer(bench);
    return 0;
  }
  bench.Copy();
  MeasureDecode(bench);
  StateLaunch wide;
  wide.key_dim = kDim;
  if (StatesRunInChunks(*device, wide)) MeasurePrefill(bench);
}
