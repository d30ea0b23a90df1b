#pragma once
#include "kernels/cuda/primitives/warpgroup_products.cuh"
#include "kernels/cuda/state/state_chunk_parts.cuh"

// Tiles of bf16 in shared memory, and products of them, for the kernels that go from chunk to chunk. A product is one
// of a warpgroup (four warps from a multiple of four on): 64 rows, of which warp w has [16 w, 16 w + 16), its
// accumulators as those of mma.m16n8k16, a tile of 8 columns behind the other. Hopper multiplies whole tiles as they
// lie (wgmma, asynchronous: PTX ISA 9.7.15); other GPUs by mma.sync, from the same places. Device code only.

namespace dovetail::kernels::cuda {

constexpr int kTileTokens = 64;

// kColumns in panels of 64 of 64 tokens: rows of 128 bytes, whose sixteen-byte parts trade places by the row, so that
// eight rows of a column have all banks (wgmma's 128-byte swizzle).
template <int kOfColumns>
struct WideTile {
  static constexpr int kColumns = kOfColumns, kRowBytes = 128, kPanel = kTileTokens * 64;  // elements
  alignas(1024) __nv_bfloat16 data[kTileTokens * kColumns];

  __device__ __forceinline__ static int At(int row, int column) {
    return column / 64 * kPanel + row * 64 + (column / 8 % 8 ^ row % 8) * 8 + column % 8;
  }
};

// kRows of 32 or 64 columns, a value slice: rows of 64 or 128 bytes, the same (64-byte or 128-byte swizzle).
template <int kRows, int kOfColumns>
struct ThinTile {
  static constexpr int kColumns = kOfColumns, kRowBytes = 2 * kColumns;
  static_assert(kColumns == 32 || kColumns == 64);
  alignas(1024) __nv_bfloat16 data[kRows * kColumns];

  __device__ __forceinline__ static int At(int row, int column) {
    return row * kColumns + (column / 8 ^ (kColumns == 32 ? row / 2 % 4 : row % 8)) * 8 + column % 8;
  }
};

#if __CUDA_ARCH_FEAT_SM90_ALL

#define DOVETAIL_SUMS8(d, n)                                                                                           \
  "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3]), "+f"(d[n + 1][0]), "+f"(d[n + 1][1]), "+f"(d[n + 1][2]), \
      "+f"(d[n + 1][3])

// d += a b, 64 x 8 kCount x 16. kATurned: a lies column by column; kBRows: b lies row by row of its 16.
template <bool kATurned, bool kBRows, int kCount>
__device__ __forceinline__ void Wgmma(float (&d)[kCount][4], uint64_t a, uint64_t b) {
  if constexpr (kCount == 2) {
    asm volatile(
        "{ .reg .pred p; setp.eq.b32 p, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, p, 1, 1, %10, %11; }"
        : DOVETAIL_SUMS8(d, 0)
        : "l"(a), "l"(b), "n"(kATurned), "n"(kBRows));
  } else if constexpr (kCount == 4) {
    asm volatile(
        "{ .reg .pred p; setp.eq.b32 p, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
        "%16, %17, p, 1, 1, %18, %19; }"
        : DOVETAIL_SUMS8(d, 0), DOVETAIL_SUMS8(d, 2)
        : "l"(a), "l"(b), "n"(kATurned), "n"(kBRows));
  } else {
    static_assert(kCount == 8);
    asm volatile(
        "{ .reg .pred p; setp.eq.b32 p, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, p, 1, 1, %34, %35; }"
        : DOVETAIL_SUMS8(d, 0), DOVETAIL_SUMS8(d, 2), DOVETAIL_SUMS8(d, 4), DOVETAIL_SUMS8(d, 6)
        : "l"(a), "l"(b), "n"(kATurned), "n"(kBRows));
  }
}
// The same with a in registers; b lies row by row.
template <int kCount>
__device__ __forceinline__ void Wgmma(float (&d)[kCount][4], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (kCount == 4) {
    asm volatile(
        "{ .reg .pred p; setp.eq.b32 p, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
        "{%16,%17,%18,%19}, %20, p, 1, 1, 1; }"
        : DOVETAIL_SUMS8(d, 0), DOVETAIL_SUMS8(d, 2)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  } else {
    static_assert(kCount == 8);
    asm volatile(
        "{ .reg .pred p; setp.eq.b32 p, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, 1; }"
        : DOVETAIL_SUMS8(d, 0), DOVETAIL_SUMS8(d, 2), DOVETAIL_SUMS8(d, 4), DOVETAIL_SUMS8(d, 6)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
}

#undef DOVETAIL_SUMS8

#else

// d += a b: a in registers, 16 rows of b from `k` on, 8 kCount columns from `column` on.
template <int kCount, typename B>
__device__ __forceinline__ void MultiplyStep(float (&d)[kCount][4], const uint32_t (&a)[4], const B& b, int k,
                                             int column) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kCount; n += 2) {
    uint32_t y[4];
    LoadMatricesTransposed(y, SharedAddress(b.data + B::At(k + lane % 16, column + 8 * n + lane / 16 * 8)));
    BF16Math::Mma(d[n], a, y[0], y[1]);
    BF16Math::Mma(d[n + 1], a, y[2], y[3]);
  }
}

#endif

// d += a b: all columns of a; columns [column, column + 8 kCount) of b.
template <int kColumns, int kWidth, int kCount>
__device__ __forceinline__ void MultiplyTiles(float (&d)[kCount][4], const WideTile<kColumns>& a,
                                              const ThinTile<kColumns, kWidth>& b, int column) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  const uint64_t from_a = Descriptor<128>(SharedAddress(a.data));
  const uint64_t from_b = Descriptor<2 * kWidth>(SharedAddress(b.data) + 2 * column);
#pragma unroll
  for (int k = 0; k < kColumns; k += 16)
    Wgmma<false, true>(d, from_a + (k / 64 * 2 * WideTile<kColumns>::kPanel + k % 64 * 2) / 16,
                       from_b + k * 2 * kWidth / 16);
#else
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16;
#pragma unroll 4
  for (int k = 0; k < kColumns; k += 16) {
    uint32_t x[4];
    LoadMatrices(x, SharedAddress(a.data + WideTile<kColumns>::At(row + lane % 16, k + lane / 16 * 8)));
    MultiplyStep(d, x, b, k, column);
  }
#endif
}

// d += a^T b: columns [64 panel, 64 panel + 64) of a are rows of the product.
template <int kColumns, int kWidth, int kCount>
__device__ __forceinline__ void MultiplyTurned(float (&d)[kCount][4], const WideTile<kColumns>& a, int panel,
                                               const ThinTile<kTileTokens, kWidth>& b, int column) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  const uint64_t from_a = Descriptor<128>(SharedAddress(a.data) + 2 * panel * WideTile<kColumns>::kPanel);
  const uint64_t from_b = Descriptor<2 * kWidth>(SharedAddress(b.data) + 2 * column);
#pragma unroll
  for (int k = 0; k < kTileTokens; k += 16) Wgmma<true, true>(d, from_a + k * 128 / 16, from_b + k * 2 * kWidth / 16);
#else
  const int lane = threadIdx.x % 32, row = 64 * panel + threadIdx.x / 32 % 4 * 16;
#pragma unroll
  for (int k = 0; k < kTileTokens; k += 16) {
    uint32_t x[4];
    LoadMatricesTransposed(
        x, SharedAddress(a.data + WideTile<kColumns>::At(k + lane % 8 + lane / 16 * 8, row + lane / 8 % 2 * 8)));
    MultiplyStep(d, x, b, k, column);
  }
#endif
}

