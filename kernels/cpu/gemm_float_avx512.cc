#include "kernels/cpu/gemm_avx512_common.h"

namespace dovetail::kernels::avx512 {
namespace {

// 64 bytes of a tile: a column in f32, or a pair of them in bf16, the even one first.
template <PackedFormat kFormat>
inline constexpr int kColumnsPerStep = kFormat == PackedFormat::kF32 ? 1 : 2;

// Weights widened to f32 where they are not, x as it is. vdpbf16ps would need half as many
// multiplications, but an x rounded to bf16 (RoundedKernel): with outliers in x that costs the
// logits several times what the weights' own rounding does (bench/results/).
template <PackedFormat kFormat>
struct FloatKernel {
  static constexpr int kTilesTogether = 2;
  static constexpr int kStep = kColumnsPerStep<kFormat>;
  const GemmRows& x;
  const PackedView& w;
  const GemmTarget& out;

  template <int kRows, int kTiles>
  void Run(int64_t row, int64_t tile, bool first) const {
    const std::byte* weights = w.data + tile * w.tile_bytes;
    const float* in = x.f32 + row * x.f32_stride;
    __m512 sum[kRows][kTiles];
    for (int r = 0; r < kRows; ++r) {
      for (int t = 0; t < kTiles; ++t) sum[r][t] = _mm512_setzero_ps();
    }
    const int64_t steps = w.cols / kStep;
    PrefetchAhead ahead(weights + 2 * kTiles * w.tile_bytes, first ? kTiles * w.tile_bytes : 0, steps);
    __m512 columns[kStep][kTiles];
    for (int64_t step = 0; step < steps; ++step) {
      ahead.Step();
      Load<kTiles>(weights + step * 64, columns);
      for (int c = 0; c < kStep; ++c) Add<kRows, kTiles>(columns[c], in + step * kStep + c, sum);
    }
    if (steps * kStep < w.cols) {  // an odd last column, its pair is padding
      Load<kTiles>(weights + steps * 64, columns);
      Add<kRows, kTiles>(columns[0], in + steps * kStep, sum);
    }
    for (int r = 0; r < kRows; ++r) {
      for (int t = 0; t < kTiles; ++t) StoreTile(sum[r][t], w, out, row + r, tile + t);
    }
  }

 private:
  template <int kTiles>
  __attribute__((always_inline)) void Load(const std::byte* at, __m512 (&columns)[kStep][kTiles]) const {
    for (int t = 0; t < kTiles; ++t) {
      if constexpr (kFormat == PackedFormat::kF32) {
        columns[0][t] = _mm512_load_ps(at + t * w.tile_bytes);
      } else {
        const __m512i pairs = _mm512_load_si512(at + t * w.tile_bytes);
        const __m512i odd = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
        columns[0][t] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
        columns[1][t] = _mm512_castsi512_ps(_mm512_and_si512(pairs, odd));
      }
    }
  }

  template <int kRows, int kTiles>
  __attribute__((always_inline)) void Add(const __m512 (&column)[kTiles], const float* in,
                                          __m512 (&sum)[kRows][kTiles]) const {
    for (int r = 0; r < kRows; ++r) {
      const __m512 v = _mm512_set1_ps(in[r * x.f32_stride]);
      for (int t = 0; t < kTiles; ++t) sum[r][t] = _mm512_fmadd_ps(column[t], v, sum[r][t]);
    }
  }
};

// bf16 weights, x rounded to bf16.
struct RoundedKernel {
  static constexpr int kTilesTogether = 2;
  const GemmRows& x;
  const PackedView& w;
  const GemmTarget& out;

  template <int kRows, int kTiles>
  void Run(int64_t row, int64_t tile, bool first) const {
    const std::byte* weights = w.data + tile * w.tile_bytes;
    const uint16_t* in = x.BF16Panel(row);
    __m512 sum[kRows][kTiles];
    for (int r = 0; r < kRows; ++r) {
      for (int t = 0; t < kTiles; ++t) sum[r][t] = _mm512_setzero_ps();
    }
    const int64_t pairs = (w.cols + 1) / 2;
    PrefetchAhead ahead(weights + 2 * kTiles * w.tile_bytes, first ? kTiles * w.tile_bytes : 0, pairs);
    for (int64_t pair = 0; pair < pairs; ++pair) {
      ahead.Step();
      __m512i columns[kTiles];
      for (int t = 0; t < kTiles; ++t)
        columns[t] = _mm512_load_si512(weights + t * w.tile_bytes + pair * kTileRows * 4);
      for (int r = 0; r < kRows; ++r) {
        int bits;
        __builtin_memcpy(&bits, in + (pair * kPanelRows + r) * 2, 4);
        const __m512i v = _mm512_set1_epi32(bits);
        for (int t = 0; t < kTiles; ++t) sum[r][t] = _mm512_dpbf16_ps(sum[r][t], (__m512bh)columns[t], (__m512bh)v);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int t = 0; t < kTiles; ++t) StoreTile(sum[r][t], w, out, row + r, tile + t);
    }
  }
};

}  // namespace

void GemmF32(const GemmRows& x, const PackedView& w, const GemmTarget& out, int64_t row_begin, int64_t row_end,
             int64_t tile_begin, int64_t tile_end) {
  ForBlocks(FloatKernel<PackedFormat::kF32>{x, w, out}, row_begin, row_end, tile_begin, tile_end);
}

void GemmBF16(const GemmRows& x, const PackedView& w, const GemmTarget& out, int64_t row_begin, int64_t row_end,
              int64_t tile_begin, int64_t tile_end) {
  ForBlocks(FloatKernel<PackedFormat::kBF16>{x, w, out}, row_begin, row_end, tile_begin, tile_end);
}

void GemmRoundedBF16(const GemmRows& x, const PackedView& w, const GemmTarget& out, int64_t row_begin, int64_t row_end,
                     int64_t tile_begin, int64_t tile_end) {
  ForBlocks(RoundedKernel{x, w, out}, row_begin, row_end, tile_begin, tile_end);
}

}  // namespace dovetail::kernels::avx512
