#pragma once
#include <cuda_runtime.h>

#include <cstdint>

// What launchers of kernels have in common. Host code.

namespace dovetail::kernels::cuda {

inline cudaStream_t AsStream(void* stream) { return static_cast<cudaStream_t>(stream); }

// Thread blocks of `threads` that cover `count` elements.
inline unsigned BlocksOf(int64_t count, int threads) { return static_cast<unsigned>((count + threads - 1) / threads); }

inline int LastLaunchError() { return static_cast<int>(cudaGetLastError()); }

}  // namespace dovetail::kernels::cuda
