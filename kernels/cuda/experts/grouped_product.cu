#include <algorithm>
#include <map>
#include <mutex>
#include <type_traits>

#include "kernels/cuda/experts/expert_launches.h"
#include "kernels/cuda/primitives/chunks.cuh"
#include "kernels/cuda/primitives/clusters.cuh"
#include "kernels/cuda/primitives/pipeline.cuh"
#include "kernels/cuda/primitives/primitives.cuh"
#include "kernels/cuda/primitives/quads.cuh"
#include "kernels/cuda/primitives/warpgroup_products.cuh"
#include "kernels/cuda/primitives/wide_wgmma.cuh"
#include "kernels/cuda/products/tensor_map.h"
#include "kernels/cuda/rows/gated_activation.cuh"

// Products of many rows with the experts that they chose (a grouped GEMM). The two thread blocks of a cluster have 128
// rows each of one tile of rows, and the same columns of w: each brings a half of those to both. Four warps copy: one
// thread w, by tensor maps, and all of them x, whose rows may lie anywhere, in chunks of 16 bytes, where wgmma expects
// them. Two warpgroups multiply 64 rows each by 256 columns at once. Clusters go through the tiles of all experts in
// turn. The order is such that those that run at once read few experts and few rows.

namespace dovetail::kernels::cuda {
namespace {

constexpr int kStep = kMapColumns;  // of k at a time
constexpr int kRowBytes = 2 * kStep;
constexpr int kGroups = 2, kGroupThreads = 128;
constexpr int kThreads = (kGroups + 1) * kGroupThreads;
constexpr int kRows = kGroups * 64;  // of a thread block
constexpr int kCluster = 2;
static_assert(kCluster * kRows == kGroupedTileRows);
constexpr int kColumns = 256, kPart = kColumns / kCluster;
constexpr int kXBytes = kRows * kRowBytes, kPartBytes = kPart * kRowBytes;
constexpr int kStageBytes = kXBytes + kCluster * kPartBytes;
constexpr int kStages = 4;
constexpr int kSharedBytes = 1024 + kStages * kStageBytes + 2 * kStages * 8;

struct GroupedLaunch {
  CUtensorMap w;
  ExpertGemmLaunch call;
  int32_t steps = 0, column_tiles = 0, items = 0;
};

#if __CUDA_ARCH_FEAT_SM90_ALL

constexpr int kTilesTogether = 8;  // tiles of rows that go through the columns together

// A thread block's part of a tile of rows, and a tile of columns.
struct Item {
  int expert, first, rows, columns;  // slots [first, first + rows); rows may be 0
};

// each(item) for all items of the thread block's cluster, in one order for both thread blocks and all of their warps.
template <typename Each>
__device__ __forceinline__ void ForEachItem(const GroupedLaunch& p, int rank, Each&& each) {
  const int of_group = kTilesTogether * p.column_tiles;
  for (int i = static_cast<int>(blockIdx.x) / kCluster; i < p.items; i += static_cast<int>(gridDim.x) / kCluster) {
    const int first_tile = i / of_group * kTilesTogether, within = i % of_group;
    const int tiles = min(kTilesTogether, p.call.most_tiles - first_tile);
    const ExpertTile tile = p.call.tiles[first_tile + within % tiles];
    if (!p.call.Takes(tile)) continue;
    each(Item{tile.expert, tile.first + rank * kRows, max(0, min(kRows, tile.rows - rank * kRows)), within / tiles});
  }
}

struct Ring {
  uint32_t stages, full, empty;  // addresses
};

// One warpgroup copies. A thread has a chunk of every sixteenth row.
class Producer {
 public:
  __device__ __forceinline__ Producer(const GroupedLaunch& launch, const Ring& r, int cluster_rank)
      : p(launch), ring(r), rank(cluster_rank), policy(EvictNormal()) {}

  __device__ __forceinline__ void Bring(const Item& item) {
    int32_t from[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = row0 + i * kEvery, slot = item.first + row;
      from[i] = row >= item.rows ? -1 : p.call.member != nullptr ? p.call.member[slot] : slot;
    }
    const int gated = p.call.activation != ExpertActivation::kNone;
    // With an activation the parts are the gate's and the other's columns, else neighbours.
    const int w_row = (item.expert - p.call.first_expert) * p.call.n +
                      (gated ? item.columns * kPart + rank * (p.call.n / 2) : item.columns * kColumns + rank * kPart);
    for (int step = 0; step < p.steps; ++step, at.Next()) {
      BarrierWait(ring.empty + 8 * at.stage, at.parity ^ 1);
      const uint32_t to = ring.stages + at.stage * kStageBytes, full = ring.full + 8 * at.stage;
      if (thread == 0) {
        BarrierArriveExpect(full, kCluster * kPartBytes);
        CopyBox(to + kXBytes + rank * kPartBytes, p.w, step * kStep, w_row, full, kBoth, policy);
      }
      CopyRows(from, step, to);
      BarrierArriveAfterCopies(full);
    }
  }

