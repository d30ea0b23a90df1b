#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/cuda/attention_args.h"

// Reading and writing activations of any wire type. Device code only.

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

}  // namespace dovetail::kernels::cuda
