#pragma once
#include <cstdint>

// What the four lanes exchange that share a row of an accumulator. Device code only.

namespace dovetail::kernels::cuda {

// words[i] of lane c of four neighbours becomes words[c] of lane i. All 32 lanes call it.
__device__ __forceinline__ void TransposeQuad(uint32_t (&words)[4]) {
  const bool high = (threadIdx.x & 2) != 0, odd = (threadIdx.x & 1) != 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = __shfl_xor_sync(~0u, high ? words[i] : words[i + 2], 2);
    (high ? words[i] : words[i + 2]) = got;
  }
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t got = __shfl_xor_sync(~0u, odd ? words[i] : words[i + 1], 1);
    (odd ? words[i] : words[i + 1]) = got;
  }
}

}  // namespace dovetail::kernels::cuda
