#include "kernels/cuda/primitives/dependent_launch.cuh"
#include "kernels/cuda/primitives/enqueue.cuh"
#include "kernels/cuda/primitives/wire.cuh"
#include "kernels/cuda/rows/elementwise_launches.h"
#include "kernels/cuda/rows/gated_activation.cuh"

namespace dovetail::kernels::cuda {
namespace {

__global__ void __launch_bounds__(256) ActivationKernel(const __grid_constant__ ActivationLaunch p) {
  const int64_t row = blockIdx.y;
  const int i = 2 * (blockIdx.x * 256 + threadIdx.x);
  LetSuccessorBegin();
  WaitForPredecessor();
  if (i >= p.size) return;
  const float2 gate = LoadWirePair(p.type, p.gate, row * p.gate_step + i);
  const float2 up = LoadWirePair(p.type, p.up, row * p.up_step + i);
  StoreWirePair(p.type, p.out, row * p.out_step + i, Activate(p.gelu, gate.x, up.x), Activate(p.gelu, gate.y, up.y));
}

__global__ void __launch_bounds__(256) ActivationRunsKernel(const __grid_constant__ ActivationLaunch p) {
  const int64_t row = blockIdx.y;
  const int i = 8 * (blockIdx.x * 256 + threadIdx.x);
  LetSuccessorBegin();
  WaitForPredecessor();
  if (i >= p.size) return;
  float gate[8], up[8];
  LoadWire8(p.type, p.gate, row * p.gate_step + i, gate);
  LoadWire8(p.type, p.up, row * p.up_step + i, up);
#pragma unroll
  for (int j = 0; j < 8; ++j) gate[j] = Activate(p.gelu, gate[j], up[j]);
  StoreWire8(p.type, p.out, row * p.out_step + i, gate);
}

}  // namespace

int LaunchGatedActivation(const ActivationLaunch* launch, void* stream) {
  if (launch->rows == 0 || launch->size == 0) return 0;
  if (launch->type != WireType::kF32 && InRuns({launch->size, launch->gate_step, launch->up_step, launch->out_step},
                                               {launch->gate, launch->up, launch->out})) {
    const dim3 runs((launch->size / 8 + 255) / 256, launch->rows);
    return LaunchDependent(ActivationRunsKernel, runs, 256, 0, AsStream(stream), *launch);
  }
  const dim3 grid((launch->size / 2 + 255) / 256, launch->rows);
  return LaunchDependent(ActivationKernel, grid, 256, 0, AsStream(stream), *launch);
}

}  // namespace dovetail::kernels::cuda
