#pragma once
#include <cuda_runtime.h>

#include "kernels/cuda/backend_abi.h"
#include "kernels/cuda/experts/expert_launches.h"
#include "kernels/cuda/primitives/wire.cuh"
#include "kernels/cuda/products/quant_steps.cuh"
#include "kernels/cuda/rows/gated_activation.cuh"

// Products of few rows with the experts that they chose, whose weights are in 4 or 8 bits (quant_steps.cuh). A thread
// block takes one tile of rows of an expert and a range of that expert's tiles of weights. Two of them share a
// multiprocessor, so that one brings its rows while the other multiplies. Where a tile has rows of the gate and of the
// other half, a lane has both sums, and joins them in registers.

namespace dovetail::kernels::cuda {

inline constexpr int kCodesWarps = 8, kCodesThreads = kCodesWarps * 32, kCodesBlocks = 2;

struct ExpertCodesPart : ExpertCodesLaunch {
  int32_t rows_at_once = 0;  // of a tile of rows, which shared memory has room for
};

// What a warp has of a tile of weights goes to y.
template <WireType kType, QuantKind kKind>
struct ExpertCodesStore {
  const ExpertCodesPart& p;
  const ExpertTile& tile;
  int first, m;  // rows of the tile

  template <int kTiles>
  __device__ __forceinline__ void operator()(int weights, const float (&sum)[kTiles][4]) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const float low = p.codes.factor[weights * kQuantTileRows + g] * RestOf<kType, kKind>(false);
    const float high = p.codes.factor[weights * kQuantTileRows + g + 8] * RestOf<kType, kKind>(true);
    const int row_low = p.codes.RowOf(weights, g), row_high = p.codes.RowOf(weights, g + 8);
    const float* const bias = p.product.bias;
    const float bias_low = bias != nullptr ? bias[row_low] : 0, bias_high = bias != nullptr ? bias[row_high] : 0;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = 8 * n + 2 * t + e;
        if (row >= m) continue;
        Store(tile.first + first + row, row_low - tile.expert * p.product.n, row_high - tile.expert * p.product.n,
              fmaf(sum[n][e], low, bias_low), fmaf(sum[n][2 + e], high, bias_high));
      }
    }
  }

 private:
  // Two columns of a slot's row; with an activation they are a gate and what it gates.
  __device__ __forceinline__ void Store(int64_t slot, int column, int other, float y, float y_other) const {
    if (p.product.activation != ExpertActivation::kNone) {
      const bool gelu = p.product.activation == ExpertActivation::kGeluTanh;
      return StoreWire(kType, p.product.y, slot * (p.product.n / 2) + column, Activate(gelu, y, y_other));
    }
    const WireType type = p.product.y_is_f32 ? WireType::kF32 : kType;
    StoreWire(type, p.product.y, slot * p.product.n + column, y);
    StoreWire(type, p.product.y, slot * p.product.n + other, y_other);
  }
};

// Rows [first, first + m) of the tile.
template <WireType kType, QuantKind kKind, int kTiles>
__device__ __forceinline__ void MultiplyExpertRows(const ExpertCodesPart& p, const ExpertTile& tile, int first, int m,
                                                   unsigned char* shared) {
  const int steps = p.codes.steps(), tiles = p.product.n / kQuantTileRows;
  const QuantSteps<kCodesWarps> all(tile.expert * tiles, tiles, steps, blockIdx.x, gridDim.x);
  const auto memory = QuantMemory::In<kKind, kTiles, kCodesWarps>(shared, steps);
  const auto fill = [&] {
    WaitForPredecessor();
    FillRows<kType, kKind, kCodesThreads>(steps, p.product.k, m, memory.rows, memory.sums, memory.stride, [&](int row) {
      const int slot = tile.first + first + row;
      const int64_t from = p.product.member != nullptr ? p.product.member[slot] : slot;
      return static_cast<const uint16_t*>(p.product.x) + from * p.product.k;
    });
    __syncthreads();
  };
  MultiplyTiles<kType, kKind, kTiles>(p.codes, 0, all, memory, m, fill,
                                      ExpertCodesStore<kType, kKind>{p, tile, first, m});
}

