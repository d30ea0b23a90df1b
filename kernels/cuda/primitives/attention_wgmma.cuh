#pragma once
#include <cstdint>

#include "kernels/cuda/primitives/warpgroup_products.cuh"

// wgmma as attention uses it: scores, whose operands lie in shared memory, and weights times values, whose weights are
// registers (PTX ISA 9.7.15). Sums are f32 in d[column / 8][4], as mma.m16n8k16 lays out a warp's 16 of the 64 rows.
// Device code only, of sm_90a.

namespace dovetail::kernels::cuda {

// What is computed from these registers is computed behind what has been issued so far, and what is issued from here on
// is issued behind it.
template <int kCount>
__device__ __forceinline__ void FenceRegisters(float (&d)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+f"(d[i][j])::"memory");
  }
}
template <int kCount>
__device__ __forceinline__ void FenceRegisters(uint32_t (&w)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(w[i][j])::"memory");
  }
}

#if __CUDA_ARCH_FEAT_SM90_ALL

// A matrix in shared memory whose rows of kRowBytes (128, 64 or 32) are swizzled over as many bytes. By rows of k:
// groups of eight rows lie one behind the other. Else, by rows of the other dimension: those too, and runs of kRowBytes
// of a row lie `run_step` bytes apart.
template <int kRowBytes>
__device__ __forceinline__ uint64_t MatrixOf(uint32_t address, int run_step = 16) {
  constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;
  return kSwizzle << 62 | static_cast<uint64_t>(8 * kRowBytes / 16) << 32 | static_cast<uint64_t>(run_step / 16) << 16 |
         (address & 0x3ffff) >> 4;
}

#define DOVETAIL_LIST32                                                                                \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26," \
  "%27,%28,%29,%30,%31"
#define DOVETAIL_LIST40 \
  DOVETAIL_LIST32       \
  ",%32,%33,%34,%35,%36,%37,%38,%39"
#define DOVETAIL_LIST48 \
  DOVETAIL_LIST40       \
  ",%40,%41,%42,%43,%44,%45,%46,%47"
#define DOVETAIL_LIST64 \
  DOVETAIL_LIST48       \
  ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define DOVETAIL_LIST128                                                                               \
  DOVETAIL_LIST64                                                                                      \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,"  \
  "%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109," \
  "%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define DOVETAIL_SUMS8(d, n)                                                                                           \
  "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3]), "+f"(d[n + 1][0]), "+f"(d[n + 1][1]), "+f"(d[n + 1][2]), \
      "+f"(d[n + 1][3])
#define DOVETAIL_SUMS32(d, n) \
  DOVETAIL_SUMS8(d, n), DOVETAIL_SUMS8(d, n + 2), DOVETAIL_SUMS8(d, n + 4), DOVETAIL_SUMS8(d, n + 6)
#define DOVETAIL_SUMS40(d) DOVETAIL_SUMS32(d, 0), DOVETAIL_SUMS8(d, 8)
#define DOVETAIL_SUMS48(d) DOVETAIL_SUMS40(d), DOVETAIL_SUMS8(d, 10)
#define DOVETAIL_SUMS64(d) DOVETAIL_SUMS32(d, 0), DOVETAIL_SUMS32(d, 8)
#define DOVETAIL_SUMS128(d) DOVETAIL_SUMS64(d), DOVETAIL_SUMS32(d, 16), DOVETAIL_SUMS32(d, 24)

// scale: 0 drops what d held.
#define DOVETAIL_SCORES(shape, type, list, a_at, b_at, scale_at, sums, a, b, scale)                                 \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %" scale_at ", 0;\nwgmma.mma_async.sync.aligned." shape ".f32." type \
               "." type " {" list "}, %" a_at ", %" b_at ", p, 1, 1, 0, 0; }"                                       \
               : sums                                                                                               \
               : "l"(a), "l"(b), "n"(scale))

// d = a b^T, or d + a b^T where kAdds: 64 x 8 kCount x 16, both by rows of k.
template <bool kBF16, bool kAdds, int kCount>
__device__ __forceinline__ void ScoresOf(float (&d)[kCount][4], uint64_t a, uint64_t b) {
  constexpr int kScale = kAdds ? 1 : 0;
  static_assert(kCount == 8 || kCount == 16);
  if constexpr (kCount == 8 && kBF16) {
    DOVETAIL_SCORES("m64n64k16", "bf16", DOVETAIL_LIST32, "32", "33", "34", DOVETAIL_SUMS32(d, 0), a, b, kScale);
  } else if constexpr (kCount == 8) {
    DOVETAIL_SCORES("m64n64k16", "f16", DOVETAIL_LIST32, "32", "33", "34", DOVETAIL_SUMS32(d, 0), a, b, kScale);
  } else if constexpr (kBF16) {
    DOVETAIL_SCORES("m64n128k16", "bf16", DOVETAIL_LIST64, "64", "65", "66", DOVETAIL_SUMS64(d), a, b, kScale);
  } else {
    DOVETAIL_SCORES("m64n128k16", "f16", DOVETAIL_LIST64, "64", "65", "66", DOVETAIL_SUMS64(d), a, b, kScale);
  }
}

