#pragma once
#include <cuda_runtime.h>

// Sums over the lanes of a warp. All 32 lanes call them. Device code only.

namespace dovetail::kernels::cuda {

// v[i] summed over the lanes of a warp, for lanes with lane % N == i. N: a power of two up to 32.
template <int N, int kHalf = N / 2>
__device__ __forceinline__ float TransposeSum(float (&v)[N]) {
  if constexpr (kHalf > 0) {
    const bool upper = (threadIdx.x & kHalf) != 0;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float given = upper ? v[i] : v[i + kHalf], kept = upper ? v[i + kHalf] : v[i];
      v[i] = kept + __shfl_xor_sync(~0u, given, kHalf);
    }
    return TransposeSum<N, kHalf / 2>(v);
  } else {
#pragma unroll
    for (int step = N; step < 32; step *= 2) v[0] += __shfl_xor_sync(~0u, v[0], step);
    return v[0];
  }
}

// Over groups of kLanes neighbouring lanes; all lanes of a group get it.
template <int kLanes = 32>
__device__ __forceinline__ float WarpSum(float x) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

}  // namespace dovetail::kernels::cuda
