#include "kernels/cuda/hybrid_launches.h"
#include "kernels/cuda/warp_sums.cuh"
#include "kernels/cuda/wire.cuh"

// The small kernels around linear states and their hybrids.

namespace dovetail::kernels::cuda {
namespace {

constexpr int kThreads = 256;

int Blocks(int64_t count) { return static_cast<int>((count + kThreads - 1) / kThreads); }
int Result() { return cudaGetLastError(); }
cudaStream_t On(void* stream) { return static_cast<cudaStream_t>(stream); }

__device__ __forceinline__ float Sigmoid(float x) { return 1 / (1 + __expf(-x)); }
__device__ __forceinline__ float Softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

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

__global__ void __launch_bounds__(kThreads) JoinKeysKernel(const __grid_constant__ JoinKeysLaunch p) {
  const int dim = p.own_dim + p.shared_dim;
  const int64_t row = blockIdx.y, i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (i >= static_cast<int64_t>(p.heads) * dim) return;
  const int head = static_cast<int>(i / dim), at = static_cast<int>(i - static_cast<int64_t>(head) * dim);
  const float x = at < p.own_dim ? LoadWire(p.type, p.own, (row * p.heads + head) * p.own_dim + at)
                                 : LoadWire(p.type, p.shared, row * p.shared_step + at - p.own_dim);
  StoreWire(p.type, p.out, row * p.out_step + i, x);
}

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

int LaunchStateInputs(const StateInputsLaunch* p, void* stream) {
  const dim3 grid(Blocks(p->q_width + p->k_width + p->v_width), p->rows);
  StateInputsKernel<<<grid, kThreads, 0, On(stream)>>>(*p);
  return Result();
}

int LaunchStateGates(const StateGatesLaunch* p, void* stream) {
  const int blocks = Blocks(static_cast<int64_t>(p->rows) * p->heads * p->width);
  StateGatesKernel<<<blocks, kThreads, 0, On(stream)>>>(*p);
  return Result();
}

int LaunchOutputGate(const OutputGateLaunch* p, void* stream) {
  const int blocks = Blocks(static_cast<int64_t>(p->rows) * (p->width / p->size) * 32);
  OutputGateKernel<<<blocks, kThreads, 0, On(stream)>>>(*p);
  return Result();
}

int LaunchJoinKeys(const JoinKeysLaunch* p, void* stream) {
  const dim3 grid(Blocks(static_cast<int64_t>(p->heads) * (p->own_dim + p->shared_dim)), p->rows);
  JoinKeysKernel<<<grid, kThreads, 0, On(stream)>>>(*p);
  return Result();
}

int LaunchMlpActivation(const MlpActivationLaunch* p, void* stream) {
  const dim3 grid(p->rows, Blocks(p->size));
  MlpActivationKernel<<<grid, kThreads, 0, On(stream)>>>(*p);
  return Result();
}

int LaunchGatedAdd(const GatedAddLaunch* p, void* stream) {
  GatedAddKernel<<<p->rows, kThreads, 0, On(stream)>>>(*p);
  return Result();
}

}  // namespace dovetail::kernels::cuda
