// Sixteen floats, as one AVX-512 register or two AVX2 registers. Every operation works lane by lane with IEEE rounding,
// and reductions add in one fixed tree, so code written on F32x16 gives the same bits on both ISAs. Included by the
// files of one ISA only, which define DT_ISA_NS (their inner namespace) and, for AVX-512, DT_ISA_AVX512. Nothing here
// or there may use std:: or absl templates: a template instantiated with AVX-512 flags could be the copy that the
// linker keeps for the whole program.
// Threads: pure.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#ifndef DT_ISA_NS
#error "kernels/cpu/simd.h belongs to files that define DT_ISA_NS"
#endif

namespace dovetail::kernels::DT_ISA_NS {

#define DT_INLINE static inline __attribute__((always_inline))
#define DT_MEMBER_INLINE inline __attribute__((always_inline))

#ifdef DT_ISA_AVX512

struct F32x16 {
  __m512 v;
};
DT_INLINE F32x16 Zero() { return {_mm512_setzero_ps()}; }
DT_INLINE F32x16 Set1(float x) { return {_mm512_set1_ps(x)}; }
DT_INLINE F32x16 Load(const float* p) { return {_mm512_loadu_ps(p)}; }
DT_INLINE void Store(float* p, F32x16 x) { _mm512_storeu_ps(p, x.v); }
DT_INLINE F32x16 Add(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
DT_INLINE F32x16 Sub(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
DT_INLINE F32x16 Mul(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
DT_INLINE F32x16 Div(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
DT_INLINE F32x16 Fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
DT_INLINE F32x16 Fnma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }  // c - a b
DT_INLINE F32x16 Max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }  // b where either is NaN
DT_INLINE F32x16 Min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
DT_INLINE F32x16 RoundEven(F32x16 x) {
  return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// x * 2^n for integral n where the result is normal.
DT_INLINE F32x16 ScalePow2(F32x16 x, F32x16 n) {
  const __m512i e = _mm512_slli_epi32(_mm512_cvtps_epi32(n.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x.v), e))};
}
// a < b ? x : y, lane by lane; y where a or b is NaN.
DT_INLINE F32x16 SelectLess(F32x16 a, F32x16 b, F32x16 x, F32x16 y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
DT_INLINE bool AnyUnordered(F32x16 a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q) != 0; }
// Bit i set where a[i] > b[i] (false for NaN).
DT_INLINE uint32_t GreaterMask(F32x16 a, F32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
DT_INLINE uint32_t EqualMask(F32x16 a, F32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
DT_INLINE F32x16 LoadBF16(const void* p) {
  const __m512i u = _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(u, 16))};
}
DT_INLINE F32x16 LoadF16(const void* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)))};
}
DT_INLINE void StoreBF16(void* p, F32x16 x) {
  const __m512i u = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
  const __m512i r = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q), rounded, quiet);
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(r));
}
DT_INLINE void StoreF16(void* p, F32x16 x) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
}
DT_INLINE void LoadPairsBF16(const void* p, F32x16& even, F32x16& odd) {
  const __m512i u = _mm512_loadu_si512(p);
  even.v = _mm512_castsi512_ps(_mm512_slli_epi32(u, 16));
  odd.v = _mm512_castsi512_ps(_mm512_and_si512(u, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
DT_INLINE __m256 LowHalf(F32x16 x) { return _mm512_castps512_ps256(x.v); }
DT_INLINE __m256 HighHalf(F32x16 x) { return _mm512_extractf32x8_ps(x.v, 1); }
// Lanes lo <= i < hi of x, -infinity elsewhere.
DT_INLINE F32x16 KeepLanes(F32x16 x, int lo, int hi) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __mmask16 keep = _mm512_cmp_epi32_mask(lane, _mm512_set1_epi32(lo), _MM_CMPINT_NLT) &
                         _mm512_cmp_epi32_mask(lane, _mm512_set1_epi32(hi), _MM_CMPINT_LT);
  return {_mm512_mask_blend_ps(keep, _mm512_set1_ps(-__builtin_inff()), x.v)};
}

DT_INLINE void SplitExponent(F32x16 x, F32x16& e, F32x16& m) {
  // Bits of sqrt(1/2) subtracted: the exponent field then says how many doublings m needs.
  const __m512i u = _mm512_sub_epi32(_mm512_castps_si512(x.v), _mm512_set1_epi32(0x3f3504f3));
  const __m512i n = _mm512_srai_epi32(u, 23);
  e.v = _mm512_cvtepi32_ps(n);
  m.v = _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_castps_si512(x.v), _mm512_slli_epi32(n, 23)));
}
struct U32x16 {
  __m512i v;
};
DT_INLINE U32x16 SetU32(uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
DT_INLINE U32x16 IotaU32(uint32_t first) {
  return {_mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(first)),
                           _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15))};
}
DT_INLINE U32x16 Xor(U32x16 a, U32x16 b) { return {_mm512_xor_si512(a.v, b.v)}; }
DT_INLINE void MulWide(U32x16 a, uint32_t factor, U32x16& high, U32x16& low) {
  const __m512i f = _mm512_set1_epi32(static_cast<int>(factor));
  const __m512i even = _mm512_mul_epu32(a.v, f), odd = _mm512_mul_epu32(_mm512_srli_epi64(a.v, 32), f);
  low.v = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
  high.v = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
}
// (w + 0.5) / 2^32, rounded.
DT_INLINE F32x16 UnitInterval(U32x16 w) {
  const F32x16 high{_mm512_cvtepi32_ps(_mm512_srli_epi32(w.v, 16))};
  const F32x16 low{_mm512_cvtepi32_ps(_mm512_and_si512(w.v, _mm512_set1_epi32(0xffff)))};
  return Mul(Fma(high, Set1(65536.0f), Add(low, Set1(0.5f))), Set1(0x1p-32f));
}

