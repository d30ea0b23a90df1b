#pragma once
#include <cuda_runtime.h>

#include "kernels/cuda/primitives/dependent_launch.cuh"
#include "kernels/cuda/primitives/wire.cuh"
#include "kernels/cuda/products/quant_codes.cuh"
#include "kernels/cuda/products/quant_launches.h"

// Products of few rows with weights in 4 or 8 bits, bound by the memory that the codes come from. W is the A operand:
// 16 rows of weights and up to 16 of x make a tile.
//
// A thread block takes a range of tiles of W, and x whole in shared memory; the steps of all its tiles are cut into one
// equal range a warp, which reads on ahead of its products in registers (kAhead steps) and so never waits for others.
// Where a range ends within a tile, its sums are stored, and the tile's are added in the order of the steps when all
// warps are done. So bits do not depend on timing. Codes are read before the predecessor of the kernel has ended.

namespace dovetail::kernels::cuda {

inline constexpr int kQuantWarps = 16;
inline constexpr int kQuantThreads = kQuantWarps * 32;

template <QuantKind kKind>
struct QuantShape {
  static constexpr QuantTraits kTraits = TraitsOf(kKind);
  static constexpr int kChunks = kTraits.code_bytes() / 512;         // 16 bytes a lane
  static constexpr int kChunkColumns = kQuantStepColumns / kChunks;  // 64 or 32
  static constexpr int kGroups = kQuantStepColumns / kTraits.group;
  static constexpr int kScaleLoads = kTraits.scale_bytes() / 128;  // 16 bytes a lane, of eight different ones
  static constexpr int kAhead = kTraits.bits == 8 ? 2 : kTraits.values == 2 ? 3 : 4;
  static constexpr bool kOffsets = kTraits.values == 2;
  // Behind each row of x, so that eight rows fall on different banks.
  static constexpr int kPadBytes = kTraits.group == 16 ? 32 : 64;
};

// One step of a tile as it lies in memory.
template <QuantKind kKind>
struct QuantStep {
  using Shape = QuantShape<kKind>;
  uint4 codes[Shape::kChunks];
  uint4 scales[Shape::kScaleLoads > 0 ? Shape::kScaleLoads : 1];

  __device__ __forceinline__ static uint4 LoadOnce(const uint4* at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
  }

  __device__ __forceinline__ void Load(const QuantMatrix& w, int64_t at, int lane) {
    const auto* from = static_cast<const uint4*>(w.codes) + at * (Shape::kTraits.code_bytes() / 16) + lane;
#pragma unroll
    for (int c = 0; c < Shape::kChunks; ++c) codes[c] = LoadOnce(from + 32 * c);
    if constexpr (Shape::kScaleLoads > 0) {
      const auto* group = static_cast<const uint4*>(w.scales) + at * (Shape::kTraits.scale_bytes() / 16) +
                          lane / 4 * Shape::kScaleLoads;
#pragma unroll
      for (int i = 0; i < Shape::kScaleLoads; ++i) scales[i] = LoadOnce(group + i);
    }
  }

  // Word i of the scales: of group i, or with offsets of group i / 2.
  __device__ __forceinline__ float2 Pair(int i) const {
    const uint4& v = scales[i / 4];
    const uint32_t word = i % 4 == 0 ? v.x : i % 4 == 1 ? v.y : i % 4 == 2 ? v.z : v.w;
    return __half22float2(*reinterpret_cast<const __half2*>(&word));
  }
};

template <typename Math>
__device__ __forceinline__ void MmaTo(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                      const float (&c)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) d[e] = c[e];
  Math::Mma(d, a, b0, b1);
}

// What a thread block knows of x.
struct SharedRows {
  uint32_t x;         // [m] rows of stride bytes
  const float* sums;  // [groups][16], with offsets only: sums of x over each group, as products are scaled
  int stride;
};

