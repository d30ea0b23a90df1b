// Decode attention over K and V of bf16, E4M3 and int8, in turn: medians of each and of the ratios of neighbours.
// Arguments: threads, context, KV heads, group, head dim, rounds.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "bench/kernels/peaks.h"
#include "kernels/aligned_buffer.h"
#include "kernels/cpu/isa.h"
#include "kernels/kv_append.h"
#include "kernels/paged_attention.h"

namespace dovetail::kernels {
namespace {

struct Setting {
  int threads = 1;
  int64_t context = 16384;
  int kv_heads = 8, group = 4, dim = 128, rounds = 21;
};

// One sequence, one op, blocks scattered over one arena as after long service.
class Decode {
 public:
  Decode(const Setting& setting, KvStorage storage, const OpContext& context) : context_(context) {
    shape_ = {.group = setting.group,
              .key_dim = setting.dim,
              .value_dim = setting.dim,
              .scale = 1.0f / std::sqrt(static_cast<float>(setting.dim)),
              .storage = storage};
    const auto segments = static_cast<int32_t>((setting.context + kSegmentTokens - 1) / kSegmentTokens);
    const size_t count = static_cast<size_t>(setting.kv_heads) * segments, bytes = shape_.layout().bytes();
    arena_ = AlignedBuffer::Create(count * bytes).value();
    for (size_t i = 0; i < count; ++i) blocks_.push_back(arena_.data() + i * bytes);
    std::mt19937_64 random(1);
    const std::vector<BF16> rows = RandomRow(size_t{kSegmentTokens} * setting.dim, random);
    KvAppendItem item{.k = rows.data(), .v = rows.data(), .rows = kSegmentTokens, .kv_heads = 1};
    item.blocks = {.blocks = blocks_.data(), .head_step = 1, .segments = 1};
    (void)KvAppend(context_, shape_.layout(), {&item, 1});
    for (size_t i = 1; i < count; ++i) std::memcpy(blocks_[i], blocks_[0], bytes);
    std::shuffle(blocks_.begin(), blocks_.end(), random);
    q_ = RandomRow(static_cast<size_t>(setting.kv_heads) * setting.group * setting.dim, random);
    o_ = q_;
    item_ = {.q = q_.data(),
             .q_rows = 1,
             .kv_heads = setting.kv_heads,
             .first_position = setting.context - 1,
             .token_end = setting.context,
             .blocks = {.blocks = blocks_.data(), .head_step = segments, .segments = segments},
             .o = o_.data()};
    scratch_ = AlignedBuffer::Create(PagedAttentionScratchBytes(shape_, {.items = 1,
                                                                         .rows = 1,
                                                                         .kv_heads = setting.kv_heads,
                                                                         .tokens = setting.context,
                                                                         .threads = setting.threads}))
                   .value();
    bytes_ = static_cast<double>(count * bytes);
    (void)Seconds();  // touches the scratch
  }

  double Seconds() {
    const auto begin = std::chrono::steady_clock::now();
    auto op = PagedAttention::Begin(context_, shape_, {&item_, 1}, scratch_.bytes()).value();
    op.AttendRest();
    op.Finish();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  double bytes() const { return bytes_; }

 private:
  static std::vector<BF16> RandomRow(size_t n, std::mt19937_64& random) {
    std::vector<BF16> row(n);
    for (BF16& x : row) x = ToBF16(static_cast<float>(random() % 2001) * 1e-3f - 1);
    return row;
  }

  OpContext context_;
  AttentionShape shape_;
  AlignedBuffer arena_, scratch_;
  std::vector<std::byte*> blocks_;
  std::vector<BF16> q_, o_;
  AttentionItem item_;
  double bytes_ = 0;
};

double Median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}
double Least(const std::vector<double>& x) { return *std::min_element(x.begin(), x.end()); }

void Measure(const Setting& setting) {
  ThreadPool pool({.threads = setting.threads});
  const OpContext context{&pool, &SelectOps(DetectIsa().value_or(Isa::kAvx2))};
  constexpr KvStorage kStorages[] = {KvStorage::kAsSent, KvStorage::kE4M3, KvStorage::kInt8};
  std::vector<std::unique_ptr<Decode>> decodes;
  for (const KvStorage storage : kStorages) decodes.push_back(std::make_unique<Decode>(setting, storage, context));
  std::vector<double> seconds[3], ratio[3], read;
  for (int round = 0; round < setting.rounds; ++round) {
    for (int i = 0; i < 3; ++i) seconds[i].push_back(decodes[i]->Seconds());
    for (int i = 0; i < 3; ++i) ratio[i].push_back(seconds[0].back() / seconds[i].back());
    if (round % (setting.rounds / 3 + 1) == 0) read.push_back(bench::MeasurePeaks(pool).read_gb_per_s);
  }
  const double most = *std::max_element(read.begin(), read.end());
  std::printf("| %d | | | | a plain read | | %.1f | 100%% | | |\n", setting.threads, most);
  for (int i = 0; i < 3; ++i) {
    const double rate = decodes[i]->bytes() / Median(seconds[i]) * 1e-9;
    const double best = decodes[i]->bytes() / Least(seconds[i]) * 1e-9;
    std::printf("| %d | %d | %lld | %d | %s | %.0f | %.1f | %.0f%% | %.2f | %.2f |\n", setting.threads, setting.group,
                static_cast<long long>(setting.context), setting.dim,
                i == 0   ? "bf16"
                : i == 1 ? "E4M3"
                         : "int8",
                Median(seconds[i]) * 1e6, rate, 100 * best / most, Median(ratio[i]),
                Least(seconds[0]) / Least(seconds[i]));
  }
  std::fflush(stdout);
}

}  // namespace
}  // namespace dovetail::kernels

int main(int argc, char** argv) {
  dovetail::kernels::Setting setting;
  const auto argument = [&](int i, auto& value) {
    if (i < argc) value = static_cast<std::decay_t<decltype(value)>>(std::atoll(argv[i]));
  };
  std::printf(
      "| threads | query heads a KV head | tokens | head dim | K and V | µs (median) | GB/s of KV (median) | best over "
      "the best read rate | faster than bf16 (median) | of the best times "
      "|\n|---|---|---|---|---|---|---|---|---|---|\n");
  if (argc > 1) {
    argument(1, setting.threads), argument(2, setting.context), argument(3, setting.kv_heads);
    argument(4, setting.group), argument(5, setting.dim), argument(6, setting.rounds);
    dovetail::kernels::Measure(setting);
    return 0;
  }
  for (const int threads : {1, 2}) {
    for (const int group : {4, 8}) {
      for (const int64_t blocks : {4096, 8192}) {  // 134 and 268 MB of bf16
        setting.threads = threads;
        setting.group = group;
        setting.kv_heads = 32 / group;
        setting.context = blocks * dovetail::kernels::kSegmentTokens / setting.kv_heads;
        dovetail::kernels::Measure(setting);
      }
    }
  }
  return 0;
}
