#pragma once
#include "kernels/cuda/attention_args.h"
#include "kernels/cuda/primitives.cuh"
#include "kernels/cuda/wire.cuh"

// Where a finished row of attention goes: o / l in the wire type, or the first of the row's subtrees with all of (o, m, l) and
// nothing in the others, which merges to the same.

namespace dovetail::kernels::cuda {

struct RowResult {
  int64_t at = 0;          // of the row's o, in elements
  int64_t node_step = 0;   // elements from subtree to subtree; partial outputs only
  int64_t ml_at = 0;       // of the first subtree
  int64_t ml_step = 0;
  int nodes = -1;          // -1: o
  float factor = 0;        // times which o is stored
  float m = 0, l = 0;

  __device__ __forceinline__ void StorePair(const AttentionLaunch& p, int dim, float x, float y) const {
    if (nodes < 0) {
      StoreWirePair(p.o_type, p.o, at + dim, x * factor, y * factor);
    } else if (nodes > 0) {
      *reinterpret_cast<float2*>(p.partial_o + at + dim) = make_float2(x * factor, y * factor);
    }
  }

  // (m, l) of the first subtree, and the other subtrees. c: 0..3, the thread's place among the four of a row.
  __device__ __forceinline__ void StoreRest(const AttentionLaunch& p, const DeviceAttentionItem& item, int c) const {
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
__device__ __forceinline__ RowResult ResultOf(const AttentionLaunch& p, const DeviceAttentionItem& item, int head, int row, float m2,
                                              float l) {
  constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
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

}  // namespace dovetail::kernels::cuda