// What the lane multiplies of a group's columns of x.
template <QuantKind kKind, int kTiles>
__device__ __forceinline__ void LoadGroup(const uint32_t (&rows)[kTiles], int group, int t, uint32_t (&b)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    if constexpr (QuantShape<kKind>::kTraits.group == 32) {
      const uint4 v = LoadShared16(rows[n] + (32 * group + 8 * t) * 2);
      b[n][0] = v.x, b[n][1] = v.y, b[n][2] = v.z, b[n][3] = v.w;
    } else {
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                   : "=r"(b[n][0]), "=r"(b[n][1])
                   : "r"(rows[n] + (16 * group + 4 * t) * 2));
    }
  }
}

// sum += a group's products times its scale, and with offsets the offset times `sums`, those of x over the group.
template <QuantKind kKind, int kTiles>
__device__ __forceinline__ void AddGroup(const QuantStep<kKind>& step, int group, const float* sums,
                                         const float (&part)[kTiles][4], float (&sum)[kTiles][4]) {
  constexpr bool kOffsets = QuantShape<kKind>::kOffsets;
  const float2 scale = step.Pair(kOffsets ? 2 * group : group);
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    sum[n][0] = fmaf(scale.x, part[n][0], sum[n][0]), sum[n][1] = fmaf(scale.x, part[n][1], sum[n][1]);
    sum[n][2] = fmaf(scale.y, part[n][2], sum[n][2]), sum[n][3] = fmaf(scale.y, part[n][3], sum[n][3]);
  }
  if constexpr (kOffsets) {
    const float2 offset = step.Pair(2 * group + 1);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float2 s = *reinterpret_cast<const float2*>(sums + 8 * n);
      sum[n][0] = fmaf(offset.x, s.x, sum[n][0]), sum[n][1] = fmaf(offset.x, s.y, sum[n][1]);
      sum[n][2] = fmaf(offset.y, s.x, sum[n][2]), sum[n][3] = fmaf(offset.y, s.y, sum[n][3]);
    }
  }
}

// sums += step, whose columns begin at x's `column`.
template <WireType kType, QuantKind kKind, int kTiles>
__device__ __forceinline__ void MultiplyStep(const QuantStep<kKind>& step, const SharedRows& shared, int column, int m,
                                             int lane, float (&sum)[kTiles][4]) {
  using Shape = QuantShape<kKind>;
  using Math = typename CodeMath<kType>::Math;
  const int g = lane / 4, t = lane % 4;
  constexpr int kStepsOfGroup = Shape::kTraits.group / 16;
  uint32_t rows[kTiles];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) rows[n] = shared.x + min(8 * n + g, m - 1) * shared.stride + column * 2;
#pragma unroll
  for (int group = 0; group < Shape::kGroups; ++group) {
    const int chunk = group * Shape::kTraits.group / Shape::kChunkColumns;
    const int first = group * Shape::kTraits.group % Shape::kChunkColumns / 16;  // step of the chunk
    float part[kTiles][4];
    uint32_t b[kTiles][4];
    LoadGroup<kKind>(rows, group, t, b);
#pragma unroll
    for (int s = 0; s < kStepsOfGroup; ++s) {
      uint32_t a[4];
      Decode<kType, kKind>(step.codes[chunk], first + s, a);
      constexpr float kZeros[4] = {0, 0, 0, 0};
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        if constexpr (kKind == QuantKind::kE4M3) {
          Math::Mma(sum[n], a, b[n][2 * s], b[n][2 * s + 1]);
        } else if (s == 0) {
          MmaTo<Math>(part[n], a, b[n][0], b[n][1], kZeros);
        } else {
          Math::Mma(part[n], a, b[n][2 * s], b[n][2 * s + 1]);
        }
      }
    }
    if constexpr (kKind != QuantKind::kE4M3) {
      AddGroup(step, group, shared.sums + (column / 32 + group) * 16 + 2 * t, part, sum);
    }
  }
}

