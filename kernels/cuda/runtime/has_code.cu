#include "kernels/cuda/runtime/runtime.h"

namespace dovetail::kernels::cuda::runtime {
namespace {

// Compiled like all kernels here: where the driver can load it, it can load the others.
__global__ void ProbeKernel() {}

}  // namespace

int HasCode(int device, bool* has) {
  *has = false;
  cudaError_t error = cudaSetDevice(device);
  if (error != cudaSuccess) return static_cast<int>(error);
  cudaFuncAttributes attributes;
  error = cudaFuncGetAttributes(&attributes, ProbeKernel);
  if (error != cudaSuccess) cudaGetLastError();
  *has = error == cudaSuccess;
  const bool no_code = error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion ||
                       error == cudaErrorInvalidDeviceFunction;
  return no_code ? 0 : static_cast<int>(error);
}

}  // namespace dovetail::kernels::cuda::runtime