 private:
  static constexpr int kChunks = kRowBytes / 16, kEvery = kGroupThreads / kChunks, kCount = kRows / kEvery;
  static constexpr uint32_t kBoth = (1 << kCluster) - 1;

  __device__ __forceinline__ void CopyRows(const int32_t (&from)[kCount], int step, uint32_t to) const {
    const int k = step * kStep + chunk * 8;
    const uint32_t place = to + row0 * kRowBytes + ((chunk ^ row0 % 8) << 4);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const bool there = from[i] >= 0 && k < p.call.k;
      const int64_t element = there ? static_cast<int64_t>(from[i]) * p.call.k + k : 0;
      ChunkCopyOrZero(place + i * kEvery * kRowBytes, static_cast<const uint16_t*>(p.call.x) + element, there);
    }
  }

  const GroupedLaunch& p;
  const Ring& ring;
  const int rank;
  const uint64_t policy;
  const int thread = static_cast<int>(threadIdx.x) - kGroups * kGroupThreads;
  const int row0 = thread / kChunks, chunk = thread % kChunks;
  PipelineState<kStages> at;
};

// Four neighbouring lanes have eight columns of a row: of four such runs each lane takes one, and stores 16 bytes.
// word(i): the two columns that this lane has of run i.
template <int kRuns, typename Word>
__device__ __forceinline__ void StoreRuns(uint16_t* to, bool there, int columns, Word&& word) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int first = 0; first < kRuns; first += 4) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = word(first + i);
    TransposeQuad(words);
    const int column = 8 * (first + lane % 4);
    if (there && column < columns)
      *reinterpret_cast<uint4*>(to + column) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// One warpgroup multiplies.
template <bool kBF16, ExpertActivation kActivation>
class Consumer {
  using Math = std::conditional_t<kBF16, BF16Math, F16Math>;
  static constexpr int kCount = kColumns / 8;
  static constexpr bool kGated = kActivation != ExpertActivation::kNone;

 public:
  __device__ __forceinline__ Consumer(const GroupedLaunch& launch, const Ring& r) : p(launch), ring(r) {}

  __device__ __forceinline__ void Multiply(const Item& item) {
    if (item.rows <= group * 64) return Skip();
    float sums[kCount][4] = {};
    int before = -1;
    for (int step = 0; step < p.steps; ++step, at.Next()) {
      BarrierWait(ring.full + 8 * at.stage, at.parity);
      FenceProducts();
      const uint32_t x = ring.stages + at.stage * kStageBytes;
      const uint64_t from_x = Descriptor<kRowBytes>(x + group * 64 * kRowBytes);
      const uint64_t from_w = Descriptor<kRowBytes>(x + kXBytes);
      BeginProducts();
#pragma unroll
      for (int k = 0; k < kStep / 16; ++k) Wgmma<kBF16>(sums, from_x + 2 * k, from_w + 2 * k);
      EndProducts();
      WaitForProducts<1>();
      if (before >= 0) Release(before);
      before = at.stage;
    }
    WaitForProducts<0>();
    Release(before);
    Store(item, sums);
  }

 private:
  // No row is its own.
  __device__ __forceinline__ void Skip() {
    for (int step = 0; step < p.steps; ++step, at.Next()) {
      BarrierWait(ring.full + 8 * at.stage, at.parity);
      Release(at.stage);
    }
  }

  // The producers of both thread blocks copy into both.
  __device__ __forceinline__ void Release(int stage) const {
    __syncwarp();
    if (lane < kCluster) ArriveAt(ring.empty + 8 * stage, lane);
  }

  __device__ __forceinline__ void Store(const Item& item, const float (&sums)[kCount][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp * 16 + lane / 4 + 8 * half;
      const int64_t slot = item.first + row;
      const bool there = row < item.rows;
      if constexpr (kGated) {
        const int width = p.call.n / 2, first = item.columns * kPart;
        StoreRuns<kCount / 2>(static_cast<uint16_t*>(p.call.y) + slot * width + first, there, width - first,
                              [&](int i) {
                                constexpr bool kGelu = kActivation == ExpertActivation::kGeluTanh;
                                const float *gate = sums[i] + 2 * half, *up = sums[i + kCount / 2] + 2 * half;
                                return Math::Pack(Activate(kGelu, gate[0], up[0]), Activate(kGelu, gate[1], up[1]));
                              });
      } else {
        StorePlain(item, slot, there, half, sums);
      }
    }
  }

  __device__ __forceinline__ void StorePlain(const Item& item, int64_t slot, bool there, int half,
                                             const float (&sums)[kCount][4]) const {
    const int first = item.columns * kColumns, columns = p.call.n - first;
    const float* const bias =
        p.call.bias == nullptr ? nullptr : p.call.bias + static_cast<int64_t>(item.expert) * p.call.n + first;
    const auto value = [&](int i) {
      const int column = 8 * i + lane % 4 * 2;
      float2 y = make_float2(sums[i][2 * half], sums[i][2 * half + 1]);
      if (bias != nullptr && column < columns) y.x += bias[column], y.y += bias[column + 1];
      return y;
    };
    if (p.call.y_is_f32 != 0) {
      float* const to = static_cast<float*>(p.call.y) + slot * p.call.n + first;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int column = 8 * i + lane % 4 * 2;
        if (there && column < columns) *reinterpret_cast<float2*>(to + column) = value(i);
      }
      return;
    }
    StoreRuns<kCount>(static_cast<uint16_t*>(p.call.y) + slot * p.call.n + first, there, columns, [&](int i) {
      const float2 y = value(i);
      return Math::Pack(y.x, y.y);
    });
  }

  const GroupedLaunch& p;
  const Ring& ring;
  const int group = threadIdx.x / kGroupThreads, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  PipelineState<kStages> at;
};

