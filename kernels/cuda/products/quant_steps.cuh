#pragma once
#include <cuda_runtime.h>

#include "kernels/cuda/primitives/dependent_launch.cuh"
#include "kernels/cuda/products/quant_codes.cuh"

// Few rows times tiles of weights in 4 or 8 bits, by one thread block: what products of a matrix (quant_gemm.cuh) and
// of experts (expert_codes.cuh) have in common. W is the A operand: 16 rows of weights and up to 16 of x make a tile.
// Device code only.
//
// The steps of all tiles are cut into one equal range a warp, which reads on ahead of its products in registers (kAhead
// steps) and so never waits for others. Where a range ends within a tile, its sums are stored, and the tile's are added
// in the order of the steps when all warps are done. So bits do not depend on timing.

namespace dovetail::kernels::cuda {

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

// Rows [0, m) of x, `columns` of each, to shared memory, zeros behind them up to `steps` steps. row_at(row): a row's
// first column, 16-byte aligned.
template <WireType kType, QuantKind kKind, int kThreads, typename RowAt>
__device__ __forceinline__ void FillRows(int steps, int columns, int m, unsigned char* rows, float* sums, int stride,
                                         RowAt&& row_at) {
  using Code = CodeMath<kType>;
  const int padded = steps * kQuantStepColumns;
  const int runs = padded / 8, total = m * runs;
  if constexpr (QuantShape<kKind>::kOffsets) {
    for (int i = threadIdx.x; i < (padded / 32) * 16; i += kThreads) sums[i] = 0;
    __syncthreads();
  }
  for (int base = 0; base < total; base += kThreads) {
    const int i = base + static_cast<int>(threadIdx.x), row = i / runs, column = i % runs * 8;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (i < total && column < columns) v = *reinterpret_cast<const uint4*>(row_at(row) + column);
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

// The steps of a thread block's tiles, one behind the other, and the range of them that each of kWarps warps takes. The
// thread block takes part `range` of `ranges` of tiles [first, first + all).
template <int kWarps>
struct QuantSteps {
  int of_tile;
  int tile0, tiles;
  int64_t total;

  __device__ __forceinline__ QuantSteps(int first, int all, int steps, int range, int ranges) : of_tile(steps) {
    const int begin = static_cast<int>(static_cast<int64_t>(all) * range / ranges);
    tiles = static_cast<int>(static_cast<int64_t>(all) * (range + 1) / ranges) - begin;
    tile0 = first + begin;
    total = static_cast<int64_t>(tiles) * of_tile;
  }
  __device__ __forceinline__ int BeginOf(int warp) const { return static_cast<int>(total * warp / kWarps); }
  __device__ __forceinline__ int OwnerOf(int64_t step) const {
    return static_cast<int>(((step + 1) * kWarps - 1) / total);
  }
};

// Where a thread block has what it shares. Pieces: [warps][2][kTiles * 4][32].
struct QuantMemory {
  float *pieces, *sums;
  unsigned char* rows;
  int stride;  // of rows, bytes

  // Bytes of it for `m` rows: what is fixed, and of each step.
  template <QuantKind kKind, int kTiles, int kWarps>
  static constexpr int FixedBytes(int m) {
    return kWarps * 2 * kTiles * 4 * 32 * 4 + m * QuantShape<kKind>::kPadBytes;
  }
  template <QuantKind kKind>
  static constexpr int StepBytes(int m) {
    return m * kQuantStepColumns * 2 + (QuantShape<kKind>::kOffsets ? 4 * 16 * 4 : 0);
  }
  template <QuantKind kKind, int kTiles, int kWarps>
  static __device__ __forceinline__ QuantMemory In(unsigned char* memory, int steps) {
    QuantMemory out;
    out.pieces = reinterpret_cast<float*>(memory);
    out.sums = out.pieces + kWarps * 2 * kTiles * 4 * 32;
    out.rows = reinterpret_cast<unsigned char*>(out.sums + (QuantShape<kKind>::kOffsets ? steps * 4 * 16 : 0));
    out.stride = steps * kQuantStepColumns * 2 + QuantShape<kKind>::kPadBytes;
    return out;
  }
};

// Stores the tiles that the ranges of several warps divide: the sum of their pieces, in the order of the steps.
template <int kTiles, int kWarps, typename Store>
__device__ __forceinline__ void StoreDividedTiles(const QuantSteps<kWarps>& all, const float* pieces, int warp,
                                                  int lane, Store&& store) {
  constexpr int kPiece = kTiles * 4 * 32;
  const int64_t n = all.of_tile;
  for (int j = warp; j < all.tiles; j += kWarps) {
    const int first = all.OwnerOf(j * n), last = all.OwnerOf((j + 1) * n - 1);
    if (first == last) continue;
    float joined[kTiles][4] = {};
    for (int w = first; w <= last; ++w) {
      if (all.BeginOf(w) == all.BeginOf(w + 1)) continue;
      const float* const slot = pieces + (w * 2 + (all.BeginOf(w) / all.of_tile == j ? 0 : 1)) * kPiece + lane;
#pragma unroll
      for (int i = 0; i < kTiles * 4; ++i) joined[i / 4][i % 4] += slot[i * 32];
    }
    store(all.tile0 + j, joined);
  }
}

// Steps [first_step, ...) of the tiles of `all` times m rows. fill() brings those to shared memory and lets all threads
// wait for that; codes are read before. store(tile, sums): a tile's, by one warp.
template <WireType kType, QuantKind kKind, int kTiles, int kWarps, typename Fill, typename Store>
__device__ __forceinline__ void MultiplyTiles(const QuantMatrix& w, int first_step, const QuantSteps<kWarps>& all,
                                              const QuantMemory& memory, int m, Fill&& fill, Store&& store) {
  constexpr int kAhead = QuantShape<kKind>::kAhead, kPiece = kTiles * 4 * 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int n = all.of_tile, begin = all.BeginOf(warp), end = all.BeginOf(warp + 1);
  const SharedRows shared{SharedAddress(memory.rows), memory.sums, memory.stride};
  const int stride = w.steps();
  int load_step = begin % n;
  int64_t load_at = static_cast<int64_t>(all.tile0 + begin / n) * stride + first_step + load_step;
  QuantStep<kKind> steps[kAhead];
  const auto load = [&](QuantStep<kKind>& step) {
    step.Load(w, load_at, lane);
    ++load_at;
    if (++load_step == n) load_step = 0, load_at += stride - n;
  };
#pragma unroll
  for (int d = 0; d < kAhead; ++d) {
    if (begin + d < end) load(steps[d]);
  }
  fill();

  int step = begin % n, tile = begin / n;
  float sum[kTiles][4] = {};
  const auto flush = [&](int until) {  // of [tile * n, until)
    if (tile * static_cast<int64_t>(n) >= begin && until == (tile + 1) * n) {
      store(all.tile0 + tile, sum);
    } else {
      StorePiece(memory.pieces + (warp * 2 + (begin / n == tile ? 0 : 1)) * kPiece + lane, sum);
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
  StoreDividedTiles<kTiles>(all, memory.pieces, warp, lane, store);
}

}  // namespace dovetail::kernels::cuda
