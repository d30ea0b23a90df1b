#include "kernels/cuda/experts/expert_launches.h"
#include "kernels/cuda/primitives/enqueue.cuh"
#include "kernels/cuda/primitives/sigmoid.cuh"
#include "kernels/cuda/primitives/warp_sums.cuh"
#include "kernels/cuda/primitives/wire.cuh"

namespace dovetail::kernels::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) GatedAddKernel(const __grid_constant__ GatedAddLaunch p) {
  __shared__ float sums[kThreads / 32];
  const int64_t row = blockIdx.x;
  float sum = 0;
  for (int i = threadIdx.x; i < p.h_size; i += kThreads) sum += LoadWire(p.type, p.h, row * p.h_size + i) * p.w[i];
  sum = WarpSum(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = WarpSum(threadIdx.x % 32 < kThreads / 32 ? sums[threadIdx.x % 32] : 0.0f);
  const float factor = p.scale * Sigmoid(sum);
  for (int i = threadIdx.x; i < p.size; i += kThreads) p.x[row * p.size + i] += factor * p.y[row * p.size + i];
}

}  // namespace

int LaunchGatedAdd(const GatedAddLaunch* p, void* stream) {
  GatedAddKernel<<<p->rows, kThreads, 0, AsStream(stream)>>>(*p);
  return LastLaunchError();
}

}  // namespace dovetail::kernels::cuda
