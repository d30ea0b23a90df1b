#include "kernels/cuda/backend_abi.h"
#include "kernels/cuda/experts/expert_launches.h"
#include "kernels/cuda/experts/route.cuh"
#include "kernels/cuda/primitives/clusters.cuh"
#include "kernels/cuda/primitives/dependent_launch.cuh"
#include "kernels/cuda/primitives/primitives.cuh"

// Routing of few rows. What a row waits for are the router's weights, from device memory: how long follows from the
// loads that are on their way at once. The thread blocks of a cluster divide the experts, with many loads ahead; the
// first one gets all scores and chooses. Weights are brought to the L2 while the predecessor ends.

namespace dovetail::kernels::cuda {
namespace {

constexpr int kCluster = 8, kThreads = 512, kWarps = kThreads / 32;
constexpr int kAhead = 16;    // loads of a lane at once, of 16 bytes
constexpr int kFewRows = 16;  // whose clusters fill the GPU; of more, a cluster takes kRowsTogether
constexpr int kRowsTogether = 4;
constexpr int kLeastExperts = 2 * kCluster;

// Of shared memory, for each row: h, and in the first thread block scores, choices and groups.
int BytesOfRow(const RouteLaunch& p) {
  return (p.hidden + 2 * p.experts + (p.experts + 1) / 2) * static_cast<int>(sizeof(float));
}

#if __CUDA_ARCH_FEAT_SM90_ALL

constexpr int kLineBytes = 128;

__device__ __forceinline__ void BringToL2(const float* from, int64_t count) {
  const auto* const bytes = reinterpret_cast<const char*>(from);
  for (int64_t at = threadIdx.x * kLineBytes; at < count * static_cast<int64_t>(sizeof(float));
       at += kThreads * kLineBytes)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(bytes + at));
}

// To the same place in the cluster's first thread block.
__device__ __forceinline__ void StoreAtFirst(float* place, float value) {
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, 0;\n"
      "st.shared::cluster.f32 [there], %1; }" ::"r"(SharedAddress(place)),
      "f"(value)
      : "memory");
}

#endif

template <int kTogether>
__global__ void __launch_bounds__(kThreads) RouteClusterKernel(const __grid_constant__ RouteLaunch p) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(16) float memory[];
  __shared__ float sums[kNormWarps];
  float* const h = memory;
  float* const scores = h + kTogether * p.hidden;
  const int rank = static_cast<int>(ClusterRank()), warp = threadIdx.x / 32;
  const int64_t row0 = static_cast<int64_t>(blockIdx.x / kCluster) * kTogether;
  const int share = (p.experts + kCluster - 1) / kCluster;
  const int begin = min(rank * share, p.experts), end = min(begin + share, p.experts);
  if (blockIdx.x < kCluster) {
    BringToL2(p.norm, p.hidden);
    BringToL2(p.router + static_cast<int64_t>(begin) * p.hidden, static_cast<int64_t>(end - begin) * p.hidden);
  }
  WaitForPredecessor();
  LetSuccessorBegin();
  // Rows that are not there are the last one again.
  for (int row = 0; row < kTogether; ++row)
    NormRowTogether(p, min(row0 + row, static_cast<int64_t>(p.rows) - 1), sums, h + row * p.hidden);
  ClusterMeets();  // the first thread block runs
  const int columns = (p.hidden + kCluster - 1) / kCluster;
  for (int row = 0; p.h != nullptr && row < min(kTogether, static_cast<int>(p.rows - row0)); ++row)
    LeaveRow(p, row0 + row, h + row * p.hidden, rank * columns, min((rank + 1) * columns, p.hidden), threadIdx.x,
             kThreads);
  for (int expert = begin + warp; expert < end; expert += kWarps)
    ScoreRows<kTogether, 1, kAhead>(
        p, h, expert, [&](int row, int of, float score) { StoreAtFirst(scores + row * p.experts + of, score); });
  __syncwarp();
  ClusterMeets();
  if (rank != 0 || warp >= kTogether || row0 + warp >= p.rows) return;
  float* const choice = scores + kTogether * p.experts;
  Choose(p, row0 + warp, scores + warp * p.experts, choice + warp * p.experts,
         choice + kTogether * p.experts + warp * ((p.experts + 1) / 2));
#endif
}

template <int kTogether>
int Launch(const RouteLaunch& p, void* stream) {
  const auto kernel = RouteClusterKernel<kTogether>;
  const int bytes = kTogether * BytesOfRow(p);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return static_cast<int>(error);
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {kCluster, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((p.rows + kTogether - 1) / kTogether * kCluster);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = 2;
  return static_cast<int>(cudaLaunchKernelEx(&config, kernel, p));
}

// Of the device at hand.
bool HasCode() {
  int device = 0, major = 0, minor = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess && major == 9 &&
         minor == 0;
}

}  // namespace

int LaunchRouteByCluster(const RouteLaunch* p, void* stream) {
  constexpr int kMostBytes = 160 * 1024;
  if (p->rows >= kRouteTogetherFrom || p->experts < kLeastExperts || kRowsTogether * BytesOfRow(*p) > kMostBytes ||
      !HasCode())
    return kProductRefused;
  return p->rows <= kFewRows ? Launch<1>(*p, stream) : Launch<kRowsTogether>(*p, stream);
}

}  // namespace dovetail::kernels::cuda
