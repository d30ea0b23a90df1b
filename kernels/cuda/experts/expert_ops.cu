#include "kernels/cuda/experts/expert_launches.h"
#include "kernels/cuda/primitives/dependent_launch.cuh"
#include "kernels/cuda/primitives/enqueue.cuh"
#include "kernels/cuda/primitives/primitives.cuh"
#include "kernels/cuda/primitives/wire.cuh"
#include "kernels/cuda/rows/gated_activation.cuh"

// Experts: the order of the pairs, products by expert, their sum. All lengths that depend on the routing stay
// on the device, so that a step can be recorded.

namespace dovetail::kernels::cuda {
namespace {

constexpr int kMostExperts = 1024, kPlaceThreads = kMostExperts;

// Slots and tiles of the experts before this thread's, and of all.
struct Before {
  int slots = 0, tiles = 0, all_tiles = 0;
};

__device__ __forceinline__ int InclusiveSum(int x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, x, step);
    if (lane >= step) x += other;
  }
  return x;
}

// All threads of a thread block; `sums` is memory of two numbers a warp.
__device__ __forceinline__ Before BeforeThread(int slots, int tiles, int2* sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int2 own = make_int2(InclusiveSum(slots), InclusiveSum(tiles));
  if (lane == 31) sums[warp] = own;
  __syncthreads();
  const int2 warps = lane < kPlaceThreads / 32 ? sums[lane] : make_int2(0, 0);
  const int2 through = make_int2(InclusiveSum(warps.x), InclusiveSum(warps.y));
  const int before = warp > 0 ? warp - 1 : 0;
  const int slots_before = __shfl_sync(~0u, through.x, before), tiles_before = __shfl_sync(~0u, through.y, before);
  return {.slots = own.x - slots + (warp > 0 ? slots_before : 0),
          .tiles = own.y - tiles + (warp > 0 ? tiles_before : 0),
          .all_tiles = __shfl_sync(~0u, through.y, 31)};
}

// One thread block, with a thread for each expert: counts, offsets, places, tiles.
__global__ void __launch_bounds__(kPlaceThreads) PlaceKernel(const __grid_constant__ PlaceLaunch p) {
  __shared__ int counts[kMostExperts], next[kMostExperts];
  __shared__ int2 sums[kPlaceThreads / 32];
  const int e = threadIdx.x;
  WaitForPredecessor();
  LetSuccessorBegin();
  counts[e] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < p.pairs; i += kPlaceThreads) atomicAdd(&counts[p.expert[i]], 1);
  __syncthreads();
  const int count = counts[e], tiles = (count + p.tile_rows - 1) / p.tile_rows;
  const Before before = BeforeThread(count, tiles, sums);
  next[e] = before.slots;
  for (int first = 0, tile = before.tiles; first < count; first += p.tile_rows, ++tile)
    p.tiles[tile] = {e, before.slots + first, min(p.tile_rows, count - first)};
  for (int tile = before.all_tiles + threadIdx.x; tile < p.most_tiles; tile += kPlaceThreads) p.tiles[tile] = {0, 0, 0};
  __syncthreads();
  for (int i = threadIdx.x; i < p.pairs; i += kPlaceThreads) {
    const int slot = atomicAdd(&next[p.expert[i]], 1);
    p.slot[i] = slot;
    p.member[slot] = i / p.chosen;
  }
}

constexpr int kGemmThreads = 128, kTileN = 64;

__device__ __forceinline__ void CopyAsync(uint32_t to, const void* from, bool there) {
  const int bytes = there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLeft>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}
__device__ __forceinline__ void LoadMatrix4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// How tiles of kRows rows are multiplied: w in pieces of kTileN rows of kTileK elements. Of few rows w is what a step
// waits for, and memory gives longer runs of it faster.
template <int kRows>
struct GemmShape {
  static constexpr int kTileK = kRows == kFewTileRows ? 128 : 64;
  static constexpr int kStages = 3;
  static constexpr int kStep = kTileK + 8;  // elements from row to row in shared memory: no bank twice
};

// Gated: rows of w in shared memory are eight of the gate and the other eight in turn, so that a thread has both
// products of a column.
template <typename Math, int kRows, bool kGated, typename Shape = GemmShape<kRows>>
class ExpertGemm {
  static constexpr int kTileK = Shape::kTileK, kStages = Shape::kStages, kStep = Shape::kStep, kRuns = kTileK / 8;
  static constexpr bool kRowsByWarp = kRows == kManyTileRows;         // else a warp has all rows, of its columns
  static constexpr int kColumns = kRowsByWarp ? kTileN : kTileN / 4;  // of a warp
  static constexpr int kMTiles = kRowsByWarp ? 1 : kRows / 16, kNTiles = kColumns / 8;
  static constexpr int kStage = (kRows + kTileN) * kStep;
  static constexpr int kTilesOfColumn = kGated ? 2 : 1;

