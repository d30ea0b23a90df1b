#pragma once
#include "kernels/cuda/attention/attention_args.h"
#include "kernels/cuda/primitives/base2.h"
#include "kernels/cuda/primitives/primitives.cuh"
#include "kernels/cuda/primitives/wire.cuh"

// Where a finished row of attention goes: o / l in the wire type, or the first of the row's subtrees with all of (o,
// m, l) and nothing in the others, which merges to the same.

namespace dovetail::kernels::cuda {

struct RowResult {
  int64_t at = 0;         // of the row's o, in elements
  int64_t node_step = 0;  // elements from subtree to subtree; partial outputs only
  int64_t ml_at = 0;      // of the first subtree
  int64_t ml_step = 0;
  int nodes = -1;    // -1: o
  float factor = 0;  // times which o is stored
  float m = 0, l = 0;

  __device__ __forceinline__ void StorePair(const AttentionCall& p, int dim, float x, float y) const {
    if (nodes < 0) {
      StoreWirePair(p.o_type, p.o, at + dim, x * factor, y * factor);
    } else if (nodes > 0) {
      *reinterpret_cast<float2*>(p.partial_o + at + dim) = make_float2(x * factor, y * factor);
    }
  }

  // (m, l) of the first subtree, and the other subtrees. c: 0..3, the thread's place among the four of a row.
  __device__ __forceinline__ void StoreRest(const AttentionCall& p, const DeviceAttentionItem& item, int c) const {
    for (int node = 0; node < nodes; ++node) {
      if (node > 0) {
        for (int dim = 2 * c; dim < p.layout.value_dim; dim += 8) {
          *reinterpret_cast<float2*>(p.partial_o + at + node * node_step + dim) = make_float2(0, 0);
        }
      }
      if (c == 0) {
        *reinterpret_cast<float2*>(p.partial_ml + ml_at + node * ml_step) =
            node == 0 ? make_float2(m, l) : make_float2(-INFINITY, 0);
      }
    }
  }
};

// m2: the maximum times log2(e).
__device__ __forceinline__ RowResult ResultOf(const AttentionCall& p, const DeviceAttentionItem& item, int head,
                                              int row, float m2, float l) {
  const int q_row = row / p.group, q_head = head * p.group + row % p.group, heads = item.kv_heads * p.group;
  RowResult result;
  if (item.first_node != nullptr) {
    const int first = item.first_node[q_row];
    result.nodes = item.first_node[q_row + 1] - first;
    result.at = (static_cast<int64_t>(first) * heads + q_head) * p.layout.value_dim;
    result.node_step = static_cast<int64_t>(heads) * p.layout.value_dim;
    result.ml_at = (static_cast<int64_t>(first) * heads + q_head) * 2;
    result.ml_step = 2 * heads;
    result.factor = p.value_scale;
    result.m = m2 * kLn2;
    result.l = l;
    return result;
  }
  result.at = item.o_offset + q_row * item.o_row_step + static_cast<int64_t>(q_head) * p.layout.value_dim;
  float mine = 1;
  if (item.sinks != nullptr) {
    const float sink = item.sinks[q_head] * kLog2E, top = fmaxf(m2, sink);
    mine = Exp2(m2 - top);
    l = l * mine + Exp2(sink - top);
  }
  result.factor = l > 0 ? mine * p.value_scale / l : 0;
  return result;
}

// The pieces of some rows that thread blocks stored one after the other: the first, and then `count - 1` more, `step`
// rows apart.
struct PieceRows {
  static constexpr int kRows = 4;  // that are joined together, so that many loads are under way

  const float* first_o;
  const float* first_ml;
  const float* rest_o;
  const float* rest_ml;
  int64_t step;  // rows
  int dims;
  int count;

