#pragma once
#include <cuda_runtime.h>

#include "kernels/cuda/state/state_args.h"

namespace dovetail::kernels::cuda {

// Of the current device. Returns a cudaError_t. Any host thread.
inline int CountMultiprocessors(int& count) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  return error != cudaSuccess ? error : cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
}

// Enqueues a kernel with as much shared memory as it asks for; returns a cudaError_t. Any host thread, one at a time
// per stream.
inline int LaunchStateKernel(void (*kernel)(StateLaunch), dim3 grid, int threads, int shared_bytes,
                             const StateLaunch& launch, void* stream) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  kernel<<<grid, threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(launch);
  return cudaGetLastError();
}

}  // namespace dovetail::kernels::cuda
