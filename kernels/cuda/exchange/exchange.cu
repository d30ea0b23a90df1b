#include <cuda_runtime.h>

#include "kernels/cuda/exchange/exchange.cuh"
#include "kernels/cuda/exchange/exchange_launches.h"
#include "kernels/cuda/primitives/dependent_launch.cuh"

namespace dovetail::kernels::cuda {
namespace {

constexpr int kPushThreads = 512;

__global__ void AwaitKernel(const __grid_constant__ ExchangeAwaitLaunch p) {
  if (ExchangeAwait(p.end, p.op)) TakeTurn(p.end.own);
}

__global__ void GiveTurnKernel(const __grid_constant__ ExchangeGiveTurnLaunch p) {
  GiveTurn(LoadTurn(p.fan != nullptr ? p.fan->peers[0].end.own : p.own));
}

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

constexpr int kWarp = 32;

// A warp a peer. A wait for several is over when the last is.
__global__ void __launch_bounds__(kWarp* kMostExchangePeers)
    AwaitAllKernel(const __grid_constant__ ExchangeAwaitAllLaunch p) {
  const ExchangeFan& fan = *p.fan;
  const int peer = threadIdx.x / kWarp;
  const bool waits = threadIdx.x % kWarp == 0 && peer < fan.count;
  const bool came = !waits || ExchangeAwait(fan.peers[peer].end, p.op);
  const bool all = __syncthreads_and(came);
  if (threadIdx.x == 0 && came) {
    ExchangeWords* own = fan.peers[0].end.own;
    own->waited_ns += GlobalNanoseconds() - own->begun_ns;
    if (all) TakeTurn(own);
  }
  if (!all && waits && came) {
    const ExchangeEnd& end = fan.peers[peer].end;
    const volatile ExchangeWords* own = end.own;
    FailExchange(end, own->step, ExchangeReason::kElsewhere, p.op);
  }
}

constexpr int kGatherThreads = 256;

__global__ void __launch_bounds__(kGatherThreads) GatherKernel(const __grid_constant__ ExchangeGatherLaunch p) {
  const ExchangeRow row = p.rows[blockIdx.x];
  const auto count = static_cast<int>(p.row_bytes / sizeof(int4));
  const auto* from = static_cast<const int4*>(p.fan->peers[row.peer].answer) + static_cast<int64_t>(row.row) * count;
  auto* to = static_cast<int4*>(p.out) + static_cast<int64_t>(blockIdx.x) * count;
  WaitForPredecessor();
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += kGatherThreads) to[i] = __ldcg(from + i);
}

constexpr int kCopyThreads = 128;

// Elements of a copy's rows that this block copies, one below the other.
template <typename Element>
__device__ __forceinline__ void CopyRows(const ExchangeCopy& c) {
  const int width = c.row_bytes / static_cast<int>(sizeof(Element));
  const int64_t count = static_cast<int64_t>(c.rows) * width;
  const int64_t step = static_cast<int64_t>(gridDim.y) * kCopyThreads;
#pragma unroll 4
  for (int64_t i = blockIdx.y * kCopyThreads + threadIdx.x; i < count; i += step) {
    const int64_t row = i / width, at = i % width;
    const auto* from = reinterpret_cast<const Element*>(static_cast<const char*>(c.from) + row * c.from_step) + at;
    *(reinterpret_cast<Element*>(static_cast<char*>(c.to) + row * c.to_step) + at) = __ldcg(from);
  }
}

// A column of blocks a copy.
__global__ void __launch_bounds__(kCopyThreads) CopiesKernel(const __grid_constant__ ExchangeCopiesLaunch p) {
  const ExchangeCopy c = p.copies[blockIdx.x];
  const bool first = p.fan != nullptr && threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0;
  TurnOf turn;
  if (first) turn = LoadTurn(p.fan->peers[0].end.own);
  WaitForPredecessor();
  if (first) GiveTurn(turn);
  const uint64_t all = reinterpret_cast<uint64_t>(c.from) | reinterpret_cast<uint64_t>(c.to) |
                       static_cast<uint64_t>(c.from_step | c.to_step | c.row_bytes);
  if (all % sizeof(int4) == 0) {
    CopyRows<int4>(c);
  } else {
    CopyRows<int>(c);
  }
  if (p.fan != nullptr) ExchangeSignalAllWhenLast(*p.fan, p.op, gridDim.x * gridDim.y);
}

cudaStream_t AsStream(void* stream) { return static_cast<cudaStream_t>(stream); }

// CUDA loads a kernel at its first launch, and that load waits for the kernels that run: one that waits for a message
// must not be running when the kernel that sends is loaded.
cudaError_t LoadThoseThatSend() {
  cudaFuncAttributes ignored;
  cudaError_t error = cudaFuncGetAttributes(&ignored, SignalKernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&ignored, PushKernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&ignored, GiveTurnKernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&ignored, CopiesKernel);
  return error == cudaSuccess ? cudaFuncGetAttributes(&ignored, GatherKernel) : error;
}

}  // namespace

int LaunchExchangeAwait(const ExchangeAwaitLaunch* launch, void* stream) {
  if (const cudaError_t error = LoadThoseThatSend(); error != cudaSuccess) return static_cast<int>(error);
  AwaitKernel<<<1, 1, 0, AsStream(stream)>>>(*launch);
  return static_cast<int>(cudaGetLastError());
}

int LaunchExchangeGiveTurn(const ExchangeGiveTurnLaunch* launch, void* stream) {
  GiveTurnKernel<<<1, 1, 0, AsStream(stream)>>>(*launch);
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

int LaunchExchangeAwaitAll(const ExchangeAwaitAllLaunch* launch, void* stream) {
  if (const cudaError_t error = LoadThoseThatSend(); error != cudaSuccess) return static_cast<int>(error);
  AwaitAllKernel<<<1, kWarp * kMostExchangePeers, 0, AsStream(stream)>>>(*launch);
  return static_cast<int>(cudaGetLastError());
}

int LaunchExchangeGather(const ExchangeGatherLaunch* launch, void* stream) {
  if (launch->count == 0) return 0;
  return LaunchDependent(GatherKernel, dim3(launch->count), kGatherThreads, 0, AsStream(stream), *launch);
}

int LaunchExchangeCopies(const ExchangeCopiesLaunch* launch, void* stream) {
  if (launch->count == 0) return 0;
  return LaunchDependent(CopiesKernel, dim3(launch->count, launch->splits), kCopyThreads, 0, AsStream(stream), *launch);
}

}  // namespace dovetail::kernels::cuda
