#pragma once
#include <cstdint>
#include <variant>
#include <vector>

#include "base/dtype.h"
#include "base/ids.h"
#include "base/segment_tree.h"
#include "base/status.h"

// What an attention worker is told about a model: one small table, sent at join. It loads no weights and reads no
// config.

namespace dovetail::proto {

// Limits a table must keep; Validate() names the one that is broken.
inline constexpr int kMaxAttentionOps = 1024;
inline constexpr int kMaxLayerGroups = 16;
inline constexpr int kMaxHeads = 1024;
inline constexpr int kMaxHeadDim = 256;

// Causal softmax attention with grouped query heads: query head h reads KV head h / (query_heads / kv_heads).
struct SoftmaxSpec {
  int query_heads = 0;
  int kv_heads = 0;
  int key_dim = 0;
  int value_dim = 0;
  float scale = 0;  // multiplies q.k
  int window = 0;   // a row at position p sees t with p - t < window; 0: all t <= p
  DType kv = DType::kBF16;  // of stored K and V, and of q, k, v and o on the wire

  bool operator==(const SoftmaxSpec&) const = default;
  int group_size() const { return query_heads / kv_heads; }
};

// A linear-state family is one more alternative here.
using AttentionSpec = std::variant<SoftmaxSpec>;

// The attention ops of a model in layer order, each in the layer group of ops with an equal spec. Immutable after
// Build().
struct AttentionTable {
  std::vector<AttentionSpec> groups;     // by LayerGroup
  std::vector<LayerGroup> op_group;      // by attention op
  std::vector<int> op_index_in_group;    // by attention op: its place among the ops of its group
  std::vector<int> ops_in_group;         // by LayerGroup

  // Groups equal specs in order of first appearance. kInvalidArgument names the op and the limit.
  static absl::StatusOr<AttentionTable> Build(const std::vector<AttentionSpec>& ops);

  int op_count() const { return static_cast<int>(op_group.size()); }
  int group_count() const { return static_cast<int>(groups.size()); }
  const SoftmaxSpec& softmax(LayerGroup group) const { return std::get<SoftmaxSpec>(groups[group.value()]); }
};

}  // namespace dovetail::proto
