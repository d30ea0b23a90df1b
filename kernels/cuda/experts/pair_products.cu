#include "kernels/cuda/experts/expert_launches.h"
#include "kernels/cuda/primitives/dependent_launch.cuh"
#include "kernels/cuda/primitives/enqueue.cuh"
#include "kernels/cuda/primitives/warp_sums.cuh"
#include "kernels/cuda/primitives/wire.cuh"
#include "kernels/cuda/rows/gated_activation.cuh"

// Experts of few rows, pair by pair: what a step waits for are the chosen experts' weights, each read once. A warp
// takes a column of a pair, or of a row's sum over its experts, and has all lanes' loads of it on their way at once.
// Pairs are the fast dimension of the grid, so that pairs of one expert read the same weights at about the same time.

namespace dovetail::kernels::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kRun = 8;           // elements of a load
constexpr int kStep = 32 * kRun;  // columns of a warp's load
constexpr int kGateAhead = 4;     // loads of a lane on their way, of the gate and of the other half
constexpr int kSumAhead = 8;

// Eight weights, which nothing else reads soon.
__device__ __forceinline__ uint4 LoadWeights(const uint16_t* at) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at));
  return v;
}

template <WireType kType>
__device__ __forceinline__ float2 Widen(uint32_t pair) {
  if constexpr (kType == WireType::kBF16) return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

template <WireType kType>
__device__ __forceinline__ void AddProducts(const uint4& w, const float (&x)[kRun], float& sum) {
  const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = Widen<kType>(words[i]);
    sum += pair.x * x[2 * i];
    sum += pair.y * x[2 * i + 1];
  }
}

// A warp: one column of act(gate) * other of one pair.
template <WireType kType>
__global__ void __launch_bounds__(kThreads) PairGateKernel(const __grid_constant__ PairGateLaunch p) {
  WaitForPredecessor();
  LetSuccessorBegin();
  const int pair = blockIdx.x, column = blockIdx.y * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (column >= p.size) return;
  const int64_t expert = p.expert[pair], half = static_cast<int64_t>(p.size) * p.k;
  const auto* const x = static_cast<const uint16_t*>(p.x) + static_cast<int64_t>(pair / p.chosen) * p.k;
  const auto* const gate = static_cast<const uint16_t*>(p.w) + 2 * expert * half + static_cast<int64_t>(column) * p.k;
  float sums[2] = {};
  for (int first = lane * kRun; first < p.k; first += kGateAhead * kStep) {
    uint4 w[2][kGateAhead];
#pragma unroll
    for (int i = 0; i < kGateAhead; ++i) {
      const int at = first + i * kStep;
      if (at < p.k) w[0][i] = LoadWeights(gate + at), w[1][i] = LoadWeights(gate + half + at);
    }
#pragma unroll
    for (int i = 0; i < kGateAhead; ++i) {
      const int at = first + i * kStep;
      if (at >= p.k) continue;
      float values[kRun];
      LoadWire8(kType, x, at, values);
      AddProducts<kType>(w[0][i], values, sums[0]);
      AddProducts<kType>(w[1][i], values, sums[1]);
    }
  }
  sums[0] = WarpSum(sums[0]), sums[1] = WarpSum(sums[1]);
  if (lane != 0) return;
  if (p.bias != nullptr) {
    const float* const bias = p.bias + 2 * expert * p.size + column;
    sums[0] += bias[0], sums[1] += bias[p.size];
  }
  StoreWire(kType, p.y, static_cast<int64_t>(pair) * p.size + column,
            Activate(p.activation == ExpertActivation::kGeluTanh, sums[0], sums[1]));
}

// Where the loads of a row's column lie: its experts one after the other, each in steps of kStep.
struct ColumnWalk {
  int choice = 0, at = 0;  // of this lane
  __device__ __forceinline__ void Advance(int k, int lane) {
    at += kStep;
    if (at - lane * kRun >= k) at = lane * kRun, ++choice;
  }
};

// A warp: one column of a row, over all of its experts. Weights are asked for before the gates are there.
template <WireType kType>
__global__ void __launch_bounds__(kThreads) PairSumKernel(const __grid_constant__ PairSumLaunch p) {
  const int64_t row = blockIdx.x;
  const int column = blockIdx.y * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int32_t* const expert = p.expert + row * p.chosen;
  const auto* const x = static_cast<const uint16_t*>(p.x) + row * p.chosen * p.k;
  const auto* const w = static_cast<const uint16_t*>(p.w) + static_cast<int64_t>(column) * p.k;
  const bool there = column < p.n;
  ColumnWalk load{0, lane * kRun}, use = load;
  float sum = 0;
  for (bool waited = false; !waited || use.choice < p.chosen; waited = true) {
    uint4 weights[kSumAhead];
#pragma unroll
    for (int i = 0; i < kSumAhead; ++i, load.Advance(p.k, lane))
      if (there && load.choice < p.chosen && load.at < p.k)
        weights[i] = LoadWeights(w + static_cast<int64_t>(expert[load.choice]) * p.n * p.k + load.at);
    if (!waited) {
      WaitForPredecessor();
      LetSuccessorBegin();
    }
#pragma unroll
    for (int i = 0; i < kSumAhead; ++i, use.Advance(p.k, lane)) {
      if (!there || use.choice >= p.chosen || use.at >= p.k) continue;
      float values[kRun], product = 0;
      LoadWire8(kType, x + static_cast<int64_t>(use.choice) * p.k, use.at, values);
      AddProducts<kType>(weights[i], values, product);
      sum += p.weight[row * p.chosen + use.choice] * product;
    }
  }
  sum = WarpSum(sum);
  if (lane != 0 || !there) return;
  if (p.bias != nullptr)
    for (int s = 0; s < p.chosen; ++s)
      sum += p.weight[row * p.chosen + s] * p.bias[static_cast<int64_t>(expert[s]) * p.n + column];
  p.out[row * p.n + column] += p.scale * sum;
}

}  // namespace

int LaunchPairGate(const PairGateLaunch* p, void* stream) {
  const dim3 grid(p->pairs, BlocksOf(p->size, kWarps));
  return LaunchDependent(p->type == WireType::kBF16 ? PairGateKernel<WireType::kBF16> : PairGateKernel<WireType::kF16>,
                         grid, kThreads, 0, AsStream(stream), *p);
}

int LaunchPairSum(const PairSumLaunch* p, void* stream) {
  const dim3 grid(p->rows, BlocksOf(p->n, kWarps));
  return LaunchDependent(p->type == WireType::kBF16 ? PairSumKernel<WireType::kBF16> : PairSumKernel<WireType::kF16>,
                         grid, kThreads, 0, AsStream(stream), *p);
}

}  // namespace dovetail::kernels::cuda
