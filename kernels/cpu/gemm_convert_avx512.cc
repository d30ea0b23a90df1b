#include "kernels/cpu/gemm_avx512_common.h"

namespace dovetail::kernels::avx512 {
namespace {

constexpr int kVector = 16;

// 32 integers as bytes, saturated.
DT_INLINE void StoreCodes(__m512i a, __m512i b, int8_t* out) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtsepi32_epi8(a));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16), _mm512_cvtsepi32_epi8(b));
}

// The same values as in gemm_convert_avx2.cc, to the bit; there is why the maximum is taken over
// integers.
// Wraps, unlike _mm512_reduce_add_epi32, whose last addition is one of signed integers.
DT_INLINE int Sum(__m512i v) {
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
  __m128i n = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  n = _mm_add_epi32(n, _mm_shuffle_epi32(n, 0x4e));
  n = _mm_add_epi32(n, _mm_shuffle_epi32(n, 0xb1));
  return _mm_cvtsi128_si32(n);
}

template <int kPlanes>
DT_INLINE void QuantizeGroup(const float* in, int row, ActivationGroup<kPlanes>& out) {
  constexpr float kLargest = kLargestCode<kPlanes>;
  const __m512 a = _mm512_loadu_ps(in), b = _mm512_loadu_ps(in + 16);
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  const unsigned bits = _mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(a), magnitude),
                                                                 _mm512_and_si512(_mm512_castps_si512(b), magnitude)));
  float largest;
  __builtin_memcpy(&largest, &bits, 4);
  const bool zero = largest < kSmallestActivation<kPlanes>;
  const float s = zero ? 0.0f : largest / kLargest;
  const __m512 inverse = _mm512_set1_ps(zero ? 0.0f : kLargest / largest);
  const __m512i ca = _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse)), cb = _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse));
  if constexpr (kPlanes == 1) {
    StoreCodes(ca, cb, out.codes[0][row]);
  } else {
    const __m512i half = _mm512_set1_epi32(128);
    const __m512i ha = _mm512_srai_epi32(_mm512_add_epi32(ca, half), 8),
                  hb = _mm512_srai_epi32(_mm512_add_epi32(cb, half), 8);
    StoreCodes(ha, hb, out.codes[0][row]);
    StoreCodes(_mm512_sub_epi32(ca, _mm512_slli_epi32(ha, 8)), _mm512_sub_epi32(cb, _mm512_slli_epi32(hb, 8)),
               out.codes[1][row]);
  }
  const int first = Sum(ca), second = Sum(cb);
  out.scale[row] = s;
  SetSums(first, second, row, out);
}

// Not vcvtneps2bf16, which takes denormals for zero: integers round as base/dtype.h does.
DT_INLINE __m256i ToBF16(__m512 x) {
  const __m512i u = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
  return _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), rounded, quiet));
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

void RoundRowsToBF16(const GemmRows& x, int64_t cols, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float* in = x.f32 + row * x.f32_stride;
    uint16_t* out = x.BF16Panel(row) + row % kPanelRows * 2;
    for (int64_t k = 0; k < cols; k += kVector) {
      alignas(64) uint16_t rounded[kVector];
      const __mmask16 mask = cols - k >= kVector ? 0xffff : static_cast<__mmask16>((1u << (cols - k)) - 1);
      _mm256_store_si256(reinterpret_cast<__m256i*>(rounded), ToBF16(_mm512_maskz_loadu_ps(mask, in + k)));
      const int64_t pairs = (cols - k < kVector ? cols - k + 1 : kVector) / 2;
      for (int64_t p = 0; p < pairs; ++p) __builtin_memcpy(out + (k / 2 + p) * kPanelRows * 2, rounded + 2 * p, 4);
    }
  }
}

}  // namespace dovetail::kernels::avx512
