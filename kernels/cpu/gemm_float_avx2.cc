#include <cstring>

#include "kernels/cpu/gemm_avx2_common.h"

namespace dovetail::kernels::avx2 {
namespace {

DT_INLINE __m256 EvenBF16(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
DT_INLINE __m256 OddBF16(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

// Weights widened to f32 where they are not, x as it is (gemm_float_avx512.cc says why). The same
// order of columns as there.
template <PackedFormat kFormat>
struct FloatKernel {
  static constexpr int kStep = kFormat == PackedFormat::kF32 ? 1 : 2;  // columns in 64 bytes
  const GemmRows& x;
  const PackedView& w;
  const GemmTarget& out;

  template <int kRows>
  void Run(int64_t row, int64_t tile, bool first) const {
    const std::byte* weights = w.data + tile * w.tile_bytes;
    const float* in = x.f32 + row * x.f32_stride;
    __m256 sum[kRows][2] = {};
    const int64_t steps = w.cols / kStep;
    PrefetchAhead ahead(weights + 2 * w.tile_bytes, kRows == 1 || first ? w.tile_bytes : 0, steps);
    __m256 columns[kStep][2];
    for (int64_t step = 0; step < steps; ++step) {
      ahead.Step();
      Load(weights + step * 64, columns);
      for (int c = 0; c < kStep; ++c) Add<kRows>(columns[c], in + step * kStep + c, sum);
    }
    if (steps * kStep < w.cols) {  // an odd last column, its pair is padding
      Load(weights + steps * 64, columns);
      Add<kRows>(columns[0], in + steps * kStep, sum);
    }
    for (int r = 0; r < kRows; ++r) StoreTile(sum[r][0], sum[r][1], out, row + r, tile, LanesOf(w, tile));
  }

 private:
  __attribute__((always_inline)) void Load(const std::byte* at, __m256 (&columns)[kStep][2]) const {
    for (int half = 0; half < 2; ++half) {
      if constexpr (kFormat == PackedFormat::kF32) {
        columns[0][half] = _mm256_load_ps(reinterpret_cast<const float*>(at) + half * 8);
      } else {
        const __m256i pairs = _mm256_load_si256(reinterpret_cast<const __m256i*>(at) + half);
        columns[0][half] = EvenBF16(pairs);
        columns[1][half] = OddBF16(pairs);
      }
    }
  }

  template <int kRows>
  __attribute__((always_inline)) void Add(const __m256 (&column)[2], const float* in, __m256 (&sum)[kRows][2]) const {
    for (int r = 0; r < kRows; ++r) {
      const __m256 v = _mm256_broadcast_ss(in + r * x.f32_stride);
      sum[r][0] = _mm256_fmadd_ps(column[0], v, sum[r][0]);
      sum[r][1] = _mm256_fmadd_ps(column[1], v, sum[r][1]);
    }
  }
};

// bf16 weights, x rounded to bf16. Pairs of columns as in vdpbf16ps, widened: the even column is
// added first.
struct RoundedKernel {
  const GemmRows& x;
  const PackedView& w;
  const GemmTarget& out;

  template <int kRows>
  void Run(int64_t row, int64_t tile, bool /*first*/) const {
    const auto* weights = reinterpret_cast<const __m256i*>(w.data + tile * w.tile_bytes);
    const uint16_t* in = x.BF16Panel(row) + row % kPanelRows * 2;
    __m256 sum[kRows][2] = {};
    for (int64_t pair = 0; pair < (w.cols + 1) / 2; ++pair) {
      const __m256i w0 = _mm256_load_si256(weights + 2 * pair), w1 = _mm256_load_si256(weights + 2 * pair + 1);
      for (int r = 0; r < kRows; ++r) {
        int bits;
        memcpy(&bits, in + (pair * kPanelRows + r) * 2, 4);
        const __m256i v = _mm256_set1_epi32(bits);
        sum[r][0] = _mm256_fmadd_ps(OddBF16(w0), OddBF16(v), _mm256_fmadd_ps(EvenBF16(w0), EvenBF16(v), sum[r][0]));
        sum[r][1] = _mm256_fmadd_ps(OddBF16(w1), OddBF16(v), _mm256_fmadd_ps(EvenBF16(w1), EvenBF16(v), sum[r][1]));
      }
    }
    for (int r = 0; r < kRows; ++r) StoreTile(sum[r][0], sum[r][1], out, row + r, tile, LanesOf(w, tile));
  }
};

}  // namespace

void GemmF32(const GemmRows& x, const PackedView& w, const GemmTarget& out, int64_t row_begin, int64_t row_end,
             int64_t tile_begin, int64_t tile_end) {
  ForTiles(FloatKernel<PackedFormat::kF32>{x, w, out}, row_begin, row_end, tile_begin, tile_end);
}

void GemmBF16(const GemmRows& x, const PackedView& w, const GemmTarget& out, int64_t row_begin, int64_t row_end,
              int64_t tile_begin, int64_t tile_end) {
  ForTiles(FloatKernel<PackedFormat::kBF16>{x, w, out}, row_begin, row_end, tile_begin, tile_end);
}

void GemmRoundedBF16(const GemmRows& x, const PackedView& w, const GemmTarget& out, int64_t row_begin, int64_t row_end,
                     int64_t tile_begin, int64_t tile_end) {
  ForTiles(RoundedKernel{x, w, out}, row_begin, row_end, tile_begin, tile_end);
}

}  // namespace dovetail::kernels::avx2