// Rows [0, m) of x, columns [0, columns) of the launch's range, to shared memory, zeros behind them.
template <WireType kType, QuantKind kKind>
__device__ __forceinline__ void FillRows(const QuantPart& p, const void* x, int m, unsigned char* rows, float* sums,
                                         int stride) {
  using Code = CodeMath<kType>;
  const int padded = p.steps * kQuantStepColumns, columns = min(padded, p.w.cols - p.first_step * kQuantStepColumns);
  const int runs = padded / 8, total = m * runs;
  if constexpr (QuantShape<kKind>::kOffsets) {
    for (int i = threadIdx.x; i < (padded / 32) * 16; i += kQuantThreads) sums[i] = 0;
    __syncthreads();
  }
  for (int base = 0; base < total; base += kQuantThreads) {
    const int i = base + static_cast<int>(threadIdx.x), row = i / runs, column = i % runs * 8;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (i < total && column < columns) {
      v = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(x) + row * p.x_stride + column);
    }
    v.x = Code::ScaleX(v.x), v.y = Code::ScaleX(v.y), v.z = Code::ScaleX(v.z), v.w = Code::ScaleX(v.w);
    if (i < total) *reinterpret_cast<uint4*>(rows + row * stride + column * 2) = v;
    if constexpr (QuantShape<kKind>::kOffsets) {
      const float2 a = Code::Unpack(v.x), b = Code::Unpack(v.y), c = Code::Unpack(v.z), d = Code::Unpack(v.w);
      float sum = (a.x + a.y) + (b.x + b.y) + ((c.x + c.y) + (d.x + d.y));
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      // Codes are units of kCodeUnit of x as it is; x has been scaled already.
      constexpr float kUnit = kType == WireType::kBF16 ? 0x1p-133f : 0x1p-24f;
      if (i < total && i % 4 == 0) sums[column / 32 * 16 + row] = sum * kUnit;
    }
  }
}

template <WireType kType, QuantKind kKind, int kTiles>
__device__ __forceinline__ void StoreTile(const QuantPart& p, int tile, int row0, int m, const float (&sum)[kTiles][4],
                                          int lane) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int high = 0; high < 2; ++high) {
    const int row = tile * kQuantTileRows + g + 8 * high;
    if (row >= p.w.rows) continue;
    const float factor = p.w.factor[row] * RestOf<kType, kKind>(high != 0);
    const WireType y_type = p.y_is_f32 ? WireType::kF32 : kType;
    const float bias = p.bias != nullptr ? LoadWire(y_type, p.bias, row) : 0;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int out = 8 * n + 2 * t + e;
        if (out >= m) continue;
        const int64_t at = (row0 + out) * p.y_stride + row;
        float value = fmaf(sum[n][2 * high + e], factor, bias);
        if (p.accumulate) value += LoadWire(y_type, p.y, at);
        StoreWire(y_type, p.y, at, value);
      }
    }
  }
}

template <int kTiles>
__device__ __forceinline__ void Clear(float (&sum)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kTiles * 4; ++i) sum[i / 4][i % 4] = 0;
}

// The sums of a tile's steps in one warp's range, to be added by StoreDividedTiles.
template <int kTiles>
__device__ __forceinline__ void StorePiece(float* slot, const float (&sum)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kTiles * 4; ++i) slot[i * 32] = sum[i / 4][i % 4];
}

// The steps of a thread block's tiles, one behind the other, and the range of them that each warp takes.
struct QuantSteps {
  int of_tile;
  int tile0, tiles;
  int64_t total;

  __device__ __forceinline__ explicit QuantSteps(const QuantPart& p) : of_tile(p.steps) {
    const int ranges = gridDim.y, all_tiles = p.w.tiles();
    tile0 = static_cast<int>(static_cast<int64_t>(all_tiles) * blockIdx.y / ranges);
    tiles = static_cast<int>(static_cast<int64_t>(all_tiles) * (blockIdx.y + 1) / ranges) - tile0;
    total = static_cast<int64_t>(tiles) * of_tile;
  }
  __device__ __forceinline__ int BeginOf(int warp) const { return static_cast<int>(total * warp / kQuantWarps); }
  __device__ __forceinline__ int OwnerOf(int64_t step) const {
    return static_cast<int>(((step + 1) * kQuantWarps - 1) / total);
  }
};

