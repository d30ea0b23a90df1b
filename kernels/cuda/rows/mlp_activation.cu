#include "kernels/cuda/primitives/enqueue.cuh"
#include "kernels/cuda/primitives/sigmoid.cuh"
#include "kernels/cuda/primitives/wire.cuh"
#include "kernels/cuda/rows/elementwise_launches.h"

namespace dovetail::kernels::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float Activate(MlpKind kind, float gate, float up) {
  switch (kind) {
    case MlpKind::kSilu: return gate * Sigmoid(gate) * up;
    case MlpKind::kGeluTanh: {
      const float u = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
      return gate / (1 + __expf(-2 * u)) * up;
    }
    case MlpKind::kClampedSwiglu: {
      const float g = fminf(gate, 7.0f), u = fminf(fmaxf(up, -7.0f), 7.0f);
      return g * Sigmoid(1.702f * g) * (u + 1);
    }
    case MlpKind::kRelu2: return up > 0 ? up * up : 0.0f;
  }
  return 0;
}

__global__ void __launch_bounds__(kThreads) MlpActivationKernel(const __grid_constant__ MlpActivationLaunch p) {
  const int64_t row = blockIdx.x;
  const int i = blockIdx.y * kThreads + threadIdx.x;
  if (i >= p.size) return;
  const bool gated = p.kind != MlpKind::kRelu2;
  const int64_t step = gated ? 2 * p.size : p.size;
  const float gate = gated ? LoadWire(p.type, p.gate_up, row * step + i) : 0.0f;
  const float up = LoadWire(p.type, p.gate_up, row * step + (gated ? p.size : 0) + i);
  StoreWire(p.type, p.out, row * static_cast<int64_t>(p.size) + i, Activate(p.kind, gate, up));
}

}  // namespace

int LaunchMlpActivation(const MlpActivationLaunch* p, void* stream) {
  const dim3 grid(p->rows, BlocksOf(p->size, kThreads));
  MlpActivationKernel<<<grid, kThreads, 0, AsStream(stream)>>>(*p);
  return LastLaunchError();
}

}  // namespace dovetail::kernels::cuda