#else

struct F32x16 {
  __m256 lo, hi;
};
DT_INLINE F32x16 Zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
DT_INLINE F32x16 Set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
DT_INLINE F32x16 Load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
DT_INLINE void Store(float* p, F32x16 x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
DT_INLINE F32x16 Add(F32x16 a, F32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
DT_INLINE F32x16 Sub(F32x16 a, F32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
DT_INLINE F32x16 Mul(F32x16 a, F32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
DT_INLINE F32x16 Div(F32x16 a, F32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
DT_INLINE F32x16 Fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
DT_INLINE F32x16 Fnma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
DT_INLINE F32x16 Max(F32x16 a, F32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
DT_INLINE F32x16 Min(F32x16 a, F32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
DT_INLINE F32x16 RoundEven(F32x16 x) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.lo, kMode), _mm256_round_ps(x.hi, kMode)};
}
DT_INLINE __m256 ScalePow2(__m256 x, __m256 n) {
  const __m256i e = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), e));
}
DT_INLINE F32x16 ScalePow2(F32x16 x, F32x16 n) { return {ScalePow2(x.lo, n.lo), ScalePow2(x.hi, n.hi)}; }
DT_INLINE F32x16 SelectLess(F32x16 a, F32x16 b, F32x16 x, F32x16 y) {
  return {_mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
DT_INLINE uint32_t Mask16(__m256 lo, __m256 hi) {
  return static_cast<uint32_t>(_mm256_movemask_ps(lo)) | static_cast<uint32_t>(_mm256_movemask_ps(hi)) << 8;
}
DT_INLINE bool AnyUnordered(F32x16 a) {
  return Mask16(_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q)) != 0;
}
DT_INLINE uint32_t GreaterMask(F32x16 a, F32x16 b) {
  return Mask16(_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ));
}
DT_INLINE uint32_t EqualMask(F32x16 a, F32x16 b) {
  return Mask16(_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ));
}
DT_INLINE __m256 WidenBF16(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
DT_INLINE F32x16 LoadBF16(const void* p) {
  const __m128i* q = static_cast<const __m128i*>(p);
  return {WidenBF16(_mm_loadu_si128(q)), WidenBF16(_mm_loadu_si128(q + 1))};
}
DT_INLINE F32x16 LoadF16(const void* p) {
  const __m128i* q = static_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
DT_INLINE __m256i RoundBF16(__m256 x) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
  return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
DT_INLINE void StoreBF16(void* p, F32x16 x) {
  const __m256i packed = _mm256_packus_epi32(RoundBF16(x.lo), RoundBF16(x.hi));
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
DT_INLINE void StoreF16(void* p, F32x16 x) {
  __m128i* q = static_cast<__m128i*>(p);
  _mm_storeu_si128(q, _mm256_cvtps_ph(x.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(q + 1, _mm256_cvtps_ph(x.hi, _MM_FROUND_TO_NEAREST_INT));
}
DT_INLINE void LoadPairsBF16(const void* p, F32x16& even, F32x16& odd) {
  const __m256i* q = static_cast<const __m256i*>(p);
  const __m256i a = _mm256_loadu_si256(q), b = _mm256_loadu_si256(q + 1);
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  even = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
  odd = {_mm256_castsi256_ps(_mm256_and_si256(a, high)), _mm256_castsi256_ps(_mm256_and_si256(b, high))};
}
DT_INLINE __m256 LowHalf(F32x16 x) { return x.lo; }
DT_INLINE __m256 HighHalf(F32x16 x) { return x.hi; }
DT_INLINE __m256 KeepLanes(__m256 x, __m256i lane, int lo, int hi) {
  const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(lo), lane);
  const __m256i inside = _mm256_andnot_si256(below, _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), lane));
  return _mm256_blendv_ps(_mm256_set1_ps(-__builtin_inff()), x, _mm256_castsi256_ps(inside));
}
DT_INLINE F32x16 KeepLanes(F32x16 x, int lo, int hi) {
  return {KeepLanes(x.lo, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), lo, hi),
          KeepLanes(x.hi, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15), lo, hi)};
}

