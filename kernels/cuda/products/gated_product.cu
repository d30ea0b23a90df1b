#include "kernels/cuda/products/gated_product.h"

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <map>
#include <mutex>
#include <type_traits>
#include <utility>

#include "kernels/cuda/primitives/clusters.cuh"
#include "kernels/cuda/primitives/dependent_launch.cuh"
#include "kernels/cuda/primitives/primitives.cuh"
#include "kernels/cuda/primitives/quads.cuh"
#include "kernels/cuda/primitives/warpgroup_products.cuh"
#include "kernels/cuda/primitives/wide_wgmma.cuh"
#include "kernels/cuda/primitives/wire.cuh"
#include "kernels/cuda/products/tensor_map.h"
#include "kernels/cuda/rows/gated_activation.cuh"

// One thread block a multiprocessor. A tile of the result is 128 rows of x by some columns, for which the block reads
// as many rows of g and of u; it has one or a few tiles, so wide that the blocks end together. The two thread blocks of
// a cluster go through k together and each bring a half of what they share to both: with more than 128 rows of x they
// have different rows and share w, else they have different columns and share x. One warp copies, in steps of 64
// columns of k, into a ring of shared memory (tensor maps, rows swizzled as wgmma reads them), and begins with w before
// the predecessor has ended. Two warpgroups multiply 64 rows each by g's and u's columns at once, with all sums in
// registers: the wider a product, the less often shared memory is read, which is what bounds products of 64 x 112.

namespace dovetail::kernels::cuda {
namespace {

constexpr int kStep = kMapColumns;  // of x and w at a time
constexpr int kRowBytes = 2 * kStep;
constexpr int kGroups = 2, kGroupThreads = 128;
constexpr int kThreads = (kGroups + 1) * kGroupThreads;
constexpr int kRows = kGroups * 64;  // of a tile
constexpr int kMostRows = 2 * kRows;
constexpr int kXBytes = kRows * kRowBytes;
constexpr int kCluster = 2;   // of four, not every GPU has room for enough
constexpr int kBoxRows = 32;  // of x, copied at once: rows that are not there are not copied as zeros, which is slow
constexpr int kSharedBytes = 227 * 1024;  // that a thread block of these GPUs may have
constexpr int kFixedBytes = 1024 + 256;   // for the ring to begin on a multiple of 1024, and barriers

struct GatedLaunch {
  CUtensorMap x, w;
  void* y = nullptr;
  int64_t y_stride = 0;
  int32_t m = 0, n = 0, steps = 0;  // steps of a tile
  int32_t row_tiles = 0;            // 1 or 2, a cluster's
  int32_t rounds = 0;               // tiles of a thread block
  int32_t gelu = 0;
  int32_t rounds_halves = 0;
};

// By the columns of a product: g's and u's of a tile.
template <int kColumns>
struct Shape {
  static constexpr int kWidth = kColumns / 2;  // of a tile
  static constexpr int kPartBytes = kWidth * kRowBytes;
  static constexpr int kStageBytes = kXBytes + 2 * kPartBytes;
  static constexpr int kStages = (kSharedBytes - kFixedBytes) / kStageBytes;
  static_assert(kPartBytes % 1024 == 0 && kStages >= 4);
};

#if __CUDA_ARCH_FEAT_SM90_ALL

struct Ring {
  uint32_t stages, full, empty;  // addresses
};

// A place in the ring, as all go through it.
template <int kStages>
struct Place {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void Next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// A thread block's part in its cluster.
struct Role {
  static constexpr uint32_t kBoth = (1 << kCluster) - 1;
  int rank, columns;                 // tiles of columns of the cluster
  int row_tile, column_tile;         // of the cluster's
  uint32_t same_rows, same_columns;  // masks of the thread blocks that share x, and w
  int rows;                          // of the row tile, in whole boxes

