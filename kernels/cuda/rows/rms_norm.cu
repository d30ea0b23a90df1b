#include "kernels/cuda/primitives/dependent_launch.cuh"
#include "kernels/cuda/primitives/enqueue.cuh"
#include "kernels/cuda/primitives/warp_sums.cuh"
#include "kernels/cuda/primitives/wire.cuh"
#include "kernels/cuda/rows/elementwise_launches.h"

namespace dovetail::kernels::cuda {
namespace {

// One thread block a row. x is rounded to its type before it is squared, so that the stored row is what was normed.
__global__ void __launch_bounds__(512) RmsNormKernel(const __grid_constant__ RmsNormLaunch p) {
  __shared__ float sums[16];
  const int64_t row = blockIdx.x;
  const int64_t x_at = row * p.x_step, residual_at = row * p.residual_step, out_at = row * p.out_step;
  LetSuccessorBegin();
  WaitForPredecessor();
  const int pairs = p.size / 2;
  float squares = 0;
  for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
    float2 x = LoadWirePair(p.x_type, p.x, x_at + 2 * i);
    if (p.residual != nullptr) {
      for (int part = 0; part < p.parts; ++part) {
        const float2 r = LoadWirePair(p.x_type, p.residual, residual_at + part * p.part_step + 2 * i);
        x.x += r.x, x.y += r.y;
      }
      StoreWirePair(p.x_type, p.x, x_at + 2 * i, x.x, x.y);
      x = LoadWirePair(p.x_type, p.x, x_at + 2 * i);
    }
    squares += x.x * x.x + x.y * x.y;
  }
  squares = WarpSum(squares);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
  __syncthreads();
  float total = threadIdx.x % 32 < blockDim.x / 32 ? sums[threadIdx.x % 32] : 0.0f;
  total = WarpSum(total);
  const float inverse = rsqrtf(total / static_cast<float>(p.size) + p.eps);
  for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
    const float2 x = LoadWirePair(p.x_type, p.x, x_at + 2 * i);
    const float2 w = *reinterpret_cast<const float2*>(p.weight + 2 * i);
    StoreWirePair(p.out_type, p.out, out_at + 2 * i, x.x * inverse * w.x, x.y * inverse * w.y);
  }
}

__device__ __forceinline__ float BlockSum(float x, float* sums) {
  x = WarpSum(x);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  return WarpSum(threadIdx.x % 32 < blockDim.x / 32 ? sums[threadIdx.x % 32] : 0.0f);
}

// The same for rows in runs of eight elements, one a thread: a row is read once.
__global__ void __launch_bounds__(1024) RmsNormRunsKernel(const __grid_constant__ RmsNormLaunch p) {
  __shared__ float sums[32];
  const int64_t row = blockIdx.x;
  const int i = 8 * threadIdx.x;
  const bool there = i < p.size;
  float x[8] = {}, squares = 0;
  float4 a = {}, b = {};
  if (there) {
    a = *reinterpret_cast<const float4*>(p.weight + i);
    b = *reinterpret_cast<const float4*>(p.weight + i + 4);
  }
  LetSuccessorBegin();
  WaitForPredecessor();
  if (there) {
    LoadWire8(p.x_type, p.x, row * p.x_step + i, x);
    if (p.residual != nullptr) {
#pragma unroll 4
      for (int part = 0; part < p.parts; ++part) {
        float r[8];
        LoadWire8(p.x_type, p.residual, part * p.part_step + row * p.residual_step + i, r);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] += r[j];
      }
      StoreWire8(p.x_type, p.x, row * p.x_step + i, x);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) squares += x[j] * x[j];
  }
  const float inverse = rsqrtf(BlockSum(squares, sums) / static_cast<float>(p.size) + p.eps);
  if (!there) return;
  const float w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
  for (int j = 0; j < 8; ++j) x[j] *= inverse * w[j];
  StoreWire8(p.out_type, p.out, row * p.out_step + i, x);
}

}  // namespace

int LaunchRmsNorm(const RmsNormLaunch* launch, void* stream) {
  if (launch->rows == 0) return 0;
  const bool runs = launch->size <= 8192 &&
                    InRuns({launch->size, launch->x_step, launch->residual_step, launch->out_step, launch->part_step},
                           {launch->x, launch->residual, launch->out, launch->weight});
  if (runs) {
    const int run_threads = (launch->size / 8 + 31) / 32 * 32;
    return LaunchDependent(RmsNormRunsKernel, dim3(launch->rows), run_threads, 0, AsStream(stream), *launch);
  }
  int threads = 64;
  while (threads < 512 && threads * 8 < launch->size) threads *= 2;
  return LaunchDependent(RmsNormKernel, dim3(launch->rows), threads, 0, AsStream(stream), *launch);
}

}  // namespace dovetail::kernels::cuda
