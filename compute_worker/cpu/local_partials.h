#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "compute_worker/step_wire.h"
#include "kernels/paged_attention.h"

namespace dovetail::compute {

// Memory of the partials that a step's own attention, or other ranks', give for its rows (StepWire::LocalPartial): o
// [nodes, query heads, value_dim], then m and l [nodes, query heads, 2], one local after the other. Pure but for what
// they write; allocates nothing.
//   Units:   floats
//   Threads: thread-compatible

// The subtrees of a local, over all its rows.
inline int64_t NodesOf(const StepWire::LocalPartial& local, const proto::SoftmaxSpec& spec) {
  return kernels::PartialNodes(local.ctx_len, local.q_len, spec.window, local.begin, local.end);
}

// Of all that are not written to the rows themselves.
inline int64_t PartialFloats(std::span<const StepWire::LocalPartial> locals, const proto::SoftmaxSpec& spec) {
  int64_t floats = 0;
  for (const StepWire::LocalPartial& local : locals)
    if (!local.whole())
      floats += NodesOf(local, spec) * local.kv_heads.size() * spec.group_size() * (spec.value_dim + 2);
  return floats;
}

// Gives each of them its place from `memory` on, the same in every call, and calls visit(local, o, ml).
template <typename Visit>
void PlaceLocals(std::span<StepWire::LocalPartial> locals, const proto::SoftmaxSpec& spec, float* memory,
                 Visit&& visit) {
  for (StepWire::LocalPartial& local : locals) {
    if (local.whole()) {
      visit(local, nullptr, nullptr);
      continue;
    }
    const int64_t rows = NodesOf(local, spec) * local.kv_heads.size() * spec.group_size();
    float* const ml = memory + rows * spec.value_dim;
    local.o = memory;
    local.ml = ml;
    visit(local, memory, ml);
    memory = ml + rows * 2;
  }
}

// What another rank gave for some KV heads (kRankOutputs in proto/rank_frames.h), as far as they are the local's.
inline void CopyPartials(const StepWire::LocalPartial& local, const proto::SoftmaxSpec& spec,
                         const proto::HeadRange& heads, const std::byte* outputs, float* o, float* ml) {
  const int first = std::max(heads.begin, local.kv_heads.begin), end = std::min(heads.end, local.kv_heads.end);
  if (first >= end) return;
  const int64_t nodes = NodesOf(local, spec), per_head = spec.group_size();
  const int64_t local_heads = local.kv_heads.size() * per_head, from_heads = heads.size() * per_head;
  const int64_t count = (end - first) * per_head;
  const int64_t to = (first - local.kv_heads.begin) * per_head, from = (first - heads.begin) * per_head;
  const auto* from_o = reinterpret_cast<const float*>(outputs);
  const float* from_ml = from_o + nodes * from_heads * spec.value_dim;
  for (int64_t node = 0; node < nodes; ++node) {
    std::copy_n(from_o + (node * from_heads + from) * spec.value_dim, count * spec.value_dim,
                o + (node * local_heads + to) * spec.value_dim);
    std::copy_n(from_ml + (node * from_heads + from) * 2, count * 2, ml + (node * local_heads + to) * 2);
  }
}

}  // namespace dovetail::compute
