#pragma GCC diagnostic ignored "-Wuninitialized"  // g++ 12 warns inside its own intrinsics (GCC bug 105593)
#include <immintrin.h>

#include "bench/kernels/peaks.h"

namespace dovetail::bench {

constexpr int kChains = 12;  // enough to hide the latency
// Every loop over the chains must be unrolled, or the compiler keeps them in memory.
#define EACH_CHAIN _Pragma("GCC unroll 12") for (int i = 0; i < kChains; ++i)

double Int8MultiplyAdds(long iterations, int* sink) {
  __m512i sum[kChains];
  const __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(*sink & 1);
  EACH_CHAIN sum[i] = _mm512_set1_epi32(i);
  for (long n = 0; n < iterations; ++n) {
    EACH_CHAIN {
      sum[i] = _mm512_dpbusd_epi32(sum[i], a, b);
      __asm__ volatile("" : "+v"(sum[i]));
    }
  }
  EACH_CHAIN* sink += _mm512_reduce_add_epi32(sum[i]);
  return 64.0 * kChains * static_cast<double>(iterations);
}

double BF16MultiplyAdds(long iterations, float* sink) {
  __m512 sum[kChains];
  const __m512i a = _mm512_set1_epi32(0x3f803f80 + (*sink > 0 ? 1 : 0));
  EACH_CHAIN sum[i] = _mm512_set1_ps(static_cast<float>(i));
  for (long n = 0; n < iterations; ++n) {
    EACH_CHAIN {
      sum[i] = _mm512_dpbf16_ps(sum[i], (__m512bh)a, (__m512bh)a);
      __asm__ volatile("" : "+v"(sum[i]));
    }
  }
  EACH_CHAIN* sink += _mm512_reduce_add_ps(sum[i]);
  return 32.0 * kChains * static_cast<double>(iterations);
}

}  // namespace dovetail::bench
