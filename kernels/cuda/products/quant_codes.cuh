#pragma once
#include "kernels/cuda/primitives/primitives.cuh"
#include "kernels/cuda/products/quant_args.h"

// Codes as operands of the tensor cores. Device code only.
//
// The bits of a code, put where a 16-bit float has its lowest ones, are that float's subnormal number code * 2^-133
// (bf16; up to 255 the same holds beyond the subnormal ones) or code * 2^-24 (f16): exact without any arithmetic. So
// codes are masked, not converted, and what they are too small by is made up for: with bf16 x is taken 2^64 times too
// large, so that no product leaves the range of f32, and sums are multiplied by the rest at the end (kRest).

namespace dovetail::kernels::cuda {

template <WireType kType>
struct CodeMath {  // bf16
  using Math = BF16Math;
  static constexpr uint32_t kXFactor = 0x5f805f80u;  // 2^64, twice
  static constexpr float kCodeUnit = 0x1p-69f;       // of a product, for x as it is
  static __device__ __forceinline__ uint32_t ScaleX(uint32_t x) {
    uint32_t out;
#if __CUDA_ARCH__ >= 900
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(x), "r"(kXFactor));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(x), "r"(kXFactor), "r"(0x80008000u));
#endif
    return out;
  }
  static __device__ __forceinline__ uint32_t Minus(uint32_t a, uint32_t zero) {
    uint32_t out;
#if __CUDA_ARCH__ >= 900
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(zero));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(0x3f803f80u), "r"(zero | 0x80008000u));
#endif
    return out;
  }
  static __device__ __forceinline__ float2 Unpack(uint32_t x) {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&x));
  }
  // E2M1 with its sign on top of each half; E4M3 in the upper byte of each half.
  static __device__ __forceinline__ uint32_t FromE2M1(uint32_t top) {
    return (top & 0x80008000u) | (top >> 6 & 0x01c001c0u);
  }
  static constexpr float kE2M1Unit = 0x1p-62f;  // 2^-126 2^64
  static __device__ __forceinline__ uint32_t FromE4M3(uint32_t top) {
    return (top & 0x80008000u) | (top >> 4 & 0x07f007f0u);
  }
  static constexpr float kE4M3Unit = 0x1p-56f;  // 2^-120 2^64
};

template <>
struct CodeMath<WireType::kF16> {
  using Math = F16Math;
  static constexpr float kCodeUnit = 0x1p-24f;
  static __device__ __forceinline__ uint32_t ScaleX(uint32_t x) { return x; }
  static __device__ __forceinline__ uint32_t Minus(uint32_t a, uint32_t zero) {
    uint32_t out;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(zero));
    return out;
  }
  static __device__ __forceinline__ float2 Unpack(uint32_t x) {
    return __half22float2(*reinterpret_cast<const __half2*>(&x));
  }
  static __device__ __forceinline__ uint32_t FromE2M1(uint32_t top) {
    return (top & 0x80008000u) | (top >> 3 & 0x0e000e00u);
  }
  static constexpr float kE2M1Unit = 0x1p-14f;
  static __device__ __forceinline__ uint32_t FromE4M3(uint32_t top) {
    return (top & 0x80008000u) | (top >> 1 & 0x3f803f80u);
  }
  static constexpr float kE4M3Unit = 0x1p-8f;
};

// What sums have to be multiplied by: of a tile's rows 0 to 7, and of 8 to 15. The same of decoded codes after ScaleX.
template <WireType kType, QuantKind kKind>
__device__ __forceinline__ constexpr float RestOf(bool high) {
  if (kKind == QuantKind::kFp4) return 1 / CodeMath<kType>::kE2M1Unit;
  if (kKind == QuantKind::kE4M3) return 1 / CodeMath<kType>::kE4M3Unit;
  return (high && TraitsOf(kKind).bits == 4 ? 0x1p-4f : 1.0f) / CodeMath<kType>::kCodeUnit;
}

// The A operand of step `s` (of 16 columns) of a chunk: two for 8 bits, four for 4.
template <WireType kType, QuantKind kKind>
__device__ __forceinline__ void Decode(const uint4& chunk, int s, uint32_t (&a)[4]) {
  using Code = CodeMath<kType>;
  constexpr QuantTraits kTraits = TraitsOf(kKind);
  const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
  if constexpr (kKind == QuantKind::kFp4) {
    const uint32_t w = words[s];
    a[0] = Code::FromE2M1(w << 12), a[1] = Code::FromE2M1(w << 8);
    a[2] = Code::FromE2M1(w << 4), a[3] = Code::FromE2M1(w);
  } else if constexpr (kKind == QuantKind::kE4M3) {
    const uint32_t low = words[2 * s], high = words[2 * s + 1];
    a[0] = Code::FromE4M3(low << 8), a[1] = Code::FromE4M3(high << 8);
    a[2] = Code::FromE4M3(low), a[3] = Code::FromE4M3(high);
  } else if constexpr (kTraits.bits == 4) {
    const uint32_t w = words[s], shifted = w >> 8;
    a[0] = w & 0x000f000fu, a[1] = w & 0x00f000f0u;
    a[2] = shifted & 0x000f000fu, a[3] = shifted & 0x00f000f0u;
  } else {
    const uint32_t low = words[2 * s], high = words[2 * s + 1];
    a[0] = low & 0x00ff00ffu, a[1] = high & 0x00ff00ffu;
    a[2] = low >> 8 & 0x00ff00ffu, a[3] = high >> 8 & 0x00ff00ffu;
  }
  if constexpr (kTraits.zero != 0) {
    constexpr uint32_t kLow = kTraits.zero * 0x00010001u, kHigh = kTraits.bits == 4 ? kLow << 4 : kLow;
    a[0] = Code::Minus(a[0], kLow), a[1] = Code::Minus(a[1], kHigh);
    a[2] = Code::Minus(a[2], kLow), a[3] = Code::Minus(a[3], kHigh);
  }
}

// A code less its zero, as a number.
__device__ __forceinline__ float ValueOf(QuantKind kind, uint32_t code) {
  if (kind == QuantKind::kFp4) {
    const float magnitude =
        (code & 6) == 0 ? 0.5f * (code & 1) : __uint_as_float((((code >> 1 & 3) + 126) << 23) | (code & 1) << 22);
    return code & 8 ? -magnitude : magnitude;
  }
  if (kind == QuantKind::kE4M3) {
    const float magnitude = __uint_as_float((code & 0x7f) << 20) * 0x1p120f;
    return code & 0x80 ? -magnitude : magnitude;
  }
  return static_cast<float>(static_cast<int>(code) - TraitsOf(kind).zero);
}

}  // namespace dovetail::kernels::cuda
