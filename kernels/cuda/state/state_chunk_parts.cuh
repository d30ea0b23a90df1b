#pragma once
#include "kernels/cuda/primitives/primitives.cuh"
#include "kernels/cuda/state/state_rows.cuh"

// What the two kernels of the chunked form share: the workspace of a chunk, tensor core operands. Device code only.

namespace dovetail::kernels::cuda {

template <int kKeys>
struct ChunkSpace {
  float* factors;                        // [kStateFactors][64]: kFrom, kRecall, kTo
  float* total;                          // [kKeys]
  __nv_bfloat16 *weights, *inverse;      // [64][64]; the latter of a delta rule
  __nv_bfloat16 *query, *keys, *recall;  // [64][kKeys]; not direct; recall: vector decays with a delta rule
  __nv_bfloat16* values;                 // [64][value width]; unless values are direct

  __device__ ChunkSpace(const StateLaunch& p, int unit, int chunk) {
    std::byte* const base =
        p.workspace +
        (static_cast<int64_t>(unit) * (p.chunk_end - p.chunk_begin) + chunk - p.chunk_begin) * StateChunkBytes(p);
    factors = reinterpret_cast<float*>(base);
    total = factors + kStateFactors * kStateTokens;
    weights = reinterpret_cast<__nv_bfloat16*>(total + kKeys);
    inverse = weights + kStateTokens * kStateTokens;
    query = inverse + (p.delta ? kStateTokens * kStateTokens : 0);
    keys = query + kStateTokens * kKeys;
    recall = keys + kStateTokens * kKeys;
    values = p.vector_decay && p.delta ? recall + kStateTokens * kKeys : recall;
  }
};
enum ChunkFactor { kFrom, kRecall, kTo };

// Copies 16 bytes to shared memory, or zeros.
__device__ __forceinline__ void CopyAsync(uint32_t to, const void* from, bool there = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

// The same from a payload, at any multiple of four.
__device__ __forceinline__ void CopyPayloadAsync(uint32_t to, const std::byte* from, bool there) {
  if (IsAligned(from)) return CopyAsync(to, from, there);
#pragma unroll
  for (int i = 0; i < 16; i += 4)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to + i), "l"(from + i), "r"(there ? 4 : 0)
                 : "memory");
}

__device__ __forceinline__ int ChunksOf(const StateItem& item) {
  const int64_t last = item.first_position + item.rows - 1;
  return static_cast<int>(last / kStateTokens - item.first_position / kStateTokens) + 1;
}

// Operand A, 16 x 16 from (row, column) of a row-major matrix in shared memory.
__device__ __forceinline__ void LoadA(uint32_t (&a)[4], uint32_t base, int stride, int row, int column) {
  const int lane = threadIdx.x % 32;
  LoadMatrices(a, base + ((row + lane % 16) * stride + column + lane / 16 * 8) * 2);
}
// Operands B of columns [n, n + 16), k from k on, stored [n][k]: b[0..1] and b[2..3] of 8 columns each.
__device__ __forceinline__ void LoadB(uint32_t (&b)[4], uint32_t base, int stride, int n, int k) {
  const int lane = threadIdx.x % 32;
  LoadMatrices(b, base + ((n + lane / 16 * 8 + lane % 8) * stride + k + lane / 8 % 2 * 8) * 2);
}

}  // namespace dovetail::kernels::cuda
