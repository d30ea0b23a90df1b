#pragma once
#include <algorithm>
#include <cstdint>
#include <variant>
#include <vector>

#include "base/dtype.h"
#include "base/ids.h"
#include "base/segment_tree.h"
#include "base/status.h"

// What an attention worker is told about a model: one small table, sent at join. It loads no weights and reads no
// config.
// Threads: plain values and pure functions.

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
  float scale = 0;          // multiplies q.k
  int window = 0;           // a row at position p sees t with p - t < window; 0: all t <= p
  DType kv = DType::kBF16;  // of stored K and V, and of q, k, v and o on the wire

  // Of a linear state seen as attention (AttentionTable::softmax), else as they are here.
  int gates = 0;            // f32 numbers that a token brings for each head in addition to k and v
  int blocks_per_head = 1;  // KvBlocks of one head and op for 64 tokens
  int64_t state_bytes = 0;  // on the wire, of a head's state at a multiple of 64 tokens (proto/state_blocks.h)
  int64_t token_bytes = 0;  // on the wire, of one of the tokens since then

  bool operator==(const SoftmaxSpec&) const = default;
  int group_size() const { return query_heads / kv_heads; }
  bool linear() const { return state_bytes > 0; }
};

// A linear-attention state (kernels/linear_state.h), one S [key_dim, value_dim] a head. What crosses is q, k and v of
// each head in the wire type and its gates in f32: the logarithms of its decays, then its rate. The attention worker
// convolves q, k and v over the last conv_width tokens, normalises q and k, scales q, and updates the state.
struct LinearSpec {
  static constexpr int kMaxConvWidth = 8;

  int heads = 0;
  int key_dim = 0;
  int value_dim = 0;
  bool delta = false;         // the delta rule: k (rate (v - S^T w k))^T is added; else k (rate v)^T
  bool vector_decay = false;  // one decay a key channel, else one a head
  bool token_decay = false;   // decays come with each token; else they are LinearConstants::log_decay
  bool token_rate = false;    // a rate comes with each token; else it is 1
  bool normalise = false;     // q and k to unit length (eps 1e-6 in the sum)
  float query_scale = 1;      // of q, after that
  int conv_width = 0;         // 0: no convolution
  bool conv_linear = false;   // what it gives is taken as it is, not through silu
  DType wire = DType::kBF16;  // of q, k, v and o
  DType state = DType::kF32;
  int blocks_per_head = 1;  // KvBlocks that hold the state after a block of 64 tokens, and those tokens

  bool operator==(const LinearSpec&) const = default;
  int decays() const { return !token_decay ? 0 : vector_decay ? key_dim : 1; }
  int gates() const { return decays() + (token_rate ? 1 : 0); }
  int channels() const { return 2 * key_dim + value_dim; }                  // of a head: q, k, v
  int conv_history() const { return conv_width > 0 ? conv_width - 1 : 0; }  // tokens that the next one's inputs need
  // SoftmaxSpec::state_bytes: S [key_dim][value_dim], then the inputs of the last conv_history() tokens.
  int64_t state_bytes() const;
  // SoftmaxSpec::token_bytes: its key, value and decay in f32, then its inputs if there is a convolution.
  int64_t token_bytes() const;
};

// What is fixed for one op, in the model's order of heads; of softmax attention all but `sinks` are empty.
struct LinearConstants {
  std::vector<float> log_decay;  // [heads]; empty with token_decay
  std::vector<float> conv;       // [conv_width][heads][channels]; the last tap meets the token itself
  std::vector<float> conv_bias;  // [heads][channels] or empty
  std::vector<float> skip;       // [heads] or, always without a convolution, empty: o += skip * convolved v
  std::vector<float> sinks;      // [query_heads] of softmax attention, or empty: a logit that has no value

  bool operator==(const LinearConstants&) const = default;
};

using AttentionSpec = std::variant<SoftmaxSpec, LinearSpec>;

// The attention ops of a model in layer order, each in the layer group of ops with an equal spec.
// Threads: immutable after Build().
struct AttentionTable {
  std::vector<AttentionSpec> groups;       // by LayerGroup
  std::vector<LayerGroup> op_group;        // by attention op
  std::vector<int> op_index_in_group;      // by attention op: its place among the ops of its group
  std::vector<int> ops_in_group;           // by LayerGroup
  std::vector<LinearConstants> constants;  // by attention op; empty if no op has any

  // Groups equal specs in order of first appearance. `constants` are by op, or empty. kInvalidArgument names the op and
  // the limit.
  static absl::StatusOr<AttentionTable> Build(const std::vector<AttentionSpec>& ops,
                                              std::vector<LinearConstants> constants = {});

  int op_count() const { return static_cast<int>(op_group.size()); }
  int group_count() const { return static_cast<int>(groups.size()); }
  // Null for a group of softmax attention.
  const LinearSpec* linear(LayerGroup group) const { return std::get_if<LinearSpec>(&groups[group.value()]); }
  bool has_linear() const {
    return std::any_of(groups.begin(), groups.end(),
                       [](const AttentionSpec& spec) { return std::holds_alternative<LinearSpec>(spec); });
  }
  // [query_heads] or null: of softmax attention, an extra logit of each head that joins its denominator once.
  const float* sinks(int op) const {
    return constants.empty() || constants[op].sinks.empty() ? nullptr : constants[op].sinks.data();
  }
  // The group's heads, dimensions, wire type and window. A linear group is described as the softmax attention that
  // needs the same blocks: at position p a state is that before p's block of 64 and the tokens since, so its window is
  // 65 tokens. It has no token shards.
  const SoftmaxSpec& softmax(LayerGroup group) const { return views[group.value()]; }

  std::vector<SoftmaxSpec> views;  // by LayerGroup, made by Build
};

}  // namespace dovetail::proto