#define DOVETAIL_WEIGHED(shape, type, list, a0, a1, a2, a3, b_at, by_at, sums, a, b, by_row)                     \
  asm volatile("{ .reg .pred p; setp.eq.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned." shape ".f32." type "." type \
               " {" list "}, {%" a0 ",%" a1 ",%" a2 ",%" a3 "}, %" b_at ", p, 1, 1, %" by_at "; }"               \
               : sums                                                                                            \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(by_row))

// d += a b, 64 x 8 kCount x 16: b by rows of k, or (kByRow false) of columns.
template <bool kBF16, bool kByRow, int kCount>
__device__ __forceinline__ void AddWeighed(float (&d)[kCount][4], const uint32_t (&a)[4], uint64_t b) {
  constexpr int kBy = kByRow ? 1 : 0;
  static_assert(kCount == 8 || kCount == 10 || kCount == 12 || kCount == 16 || kCount == 32);
  if constexpr (kCount == 8 && kBF16) {
    DOVETAIL_WEIGHED("m64n64k16", "bf16", DOVETAIL_LIST32, "32", "33", "34", "35", "36", "37", DOVETAIL_SUMS32(d, 0), a,
                     b, kBy);
  } else if constexpr (kCount == 8) {
    DOVETAIL_WEIGHED("m64n64k16", "f16", DOVETAIL_LIST32, "32", "33", "34", "35", "36", "37", DOVETAIL_SUMS32(d, 0), a,
                     b, kBy);
  } else if constexpr (kCount == 10 && kBF16) {
    DOVETAIL_WEIGHED("m64n80k16", "bf16", DOVETAIL_LIST40, "40", "41", "42", "43", "44", "45", DOVETAIL_SUMS40(d), a, b,
                     kBy);
  } else if constexpr (kCount == 10) {
    DOVETAIL_WEIGHED("m64n80k16", "f16", DOVETAIL_LIST40, "40", "41", "42", "43", "44", "45", DOVETAIL_SUMS40(d), a, b,
                     kBy);
  } else if constexpr (kCount == 12 && kBF16) {
    DOVETAIL_WEIGHED("m64n96k16", "bf16", DOVETAIL_LIST48, "48", "49", "50", "51", "52", "53", DOVETAIL_SUMS48(d), a, b,
                     kBy);
  } else if constexpr (kCount == 12) {
    DOVETAIL_WEIGHED("m64n96k16", "f16", DOVETAIL_LIST48, "48", "49", "50", "51", "52", "53", DOVETAIL_SUMS48(d), a, b,
                     kBy);
  } else if constexpr (kCount == 16 && kBF16) {
    DOVETAIL_WEIGHED("m64n128k16", "bf16", DOVETAIL_LIST64, "64", "65", "66", "67", "68", "69", DOVETAIL_SUMS64(d), a,
                     b, kBy);
  } else if constexpr (kCount == 16) {
    DOVETAIL_WEIGHED("m64n128k16", "f16", DOVETAIL_LIST64, "64", "65", "66", "67", "68", "69", DOVETAIL_SUMS64(d), a, b,
                     kBy);
  } else if constexpr (kCount == 32 && kBF16) {
    DOVETAIL_WEIGHED("m64n256k16", "bf16", DOVETAIL_LIST128, "128", "129", "130", "131", "132", "133",
                     DOVETAIL_SUMS128(d), a, b, kBy);
  } else {
    DOVETAIL_WEIGHED("m64n256k16", "f16", DOVETAIL_LIST128, "128", "129", "130", "131", "132", "133",
                     DOVETAIL_SUMS128(d), a, b, kBy);
  }
}

#undef DOVETAIL_WEIGHED
#undef DOVETAIL_SCORES
#undef DOVETAIL_SUMS128
#undef DOVETAIL_SUMS64
#undef DOVETAIL_SUMS48
#undef DOVETAIL_SUMS40
#undef DOVETAIL_SUMS32
#undef DOVETAIL_SUMS8
#undef DOVETAIL_LIST128
#undef DOVETAIL_LIST64
#undef DOVETAIL_LIST48
#undef DOVETAIL_LIST40
#undef DOVETAIL_LIST32

#endif
}  // namespace dovetail::kernels::cuda
