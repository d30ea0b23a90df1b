#include "bench/kernels/peaks.h"

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <chrono>

#include "kernels/aligned_buffer.h"
#include "kernels/cpu/isa.h"

namespace dovetail::bench {
namespace {

using kernels::ThreadPool;
using Clock = std::chrono::steady_clock;

constexpr int kRepeats = 5;

double SecondsSince(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// The best of a few runs: the highest rate at which `work` on every thread gets through what it
// returns.
template <typename Work>
double BestRate(ThreadPool& pool, Work work) {
  double best = 0;
  for (int i = 0; i < kRepeats; ++i) {
    std::atomic<double> done{0};
    const auto start = Clock::now();
    pool.Run(pool.threads(), [&](int task) {
      const double amount = work(task);
      for (double seen = done.load(); !done.compare_exchange_weak(seen, seen + amount);) {
      }
    });
    best = std::max(best, done.load() / SecondsSince(start));
  }
  return best;
}

double ReadRate(ThreadPool& pool) {
  constexpr size_t kBytes = size_t{512} << 20;
  kernels::AlignedBuffer memory = kernels::AlignedBuffer::Create(kBytes).value();
  std::fill(memory.data(), memory.data() + kBytes, std::byte{1});
  const size_t share = kBytes / pool.threads() / 256 * 256;
  std::atomic<long long> sink{0};
  return BestRate(pool, [&](int task) {
    const auto* begin = reinterpret_cast<const __m256i*>(memory.data() + task * share);
    __m256i sum[8] = {};
    for (size_t i = 0; i + 8 <= share / 32; i += 8) {
      for (int j = 0; j < 8; ++j) sum[j] = _mm256_add_epi64(sum[j], _mm256_load_si256(begin + i + j));
    }
    for (int j = 1; j < 8; ++j) sum[0] = _mm256_add_epi64(sum[0], sum[j]);
    sink += _mm256_extract_epi64(sum[0], 0);
    return static_cast<double>(share);
  });
}

}  // namespace

Peaks MeasurePeaks(ThreadPool& pool) {
  Peaks peaks;
  peaks.read_gb_per_s = ReadRate(pool) * 1e-9;
  if (kernels::DetectIsa() < kernels::Isa::kAvx512) return peaks;
  peaks.int8_gops = 2e-9 * BestRate(pool, [](int) {
                      int sink = 1;
                      return Int8MultiplyAdds(5'000'000, &sink);
                    });
  peaks.bf16_gflops = 2e-9 * BestRate(pool, [](int) {
                        float sink = 1;
                        return BF16MultiplyAdds(5'000'000, &sink);
                      });
  return peaks;
}

}  // namespace dovetail::bench
