#pragma once
#include "kernels/cuda/primitives/primitives.cuh"
#include "kernels/cuda/primitives/wire.cuh"

// The inverse of 1 + L, L 64 x 64 and strictly lower, in shared memory: blocks of 16 on the diagonal row by row, the
// others as products of blocks on tensor cores (operands rounded to tf32). Device code only; a thread block of four
// warps or more.

namespace dovetail::kernels::cuda {

constexpr int kSystem = 64 + 4;  // floats from row to row

class BlockInverse {
 public:
  // `system` has L, zeros above the diagonal; block (i, j) of the inverse, i > j, comes to lie at (j, i).
  __device__ explicit BlockInverse(float* system) : s(system) {}

  __device__ void Run() {
    if (warp < 4) InvertDiagonal();
    __syncthreads();
    // Blocks below the warp's on the diagonal, from above: X_i = -D_i sum_m L_im X_m.
    for (int i = warp + 1; i < 4; ++i) {
      float sums[2][4] = {};
      for (int m = warp; m < i; ++m) Multiply(sums, At(i, m), m == warp ? At(warp, warp) : At(warp, m));
      float* const place = At(warp, i);
      Store(sums, place, 1);
      float block[2][4] = {};
      Multiply(block, At(i, i), place);
      __syncwarp();
      Store(block, place, -1);
    }
    __syncthreads();
  }
  // (1 + L)^-1 diag(rate), except blocks above the diagonal, which are not read. kCount: threads.
  template <int kCount>
  __device__ __forceinline__ void Store(const float* rate, __nv_bfloat16* to) const {
    for (int i = threadIdx.x; i < 64 * 64 / 8; i += kCount) {
      const int row = i / 8, column = i % 8 * 8;
      if (column / 16 > row / 16) continue;
      const float* const from = Row(row, column);
      float x[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = from[j] * rate[column + j];
      StoreWire8(WireType::kBF16, to, row * 64 + column, x);
    }
  }
  // Of the inverse, on or below the block diagonal.
  __device__ __forceinline__ const float* Row(int row, int column) const {
    const int i = row / 16, j = column / 16;
    return At(j, i) + row % 16 * kSystem + column % 16;
  }

 private:
  __device__ __forceinline__ float* At(int i, int j) const { return s + 16 * i * kSystem + 16 * j; }

  // A lane a column.
  __device__ __forceinline__ void InvertDiagonal() {
    float* const block = At(warp, warp);
    const int column = lane % 16;
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float sum[4] = {0, 0, 0, 0};
#pragma unroll
      for (int m = 0; m < i; m += 4) {
        const float4 row = *reinterpret_cast<const float4*>(block + i * kSystem + m);
        sum[0] += row.x * x[m];
        if (m + 1 < i) sum[1] += row.y * x[m + 1];
        if (m + 2 < i) sum[2] += row.z * x[m + 2];
        if (m + 3 < i) sum[3] += row.w * x[m + 3];
      }
      x[i] = (i == column ? 1.0f : 0.0f) - ((sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
    __syncwarp();
    if (lane < 16) {
#pragma unroll
      for (int i = 0; i < 16; ++i) block[i * kSystem + column] = x[i];
    }
  }

  __device__ __forceinline__ static uint32_t Round(float x) {
    uint32_t y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
  }
  // sums += a b, both 16 x 16; sums[n] has columns 8 n.
  __device__ __forceinline__ void Multiply(float (&sums)[2][4], const float* a, const float* b) const {
    const int group = lane / 4, quarter = lane % 4;
#pragma unroll
    for (int k = 0; k < 16; k += 8) {
      uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = Round(a[(group + i % 2 * 8) * kSystem + k + quarter + i / 2 * 4]);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const uint32_t y0 = Round(b[(k + quarter) * kSystem + 8 * n + group]);
        const uint32_t y1 = Round(b[(k + quarter + 4) * kSystem + 8 * n + group]);
        asm volatile(
            "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(sums[n][0]), "+f"(sums[n][1]), "+f"(sums[n][2]), "+f"(sums[n][3])
            : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y0), "r"(y1));
      }
    }
  }
  __device__ __forceinline__ void Store(const float (&sums)[2][4], float* to, float factor) const {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        to[(lane / 4 + i / 2 * 8) * kSystem + 8 * n + lane % 4 * 2 + i % 2] = factor * sums[n][i];
    __syncwarp();
  }

  float* const s;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
};

}  // namespace dovetail::kernels::cuda
