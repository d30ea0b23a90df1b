// Shared by the AVX2 GEMM files: storing a tile, choosing how many rows go through it together.
// Threads: reentrant.
#pragma once
#include <immintrin.h>

#include "kernels/cpu/gemm_kernels.h"
#include "kernels/cpu/gemm_prefetch.h"

namespace dovetail::kernels::avx2 {
namespace {

#define DT_INLINE static inline __attribute__((always_inline))

DT_INLINE int64_t LanesOf(const PackedView& w, int64_t tile) {
  const int64_t left = w.rows - tile * kTileRows;
  return left < kTileRows ? left : kTileRows;
}

// Eight outputs at y, the first `lanes` of which exist.
DT_INLINE void StoreLanes(__m256 sum, float* y, const float* bias, bool accumulate, int64_t lanes) {
  const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(lanes)), index);
  if (bias != nullptr) sum = _mm256_add_ps(sum, _mm256_maskload_ps(bias, mask));
  if (accumulate) sum = _mm256_add_ps(_mm256_maskload_ps(y, mask), sum);
  _mm256_maskstore_ps(y, mask, sum);
}

// The 16 outputs of a tile in one row.
DT_INLINE void StoreTile(__m256 low, __m256 high, const GemmTarget& out, int64_t row, int64_t tile, int64_t lanes) {
  float* y = out.y + row * out.y_stride + tile * kTileRows;
  const float* bias = out.bias == nullptr ? nullptr : out.bias + tile * kTileRows;
  StoreLanes(low, y, bias, out.accumulate, lanes);
  if (lanes > 8) StoreLanes(high, y + 8, bias == nullptr ? nullptr : bias + 8, out.accumulate, lanes - 8);
}

// Calls Kernel::Run<rows>(row, tile, first) for every tile and all rows, four rows at a time while there are four. The
// first rows that pass over a tile wait for memory, and ask for the next tiles (gemm_prefetch.h); so does each of less
// than four.
template <typename Kernel>
DT_INLINE void ForTiles(const Kernel& kernel, int64_t row_begin, int64_t row_end, int64_t tile_begin,
                        int64_t tile_end) {
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    int64_t row = row_begin;
    for (; row + 4 <= row_end; row += 4) kernel.template Run<4>(row, tile, row == row_begin);
    for (; row < row_end; ++row) kernel.template Run<1>(row, tile, true);
  }
}

}  // namespace
}  // namespace dovetail::kernels::avx2