DT_INLINE void SplitExponent(__m256 x, __m256& e, __m256& m) {
  const __m256i u = _mm256_sub_epi32(_mm256_castps_si256(x), _mm256_set1_epi32(0x3f3504f3));
  const __m256i n = _mm256_srai_epi32(u, 23);
  e = _mm256_cvtepi32_ps(n);
  m = _mm256_castsi256_ps(_mm256_sub_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(n, 23)));
}
DT_INLINE void SplitExponent(F32x16 x, F32x16& e, F32x16& m) {
  SplitExponent(x.lo, e.lo, m.lo);
  SplitExponent(x.hi, e.hi, m.hi);
}
struct U32x16 {
  __m256i lo, hi;
};
DT_INLINE U32x16 SetU32(uint32_t x) {
  const __m256i v = _mm256_set1_epi32(static_cast<int>(x));
  return {v, v};
}
DT_INLINE U32x16 IotaU32(uint32_t first) {
  const __m256i v =
      _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(first)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  return {v, _mm256_add_epi32(v, _mm256_set1_epi32(8))};
}
DT_INLINE U32x16 Xor(U32x16 a, U32x16 b) { return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)}; }
DT_INLINE void MulWide(__m256i a, __m256i f, __m256i& high, __m256i& low) {
  const __m256i even = _mm256_mul_epu32(a, f), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), f);
  low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
  high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}
DT_INLINE void MulWide(U32x16 a, uint32_t factor, U32x16& high, U32x16& low) {
  const __m256i f = _mm256_set1_epi32(static_cast<int>(factor));
  MulWide(a.lo, f, high.lo, low.lo);
  MulWide(a.hi, f, high.hi, low.hi);
}
DT_INLINE F32x16 UnitInterval(U32x16 w) {
  const __m256i mask = _mm256_set1_epi32(0xffff);
  const F32x16 high{_mm256_cvtepi32_ps(_mm256_srli_epi32(w.lo, 16)), _mm256_cvtepi32_ps(_mm256_srli_epi32(w.hi, 16))};
  const F32x16 low{_mm256_cvtepi32_ps(_mm256_and_si256(w.lo, mask)), _mm256_cvtepi32_ps(_mm256_and_si256(w.hi, mask))};
  return Mul(Fma(high, Set1(65536.0f), Add(low, Set1(0.5f))), Set1(0x1p-32f));
}

#endif

