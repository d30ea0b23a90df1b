#include <cstring>

#include "kernels/cpu/gemm_avx2_common.h"

namespace dovetail::kernels::avx2 {
namespace {

struct F32Kernel {
  const GemmRows& x;
  const PackedView& w;
  const GemmTarget& out;

  template <int kRows>
  void Run(int64_t row, int64_t tile) const {
    const auto* weights = reinterpret_cast<const float*>(w.data + tile * w.tile_bytes);
    const float* in = x.f32 + row * x.f32_stride;
    __m256 sum[kRows][2] = {};
    for (int64_t k = 0; k < w.cols; ++k) {
      const __m256 w0 = _mm256_load_ps(weights + k * kTileRows),
                   w1 = _mm256_load_ps(weights + k * kTileRows + 8);
      for (int r = 0; r < kRows; ++r) {
        const __m256 v = _mm256_broadcast_ss(in + r * x.f32_stride + k);
        sum[r][0] = _mm256_fmadd_ps(w0, v, sum[r][0]);
        sum[r][1] = _mm256_fmadd_ps(w1, v, sum[r][1]);
      }
    }
    for (int r = 0; r < kRows; ++r)
      StoreTile(sum[r][0], sum[r][1], out, row + r, tile, LanesOf(w, tile));
  }
};

DT_INLINE __m256 EvenBF16(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
}
DT_INLINE __m256 OddBF16(__m256i pairs) {
  return _mm256_castsi256_ps(
      _mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

// Pairs of columns as in vdpbf16ps, widened: the even column is added first.
struct BF16Kernel {
  const GemmRows& x;
  const PackedView& w;
  const GemmTarget& out;

  template <int kRows>
  void Run(int64_t row, int64_t tile) const {
    const auto* weights = reinterpret_cast<const __m256i*>(w.data + tile * w.tile_bytes);
    const uint16_t* in = x.BF16Panel(row) + row % kPanelRows * 2;
    __m256 sum[kRows][2] = {};
    for (int64_t pair = 0; pair < (w.cols + 1) / 2; ++pair) {
      const __m256i w0 = _mm256_load_si256(weights + 2 * pair),
                    w1 = _mm256_load_si256(weights + 2 * pair + 1);
      for (int r = 0; r < kRows; ++r) {
        int bits;
        memcpy(&bits, in + (pair * kPanelRows + r) * 2, 4);
        const __m256i v = _mm256_set1_epi32(bits);
        sum[r][0] = _mm256_fmadd_ps(OddBF16(w0), OddBF16(v),
                                    _mm256_fmadd_ps(EvenBF16(w0), EvenBF16(v), sum[r][0]));
        sum[r][1] = _mm256_fmadd_ps(OddBF16(w1), OddBF16(v),
                                    _mm256_fmadd_ps(EvenBF16(w1), EvenBF16(v), sum[r][1]));
      }
    }
    for (int r = 0; r < kRows; ++r)
      StoreTile(sum[r][0], sum[r][1], out, row + r, tile, LanesOf(w, tile));
  }
};

}  // namespace

void GemmF32(const GemmRows& x, const PackedView& w, const GemmTarget& out, int64_t row_begin,
             int64_t row_end, int64_t tile_begin, int64_t tile_end) {
  ForTiles(F32Kernel{x, w, out}, row_begin, row_end, tile_begin, tile_end);
}

void GemmBF16(const GemmRows& x, const PackedView& w, const GemmTarget& out, int64_t row_begin,
              int64_t row_end, int64_t tile_begin, int64_t tile_end) {
  ForTiles(BF16Kernel{x, w, out}, row_begin, row_end, tile_begin, tile_end);
}

}  // namespace dovetail::kernels::avx2