  __device__ __forceinline__ const float* O(int piece, int row) const {
    return (piece == 0 ? first_o : rest_o + (piece - 1) * step * dims) + row * dims;
  }
  __device__ __forceinline__ float2 Ml(int piece, int row) const {
    return __ldcg(
        reinterpret_cast<const float2*>((piece == 0 ? first_ml : rest_ml + (piece - 1) * step * 2) + row * 2));
  }

  // The rows' maxima over all pieces, for which pieces are taken in turn by the lanes; 0 where nothing was seen.
  __device__ __forceinline__ void FindTops(const int (&at)[kRows], int lane, float (&top)[kRows]) const {
    for (int piece = lane; piece < count; piece += 32) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) top[r] = fmaxf(top[r], Ml(piece, at[r]).x);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      for (int hop = 16; hop > 0; hop /= 2) top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], hop));
      if (top[r] == -INFINITY) top[r] = 0;  // nothing seen: every weight is 0
    }
  }

  // (o, l) += pieces [begin, begin + kBatch), in order; those beyond the last weigh nothing.
  template <int kRuns, int kBatch>
  __device__ __forceinline__ void AddPieces(int begin, const int (&at)[kRows], const int (&dim)[kRuns],
                                            const float (&top)[kRows], float (&l)[kRows],
                                            float4 (&o)[kRows][kRuns]) const {
    float2 ml[kBatch][kRows];
    float4 x[kBatch][kRows][kRuns];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int piece = min(begin + b, count - 1);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        ml[b][r] = Ml(piece, at[r]);
#pragma unroll
        for (int v = 0; v < kRuns; ++v) x[b][r][v] = __ldcg(reinterpret_cast<const float4*>(O(piece, at[r]) + dim[v]));
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float weight = begin + b < count ? Exp2(ml[b][r].x - top[r]) : 0.0f;
        l[r] += weight * ml[b][r].y;
#pragma unroll
        for (int v = 0; v < kRuns; ++v) {
          o[r][v].x += weight * x[b][r][v].x, o[r][v].y += weight * x[b][r][v].y;
          o[r][v].z += weight * x[b][r][v].z, o[r][v].w += weight * x[b][r][v].w;
        }
      }
    }
  }

  // One warp: writes rows [row, row + rows) of the tile. Lanes hold runs of four dimensions, 128 apart.
  template <int kRuns>
  __device__ __forceinline__ void Join(const AttentionCall& p, const DeviceAttentionItem& item, int head, int row0,
                                       int row, int rows, int lane) const {
    float top[kRows], l[kRows];
    float4 o[kRows][kRuns];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      top[r] = -INFINITY;
      l[r] = 0;
      for (int v = 0; v < kRuns; ++v) o[r][v] = make_float4(0, 0, 0, 0);
    }
    // Rows and dimensions beyond the last are read again rather than skipped: without branches the loads of several
    // pieces overlap.
    int at[kRows], dim[kRuns];
#pragma unroll
    for (int r = 0; r < kRows; ++r) at[r] = row + min(r, rows - 1);
#pragma unroll
    for (int v = 0; v < kRuns; ++v) dim[v] = min(4 * lane + 128 * v, dims - 4);
    FindTops(at, lane, top);
    constexpr int kBatch = kRuns == 1 ? 4 : 2;
    for (int begin = 0; begin < count; begin += kBatch) AddPieces<kRuns, kBatch>(begin, at, dim, top, l, o);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows) continue;
      const RowResult result = ResultOf(p, item, head, row0 + row + r, l[r] > 0 ? top[r] : -INFINITY, l[r]);
#pragma unroll
      for (int v = 0; v < kRuns; ++v) {
        if (4 * lane + 128 * v >= dims) continue;
        result.StorePair(p, dim[v], o[r][v].x, o[r][v].y);
        result.StorePair(p, dim[v] + 2, o[r][v].z, o[r][v].w);
      }
      if (lane < 4) result.StoreRest(p, item, lane);
    }
  }
};

}  // namespace dovetail::kernels::cuda