// The first n floats at p (all 16 if there are more), `rest` in the other lanes; reads no further.
DT_INLINE F32x16 LoadFirst(const float* p, int64_t n, float rest = 0.0f) {
  if (n >= 16) return Load(p);
  alignas(64) float lanes[16];
  Store(lanes, Set1(rest));
  memcpy(lanes, p, static_cast<size_t>(n) * 4);
  return Load(lanes);
}
DT_INLINE void StoreFirst(float* p, F32x16 x, int64_t n) {
  if (n >= 16) return Store(p, x);
  alignas(64) float lanes[16];
  Store(lanes, x);
  memcpy(p, lanes, static_cast<size_t>(n) * 4);
}

// ((x0+x8)+(x4+x12)) + ... : halves, then quarters, then neighbours.
DT_INLINE float ReduceAdd(F32x16 x) {
  const __m256 a = _mm256_add_ps(LowHalf(x), HighHalf(x));
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
// Four of them, each as above.
DT_INLINE void ReduceAdd4(F32x16 x0, F32x16 x1, F32x16 x2, F32x16 x3, float* out) {
  const auto quarter = [](F32x16 x) {
    const __m256 a = _mm256_add_ps(LowHalf(x), HighHalf(x));
    return _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  };
  const __m128 a = quarter(x0), b = quarter(x1), c = quarter(x2), d = quarter(x3);
  const __m128 ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
  const __m128 cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
  _mm_storeu_ps(out, _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab)));
}
DT_INLINE float ReduceMax(F32x16 x) {
  const __m256 a = _mm256_max_ps(LowHalf(x), HighHalf(x));
  const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}

// e^x, at most 1.2 ulp off for -87.3 <= x <= 88.3 (tests/kernels/exp_test.cc); exactly 0 below (so
// e^-inf = 0), held at e^88.3 above, exactly 1 at 0, NaN for NaN.
DT_INLINE F32x16 Exp(F32x16 x) {
  const F32x16 floor = Set1(-87.3f);
  const F32x16 clamped = Max(floor, Min(Set1(88.3f), x));  // the second operand survives: NaN stays NaN
  const F32x16 n = RoundEven(Mul(clamped, Set1(1.44269504088896341f)));
  const F32x16 r = Fnma(n, Set1(-2.12194440e-4f), Fnma(n, Set1(0.693359375f), clamped));
  F32x16 p = Set1(1.9875691500e-4f);
  p = Fma(p, r, Set1(1.3981999507e-3f));
  p = Fma(p, r, Set1(8.3334519073e-3f));
  p = Fma(p, r, Set1(4.1665795894e-2f));
  p = Fma(p, r, Set1(1.6666665459e-1f));
  p = Fma(p, r, Set1(5.0000001201e-1f));
  p = Fma(Mul(r, r), p, r);
  p = Add(p, Set1(1.0f));
  return SelectLess(x, floor, Zero(), ScalePow2(p, n));
}
// ln x for normal x > 0, within 2 ulp (4e-8 absolute near 1).
DT_INLINE F32x16 Log(F32x16 x) {
  F32x16 e, m;
  SplitExponent(x, e, m);  // x = m 2^e, sqrt(1/2) <= m < sqrt(2)
  const F32x16 r = Sub(m, Set1(1.0f));
  F32x16 p = Set1(7.0376836292e-2f);
  p = Fma(p, r, Set1(-1.1514610310e-1f));
  p = Fma(p, r, Set1(1.1676998740e-1f));
  p = Fma(p, r, Set1(-1.2420140846e-1f));
  p = Fma(p, r, Set1(1.4249322787e-1f));
  p = Fma(p, r, Set1(-1.6668057665e-1f));
  p = Fma(p, r, Set1(2.0000714765e-1f));
  p = Fma(p, r, Set1(-2.4999993993e-1f));
  p = Fma(p, r, Set1(3.3333331174e-1f));
  const F32x16 r2 = Mul(r, r);
  F32x16 y = Mul(Mul(p, r), r2);
  y = Fma(e, Set1(-2.12194440e-4f), y);
  y = Fma(r2, Set1(-0.5f), y);
  return Fma(e, Set1(0.693359375f), Add(r, y));
}
DT_INLINE float Exp(float x) { return _mm256_cvtss_f32(LowHalf(Exp(Set1(x)))); }

}  // namespace dovetail::kernels::DT_ISA_NS
