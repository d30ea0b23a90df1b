// Elements of 8 bits for the code on F32x16: E4M3 as floats, and products of 16-bit numbers summed in 32 bits, which
// are exact, so the same on both ISAs. Included by the files of one ISA only, after simd.h.
// Threads: pure.
#pragma once
#include "kernels/cpu/simd.h"

namespace dovetail::kernels::DT_ISA_NS {

// Sixteen codes, each with its sign in all upper bits. E4M3 shifted into place is an f16 that is 2^8 times too small,
// subnormal numbers included; both steps are exact.
DT_INLINE F32x16 FromE4M3Words(__m256i codes) {
  const __m256i number = _mm256_and_si256(_mm256_slli_epi16(codes, 7), _mm256_set1_epi16(int16_t(0xbf80)));
  const __m256i sign = _mm256_set1_epi16(int16_t(0x8000));
  const __m256i nan = _mm256_cmpeq_epi16(_mm256_or_si256(number, sign), _mm256_set1_epi16(int16_t(0xbf80)));
  const __m256i half = _mm256_or_si256(number, nan);  // all bits are a NaN in f16, too
#ifdef DT_ISA_AVX512
  return {_mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f))};
#else
  const __m256 scale = _mm256_set1_ps(256.0f);
  return {_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), scale),
          _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)), scale)};
#endif
}
DT_INLINE F32x16 LoadE4M3(const std::byte* p) {
  return FromE4M3Words(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

#ifdef DT_ISA_AVX512

// The bfloat16 of each code without its sign.
struct E4M3Table {
  alignas(64) uint16_t bf16[128];
  constexpr E4M3Table() : bf16() {
    for (int code = 0; code < 128; ++code) {
      int exponent = code >> 3, mantissa = code & 7;
      if (exponent == 0 && mantissa != 0) {
        exponent = 1;
        while (mantissa < 8) {
          mantissa <<= 1;
          --exponent;
        }
      }
      const bool zero = code == 0;
      bf16[code] = static_cast<uint16_t>(zero ? 0 : (exponent + 120) << 7 | (mantissa & 7) << 4);
    }
    bf16[127] = 0x7fc0;
  }
};
inline constexpr E4M3Table kE4M3Table;

// 32 codes as bfloat16.
DT_INLINE __m512bh LoadE4M3Pairs(const std::byte* p) {
  const __m512i codes = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  const uint16_t* const table = kE4M3Table.bf16;
  const __m512i low = _mm512_permutex2var_epi16(_mm512_load_si512(table), codes, _mm512_load_si512(table + 32));
  const __m512i high = _mm512_permutex2var_epi16(_mm512_load_si512(table + 64), codes, _mm512_load_si512(table + 96));
  const __mmask32 upper = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x40));
  const __m512i size = _mm512_mask_blend_epi16(upper, low, high);
  return (__m512bh)_mm512_ternarylogic_epi32(size, codes, _mm512_set1_epi16(int16_t(0x8000)), 0xf8);  // a | (b & c)
}

struct I32x16 {
  __m512i v;
};
struct I16x32 {
  __m512i v;
};
DT_INLINE I32x16 ZeroI32() { return {_mm512_setzero_si512()}; }
DT_INLINE I16x32 WidenI8(const std::byte* p) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
DT_INLINE I16x32 SetPair(int32_t pair) { return {_mm512_set1_epi32(pair)}; }
// acc[i] + a[2i] b[2i] + a[2i + 1] b[2i + 1]
// Not the intrinsic: g++ 12 copies its accumulator before and after, since it changes the vector's element type.
DT_INLINE I32x16 DotPairs(I32x16 acc, I16x32 a, I16x32 b) {
  asm("vpdpwssd %2, %1, %0" : "+v"(acc.v) : "v"(a.v), "v"(b.v));
  return acc;
}
DT_INLINE F32x16 ToFloat(I32x16 x) { return {_mm512_cvtepi32_ps(x.v)}; }
// Rounded to nearest even; x within 16 bits.
DT_INLINE void StoreI16(int16_t* p, F32x16 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x.v)));
}

#else

// Of pairs, the first ones and the second ones.
DT_INLINE void LoadE4M3Pairs(const std::byte* p, F32x16& even, F32x16& odd) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  even = FromE4M3Words(_mm256_srai_epi16(_mm256_slli_epi16(pairs, 8), 8));
  odd = FromE4M3Words(_mm256_srai_epi16(pairs, 8));
}

struct I32x16 {
  __m256i lo, hi;
};
struct I16x32 {
  __m256i lo, hi;
};
DT_INLINE I32x16 ZeroI32() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
DT_INLINE I16x32 WidenI8(const std::byte* p) {
  const __m128i* const q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(q)), _mm256_cvtepi8_epi16(_mm_loadu_si128(q + 1))};
}
DT_INLINE I16x32 SetPair(int32_t pair) { return {_mm256_set1_epi32(pair), _mm256_set1_epi32(pair)}; }
DT_INLINE I32x16 DotPairs(I32x16 acc, I16x32 a, I16x32 b) {
  return {_mm256_add_epi32(acc.lo, _mm256_madd_epi16(a.lo, b.lo)),
          _mm256_add_epi32(acc.hi, _mm256_madd_epi16(a.hi, b.hi))};
}
DT_INLINE F32x16 ToFloat(I32x16 x) { return {_mm256_cvtepi32_ps(x.lo), _mm256_cvtepi32_ps(x.hi)}; }
DT_INLINE void StoreI16(int16_t* p, F32x16 x) {
  const __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}

#endif

DT_INLINE int32_t LoadPair(const int16_t* p) {
  int32_t pair;
  memcpy(&pair, p, 4);
  return pair;
}

}  // namespace dovetail::kernels::DT_ISA_NS
