// Shared by the AVX-512 and AMX GEMM files: scales, storing a tile, choosing how many rows and tiles go together.
// Includes nothing with inline functions (gemm_kernels.h).
// Threads: reentrant.
#pragma once
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 warns inside its own intrinsics (GCC bug 105593)
#include <immintrin.h>

#include "kernels/cpu/gemm_kernels.h"
#include "kernels/cpu/gemm_prefetch.h"

namespace dovetail::kernels::avx512 {
namespace {

#define DT_INLINE static inline __attribute__((always_inline))

// The outputs of one tile in one row; the last tile has fewer than 16.
DT_INLINE void StoreTile(__m512 sum, const PackedView& w, const GemmTarget& out, int64_t row, int64_t tile) {
  const int64_t left = w.rows - tile * kTileRows;
  const __mmask16 mask = left >= kTileRows ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
  float* y = out.y + row * out.y_stride + tile * kTileRows;
  if (out.bias != nullptr) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, out.bias + tile * kTileRows));
  if (out.accumulate) sum = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, y), sum);
  _mm512_mask_storeu_ps(y, mask, sum);
}

// The scales, or the offsets, of a group in the 16 rows of a tile.
template <int kBytes>
DT_INLINE __m512 LoadScales(const std::byte* at, int64_t group) {
  if constexpr (kBytes == 1) {
    const __m512i exponent =
        _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(at + group * kTileRows)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
  }
  if constexpr (kBytes == 2)
    return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(at + group * kTileRows * 2)));
  return _mm512_load_ps(at + group * kTileRows * 4);
}

// Kernel::Run<rows, tiles>(row, tile, first) computes a block of outputs in registers. The first rows that pass over
// tiles wait for memory, and ask for the next tiles (gemm_prefetch.h).
template <typename Kernel, int kTiles>
DT_INLINE void ForRows(const Kernel& kernel, int64_t row_begin, int64_t row_end, int64_t tile) {
  int64_t row = row_begin;
  for (; row + 8 <= row_end; row += 8) kernel.template Run<8, kTiles>(row, tile, row == row_begin);
  const bool first = row == row_begin;
  switch (row_end - row) {
    case 7: return kernel.template Run<7, kTiles>(row, tile, first);
    case 6: return kernel.template Run<6, kTiles>(row, tile, first);
    case 5: return kernel.template Run<5, kTiles>(row, tile, first);
    case 4: return kernel.template Run<4, kTiles>(row, tile, first);
    case 3: return kernel.template Run<3, kTiles>(row, tile, first);
    case 2: return kernel.template Run<2, kTiles>(row, tile, first);
    case 1: return kernel.template Run<1, kTiles>(row, tile, first);
    default: return;
  }
}

// All tiles and rows, with the tiles in the outer loop: a group of tiles stays in L1 or L2 while
// the rows pass.
template <typename Kernel>
DT_INLINE void ForBlocks(const Kernel& kernel, int64_t row_begin, int64_t row_end, int64_t tile_begin,
                         int64_t tile_end) {
  int64_t tile = tile_begin;
  // A row's tiles come from memory as one stream, which is faster than two of them at once.
  if (row_end - row_begin == 1) {
    for (; tile < tile_end; ++tile) kernel.template Run<1, 1>(row_begin, tile, true);
    return;
  }
  for (; tile + Kernel::kTilesTogether <= tile_end; tile += Kernel::kTilesTogether) {
    ForRows<Kernel, Kernel::kTilesTogether>(kernel, row_begin, row_end, tile);
  }
  for (; tile < tile_end; ++tile) ForRows<Kernel, 1>(kernel, row_begin, row_end, tile);
}

}  // namespace
}  // namespace dovetail::kernels::avx512
