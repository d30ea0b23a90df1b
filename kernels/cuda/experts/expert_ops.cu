#include "kernels/cuda/experts/expert_launches.h"
#include "kernels/cuda/primitives/primitives.cuh"
#include "kernels/cuda/primitives/wire.cuh"

// Experts: the order of the pairs, products by expert, their sum. All lengths that depend on the routing stay
// on the device, so that a step can be recorded.

namespace dovetail::kernels::cuda {
namespace {

constexpr int kMostExperts = 1024, kPlaceThreads = 1024;

// One thread block: counts, offsets, places, tiles.
__global__ void __launch_bounds__(kPlaceThreads) PlaceKernel(const __grid_constant__ PlaceLaunch p) {
  __shared__ int counts[kMostExperts], next[kMostExperts], tiles[kMostExperts];
  for (int e = threadIdx.x; e < p.experts; e += kPlaceThreads) counts[e] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < p.pairs; i += kPlaceThreads) atomicAdd(&counts[p.expert[i]], 1);
  __syncthreads();
  if (threadIdx.x == 0) {
    int slot = 0, tile = 0;
    for (int e = 0; e < p.experts; ++e) {
      next[e] = slot;
      tiles[e] = tile;
      slot += counts[e];
      tile += (counts[e] + p.tile_rows - 1) / p.tile_rows;
    }
    for (; tile < p.most_tiles; ++tile) p.tiles[tile] = {0, 0, 0};
  }
  __syncthreads();
  for (int e = threadIdx.x; e < p.experts; e += kPlaceThreads)
    for (int first = 0, tile = tiles[e]; first < counts[e]; first += p.tile_rows, ++tile)
      p.tiles[tile] = {e, next[e] + first, min(p.tile_rows, counts[e] - first)};
  __syncthreads();
  for (int i = threadIdx.x; i < p.pairs; i += kPlaceThreads) {
    const int slot = atomicAdd(&next[p.expert[i]], 1);
    p.slot[i] = slot;
    p.member[slot] = i / p.chosen;
  }
}

constexpr int kGemmThreads = 128, kTileN = 64, kTileK = 64, kStages = 3;
constexpr int kRow = kTileK + 8;  // 16-bit elements from row to row in shared memory: no bank twice

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

template <typename Math, int kRows>
class ExpertGemm {
  static constexpr int kColumns = kRows == 16 ? kTileN / 4 : kTileN;  // of a warp
  static constexpr int kNTiles = kColumns / 8;
  static constexpr int kStage = (kRows + kTileN) * kRow;

 public:
  static constexpr int kSharedBytes = kStages * kStage * 2;

  __device__ ExpertGemm(const ExpertGemmLaunch& launch, uint16_t* shared, const ExpertTile& of)
      : p(launch), shared_(SharedAddress(shared)), tile(of), first_n(blockIdx.x * kTileN) {}

  __device__ void Run() {
    const int steps = (p.k + kTileK - 1) / kTileK;
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) {
      if (s < steps) Load(s, s);
      CommitCopies();
    }
    for (int step = 0; step < steps; ++step) {
      WaitForCopies<kStages - 2>();
      __syncthreads();
      if (step + kStages - 1 < steps) Load(step + kStages - 1, (step + kStages - 1) % kStages);
      CommitCopies();
      Multiply(step % kStages);
    }
    Store();
  }

 private:
  __device__ __forceinline__ void Load(int step, int stage) {
    const uint32_t to = shared_ + stage * kStage * 2;
    const int k0 = step * kTileK;
    for (int i = threadIdx.x; i < kRows * 8; i += kGemmThreads) {
      const int row = i / 8, k = k0 + i % 8 * 8;
      const bool there = row < tile.rows && k < p.k;
      int64_t from = 0;
      if (there) {
        const int slot = tile.first + row;
        from = static_cast<int64_t>(p.member != nullptr ? p.member[slot] : slot) * p.k + k;
      }
      CopyAsync(to + (row * kRow + i % 8 * 8) * 2, static_cast<const uint16_t*>(p.x) + from, there);
    }
    const auto* const w = static_cast<const uint16_t*>(p.w) + static_cast<int64_t>(tile.expert) * p.n * p.k;
    for (int i = threadIdx.x; i < kTileN * 8; i += kGemmThreads) {
      const int row = i / 8, k = k0 + i % 8 * 8;
      const bool there = first_n + row < p.n && k < p.k;
      CopyAsync(to + ((kRows + row) * kRow + i % 8 * 8) * 2,
                w + (there ? static_cast<int64_t>(first_n + row) * p.k + k : 0), there);
    }
  }

