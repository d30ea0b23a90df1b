#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <initializer_list>

#include "kernels/cuda/wire_type.h"

// Reading and writing activations of any wire type. Device code, except what launches ask for.

namespace dovetail::kernels::cuda {

__device__ __forceinline__ void StoreWirePair(WireType type, void* base, int64_t at, float x, float y) {
  if (type == WireType::kBF16) {
    *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(base) + at) = __floats2bfloat162_rn(x, y);
  } else if (type == WireType::kF16) {
    *reinterpret_cast<__half2*>(static_cast<__half*>(base) + at) = __floats2half2_rn(x, y);
  } else {
    *reinterpret_cast<float2*>(static_cast<float*>(base) + at) = make_float2(x, y);
  }
}

__device__ __forceinline__ float2 LoadWirePair(WireType type, const void* base, int64_t at) {
  if (type == WireType::kBF16) {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(static_cast<const __nv_bfloat16*>(base) + at));
  }
  if (type == WireType::kF16)
    return __half22float2(*reinterpret_cast<const __half2*>(static_cast<const __half*>(base) + at));
  return *reinterpret_cast<const float2*>(static_cast<const float*>(base) + at);
}

// Eight elements, 16-byte aligned.
__device__ __forceinline__ void LoadWire8(WireType type, const void* base, int64_t at, float (&x)[8]) {
  if (type == WireType::kF32) {
    const auto* from = reinterpret_cast<const float4*>(static_cast<const float*>(base) + at);
    const float4 a = from[0], b = from[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    return;
  }
  const uint4 raw = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(base) + at);
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = type == WireType::kBF16
                            ? __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&words[i]))
                            : __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
    x[2 * i] = pair.x;
    x[2 * i + 1] = pair.y;
  }
}

// Rounds x to the type, too.
__device__ __forceinline__ void StoreWire8(WireType type, void* base, int64_t at, float (&x)[8]) {
  if (type == WireType::kF32) {
    auto* to = reinterpret_cast<float4*>(static_cast<float*>(base) + at);
    to[0] = make_float4(x[0], x[1], x[2], x[3]);
    to[1] = make_float4(x[4], x[5], x[6], x[7]);
    return;
  }
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (type == WireType::kBF16) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
      words[i] = *reinterpret_cast<const uint32_t*>(&pair);
      x[2 * i] = __low2float(pair), x[2 * i + 1] = __high2float(pair);
    } else {
      const __half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
      words[i] = *reinterpret_cast<const uint32_t*>(&pair);
      x[2 * i] = __low2float(pair), x[2 * i + 1] = __high2float(pair);
    }
  }
  *reinterpret_cast<uint4*>(static_cast<uint16_t*>(base) + at) = make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ float LoadWire(WireType type, const void* base, int64_t at) {
  if (type == WireType::kBF16) return __bfloat162float(static_cast<const __nv_bfloat16*>(base)[at]);
  if (type == WireType::kF16) return __half2float(static_cast<const __half*>(base)[at]);
  return static_cast<const float*>(base)[at];
}

__device__ __forceinline__ void StoreWire(WireType type, void* base, int64_t at, float x) {
  if (type == WireType::kBF16) {
    static_cast<__nv_bfloat16*>(base)[at] = __float2bfloat16_rn(x);
  } else if (type == WireType::kF16) {
    static_cast<__half*>(base)[at] = __float2half_rn(x);
  } else {
    static_cast<float*>(base)[at] = x;
  }
}

// Whether rows can be moved 16 bytes at a time, eight elements of 16 bits or twice four of 32.
inline bool InRuns(std::initializer_list<int64_t> sizes, std::initializer_list<const void*> pointers) {
  for (const int64_t size : sizes) {
    if (size % 8 != 0) return false;
  }
  for (const void* pointer : pointers) {
    if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) return false;
  }
  return true;
}

}  // namespace dovetail::kernels::cuda