 public:
  static constexpr int kSharedBytes = kStages * kStage * 2;
  static constexpr int kOfBlock = kGated ? kTileN / 2 : kTileN;  // columns of y

  __device__ ExpertGemm(const ExpertGemmLaunch& launch, uint16_t* shared, const ExpertTile& of)
      : p(launch), shared_(SharedAddress(shared)), tile(of), first_n(blockIdx.x * kOfBlock) {}

  // The first pieces of w come before the predecessor's x.
  __device__ void Run() {
    const int steps = (p.k + kTileK - 1) / kTileK;
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s)
      if (s < steps) LoadWeights(s, s);
    WaitForPredecessor();
    LetSuccessorBegin();
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) {
      if (s < steps) LoadRows(s, s);
      CommitCopies();
    }
    for (int step = 0; step < steps; ++step) {
      WaitForCopies<kStages - 2>();
      __syncthreads();
      const int next = step + kStages - 1;
      if (next < steps) LoadWeights(next, next % kStages), LoadRows(next, next % kStages);
      CommitCopies();
      Multiply(step % kStages);
    }
    Store();
  }

 private:
  __device__ __forceinline__ void LoadRows(int step, int stage) {
    const uint32_t to = shared_ + stage * kStage * 2;
    for (int i = threadIdx.x; i < kRows * kRuns; i += kGemmThreads) {
      const int row = i / kRuns, k = step * kTileK + i % kRuns * 8;
      const bool there = row < tile.rows && k < p.k;
      int64_t from = 0;
      if (there) {
        const int slot = tile.first + row;
        from = static_cast<int64_t>(p.member != nullptr ? p.member[slot] : slot) * p.k + k;
      }
      CopyAsync(to + (row * kStep + i % kRuns * 8) * 2, static_cast<const uint16_t*>(p.x) + from, there);
    }
  }

  __device__ __forceinline__ void LoadWeights(int step, int stage) {
    const uint32_t to = shared_ + (stage * kStage + kRows * kStep) * 2;
    const auto* const w =
        static_cast<const uint16_t*>(p.w) + static_cast<int64_t>(tile.expert - p.first_expert) * p.n * p.k;
    for (int i = threadIdx.x; i < kTileN * kRuns; i += kGemmThreads) {
      const int row = i / kRuns, k = step * kTileK + i % kRuns * 8;
      const int column = first_n + (kGated ? row / 16 * 8 + row % 8 : row), size = kGated ? p.n / 2 : p.n;
      const int from = column + (kGated && row / 8 % 2 != 0 ? size : 0);
      const bool there = column < size && k < p.k;
      CopyAsync(to + (row * kStep + i % kRuns * 8) * 2, w + (there ? static_cast<int64_t>(from) * p.k + k : 0), there);
    }
  }

  __device__ __forceinline__ void Multiply(int stage) {
    const uint32_t a_at = shared_ + stage * kStage * 2, b_at = a_at + kRows * kStep * 2;
    const int m0 = kRowsByWarp ? warp * 16 : 0, n0 = kRowsByWarp ? 0 : warp * kColumns;
#pragma unroll
    for (int kk = 0; kk < kTileK; kk += 16) {
      uint32_t a[kMTiles][4];
#pragma unroll
      for (int m = 0; m < kMTiles; ++m)
        LoadMatrix4(a[m], a_at + ((m0 + m * 16 + lane % 16) * kStep + kk + lane / 16 * 8) * 2);
#pragma unroll
      for (int n = 0; n < kNTiles; n += 2) {
        uint32_t b[4];  // two tiles of 8 columns: k 0..7 and 8..15 of each
        LoadMatrix4(b, b_at + ((n0 + n * 8 + lane / 16 * 8 + lane % 8) * kStep + kk + lane / 8 % 2 * 8) * 2);
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
          Math::Mma(sums[m][n], a[m], b[0], b[1]);
          Math::Mma(sums[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  __device__ __forceinline__ float Biased(float y, int column) const {
    return p.bias != nullptr ? y + p.bias[static_cast<int64_t>(tile.expert) * p.n + column] : y;
  }

  __device__ __forceinline__ void Store() {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kNTiles; n += kTilesOfColumn) {
#pragma unroll
        for (int i = 0; i < 4; ++i) StoreElement(m, n, i);
      }
    }
  }

  // Element i of a thread's in tile n of columns, and with kGated in tile n + 1.
  __device__ __forceinline__ void StoreElement(int m, int n, int i) {
    const int m0 = kRowsByWarp ? warp * 16 : 0, n0 = kRowsByWarp ? 0 : warp * kColumns / kTilesOfColumn;
    const int size = kGated ? p.n / 2 : p.n;
    const int row = m0 + m * 16 + lane / 4 + i / 2 * 8;
    const int column = first_n + n0 + n / kTilesOfColumn * 8 + lane % 4 * 2 + i % 2;
    if (row >= tile.rows || column >= size) return;
    float y = Biased(sums[m][n][i], column);
    if constexpr (kGated)
      y = Activate(p.activation == ExpertActivation::kGeluTanh, y, Biased(sums[m][n + 1][i], column + size));
    StoreWire(p.y_is_f32 ? WireType::kF32 : p.type, p.y, static_cast<int64_t>(tile.first + row) * size + column, y);
  }

  const ExpertGemmLaunch& p;
  const uint32_t shared_;
  const ExpertTile tile;
  const int first_n;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float sums[kMTiles][kNTiles][4] = {};
};

template <typename Math, int kRows, bool kGated>
__global__ void __launch_bounds__(kGemmThreads) ExpertGemmKernel(const __grid_constant__ ExpertGemmLaunch p) {
  extern __shared__ uint16_t memory[];
  // A product that follows one begins when that has waited for the tiles.
  if (p.follows_product == 0) WaitForPredecessor();
  const ExpertTile tile = p.tiles[blockIdx.y];
  if (!p.Takes(tile)) return WaitForPredecessor();
  ExpertGemm<Math, kRows, kGated>(p, memory, tile).Run();
}

__global__ void __launch_bounds__(256) ExpertSumKernel(const __grid_constant__ ExpertSumLaunch p) {
  WaitForPredecessor();
  LetSuccessorBegin();
  const int64_t row = blockIdx.y;
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= p.size) return;
  float sum = 0;
  for (int s = 0; s < p.chosen; ++s)
    sum += p.weight[row * p.chosen + s] * p.y[static_cast<int64_t>(p.slot[row * p.chosen + s]) * p.size + i];
  p.out[row * p.size + i] += p.scale * sum;
}

template <typename Math, int kRows, bool kGated>
int LaunchGemm(const ExpertGemmLaunch& p, void* stream) {
  using Gemm = ExpertGemm<Math, kRows, kGated>;
  auto* const kernel = ExpertGemmKernel<Math, kRows, kGated>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Gemm::kSharedBytes);
  if (error != cudaSuccess) return error;
  const dim3 grid(BlocksOf(kGated ? p.n / 2 : p.n, Gemm::kOfBlock), p.most_tiles);
  if (p.w_is_new == 0) return LaunchDependent(kernel, grid, kGemmThreads, Gemm::kSharedBytes, AsStream(stream), p);
  kernel<<<grid, kGemmThreads, Gemm::kSharedBytes, AsStream(stream)>>>(p);
  return LastLaunchError();
}

