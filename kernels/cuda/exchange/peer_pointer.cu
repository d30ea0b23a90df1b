#include <cuda_runtime.h>
#include <ucp/api/device/ucp_device_impl.h>

#include "kernels/cuda/exchange/exchange_launches.h"

namespace dovetail::kernels::cuda {
namespace {

struct Found {
  void* pointer;
  int status;
};

__global__ void FindKernel(ucp_device_remote_mem_list_h list, unsigned index, Found* out) {
  out->pointer = nullptr;
  out->status = ucp_device_get_ptr(list, index, &out->pointer);
}

}  // namespace

int UcxPeerPointer(int device, void* list, unsigned index, void** pointer) {
  *pointer = nullptr;
  Found* there = nullptr;
  cudaError_t error = cudaSetDevice(device);
  if (error == cudaSuccess) error = cudaMalloc(&there, sizeof(Found));
  if (error != cudaSuccess) return static_cast<int>(error);
  Found found{};
  cudaStream_t stream = nullptr;
  error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (error == cudaSuccess) {
    FindKernel<<<1, 1, 0, stream>>>(static_cast<ucp_device_remote_mem_list_h>(list), index, there);
    error = cudaGetLastError();
    if (error == cudaSuccess) error = cudaMemcpyAsync(&found, there, sizeof(found), cudaMemcpyDefault, stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    cudaStreamDestroy(stream);
  }
  cudaFree(there);
  if (error != cudaSuccess) return static_cast<int>(error);
  if (found.status != UCS_OK || found.pointer == nullptr) return -1;
  *pointer = found.pointer;
  return 0;
}

}  // namespace dovetail::kernels::cuda
