#include <cuda_runtime.h>

#include "kernels/cuda/exchange.cuh"
#include "kernels/cuda/exchange_launches.h"

namespace dovetail::kernels::cuda {
namespace {

constexpr int kPushThreads = 512;

__global__ void AwaitKernel(const __grid_constant__ ExchangeAwaitLaunch p) { ExchangeAwait(p.end, p.op); }

__global__ void SignalKernel(const __grid_constant__ ExchangeSignalLaunch p) { ExchangeSignal(p.end, p.op); }

__global__ void __launch_bounds__(kPushThreads) PushKernel(const __grid_constant__ ExchangePushLaunch p) {
  if (p.await_op >= 0) {
    if (threadIdx.x == 0) ExchangeAwait(p.end, static_cast<uint32_t>(p.await_op));
    __syncthreads();
  }
  const size_t first = blockIdx.x * static_cast<size_t>(kPushThreads) + threadIdx.x;
  const size_t step = gridDim.x * static_cast<size_t>(kPushThreads);
#pragma unroll
  for (int part = 0; part < ExchangePushLaunch::kParts; ++part) {
    const auto* from = static_cast<const int4*>(p.parts[part].from);
    auto* to = static_cast<int4*>(p.parts[part].to);
    const size_t count = p.parts[part].bytes / sizeof(int4);
#pragma unroll 4
    for (size_t i = first; i < count; i += step) to[i] = __ldcg(from + i);
  }
  ExchangeSignalWhenLast(p.end, p.op, gridDim.x);
}

cudaStream_t AsStream(void* stream) { return static_cast<cudaStream_t>(stream); }

// CUDA loads a kernel at its first launch, and that load waits for the kernels that run: one that waits for a message
// must not be running when the kernel that sends is loaded.
cudaError_t LoadThoseThatSend() {
  cudaFuncAttributes ignored;
  const cudaError_t signal = cudaFuncGetAttributes(&ignored, SignalKernel);
  return signal != cudaSuccess ? signal : cudaFuncGetAttributes(&ignored, PushKernel);
}

}  // namespace

int LaunchExchangeAwait(const ExchangeAwaitLaunch* launch, void* stream) {
  if (const cudaError_t error = LoadThoseThatSend(); error != cudaSuccess) return static_cast<int>(error);
  AwaitKernel<<<1, 1, 0, AsStream(stream)>>>(*launch);
  return static_cast<int>(cudaGetLastError());
}

int LaunchExchangeSignal(const ExchangeSignalLaunch* launch, void* stream) {
  SignalKernel<<<1, 1, 0, AsStream(stream)>>>(*launch);
  return static_cast<int>(cudaGetLastError());
}

int LaunchExchangePush(const ExchangePushLaunch* launch, void* stream) {
  PushKernel<<<launch->blocks, kPushThreads, 0, AsStream(stream)>>>(*launch);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace dovetail::kernels::cuda