#endif

template <bool kBF16, ExpertActivation kActivation>
__global__ void __launch_bounds__(kThreads, 1) GroupedProductKernel(const __grid_constant__ GroupedLaunch p) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char memory[];
  const int rank = static_cast<int>(ClusterRank());
  Ring ring;
  ring.stages = (SharedAddress(memory) + 1023) / 1024 * 1024;
  ring.full = ring.stages + kStages * kStageBytes;
  ring.empty = ring.full + 8 * kStages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      BarrierInit(ring.full + 8 * i, kGroupThreads + 1);
      BarrierInit(ring.empty + 8 * i, kCluster * kGroups * kGroupThreads / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  ClusterMeets();
  if (threadIdx.x / kGroupThreads == kGroups) {
    TakeRegisters<40, false>();
    Producer producer(p, ring, rank);
    ForEachItem(p, rank, [&](const Item& item) { producer.Bring(item); });
  } else {
    TakeRegisters<232, true>();
    Consumer<kBF16, kActivation> consumer(p, ring);
    ForEachItem(p, rank, [&](const Item& item) { consumer.Multiply(item); });
  }
  __syncwarp();
  // No block ends while the other one still reports to it what it has read.
  ClusterMeets();
#endif
}

using Kernel = void (*)(GroupedLaunch);

template <bool kBF16>
Kernel KernelOf(ExpertActivation activation) {
  switch (activation) {
    case ExpertActivation::kNone: return GroupedProductKernel<kBF16, ExpertActivation::kNone>;
    case ExpertActivation::kSilu: return GroupedProductKernel<kBF16, ExpertActivation::kSilu>;
    case ExpertActivation::kGeluTanh: return GroupedProductKernel<kBF16, ExpertActivation::kGeluTanh>;
  }
  return nullptr;
}

cudaLaunchConfig_t ConfigOf(int grid, cudaLaunchAttribute& cluster, void* stream) {
  cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kCluster, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &cluster;
  config.numAttrs = 1;
  return config;
}

// That the device at hand runs at once, asked once a kernel. 0: it has no code for them.
int ClustersOf(Kernel kernel) {
  static std::mutex mutex;
  static std::map<std::pair<int, Kernel>, int> known;
  int index = 0;
  if (cudaGetDevice(&index) != cudaSuccess) return 0;
  const std::lock_guard lock(mutex);
  const auto [it, is_new] = known.emplace(std::pair(index, kernel), 0);
  if (!is_new) return it->second;
  cudaLaunchAttribute cluster;
  const cudaLaunchConfig_t config = ConfigOf(kCluster, cluster, nullptr);
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes) != cudaSuccess ||
      cudaOccupancyMaxActiveClusters(&it->second, kernel, &config) != cudaSuccess) {
    cudaGetLastError();
    it->second = 0;
  }
  return it->second;
}

}  // namespace

bool GroupedProductRuns(const DeviceLimits* device) {
  return device->major == 9 && device->minor == 0 && device->shared_bytes >= kSharedBytes &&
         ClustersOf(KernelOf<true>(ExpertActivation::kNone)) > 0;
}

int LaunchGroupedProduct(const ExpertGemmLaunch* p, void* stream) {
  GroupedLaunch launch;
  launch.call = *p;
  const GemmType type = p->type == WireType::kBF16 ? GemmType::kBF16 : GemmType::kF16;
  if (!MakeRowsMap({p->w, type, int64_t{p->experts} * p->n, p->k, p->k}, kPart, launch.w))
    return static_cast<int>(cudaErrorInvalidValue);
  const int width = p->activation == ExpertActivation::kNone ? kColumns : kPart;
  const int columns = p->activation == ExpertActivation::kNone ? p->n : p->n / 2;
  launch.steps = (p->k + kStep - 1) / kStep;
  launch.column_tiles = (columns + width - 1) / width;
  launch.items = launch.column_tiles * p->most_tiles;
  const Kernel kernel = type == GemmType::kBF16 ? KernelOf<true>(p->activation) : KernelOf<false>(p->activation);
  const int clusters = ClustersOf(kernel);
  if (clusters == 0) return static_cast<int>(cudaErrorNoKernelImageForDevice);
  cudaLaunchAttribute cluster;
  const cudaLaunchConfig_t config = ConfigOf(std::min(clusters, launch.items) * kCluster, cluster, stream);
  return static_cast<int>(cudaLaunchKernelEx(&config, kernel, launch));
}

}  // namespace dovetail::kernels::cuda
