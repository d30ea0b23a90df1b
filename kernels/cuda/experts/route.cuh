#pragma once
#include "kernels/cuda/experts/expert_args.h"
#include "kernels/cuda/primitives/warp_sums.cuh"
#include "kernels/cuda/primitives/wire.cuh"

// What the kernels of routing share: they differ in who does it. A row's sums have one order everywhere. Device code
// only.

namespace dovetail::kernels::cuda {

inline constexpr int kMostExperts = 1024;
inline constexpr int kNormThreads = 256, kNormWarps = kNormThreads / 32;  // whose squares are summed in turn

__device__ __forceinline__ float WarpMax(float x) {
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// In the order of the floats, zeros being equal; 0 is below all.
__device__ __forceinline__ uint32_t OrderOf(float x) {
  const uint32_t bits = __float_as_uint(x == 0 ? 0.0f : x);
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}

// The best of a warp's candidates, of equals the lower number; a lane without one has `none`. All lanes return it.
__device__ __forceinline__ int WarpBest(float best, int at, int none) {
  const uint32_t order = at == none ? 0 : OrderOf(best), top = __reduce_max_sync(~0u, order);
  return static_cast<int>(__reduce_min_sync(~0u, static_cast<uint32_t>(order == top ? at : none)));
}

// One warp marks the experts of all groups but the chosen ones as taken.
__device__ inline void TakeOtherGroups(const RouteLaunch& p, float* groups, float* choice) {
  const int lane = threadIdx.x % 32, size = p.experts / p.groups;
  for (int g = lane; g < p.groups; g += 32) {
    float first = -INFINITY, second = -INFINITY;
    for (int e = g * size; e < (g + 1) * size; ++e) {
      second = fmaxf(second, fminf(first, choice[e]));
      first = fmaxf(first, choice[e]);
    }
    const float sum = first + second;
    groups[g] = isnan(sum) ? -INFINITY : sum;
  }
  __syncwarp();
  for (int s = 0; s < p.chosen_groups; ++s) {
    float best = 0;
    int at = kMostExperts;
    for (int g = lane; g < p.groups; g += 32)
      if (!isnan(groups[g]) && (at == kMostExperts || groups[g] > best)) best = groups[g], at = g;
    at = WarpBest(best, at, kMostExperts);
    __syncwarp();
    if (lane == at % 32) groups[at] = NAN;  // chosen
    __syncwarp();
  }
  for (int e = lane; e < p.experts; e += 32)
    if (!isnan(groups[e / size])) choice[e] = NAN;
  __syncwarp();
}

// One warp turns logits into scores and chooses; of equals the lower number. `groups` is memory for kMostExperts / 2.
__device__ inline void Choose(const RouteLaunch& p, int64_t row, float* scores, float* choice, float* groups) {
  const int lane = threadIdx.x % 32;
  if (p.score == RouteScore::kSoftmax) {
    float largest = -INFINITY, sum = 0;
    for (int e = lane; e < p.experts; e += 32) largest = fmaxf(largest, scores[e]);
    largest = WarpMax(largest);
    for (int e = lane; e < p.experts; e += 32) sum += scores[e] = expf(scores[e] - largest);
    sum = WarpSum(sum);
    for (int e = lane; e < p.experts; e += 32) scores[e] /= sum;
  } else if (p.score == RouteScore::kSigmoid) {
    for (int e = lane; e < p.experts; e += 32) scores[e] = 1 / (1 + expf(-scores[e]));
  }
  for (int e = lane; e < p.experts; e += 32) {
    const float x = scores[e] + (p.selection_bias != nullptr ? p.selection_bias[e] : 0.0f);
    choice[e] = isnan(x) ? -INFINITY : x;
  }
  __syncwarp();
  if (p.groups > 1) TakeOtherGroups(p, groups, choice);
  float total = 0, first = 0, own = 0;
  int own_expert = 0;  // of the choice with the lane's number
  for (int s = 0; s < p.chosen; ++s) {
    float best = 0;
    int at = kMostExperts;  // beyond all
    for (int e = lane; e < p.experts; e += 32)
      if (!isnan(choice[e]) && (at == kMostExperts || choice[e] > best)) best = choice[e], at = e;
    at = WarpBest(best, at, kMostExperts);
    float weight = scores[at];
    if (s == 0) first = weight;
    if (p.score == RouteScore::kSoftmaxOfChosen) weight = expf(weight - first);
    total += weight;
    if (s >= 32 && lane == 0) p.expert[row * p.chosen + s] = at, p.weight[row * p.chosen + s] = weight;
    if (s == lane) own = weight, own_expert = at;
    if (lane == at % 32) choice[at] = NAN;  // taken
    __syncwarp();
  }
  const float factor = p.renormalise || p.score == RouteScore::kSoftmaxOfChosen ? p.scale / total : p.scale;
  if (lane < p.chosen) p.expert[row * p.chosen + lane] = own_expert, p.weight[row * p.chosen + lane] = own * factor;
  for (int s = lane + 32; s < p.chosen; s += 32) p.weight[row * p.chosen + s] *= factor;
}

// 1 / rms of a row whose squares eight warps have summed, in turn, to `sums`. All lanes of a warp return it.
__device__ __forceinline__ float InverseOf(const RouteLaunch& p, const float* sums) {
  const int lane = threadIdx.x % 32;
  return rsqrtf(WarpSum(lane < kNormWarps ? sums[lane] : 0.0f) / static_cast<float>(p.hidden) + p.eps);
}

// x[row] normed, to h[..]. All threads of a thread block, of which there are kNormThreads at least. `sums` is memory of
// kNormWarps.
__device__ __forceinline__ void NormRowTogether(const RouteLaunch& p, int64_t row, float* sums, float* h) {
  const float* const x = p.x + row * p.hidden;
  const int warp = threadIdx.x / 32;
  if (warp < kNormWarps) {
    float squares = 0;
    for (int i = threadIdx.x; i < p.hidden; i += kNormThreads) squares += x[i] * x[i];
    squares = WarpSum(squares);
    if (threadIdx.x % 32 == 0) sums[warp] = squares;
  }
  __syncthreads();
  const float inverse = InverseOf(p, sums);
  for (int i = threadIdx.x; i < p.hidden; i += blockDim.x) h[i] = x[i] * (inverse * p.norm[i]);
  __syncthreads();
}

// The same by one warp.
__device__ inline void NormRow(const RouteLaunch& p, int64_t row, float* h) {
  const int lane = threadIdx.x % 32;
  const float* const x = p.x + row * p.hidden;
  float sums = 0;  // of warp `lane`
  for (int warp = 0; warp < kNormWarps; ++warp) {
    float squares = 0;
    for (int i = warp * 32 + lane; i < p.hidden; i += kNormThreads) {
      const float value = x[i];
      squares += value * value;
    }
    squares = WarpSum(squares);
    if (lane == warp) sums = squares;
  }
  const float inverse = rsqrtf(WarpSum(sums) / static_cast<float>(p.hidden) + p.eps);
  for (int i = lane; i < p.hidden; i += 32) h[i] = x[i] * (inverse * p.norm[i]);
}

// h[first, end) of a row, from shared memory, for the products that follow; by `threads` threads, of which this is one.
__device__ __forceinline__ void LeaveRow(const RouteLaunch& p, int64_t row, const float* h, int first, int end,
                                         int thread, int threads) {
  for (int i = first + thread; i < end; i += threads) StoreWire(p.type, p.h, row * p.hidden + i, h[i]);
}

// Products of weights that lie one after the other, in their order.
__device__ __forceinline__ void AddProduct(float w, const float* h, float& sum) { sum += *h * w; }
__device__ __forceinline__ void AddProduct(const float4& w, const float* h, float& sum) {
  const float4 x = *reinterpret_cast<const float4*>(h);
  sum += x.x * w.x, sum += x.y * w.y, sum += x.z * w.z, sum += x.w * w.w;
}

// Of a lane: the products of its columns, kWide at a time, kAhead loads of each expert on their way.
template <typename Weights, int kTogether, int kAtOnce, int kAhead>
__device__ __forceinline__ void SumProducts(const RouteLaunch& p, const float* h, int first,
                                            float (&sums)[kAtOnce][kTogether]) {
  constexpr int kWide = sizeof(Weights) / sizeof(float);
  const Weights* w[kAtOnce];
#pragma unroll
  for (int e = 0; e < kAtOnce; ++e)
    w[e] = reinterpret_cast<const Weights*>(p.router + static_cast<int64_t>(min(first + e, p.experts - 1)) * p.hidden);
#pragma unroll kAhead
  for (int i = threadIdx.x % 32; i < p.hidden / kWide; i += 32) {
    Weights weights[kAtOnce];
#pragma unroll
    for (int e = 0; e < kAtOnce; ++e) weights[e] = w[e][i];
#pragma unroll
    for (int row = 0; row < kTogether; ++row) {
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e) AddProduct(weights[e], h + row * p.hidden + i * kWide, sums[e][row]);
    }
  }
}

// Scores of all rows at hand for experts [first, first + kAtOnce): each(row, expert, score) by one lane of the warp.
// Rows of h in shared memory begin at multiples of 16 bytes where `hidden` is a multiple of 4.
template <int kTogether, int kAtOnce, int kAhead, typename Each>
__device__ __forceinline__ void ScoreRows(const RouteLaunch& p, const float* h, int first, Each&& each) {
  const int lane = threadIdx.x % 32;
  float sums[kAtOnce][kTogether] = {};
  if (p.hidden % 4 == 0 && reinterpret_cast<uintptr_t>(p.router) % sizeof(float4) == 0)
    SumProducts<float4, kTogether, kAtOnce, kAhead>(p, h, first, sums);
  else
    SumProducts<float, kTogether, kAtOnce, kAhead>(p, h, first, sums);
#pragma unroll
  for (int e = 0; e < kAtOnce; ++e) {
#pragma unroll
    for (int row = 0; row < kTogether; ++row) {
      const float sum = WarpSum(sums[e][row]);
      if (lane == 0 && first + e < p.experts)
        each(row, first + e, sum + (p.bias != nullptr ? p.bias[first + e] : 0.0f));
    }
  }
}

}  // namespace dovetail::kernels::cuda
