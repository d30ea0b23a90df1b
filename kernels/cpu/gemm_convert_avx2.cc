#include <cstring>

#include "kernels/cpu/gemm_avx2_common.h"

namespace dovetail::kernels::avx2 {
namespace {

constexpr int kVector = 8;

// Largest |x| by its bits: as integers NaN is above infinity, so that it comes out and spoils the
// scale, as it should.
DT_INLINE float MaxAbs32(const __m256* v) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i m = _mm256_setzero_si256();
  for (int i = 0; i < 4; ++i) m = _mm256_max_epu32(m, _mm256_and_si256(_mm256_castps_si256(v[i]), magnitude));
  __m128i n = _mm_max_epu32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
  n = _mm_max_epu32(n, _mm_shuffle_epi32(n, 0x4e));
  n = _mm_max_epu32(n, _mm_shuffle_epi32(n, 0xb1));
  return _mm_cvtss_f32(_mm_castsi128_ps(n));
}

DT_INLINE int Sum(__m256i v) {
  __m128i n = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  n = _mm_add_epi32(n, _mm_shuffle_epi32(n, 0x4e));
  n = _mm_add_epi32(n, _mm_shuffle_epi32(n, 0xb1));
  return _mm_cvtsi128_si32(n);
}

// 32 integers as bytes, saturated.
DT_INLINE void StoreCodes(const __m256i* c, int8_t* out) {
  const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(c[0], c[1]), _mm256_packs_epi32(c[2], c[3]));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                      _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
}

// 32 integers of 16 bits: those of even columns, and those of odd ones.
DT_INLINE void StoreJoined(const __m256i* c, int row, ActivationGroup<2>& out) {
  const auto in_order = [](__m256i a, __m256i b) {
    return _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), _MM_SHUFFLE(3, 1, 2, 0));
  };
  const __m256i first = in_order(c[0], c[1]), second = in_order(c[2], c[3]);
  const auto even = [](__m256i pairs) { return _mm256_srai_epi32(_mm256_slli_epi32(pairs, 16), 16); };
  const auto odd = [](__m256i pairs) { return _mm256_srai_epi32(pairs, 16); };
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.codes[0][row]), in_order(even(first), even(second)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.codes[1][row]), in_order(odd(first), odd(second)));
}

template <int kPlanes, bool kJoined = false>
DT_INLINE void QuantizeGroup(const float* in, int row, ActivationGroup<kPlanes>& out) {
  constexpr float kLargest = kLargestCode<kPlanes>;
  __m256 v[4];
  for (int i = 0; i < 4; ++i) v[i] = _mm256_loadu_ps(in + 8 * i);
  const float largest = MaxAbs32(v);
  const bool zero = largest < kSmallestActivation<kPlanes>;
  const float s = zero ? 0.0f : largest / kLargest;
  const __m256 inverse = _mm256_set1_ps(zero ? 0.0f : kLargest / largest);
  __m256i c[4];
  for (int i = 0; i < 4; ++i) c[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));  // rounds to nearest even
  const int first = Sum(_mm256_add_epi32(c[0], c[1])), second = Sum(_mm256_add_epi32(c[2], c[3]));
  if constexpr (kJoined) {
    StoreJoined(c, row, out);
  } else if constexpr (kPlanes == 2) {
    __m256i low[4];
    for (int i = 0; i < 4; ++i) {
      const __m256i high = _mm256_srai_epi32(_mm256_add_epi32(c[i], _mm256_set1_epi32(128)), 8);
      low[i] = _mm256_sub_epi32(c[i], _mm256_slli_epi32(high, 8));
      c[i] = high;
    }
    StoreCodes(low, out.codes[1][row]);
  }
  if constexpr (!kJoined) StoreCodes(c, out.codes[0][row]);
  out.scale[row] = s;
  SetSums(first, second, row, out);
}

DT_INLINE __m128i ToBF16(__m256 x) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
  const __m256i r = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
  return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
}

// Eight floats, zero from the n-th on.
DT_INLINE __m256 LoadFirst(const float* in, int64_t n) {
  if (n >= kVector) return _mm256_loadu_ps(in);
  float first[kVector] = {};
  memcpy(first, in, static_cast<size_t>(n) * sizeof(float));
  return _mm256_loadu_ps(first);
}

template <int kPlanes>
DT_INLINE void QuantizeAll(const GemmRows& x, int64_t cols, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float* in = x.f32 + row * x.f32_stride;
    ActivationGroup<kPlanes>* panel = x.QuantizedPanel<kPlanes>(row);
    for (int64_t g = 0; g < cols / kActivationGroup; ++g) {
      QuantizeGroup(in + g * kActivationGroup, static_cast<int>(row % kPanelRows), panel[g]);
    }
  }
}

}  // namespace

void QuantizeRows(const GemmRows& x, int64_t cols, int64_t row_begin, int64_t row_end) {
  QuantizeAll<1>(x, cols, row_begin, row_end);
}

void QuantizeRowsPrecisely(const GemmRows& x, int64_t cols, int64_t row_begin, int64_t row_end) {
  QuantizeAll<2>(x, cols, row_begin, row_end);
}

void QuantizeRowsJoined(const GemmRows& x, int64_t cols, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float* in = x.f32 + row * x.f32_stride;
    ActivationGroup<2>* panel = x.JoinedPanel(row);
    for (int64_t g = 0; g < cols / kActivationGroup; ++g)
      QuantizeGroup<2, /*kJoined=*/true>(in + g * kActivationGroup, static_cast<int>(row % kPanelRows), panel[g]);
  }
}

void RoundRowsToBF16(const GemmRows& x, int64_t cols, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float* in = x.f32 + row * x.f32_stride;
    uint16_t* out = x.BF16Panel(row) + row % kPanelRows * 2;
    for (int64_t k = 0; k < cols; k += kVector) {
      alignas(64) uint16_t rounded[kVector];
      _mm_store_si128(reinterpret_cast<__m128i*>(rounded), ToBF16(LoadFirst(in + k, cols - k)));
      const int64_t pairs = (cols - k < kVector ? cols - k + 1 : kVector) / 2;
      for (int64_t p = 0; p < pairs; ++p) memcpy(out + (k / 2 + p) * kPanelRows * 2, rounded + 2 * p, 4);
    }
  }
}

}  // namespace dovetail::kernels::avx2
