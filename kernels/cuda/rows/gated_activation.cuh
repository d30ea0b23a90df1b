#pragma once

// act(gate) * up, of a gated MLP. Device code only.

namespace dovetail::kernels::cuda {

// GELU by its tanh, or SiLU. A quotient whose divisor is beyond 2^126 is 0, as it is in any type of ours.
__device__ __forceinline__ float Activate(bool gelu, float gate, float up) {
  if (!gelu) return __fdividef(gate, 1 + __expf(-gate)) * up;
  const float u = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
  return __fdividef(gate, 1 + __expf(-2 * u)) * up;
}

}  // namespace dovetail::kernels::cuda