template <typename Math, int kRows>
int LaunchGemm(const ExpertGemmLaunch& p, void* stream) {
  return p.activation != ExpertActivation::kNone ? LaunchGemm<Math, kRows, true>(p, stream)
                                                 : LaunchGemm<Math, kRows, false>(p, stream);
}

template <typename Math>
int LaunchGemm(const ExpertGemmLaunch& p, void* stream) {
  if (p.tile_rows == kFewTileRows) return LaunchGemm<Math, kFewTileRows>(p, stream);
  return p.tile_rows == kMoreTileRows ? LaunchGemm<Math, kMoreTileRows>(p, stream)
                                      : LaunchGemm<Math, kManyTileRows>(p, stream);
}

}  // namespace

int LaunchPlace(const PlaceLaunch* p, void* stream) {
  return LaunchDependent(PlaceKernel, dim3(1), kPlaceThreads, 0, AsStream(stream), *p);
}

int LaunchExpertGemm(const ExpertGemmLaunch* p, void* stream) {
  return p->type == WireType::kBF16 ? LaunchGemm<BF16Math>(*p, stream) : LaunchGemm<F16Math>(*p, stream);
}

int LaunchExpertCodes(const ExpertCodesLaunch* p, void* stream) {
  QuantDevice device;
  const int error = GetQuantDevice(&device);
  if (error != 0) return error;
  return p->product.type == WireType::kBF16 ? LaunchExpertCodesBF16(*p, device, stream)
                                            : LaunchExpertCodesF16(*p, device, stream);
}

int LaunchExpertSum(const ExpertSumLaunch* p, void* stream) {
  return LaunchDependent(ExpertSumKernel, dim3(BlocksOf(p->size, 256), p->rows), 256, 0, AsStream(stream), *p);
}

}  // namespace dovetail::kernels::cuda