  __device__ __forceinline__ void Multiply(int stage) {
    const uint32_t a_at = shared_ + stage * kStage * 2, b_at = a_at + kRows * kRow * 2;
    const int m0 = kRows == 16 ? 0 : warp * 16, n0 = kRows == 16 ? warp * kColumns : 0;
#pragma unroll
    for (int kk = 0; kk < kTileK; kk += 16) {
      uint32_t a[4];
      LoadMatrix4(a, a_at + ((m0 + lane % 16) * kRow + kk + lane / 16 * 8) * 2);
#pragma unroll
      for (int n = 0; n < kNTiles; n += 2) {
        uint32_t b[4];  // two tiles of 8 columns: k 0..7 and 8..15 of each
        LoadMatrix4(b, b_at + ((n0 + n * 8 + lane / 16 * 8 + lane % 8) * kRow + kk + lane / 8 % 2 * 8) * 2);
        Math::Mma(sums[n], a, b[0], b[1]);
        Math::Mma(sums[n + 1], a, b[2], b[3]);
      }
    }
  }

  __device__ __forceinline__ void Store() {
    const int m0 = kRows == 16 ? 0 : warp * 16, n0 = kRows == 16 ? warp * kColumns : 0;
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = m0 + lane / 4 + i / 2 * 8, column = first_n + n0 + n * 8 + lane % 4 * 2 + i % 2;
        if (row >= tile.rows || column >= p.n) continue;
        float y = sums[n][i];
        if (p.bias != nullptr) y += p.bias[static_cast<int64_t>(tile.expert) * p.n + column];
        StoreWire(p.y_is_f32 ? WireType::kF32 : p.type, p.y, static_cast<int64_t>(tile.first + row) * p.n + column, y);
      }
    }
  }

  const ExpertGemmLaunch& p;
  const uint32_t shared_;
  const ExpertTile tile;
  const int first_n;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float sums[kNTiles][4] = {};
};

template <typename Math, int kRows>
__global__ void __launch_bounds__(kGemmThreads) ExpertGemmKernel(const __grid_constant__ ExpertGemmLaunch p) {
  extern __shared__ uint16_t memory[];
  const ExpertTile tile = p.tiles[blockIdx.y];
  if (tile.rows == 0) return;
  ExpertGemm<Math, kRows>(p, memory, tile).Run();
}

__global__ void __launch_bounds__(256) ExpertSumKernel(const __grid_constant__ ExpertSumLaunch p) {
  const int64_t row = blockIdx.y;
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= p.size) return;
  float sum = 0;
  for (int s = 0; s < p.chosen; ++s)
    sum += p.weight[row * p.chosen + s] * p.y[static_cast<int64_t>(p.slot[row * p.chosen + s]) * p.size + i];
  p.out[row * p.size + i] += p.scale * sum;
}

template <typename Math, int kRows>
int LaunchGemm(const ExpertGemmLaunch& p, cudaStream_t stream) {
  constexpr int kBytes = ExpertGemm<Math, kRows>::kSharedBytes;
  auto* const kernel = ExpertGemmKernel<Math, kRows>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<dim3((p.n + kTileN - 1) / kTileN, p.most_tiles), kGemmThreads, kBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

int LaunchPlace(const PlaceLaunch* p, void* stream) {
  PlaceKernel<<<1, kPlaceThreads, 0, static_cast<cudaStream_t>(stream)>>>(*p);
  return cudaGetLastError();
}

int LaunchExpertGemm(const ExpertGemmLaunch* p, void* stream) {
  auto* const on = static_cast<cudaStream_t>(stream);
  if (p->type == WireType::kBF16)
    return p->tile_rows == 16 ? LaunchGemm<BF16Math, 16>(*p, on) : LaunchGemm<BF16Math, 64>(*p, on);
  return p->tile_rows == 16 ? LaunchGemm<F16Math, 16>(*p, on) : LaunchGemm<F16Math, 64>(*p, on);
}

int LaunchExpertSum(const ExpertSumLaunch* p, void* stream) {
  ExpertSumKernel<<<dim3((p->size + 255) / 256, p->rows), 256, 0, static_cast<cudaStream_t>(stream)>>>(*p);
  return cudaGetLastError();
}

}  // namespace dovetail::kernels::cuda
