#include "kernels/cuda/primitives/enqueue.cuh"
#include "kernels/cuda/primitives/wire.cuh"
#include "kernels/cuda/rows/append_launches.h"

namespace dovetail::kernels::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) JoinKeysKernel(const __grid_constant__ JoinKeysLaunch p) {
  const int dim = p.own_dim + p.shared_dim;
  const int64_t row = blockIdx.y, i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (i >= static_cast<int64_t>(p.heads) * dim) return;
  const int head = static_cast<int>(i / dim), at = static_cast<int>(i - static_cast<int64_t>(head) * dim);
  const float x = at < p.own_dim ? LoadWire(p.type, p.own, (row * p.heads + head) * p.own_dim + at)
                                 : LoadWire(p.type, p.shared, row * p.shared_step + at - p.own_dim);
  StoreWire(p.type, p.out, row * p.out_step + i, x);
}

}  // namespace

int LaunchJoinKeys(const JoinKeysLaunch* p, void* stream) {
  const dim3 grid(BlocksOf(static_cast<int64_t>(p->heads) * (p->own_dim + p->shared_dim), kThreads), p->rows);
  JoinKeysKernel<<<grid, kThreads, 0, AsStream(stream)>>>(*p);
  return LastLaunchError();
}

}  // namespace dovetail::kernels::cuda
