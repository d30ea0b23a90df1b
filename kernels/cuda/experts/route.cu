#include "kernels/cuda/backend_abi.h"
#include "kernels/cuda/experts/expert_launches.h"
#include "kernels/cuda/experts/route.cuh"

// Routing: which experts serve a row, and with what weight. A thread block takes a row, or, of many rows, several,
// which read the router's weights together.

namespace dovetail::kernels::cuda {
namespace {

constexpr int kOneThreads = 1024;  // of a thread block with one row: what a row waits for are the weights
constexpr int kTogetherThreads = 512;
constexpr int kExpertsAtOnce = 4, kAhead = 1;  // of a warp; loads of 16 bytes
constexpr int kMostSharedBytes = 160 * 1024;

// Of shared memory, for each row: h, scores, choices and groups.
constexpr int FloatsOfRow(int hidden, int experts) { return hidden + 2 * experts + (experts + 1) / 2; }

// A thread block a row.
__global__ void __launch_bounds__(kOneThreads) RouteOneKernel(const __grid_constant__ RouteLaunch p) {
  extern __shared__ __align__(16) float memory[];
  __shared__ float sums[kNormWarps];
  float* const h = memory;
  float* const scores = h + p.hidden;
  const int64_t row = blockIdx.x;
  const int warp = threadIdx.x / 32;
  NormRowTogether(p, row, sums, h);
  if (p.h != nullptr) LeaveRow(p, row, h, 0, p.hidden, threadIdx.x, kOneThreads);
  for (int first = warp * kExpertsAtOnce; first < p.experts; first += kOneThreads / 32 * kExpertsAtOnce)
    ScoreRows<1, kExpertsAtOnce, kAhead>(p, h, first, [&](int, int expert, float score) { scores[expert] = score; });
  __syncthreads();
  if (warp == 0) Choose(p, row, scores, scores + p.experts, scores + 2 * p.experts);
}

// A thread block kTogether rows, of which a warp norms one and chooses for it.
template <int kTogether>
__global__ void __launch_bounds__(kTogetherThreads) RouteTogetherKernel(const __grid_constant__ RouteLaunch p) {
  extern __shared__ __align__(16) float memory[];
  float* const h = memory;
  float* const scores = h + kTogether * p.hidden;
  float* const choice = scores + kTogether * p.experts;
  float* const groups = choice + kTogether * p.experts;
  const int warp = threadIdx.x / 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kTogether + warp;
  // Rows that are not there are the last one again.
  if (warp < kTogether) NormRow(p, min(row, static_cast<int64_t>(p.rows) - 1), h + warp * p.hidden);
  __syncthreads();
  if (p.h != nullptr && warp < kTogether && row < p.rows)
    LeaveRow(p, row, h + warp * p.hidden, 0, p.hidden, threadIdx.x % 32, 32);
  for (int first = warp * kExpertsAtOnce; first < p.experts; first += kTogetherThreads / 32 * kExpertsAtOnce)
    ScoreRows<kTogether, kExpertsAtOnce, kAhead>(
        p, h, first, [&](int of, int expert, float score) { scores[of * p.experts + expert] = score; });
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
  const int by_cluster = LaunchRouteByCluster(p, stream);
  if (by_cluster != kProductRefused) return by_cluster;
  const int bytes_of_row = FloatsOfRow(p->hidden, p->experts) * static_cast<int>(sizeof(float));
  if (p->rows >= kRouteTogetherFrom && 4 * bytes_of_row <= kMostSharedBytes)
    return LaunchTogether(*p, bytes_of_row, stream);
  return Launch(RouteOneKernel, *p, 1, kOneThreads, bytes_of_row, stream);
}

}  // namespace dovetail::kernels::cuda
