// Shared by the GEMM files of every ISA. Includes nothing with inline functions (gemm_kernels.h).
#pragma once
#include <cstddef>
#include <cstdint>

namespace dovetail::kernels {
namespace {

// Few rows run at the speed of memory. A tile's codes, scales and offsets, and tiles walked side
// by side, are too many short streams for the hardware prefetcher, so the bytes of the next tiles
// are asked for in their order, a share at each step over the present ones. Beyond the last tile
// usually lies the next matrix; prefetching never faults.
// Threads: thread-compatible; a value.
struct PrefetchAhead {
  const std::byte* at;
  int64_t lines_per_step;

  __attribute__((always_inline)) PrefetchAhead(const std::byte* begin, int64_t bytes, int64_t steps)
      : at(begin), lines_per_step((bytes / 64 + steps - 1) / (steps > 0 ? steps : 1)) {}
  __attribute__((always_inline)) void Step() {
    for (int64_t i = 0; i < lines_per_step; ++i) __builtin_prefetch(at + i * 64, 0, 2);
    at += lines_per_step * 64;
  }
};

}  // namespace
}  // namespace dovetail::kernels
