// What the first append to KV memory costs: to fresh memory, to memory that PagesAhead has taken before, and to memory
// that was written before. In turn; medians. Arguments: MiB of blocks, rounds, `small` for pages of 4 KiB.
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "kernels/aligned_buffer.h"
#include "kernels/cpu/isa.h"
#include "kernels/kv_append.h"
#include "kernels/pages_ahead.h"

namespace dovetail::kernels {
namespace {

constexpr int kDim = 128;

double SecondsSince(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// A prompt's rows, block by block.
double AppendSeconds(AlignedBuffer& arena, const OpContext& context) {
  const KvBlockLayout layout{kDim, kDim, DType::kBF16};
  static const std::vector<BF16> rows(size_t{kSegmentTokens} * kDim, ToBF16(0.5f));
  const auto begin = std::chrono::steady_clock::now();
  for (size_t at = 0; at + layout.bytes() <= arena.size_bytes(); at += layout.bytes()) {
    std::byte* block = arena.data() + at;
    KvAppendItem item{.k = rows.data(), .v = rows.data(), .rows = kSegmentTokens, .kv_heads = 1};
    item.blocks = {.blocks = &block, .head_step = 1, .segments = 1};
    if (!KvAppend(context, layout, {&item, 1}).ok()) std::abort();
  }
  return SecondsSince(begin);
}

double Median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

void Measure(size_t bytes, int rounds) {
  ThreadPool pool({.threads = 1});
  const OpContext context{&pool, &SelectOps(DetectIsa().value_or(Isa::kAvx2))};
  std::vector<double> fresh, again, ahead, taking;
  for (int round = 0; round < rounds; ++round) {
    {
      AlignedBuffer arena = AlignedBuffer::Create(bytes).value();
      fresh.push_back(AppendSeconds(arena, context));
      again.push_back(AppendSeconds(arena, context));
    }
    AlignedBuffer arena = AlignedBuffer::Create(bytes).value();
    const auto begin = std::chrono::steady_clock::now();
    const PagesAhead pages(arena.bytes(), bytes);
    while (pages.taken() < bytes && SecondsSince(begin) < 60) std::this_thread::yield();
    taking.push_back(SecondsSince(begin));
    ahead.push_back(AppendSeconds(arena, context));
  }
  const double gb = static_cast<double>(bytes) * 1e-9;
  std::printf("| fresh | taken ahead | written before | taking alone |\n|---|---|---|---|\n");
  std::printf("| %.2f GB/s | %.2f GB/s | %.2f GB/s | %.2f GB/s |\n", gb / Median(fresh), gb / Median(ahead),
              gb / Median(again), gb / Median(taking));
  std::printf("the very first round, on memory that the machine may never have used: fresh %.2f GB/s\n", gb / fresh[0]);
}

}  // namespace
}  // namespace dovetail::kernels

int main(int argc, char** argv) {
  const size_t mib = argc > 1 ? static_cast<size_t>(std::atoll(argv[1])) : 256;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 7;
  if (argc > 3 && std::strcmp(argv[3], "small") == 0) prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
  dovetail::kernels::Measure(mib << 20, rounds);
  return 0;
}