// Stores the tiles that the ranges of several warps divide: the sum of their pieces, in the order of the steps. pieces:
// [warps][2][kTiles * 4][32].
template <WireType kType, QuantKind kKind, int kTiles>
__device__ __forceinline__ void StoreDividedTiles(const QuantPart& p, const QuantSteps& all, const float* pieces,
                                                  int row0, int m, int warp, int lane) {
  constexpr int kPiece = kTiles * 4 * 32;
  const int64_t n = all.of_tile;
  for (int j = warp; j < all.tiles; j += kQuantWarps) {
    const int first = all.OwnerOf(j * n), last = all.OwnerOf((j + 1) * n - 1);
    if (first == last) continue;
    float joined[kTiles][4] = {};
    for (int w = first; w <= last; ++w) {
      if (all.BeginOf(w) == all.BeginOf(w + 1)) continue;
      const float* const slot = pieces + (w * 2 + (all.BeginOf(w) / all.of_tile == j ? 0 : 1)) * kPiece + lane;
#pragma unroll
      for (int i = 0; i < kTiles * 4; ++i) joined[i / 4][i % 4] += slot[i * 32];
    }
    StoreTile<kType, kKind, kTiles>(p, all.tile0 + j, row0, m, joined, lane);
  }
}

template <WireType kType, QuantKind kKind, int kTiles>
__global__ void __launch_bounds__(kQuantThreads, 1) QuantGemmKernel(const __grid_constant__ QuantPart p) {
  using Shape = QuantShape<kKind>;
  constexpr int kAhead = Shape::kAhead;
  extern __shared__ __align__(128) unsigned char memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row0 = blockIdx.x * 8 * kTiles, m = min(8 * kTiles, p.m - row0);
  const QuantSteps all(p);
  const int n = p.steps, begin = all.BeginOf(warp), end = all.BeginOf(warp + 1);

  float* const pieces = reinterpret_cast<float*>(memory);  // [warps][2][kTiles * 4][32]
  constexpr int kPiece = kTiles * 4 * 32;
  float* const sums = pieces + kQuantWarps * 2 * kPiece;
  auto* const rows = reinterpret_cast<unsigned char*>(sums + (Shape::kOffsets ? n * 4 * 16 : 0));
  SharedRows shared{SharedAddress(rows), sums, n * kQuantStepColumns * 2 + Shape::kPadBytes};

  const int stride = p.w.steps();
  int load_step = begin % n;
  int64_t load_at = static_cast<int64_t>(all.tile0 + begin / n) * stride + p.first_step + load_step;
  QuantStep<kKind> steps[kAhead];
  const auto load = [&](QuantStep<kKind>& step) {
    step.Load(p.w, load_at, lane);
    ++load_at;
    if (++load_step == n) load_step = 0, load_at += stride - n;
  };
#pragma unroll
  for (int d = 0; d < kAhead; ++d) {
    if (begin + d < end) load(steps[d]);
  }
  WaitForPredecessor();
  FillRows<kType, kKind>(p, static_cast<const uint16_t*>(p.x) + row0 * p.x_stride, m, rows, sums, shared.stride);
  __syncthreads();

  int step = begin % n, tile = begin / n;
  float sum[kTiles][4] = {};
  const auto flush = [&](int until) {  // of [tile * n, until)
    if (tile * static_cast<int64_t>(n) >= begin && until == (tile + 1) * n) {
      StoreTile<kType, kKind, kTiles>(p, all.tile0 + tile, row0, m, sum, lane);
    } else {
      StorePiece(pieces + (warp * 2 + (begin / n == tile ? 0 : 1)) * kPiece + lane, sum);
    }
  };
  for (int base = begin; base < end; base += kAhead) {
#pragma unroll
    for (int d = 0; d < kAhead; ++d) {
      if (base + d >= end) break;
      MultiplyStep<kType, kKind, kTiles>(steps[d], shared, step * kQuantStepColumns, m, lane, sum);
      if (base + d + kAhead < end) load(steps[d]);
      if (++step == n) {
        flush(base + d + 1);
        step = 0, ++tile;
        Clear(sum);
      }
    }
  }
  if (step != 0 && begin < end) flush(end);
  LetSuccessorBegin();
  __syncthreads();
  StoreDividedTiles<kType, kKind, kTiles>(p, all, pieces, row0, m, warp, lane);
}