template <WireType kType, QuantKind kKind>
__global__ void __launch_bounds__(kCodesThreads, kCodesBlocks)
    ExpertCodesKernel(const __grid_constant__ ExpertCodesPart p) {
  extern __shared__ __align__(128) unsigned char shared[];
  if (p.product.follows_product == 0) WaitForPredecessor();  // which may have made the tiles
  const ExpertTile tile = p.product.tiles[blockIdx.y];
  if (tile.rows == 0) return WaitForPredecessor();
  for (int first = 0; first < tile.rows; first += p.rows_at_once) {
    if (first > 0) __syncthreads();
    const int m = min(p.rows_at_once, tile.rows - first);
    if (m > 8) {
      MultiplyExpertRows<kType, kKind, 2>(p, tile, first, m, shared);
    } else {
      MultiplyExpertRows<kType, kKind, 1>(p, tile, first, m, shared);
    }
  }
}

template <QuantKind kKind>
constexpr int ExpertCodesBytes(int steps, int m) {
  const int fixed =
      m > 8 ? QuantMemory::FixedBytes<kKind, 2, kCodesWarps>(m) : QuantMemory::FixedBytes<kKind, 1, kCodesWarps>(m);
  return fixed + steps * QuantMemory::StepBytes<kKind>(m);
}

// Rows at once that leave room for all thread blocks of a multiprocessor, else that fit at all; 0: none.
template <QuantKind kKind>
int ExpertRowsAtOnce(int steps, int rows, int shared_bytes) {
  constexpr int kReserved = 1024;  // by the GPU, of each thread block
  for (const int room : {shared_bytes / kCodesBlocks - kReserved, shared_bytes})
    for (const int most : {16, 8}) {
      const int m = rows < most ? rows : most;
      if (ExpertCodesBytes<kKind>(steps, m) <= room) return m;
    }
  return 0;
}

// Few tiles of rows: all thread blocks run at once. Many: each multiprocessor has several in turn, so that those with
// more or fewer rows even out.
template <WireType kType, QuantKind kKind>
int LaunchExpertCodesKind(const ExpertCodesLaunch& launch, const QuantDevice& device, void* stream) {
  ExpertCodesPart part;
  static_cast<ExpertCodesLaunch&>(part) = launch;
  part.rows_at_once = ExpertRowsAtOnce<kKind>(launch.codes.steps(), launch.most_rows, device.shared_bytes);
  if (part.rows_at_once == 0) return kQuantTooWide;
  const auto kernel = ExpertCodesKernel<kType, kKind>;
  const int bytes = ExpertCodesBytes<kKind>(launch.codes.steps(), part.rows_at_once);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return static_cast<int>(error);
  const int at_once = kCodesBlocks * device.multiprocessors, most_tiles = launch.product.most_tiles;
  const int turns = most_tiles * 4 < at_once ? 1 : 4;
  int ranges = turns * at_once / most_tiles;
  if (ranges > launch.product.n / kQuantTileRows) ranges = launch.product.n / kQuantTileRows;
  if (ranges < 1) ranges = 1;
  return LaunchDependent(kernel, dim3(ranges, most_tiles), kCodesThreads, bytes, static_cast<cudaStream_t>(stream),
                         part);
}

template <WireType kType>
int LaunchExpertCodesType(const ExpertCodesLaunch& launch, const QuantDevice& device, void* stream) {
  switch (launch.codes.kind) {
    case QuantKind::kU4: return LaunchExpertCodesKind<kType, QuantKind::kU4>(launch, device, stream);
    case QuantKind::kU4Offset: return LaunchExpertCodesKind<kType, QuantKind::kU4Offset>(launch, device, stream);
    case QuantKind::kU8: return LaunchExpertCodesKind<kType, QuantKind::kU8>(launch, device, stream);
    case QuantKind::kU8Offset: return LaunchExpertCodesKind<kType, QuantKind::kU8Offset>(launch, device, stream);
    case QuantKind::kU8Group16: return LaunchExpertCodesKind<kType, QuantKind::kU8Group16>(launch, device, stream);
    case QuantKind::kFp4: return LaunchExpertCodesKind<kType, QuantKind::kFp4>(launch, device, stream);
    case QuantKind::kE4M3: return LaunchExpertCodesKind<kType, QuantKind::kE4M3>(launch, device, stream);
  }
  return static_cast<int>(cudaErrorInvalidValue);
}

}  // namespace dovetail::kernels::cuda
