#include "kernels/cuda/primitives/enqueue.cuh"
#include "kernels/cuda/primitives/sigmoid.cuh"
#include "kernels/cuda/primitives/warp_sums.cuh"
#include "kernels/cuda/primitives/wire.cuh"
#include "kernels/cuda/state/layer_launches.h"

namespace dovetail::kernels::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) StateInputsKernel(const __grid_constant__ StateInputsLaunch p) {
  const int64_t width = p.q_width + p.k_width + p.v_width, row = blockIdx.y;
  const int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (i >= width) return;
  float x = LoadWire(p.type, p.qkv, row * width + i);
  if (p.silu) x *= Sigmoid(x);
  if (i < p.q_width) {
    StoreWire(p.type, p.q, row * p.q_width + i, x);
  } else if (i < p.q_width + p.k_width) {
    StoreWire(p.type, p.k, row * p.k_width + i - p.q_width, x);
  } else {
    const int64_t at = row * p.v_width + i - p.q_width - p.k_width;
    if (p.v_factor != nullptr) x *= LoadWire(p.type, p.v_factor, at);
    StoreWire(p.type, p.v, at, x);
  }
}

__global__ void __launch_bounds__(kThreads) StateGatesKernel(const __grid_constant__ StateGatesLaunch p) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  const int per_row = p.heads * p.width;
  if (i >= static_cast<int64_t>(p.rows) * per_row) return;
  const int64_t row = i / per_row;
  const int at = static_cast<int>(i - row * per_row), head = at / p.width, channel = at - head * p.width;
  float* const out = p.out + (row * p.heads + head) * p.stride;
  const float t = fminf(fmaxf(Softplus(p.scale * p.x[i] + p.bias[at]), p.low), p.high);
  out[channel] = t * p.factor[at];
  if (p.step_is_rate) out[p.width] = t;
  if (p.rate != nullptr && channel == 0) out[p.width] = p.rate_scale * Sigmoid(p.rate[row * p.heads + head]);
}

__device__ __forceinline__ float Gate(const OutputGateLaunch& p, int64_t at) {
  if (p.gate == nullptr) return 1;
  const float x = p.scale * LoadWire(p.type, p.gate, at);
  return p.kind == GateKind::kSigmoid ? Sigmoid(x) : p.kind == GateKind::kSilu ? x * Sigmoid(x) : x;
}

// A warp a vector.
__global__ void __launch_bounds__(kThreads) OutputGateKernel(const __grid_constant__ OutputGateLaunch p) {
  const int vectors = p.width / p.size;
  const int64_t vector = (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) / 32;
  if (vector >= static_cast<int64_t>(p.rows) * vectors) return;
  const int lane = threadIdx.x % 32, part = static_cast<int>(vector % vectors);
  const int64_t first = vector * p.size;
  float inverse = 1;
  if (p.weight != nullptr) {
    float squares = 0;
    for (int i = lane; i < p.size; i += 32) {
      float x = LoadWire(p.type, p.x, first + i);
      if (p.gate_first) x *= Gate(p, first + i);
      squares += x * x;
    }
    inverse = rsqrtf(WarpSum(squares) / static_cast<float>(p.size) + p.eps);
  }
  for (int i = lane; i < p.size; i += 32) {
    float x = LoadWire(p.type, p.x, first + i) * Gate(p, first + i) * inverse;
    if (p.weight != nullptr) x *= p.weight[p.weight_each ? part * p.size + i : i];
    StoreWire(p.type, p.out, first + i, x);
  }
}

}  // namespace

int LaunchStateInputs(const StateInputsLaunch* p, void* stream) {
  const dim3 grid(BlocksOf(p->q_width + p->k_width + p->v_width, kThreads), p->rows);
  StateInputsKernel<<<grid, kThreads, 0, AsStream(stream)>>>(*p);
  return LastLaunchError();
}

int LaunchStateGates(const StateGatesLaunch* p, void* stream) {
  const int blocks = BlocksOf(static_cast<int64_t>(p->rows) * p->heads * p->width, kThreads);
  StateGatesKernel<<<blocks, kThreads, 0, AsStream(stream)>>>(*p);
  return LastLaunchError();
}

int LaunchOutputGate(const OutputGateLaunch* p, void* stream) {
  const int blocks = BlocksOf(static_cast<int64_t>(p->rows) * (p->width / p->size) * 32, kThreads);
  OutputGateKernel<<<blocks, kThreads, 0, AsStream(stream)>>>(*p);
  return LastLaunchError();
}

}  // namespace dovetail::kernels::cuda
