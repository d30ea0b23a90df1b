#pragma once

// Functions of gates. Device code only.

namespace dovetail::kernels::cuda {

__device__ __forceinline__ float Sigmoid(float x) { return 1 / (1 + __expf(-x)); }
__device__ __forceinline__ float Softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

}  // namespace dovetail::kernels::cuda