// d += a b^T: 64 tokens with 64 tokens.
template <int kColumns>
__device__ __forceinline__ void MultiplyRows(float (&d)[8][4], const WideTile<kColumns>& a,
                                             const WideTile<kColumns>& b) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  const uint64_t from_a = Descriptor<128>(SharedAddress(a.data)), from_b = Descriptor<128>(SharedAddress(b.data));
#pragma unroll
  for (int k = 0; k < kColumns; k += 16) {
    const int step = (k / 64 * 2 * WideTile<kColumns>::kPanel + k % 64 * 2) / 16;
    Wgmma<false, false>(d, from_a + step, from_b + step);
  }
#else
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16;
#pragma unroll 2
  for (int k = 0; k < kColumns; k += 16) {
    uint32_t x[4];
    LoadMatrices(x, SharedAddress(a.data + WideTile<kColumns>::At(row + lane % 16, k + lane / 16 * 8)));
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      uint32_t y[4];
      const int at = WideTile<kColumns>::At(16 * n + lane / 16 * 8 + lane % 8, k + lane / 8 % 2 * 8);
      LoadMatrices(y, SharedAddress(b.data + at));
      BF16Math::Mma(d[2 * n], x, y[0], y[1]);
      BF16Math::Mma(d[2 * n + 1], x, y[2], y[3]);
    }
  }
#endif
}

// d += a b: the warp's rows of a in registers, 16 columns each, as operands of mma.m16n8k16.
template <int kWidth>
__device__ __forceinline__ void MultiplyRegisters(float (&d)[kWidth / 8][4], const uint32_t (&a)[4][4],
                                                  const ThinTile<kTileTokens, kWidth>& b) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#if __CUDA_ARCH_FEAT_SM90_ALL
    Wgmma(d, a[k], Descriptor<2 * kWidth>(SharedAddress(b.data)) + k * 2 * kWidth);
#else
    MultiplyStep(d, a[k], b, 16 * k, 0);
#endif
  }
}

}  // namespace dovetail::kernels::cuda
