#include "kernels/cuda/experts/expert_launches.h"
#include "kernels/cuda/primitives/primitives.cuh"
#include "kernels/cuda/primitives/warp_sums.cuh"

// Routing: which experts serve a row, and with what weight. A thread block takes a row, or, of many rows, several,
// which read the router's weights together. Either way a row's sums have the same order.

namespace dovetail::kernels::cuda {
namespace {

constexpr int kMostExperts = 1024;
constexpr int kOneThreads = 1024;  // of a thread block with one row: what a row waits for are the weights
constexpr int kNormThreads = 256, kNormWarps = kNormThreads / 32;  // whose squares are summed in turn
constexpr int kTogetherThreads = 512;
constexpr int kExpertsAtOnce = 4;   // of a warp
constexpr int kTogetherFrom = 512;  // rows: fewer would leave multiprocessors idle
constexpr int kMostSharedBytes = 160 * 1024;

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
__device__ void TakeOtherGroups(const RouteLaunch& p, float* groups, float* choice) {
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
__device__ void Choose(const RouteLaunch& p, int64_t row, float* scores, float* choice, float* groups) {
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

// x[row] normed, to h[..]. One warp sums as all of RouteOneKernel do.
__device__ void NormRow(const RouteLaunch& p, int64_t row, float* h) {
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

// Scores of all rows at hand for experts [first, first + kExpertsAtOnce). One warp.
template <int kTogether>
__device__ __forceinline__ void ScoreRows(const RouteLaunch& p, const float* h, int first, float* scores) {
  const int lane = threadIdx.x % 32;
  const float* w[kExpertsAtOnce];
#pragma unroll
  for (int e = 0; e < kExpertsAtOnce; ++e)
    w[e] = p.router + static_cast<int64_t>(min(first + e, p.experts - 1)) * p.hidden;
  float sums[kExpertsAtOnce][kTogether] = {};
#pragma unroll 4
  for (int i = lane; i < p.hidden; i += 32) {
    float weights[kExpertsAtOnce];
#pragma unroll
    for (int e = 0; e < kExpertsAtOnce; ++e) weights[e] = w[e][i];
#pragma unroll
    for (int row = 0; row < kTogether; ++row) {
      const float value = h[row * p.hidden + i];
#pragma unroll
      for (int e = 0; e < kExpertsAtOnce; ++e) sums[e][row] += value * weights[e];
    }
  }
#pragma unroll
  for (int e = 0; e < kExpertsAtOnce; ++e) {
#pragma unroll
    for (int row = 0; row < kTogether; ++row) {
      const float sum = WarpSum(sums[e][row]);
      if (lane == 0 && first + e < p.experts)
        scores[row * p.experts + first + e] = sum + (p.bias != nullptr ? p.bias[first + e] : 0.0f);
    }
  }
}

// Of shared memory, for each row: h, scores, choices and groups.
constexpr int FloatsOfRow(int hidden, int experts) { return hidden + 2 * experts + (experts + 1) / 2; }

// A thread block a row.
__global__ void __launch_bounds__(kOneThreads) RouteOneKernel(const __grid_constant__ RouteLaunch p) {
  extern __shared__ float memory[];
  __shared__ float sums[kNormWarps];
  float* const h = memory;
  float* const scores = h + p.hidden;
  const int64_t row = blockIdx.x;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float* const x = p.x + row * p.hidden;
  if (warp < kNormWarps) {
    float squares = 0;
    for (int i = threadIdx.x; i < p.hidden; i += kNormThreads) squares += x[i] * x[i];
    squares = WarpSum(squares);
    if (lane == 0) sums[warp] = squares;
  }
  __syncthreads();
  const float inverse = rsqrtf(WarpSum(lane < kNormWarps ? sums[lane] : 0.0f) / static_cast<float>(p.hidden) + p.eps);
  for (int i = threadIdx.x; i < p.hidden; i += kOneThreads) h[i] = x[i] * (inverse * p.norm[i]);
  __syncthreads();
  for (int first = warp * kExpertsAtOnce; first < p.experts; first += kOneThreads / 32 * kExpertsAtOnce)
    ScoreRows<1>(p, h, first, scores);
  __syncthreads();
  if (warp == 0) Choose(p, row, scores, scores + p.experts, scores + 2 * p.experts);
}

// A thread block kTogether rows, of which a warp norms one and chooses for it.
template <int kTogether>
__global__ void __launch_bounds__(kTogetherThreads) RouteTogetherKernel(const __grid_constant__ RouteLaunch p) {
  extern __shared__ float memory[];
  float* const h = memory;
  float* const scores = h + kTogether * p.hidden;
  float* const choice = scores + kTogether * p.experts;
  float* const groups = choice + kTogether * p.experts;
  const int warp = threadIdx.x / 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kTogether + warp;
  // Rows that are not there are the last one again.
  if (warp < kTogether) NormRow(p, min(row, static_cast<int64_t>(p.rows) - 1), h + warp * p.hidden);
  __syncthreads();
  for (int first = warp * kExpertsAtOnce; first < p.experts; first += kTogetherThreads / 32 * kExpertsAtOnce)
    ScoreRows<kTogether>(p, h, first, scores);
  __syncthreads();
  if (warp < kTogether && row < p.rows)
    Choose(p, row, scores + warp * p.experts, choice + warp * p.experts, groups + warp * ((p.experts + 1) / 2));
}

using Kernel = void (*)(RouteLaunch);

int Launch(Kernel kernel, const RouteLaunch& p, int together, int threads, int bytes, void* stream) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  kernel<<<(p.rows + together - 1) / together, threads, bytes, static_cast<cudaStream_t>(stream)>>>(p);
  return cudaGetLastError();
}

// As many rows as shared memory holds.
int LaunchTogether(const RouteLaunch& p, int bytes_of_row, void* stream) {
  const auto launch = [&](Kernel kernel, int together) {
    return Launch(kernel, p, together, kTogetherThreads, together * bytes_of_row, stream);
  };
  if (16 * bytes_of_row <= kMostSharedBytes) return launch(RouteTogetherKernel<16>, 16);
  if (8 * bytes_of_row <= kMostSharedBytes) return launch(RouteTogetherKernel<8>, 8);
  return launch(RouteTogetherKernel<4>, 4);
}

}  // namespace

int LaunchRoute(const RouteLaunch* p, void* stream) {
  const int bytes_of_row = FloatsOfRow(p->hidden, p->experts) * static_cast<int>(sizeof(float));
  if (p->rows >= kTogetherFrom && 4 * bytes_of_row <= kMostSharedBytes) return LaunchTogether(*p, bytes_of_row, stream);
  return Launch(RouteOneKernel, *p, 1, kOneThreads, bytes_of_row, stream);
}

}  // namespace dovetail::kernels::cuda
