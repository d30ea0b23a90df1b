#pragma once
#include <cstdint>

// wgmma of 64 x 192, 224 and 256, both operands in shared memory. Device code only, of sm_90a.

namespace dovetail::kernels::cuda {
#if __CUDA_ARCH_FEAT_SM90_ALL

#define DOVETAIL_LIST96                                                                                              \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"   \
  "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57," \
  "%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85," \
  "%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define DOVETAIL_LIST112 \
  DOVETAIL_LIST96        \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define DOVETAIL_LIST128 \
  DOVETAIL_LIST112       \
  ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define DOVETAIL_SUMS16(d, n)                                                                                          \
  "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3]), "+f"(d[n + 1][0]), "+f"(d[n + 1][1]), "+f"(d[n + 1][2]), \
      "+f"(d[n + 1][3]), "+f"(d[n + 2][0]), "+f"(d[n + 2][1]), "+f"(d[n + 2][2]), "+f"(d[n + 2][3]),                   \
      "+f"(d[n + 3][0]), "+f"(d[n + 3][1]), "+f"(d[n + 3][2]), "+f"(d[n + 3][3])
#define DOVETAIL_SUMS96(d)                                                                                             \
  DOVETAIL_SUMS16(d, 0), DOVETAIL_SUMS16(d, 4), DOVETAIL_SUMS16(d, 8), DOVETAIL_SUMS16(d, 12), DOVETAIL_SUMS16(d, 16), \
      DOVETAIL_SUMS16(d, 20)
#define DOVETAIL_SUMS112(d) DOVETAIL_SUMS96(d), DOVETAIL_SUMS16(d, 24)
#define DOVETAIL_SUMS128(d) DOVETAIL_SUMS112(d), DOVETAIL_SUMS16(d, 28)
#define DOVETAIL_WGMMA(shape, type, list, a_at, b_at, sums, a, b)                                                \
  asm volatile("{ .reg .pred p; setp.eq.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned." shape ".f32." type "." type \
               " {" list "}, %" a_at ", %" b_at ", p, 1, 1, 0, 0; }"                                             \
               : sums                                                                                            \
               : "l"(a), "l"(b))

// d += a b^T, 64 x 8 kCount x 16, both as rows of k.
template <bool kBF16, int kCount>
__device__ __forceinline__ void Wgmma(float (&d)[kCount][4], uint64_t a, uint64_t b) {
  if constexpr (kCount == 24 && kBF16) {
    DOVETAIL_WGMMA("m64n192k16", "bf16", DOVETAIL_LIST96, "96", "97", DOVETAIL_SUMS96(d), a, b);
  } else if constexpr (kCount == 24) {
    DOVETAIL_WGMMA("m64n192k16", "f16", DOVETAIL_LIST96, "96", "97", DOVETAIL_SUMS96(d), a, b);
  } else if constexpr (kCount == 28 && kBF16) {
    DOVETAIL_WGMMA("m64n224k16", "bf16", DOVETAIL_LIST112, "112", "113", DOVETAIL_SUMS112(d), a, b);
  } else if constexpr (kCount == 28) {
    DOVETAIL_WGMMA("m64n224k16", "f16", DOVETAIL_LIST112, "112", "113", DOVETAIL_SUMS112(d), a, b);
  } else if constexpr (kBF16) {
    static_assert(kCount == 32);
    DOVETAIL_WGMMA("m64n256k16", "bf16", DOVETAIL_LIST128, "128", "129", DOVETAIL_SUMS128(d), a, b);
  } else {
    static_assert(kCount == 32);
    DOVETAIL_WGMMA("m64n256k16", "f16", DOVETAIL_LIST128, "128", "129", DOVETAIL_SUMS128(d), a, b);
  }
}

#undef DOVETAIL_WGMMA
#undef DOVETAIL_SUMS128
#undef DOVETAIL_SUMS112
#undef DOVETAIL_SUMS96
#undef DOVETAIL_SUMS16
#undef DOVETAIL_LIST128
#undef DOVETAIL_LIST112
#undef DOVETAIL_LIST96

#endif
}  // namespace dovetail::kernels::cuda
