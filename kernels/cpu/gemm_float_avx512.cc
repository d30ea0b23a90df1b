#include "kernels/cpu/gemm_avx512_common.h"

namespace dovetail::kernels::avx512 {
namespace {

struct F32Kernel {
  static constexpr int kTilesTogether = 2;
  const GemmRows& x;
  const PackedView& w;
  const GemmTarget& out;

  template <int kRows, int kTiles>
  void Run(int64_t row, int64_t tile) const {
    const std::byte* weights = w.data + tile * w.tile_bytes;
    const float* in = x.f32 + row * x.f32_stride;
    __m512 sum[kRows][kTiles];
    for (int r = 0; r < kRows; ++r) {
      for (int t = 0; t < kTiles; ++t) sum[r][t] = _mm512_setzero_ps();
    }
    for (int64_t k = 0; k < w.cols; ++k) {
      __m512 column[kTiles];
      for (int t = 0; t < kTiles; ++t)
        column[t] = _mm512_load_ps(weights + t * w.tile_bytes + k * kTileRows * 4);
      for (int r = 0; r < kRows; ++r) {
        const __m512 v = _mm512_set1_ps(in[r * x.f32_stride + k]);
        for (int t = 0; t < kTiles; ++t) sum[r][t] = _mm512_fmadd_ps(column[t], v, sum[r][t]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int t = 0; t < kTiles; ++t) StoreTile(sum[r][t], w, out, row + r, tile + t);
    }
  }
};

struct BF16Kernel {
  static constexpr int kTilesTogether = 2;
  const GemmRows& x;
  const PackedView& w;
  const GemmTarget& out;

  template <int kRows, int kTiles>
  void Run(int64_t row, int64_t tile) const {
    const std::byte* weights = w.data + tile * w.tile_bytes;
    const uint16_t* in = x.BF16Panel(row);
    __m512 sum[kRows][kTiles];
    for (int r = 0; r < kRows; ++r) {
      for (int t = 0; t < kTiles; ++t) sum[r][t] = _mm512_setzero_ps();
    }
    for (int64_t pair = 0; pair < (w.cols + 1) / 2; ++pair) {
      __m512i columns[kTiles];
      for (int t = 0; t < kTiles; ++t)
        columns[t] = _mm512_load_si512(weights + t * w.tile_bytes + pair * kTileRows * 4);
      for (int r = 0; r < kRows; ++r) {
        int bits;
        __builtin_memcpy(&bits, in + (pair * kPanelRows + r) * 2, 4);
        const __m512i v = _mm512_set1_epi32(bits);
        for (int t = 0; t < kTiles; ++t)
          sum[r][t] = _mm512_dpbf16_ps(sum[r][t], (__m512bh)columns[t], (__m512bh)v);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int t = 0; t < kTiles; ++t) StoreTile(sum[r][t], w, out, row + r, tile + t);
    }
  }
};

}  // namespace

void GemmF32(const GemmRows& x, const PackedView& w, const GemmTarget& out, int64_t row_begin,
             int64_t row_end, int64_t tile_begin, int64_t tile_end) {
  ForBlocks(F32Kernel{x, w, out}, row_begin, row_end, tile_begin, tile_end);
}

void GemmBF16(const GemmRows& x, const PackedView& w, const GemmTarget& out, int64_t row_begin,
              int64_t row_end, int64_t tile_begin, int64_t tile_end) {
  ForBlocks(BF16Kernel{x, w, out}, row_begin, row_end, tile_begin, tile_end);
}

}  // namespace dovetail::kernels::avx512