template <WireType kType, QuantKind kKind, int kTiles>
int LaunchQuantTiles(QuantPart part, const QuantDevice& device, cudaStream_t stream) {
  using Shape = QuantShape<kKind>;
  const int most = part.m < 8 * kTiles ? part.m : 8 * kTiles;  // rows of a pass
  const int passes = (part.m + 8 * kTiles - 1) / (8 * kTiles);
  const int fixed = kQuantWarps * 2 * kTiles * 4 * 32 * 4 + most * Shape::kPadBytes;
  const int a_step = most * kQuantStepColumns * 2 + (Shape::kOffsets ? 4 * 16 * 4 : 0);
  const int steps = part.w.steps(), room = (device.shared_bytes - fixed) / a_step;
  if (room < 1) return static_cast<int>(cudaErrorInvalidConfiguration);
  const int launches = (steps + room - 1) / room;
  if (launches > 1 && !part.y_is_f32) return kQuantTooWide;
  const auto kernel = QuantGemmKernel<kType, kKind, kTiles>;
  const int widest = (steps + launches - 1) / launches;
  const int shared_bytes = fixed + widest * a_step;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return static_cast<int>(error);
  int ranges = device.multiprocessors / passes;
  if (ranges > part.w.tiles()) ranges = part.w.tiles();
  if (ranges < 1) ranges = 1;
  const auto* const x = static_cast<const uint16_t*>(part.x);
  for (int i = 0; i < launches; ++i) {  // of a range of columns each; the first one adds the bias
    part.first_step = steps * i / launches;
    part.steps = steps * (i + 1) / launches - part.first_step;
    part.x = x + part.first_step * kQuantStepColumns;
    const int failed = LaunchDependent(kernel, dim3(passes, ranges), kQuantThreads, shared_bytes, stream, part);
    if (failed != 0) return failed;
    part.bias = nullptr;
    part.accumulate = 1;
  }
  return 0;
}

// Rows that do not fit into one launch are taken eight at a time.
template <WireType kType, QuantKind kKind>
int LaunchQuantKind(const QuantPart& part, const QuantDevice& device, cudaStream_t stream) {
  if (part.m > 8) {
    const int error = LaunchQuantTiles<kType, kKind, 2>(part, device, stream);
    if (error != kQuantTooWide) return error;
  }
  return LaunchQuantTiles<kType, kKind, 1>(part, device, stream);
}

template <WireType kType>
int LaunchQuantType(const QuantPart& part, const QuantDevice& device, cudaStream_t stream) {
  switch (part.w.kind) {
    case QuantKind::kU4: return LaunchQuantKind<kType, QuantKind::kU4>(part, device, stream);
    case QuantKind::kU4Offset: return LaunchQuantKind<kType, QuantKind::kU4Offset>(part, device, stream);
    case QuantKind::kU8: return LaunchQuantKind<kType, QuantKind::kU8>(part, device, stream);
    case QuantKind::kU8Offset: return LaunchQuantKind<kType, QuantKind::kU8Offset>(part, device, stream);
    case QuantKind::kU8Group16: return LaunchQuantKind<kType, QuantKind::kU8Group16>(part, device, stream);
    case QuantKind::kFp4: return LaunchQuantKind<kType, QuantKind::kFp4>(part, device, stream);
    case QuantKind::kE4M3: return LaunchQuantKind<kType, QuantKind::kE4M3>(part, device, stream);
  }
  return static_cast<int>(cudaErrorInvalidValue);
}

}  // namespace dovetail::kernels::cuda
