#pragma once
#include "kernels/cuda/experts/expert_args.h"
#include "kernels/cuda/primitives/warp_sums.cuh"

// What the kernels of routing share: they differ in who does it. A row's sums have one order everywhere. Device code
// only.

namespace dovetail::kernels::cuda {

inline constexpr int kMostExperts = 1024;
inline constexpr int kNormThreads = 256, kNormWarps = kNormThreads / 32;  // whose squares are summed in turn

__device__ __forceinline__ float WarpMax(float x) {
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// The best of a warp's candidates, of equals the lower number; a lane without one has `none`. All lanes return it.
__device__ __forceinline__ int WarpBest(float best, int at, int none) {
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(~0u, best, step);
    const int other_at = __shfl_xor_sync(~0u, at, step);
    if (other_at < none && (at == none || other > best || (other == best && other_at < at)))
      best = other, at = other_at;
  }
  return at;
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
  float total = 0, first = 0;
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
    if (lane == 0) {
      p.expert[row * p.chosen + s] = at;
      p.weight[row * p.chosen + s] = weight;
    }
    __syncwarp();
    if (lane == at % 32) choice[at] = NAN;  // taken
    __syncwarp();
  }
  const bool divide = p.renormalise || p.score == RouteScore::kSoftmaxOfChosen;
  for (int s = lane; s < p.chosen; s += 32) p.weight[row * p.chosen + s] *= divide ? p.scale / total : p.scale;
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

// Scores of all rows at hand for experts [first, first + kAtOnce): each(row, expert, score) by one lane of the warp.
// Weights of kAhead columns of lanes are on their way at once.
template <int kTogether, int kAtOnce, int kAhead, typename Each>
__device__ __forceinline__ void ScoreRows(const RouteLaunch& p, const float* h, int first, Each&& each) {
  const int lane = threadIdx.x % 32;
  const float* w[kAtOnce];
#pragma unroll
  for (int e = 0; e < kAtOnce; ++e) w[e] = p.router + static_cast<int64_t>(min(first + e, p.experts - 1)) * p.hidden;
  float sums[kAtOnce][kTogether] = {};
#pragma unroll kAhead
  for (int i = lane; i < p.hidden; i += 32) {
    float weights[kAtOnce];
#pragma unroll
    for (int e = 0; e < kAtOnce; ++e) weights[e] = w[e][i];
#pragma unroll
    for (int row = 0; row < kTogether; ++row) {
      const float value = h[row * p.hidden + i];
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e) sums[e][row] += value * weights[e];
    }
  }
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