  __device__ __forceinline__ explicit Role(const GatedLaunch& p) : rank(static_cast<int>(ClusterRank())) {
    const bool by_rows = p.row_tiles == kCluster;
    columns = by_rows ? 1 : kCluster;
    row_tile = by_rows ? rank : 0;
    column_tile = by_rows ? 0 : rank;
    same_rows = by_rows ? 1u << rank : kBoth;
    same_columns = by_rows ? kBoth : 1u << rank;
    rows = (min(p.m - row_tile * kRows, kRows) + kBoxRows - 1) / kBoxRows * kBoxRows;
  }
  __device__ __forceinline__ int TileOf(int round) const {
    return static_cast<int>(round * (gridDim.x / kCluster) + blockIdx.x / kCluster) * columns + column_tile;
  }
};

// The steps of a thread block, tile after tile.
struct Steps {
  int round = 0, step = 0;
  __device__ __forceinline__ void Next(const GatedLaunch& p) {
    if (++step == p.steps) step = 0, ++round;
  }
};

// One thread.
template <typename S>
__device__ __forceinline__ void Produce(const GatedLaunch& p, const Ring& ring, const Role& role) {
  const uint64_t once = EvictFirst(), often = EvictLast();
  // Of what is shared, this thread block copies every other part from its own on.
  const int first_part = role.columns == 1 ? role.rank : 0, parts = role.columns == 1 ? kCluster : 1;
  const int first_box = role.column_tile * kBoxRows, boxes = role.columns * kBoxRows;
  const auto load_w = [&](const Steps& at, int stage) {
    const int column = at.step * kStep, row = role.TileOf(at.round) * S::kWidth;
    const uint32_t full = ring.full + 8 * stage, to = ring.stages + stage * S::kStageBytes + kXBytes;
    BarrierArriveExpect(full, role.rows * kRowBytes + 2 * S::kPartBytes);
    for (int part = first_part; part < 2; part += parts)
      CopyBox(to + part * S::kPartBytes, p.w, column, part * p.n + row, full, role.same_columns, once);
  };
  const auto load_x = [&](const Steps& at, int stage) {
    for (int row = first_box; row < role.rows; row += boxes)
      CopyBox(ring.stages + stage * S::kStageBytes + row * kRowBytes, p.x, at.step * kStep, role.row_tile * kRows + row,
              ring.full + 8 * stage, role.same_rows, often);
  };
  const int ahead = min(S::kStages, p.rounds * p.steps);
  Steps w, x;
  for (int stage = 0; stage < ahead; ++stage, w.Next(p)) load_w(w, stage);
  WaitForPredecessor();
  LetSuccessorBegin();
  for (int stage = 0; stage < ahead; ++stage, x.Next(p)) load_x(x, stage);
  for (Place<S::kStages> place; p.rounds > w.round; w.Next(p), place.Next()) {
    BarrierWait(ring.empty + 8 * place.stage, place.parity);
    load_w(w, place.stage);
    load_x(w, place.stage);
  }
}

// Rows lane / 4 and 8 more of a warp's 16; sums of g's columns and then of u's. Four neighbours have eight columns of a
// row: of four such runs each takes one, and stores 16 bytes.
template <typename Math, int kCount>
__device__ __forceinline__ void Store(const GatedLaunch& p, bool gelu, int row0, int column0,
                                      const float (&sums)[kCount][4]) {
  constexpr int kRuns = kCount / 2;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row0 + lane / 4 + 8 * half;
    uint16_t* const to = static_cast<uint16_t*>(p.y) + row * p.y_stride;
#pragma unroll
    for (int first = 0; first < kRuns; first += 4) {
      uint32_t words[4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first + i >= kRuns) continue;
        const float *gate = sums[first + i] + 2 * half, *up = sums[first + i + kRuns] + 2 * half;
        if (p.rounds_halves != 0) {
          const float2 g = Math::Unpack(Math::Pack(gate[0], gate[1])), u = Math::Unpack(Math::Pack(up[0], up[1]));
          words[i] = Math::Pack(Activate(gelu, g.x, u.x), Activate(gelu, g.y, u.y));
        } else {
          words[i] = Math::Pack(Activate(gelu, gate[0], up[0]), Activate(gelu, gate[1], up[1]));
        }
      }
      TransposeQuad(words);
      const int run = first + lane % 4, column = column0 + 8 * run;
      if (row < p.m && run < kRuns && column < p.n)
        *reinterpret_cast<uint4*>(to + column) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// One warpgroup.
template <typename S, bool kBF16>
__device__ __forceinline__ void Consume(const GatedLaunch& p, const Ring& ring, const Role& role) {
  constexpr int kCount = 2 * S::kWidth / 8;
  using Math = std::conditional_t<kBF16, BF16Math, F16Math>;
  const int group = threadIdx.x / kGroupThreads, lane = threadIdx.x % 32;
  const bool tells = lane < kCluster;  // each copies to both
  const auto release = [&](int stage) {
    if (tells) ArriveAt(ring.empty + 8 * stage, lane);
  };
  Place<S::kStages> place;
  for (int round = 0; round < p.rounds; ++round) {
    float sums[kCount][4] = {};
    int before = -1;
    for (int step = 0; step < p.steps; ++step, place.Next()) {
      BarrierWait(ring.full + 8 * place.stage, place.parity);
      const uint32_t x = ring.stages + place.stage * S::kStageBytes;
      const uint64_t from_x = Descriptor<kRowBytes>(x + group * 64 * kRowBytes);
      const uint64_t from_w = Descriptor<kRowBytes>(x + kXBytes);
      BeginProducts();
#pragma unroll
      for (int k = 0; k < kStep / 16; ++k) Wgmma<kBF16>(sums, from_x + 2 * k, from_w + 2 * k);
      EndProducts();
      WaitForProducts<1>();
      if (before >= 0) release(before);
      before = place.stage;
    }
    WaitForProducts<0>();
    release(before);
    const int row = role.row_tile * kRows + threadIdx.x / 32 * 16, column = role.TileOf(round) * S::kWidth;
    p.gelu != 0 ? Store<Math>(p, true, row, column, sums) : Store<Math>(p, false, row, column, sums);
  }
}

#endif

template <typename S, bool kBF16>
__global__ void __launch_bounds__(kThreads, 1) GatedProductKernel(const __grid_constant__ GatedLaunch p) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char memory[];
  const Role role(p);
  Ring ring;
  ring.stages = (SharedAddress(memory) + 1023) / 1024 * 1024;
  ring.full = ring.stages + S::kStages * S::kStageBytes;
  ring.empty = ring.full + 8 * S::kStages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      BarrierInit(ring.full + 8 * i, 1);
      BarrierInit(ring.empty + 8 * i, kCluster * kGroups * kGroupThreads / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  ClusterMeets();
  if (threadIdx.x / kGroupThreads == kGroups) {
    TakeRegisters<40, false>();
    if (threadIdx.x == kGroups * kGroupThreads) Produce<S>(p, ring, role);
  } else {
    TakeRegisters<232, true>();
    Consume<S, kBF16>(p, ring, role);
  }
  __syncwarp();
  // No block ends while others of the cluster still report to it what they have read.
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// A kernel of some width, and how many thread blocks take how many rounds.
struct Variant {
  void (*kernel)(GatedLaunch) = nullptr;
  int width = 0, shared_bytes = 0;
  int grid = 0, rounds = 0;  // 0: the device cannot run it
  int64_t time() const { return int64_t{rounds} * width; }
};

cudaLaunchConfig_t ConfigOf(const Variant& variant, int grid, cudaLaunchAttribute (&attributes)[2], void* stream) {
  attributes[0] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {kCluster, 1, 1};
  attributes[1] = {};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = variant.shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = 2;
  return config;
}

// Of this kind at once on the device, asked once. 0: it cannot run them.
int ClustersOf(const Variant& variant, const DeviceLimits& device) {
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, int> known;
  int index = 0;
  if (variant.shared_bytes > device.shared_bytes || cudaGetDevice(&index) != cudaSuccess) return 0;
  const std::lock_guard lock(mutex);
  const auto [it, is_new] = known.emplace(std::pair(index, reinterpret_cast<const void*>(variant.kernel)), 0);
  if (!is_new) return it->second;
  cudaLaunchAttribute attributes[2];
  const cudaLaunchConfig_t config = ConfigOf(variant, kCluster, attributes, nullptr);
  if (cudaFuncSetAttribute(variant.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, variant.shared_bytes) !=
          cudaSuccess ||
      cudaOccupancyMaxActiveClusters(&it->second, variant.kernel, &config) != cudaSuccess) {
    cudaGetLastError();
    it->second = 0;
  }
  return it->second;
}

template <int kColumns, bool kBF16>
Variant Deal(const GatedProductCall& call, int row_tiles, const DeviceLimits& device) {
  using S = Shape<kColumns>;
  Variant variant;
  variant.kernel = GatedProductKernel<S, kBF16>;
  variant.width = S::kWidth;
  variant.shared_bytes = kFixedBytes + S::kStages * S::kStageBytes;
  const int clusters = ClustersOf(variant, device);
  if (clusters == 0) return variant;
  const int64_t columns = kCluster / row_tiles;  // tiles of a cluster
  const int64_t tiles = (call.n + S::kWidth - 1) / S::kWidth, of_clusters = (tiles + columns - 1) / columns;
  variant.rounds = static_cast<int>((of_clusters + clusters - 1) / clusters);
  variant.grid = static_cast<int>((of_clusters + variant.rounds - 1) / variant.rounds) * kCluster;
  return variant;
}

// What ends first.
template <bool kBF16>
Variant BestOf(const GatedProductCall& call, int row_tiles, const DeviceLimits& device) {
  Variant best;
  for (const Variant& variant : {Deal<224, kBF16>(call, row_tiles, device), Deal<256, kBF16>(call, row_tiles, device),
                                 Deal<192, kBF16>(call, row_tiles, device)}) {
    if (variant.rounds > 0 && (best.rounds == 0 || variant.time() < best.time())) best = variant;
  }
  return best;
}

int Launch(const GatedProductCall& call, const DeviceLimits& device, void* stream) {
  const int row_tiles = call.m > kRows ? 2 : 1;
  const Variant best =
      call.type == GemmType::kBF16 ? BestOf<true>(call, row_tiles, device) : BestOf<false>(call, row_tiles, device);
  // Of what all multiprocessors could do in that time, most must be used.
  if (best.rounds == 0 || best.time() * device.multiprocessors * 4 > call.n * row_tiles * 5) return kProductRefused;
  GatedLaunch launch;
  if (!MakeRowsMap({call.x, call.type, call.m, call.k, call.x_stride}, kBoxRows, launch.x) ||
      !MakeRowsMap({call.w, call.type, 2 * call.n, call.k, call.w_stride}, best.width, launch.w))
    return kProductRefused;
  launch.y = call.y;
  launch.y_stride = call.y_stride;
  launch.m = static_cast<int32_t>(call.m);
  launch.n = static_cast<int32_t>(call.n);
  launch.steps = static_cast<int32_t>((call.k + kStep - 1) / kStep);
  launch.row_tiles = row_tiles;
  launch.rounds = best.rounds;
  launch.gelu = call.gelu;
  launch.rounds_halves = call.rounds_halves;
  cudaLaunchAttribute attributes[2];
  const cudaLaunchConfig_t config = ConfigOf(best, best.grid, attributes, stream);
  return static_cast<int>(cudaLaunchKernelEx(&config, best.kernel, launch));
}

}  // namespace

int LaunchGatedProduct(const GatedProductCall* call, const DeviceLimits* device, void* stream) {
  const GatedProductCall& c = *call;
  if (device->major != 9 || device->minor != 0 || c.m <= kRows / 2 || c.m > kMostRows || c.n < 1 || c.n >= 1 << 28 ||
      c.k < kStep || c.k >= 1 << 24 || !InRuns({c.n, c.k, c.x_stride, c.w_stride, c.y_stride}, {c.x, c.w, c.y}))
    return kProductRefused;
  return Launch(c, *device, stream);
}

}  // namespace dovetail::kernels::cuda
