#include "scheduler/core/prefill_volume.h"

#include <algorithm>
#include <bit>

#include "base/dtype.h"
#include "base/segment_tree.h"
#include "proto/linear_switch.h"
#include "proto/pass_q.h"

namespace dovetail::scheduler {
namespace {

int64_t WireBytes(DType type) { return static_cast<int64_t>(SizeOf(type)); }

// f x value.
int64_t Others(int64_t value, const PromptShape& shape) { return (shape.ranks - 1) * value / shape.ranks; }

int64_t SummaryBytes(const proto::LinearSpec& spec) {
  const int64_t width = spec.delta ? spec.key_dim + spec.value_dim : spec.value_dim;
  return int64_t{4} * spec.heads * spec.key_dim * width;
}

}  // namespace

int64_t RingBytes(const proto::SoftmaxSpec& spec, const PromptShape& shape) {
  const int64_t row = int64_t{spec.kv_heads} * (spec.key_dim + spec.value_dim) * WireBytes(spec.kv);
  return Others((shape.new_tokens + shape.earlier_tokens) * row, shape);
}

int64_t SwitchBytes(const proto::SoftmaxSpec& spec, const PromptShape& shape) {
  const int64_t heads = spec.query_heads + std::max<int64_t>(spec.kv_heads, shape.ranks);
  const int64_t row = heads * (spec.key_dim + spec.value_dim) * WireBytes(spec.kv);
  return Others(shape.new_tokens * row, shape) / shape.ranks;
}

int64_t PassQBytes(const proto::SoftmaxSpec& spec, const PromptShape& shape) {
  std::vector<Position> cuts;
  const int64_t segments = (shape.new_tokens + kSegmentTokens - 1) / kSegmentTokens;
  for (int64_t rank = 0; rank < shape.ranks; ++rank) cuts.push_back(rank * segments / shape.ranks * kSegmentTokens);
  cuts.push_back(shape.new_tokens);
  int64_t most = 0;
  for (int rank = 0; rank < shape.ranks; ++rank) most = std::max(most, proto::PassQBytesTo(spec, cuts, rank));
  return most;
}

int64_t ChainBytes(const proto::LinearSpec& spec, const PromptShape& shape) {
  return shape.ranks < 2 ? 0 : spec.heads * spec.state_bytes();
}

int64_t StateGatherBytes(const proto::LinearSpec& spec, const PromptShape& shape) {
  return (shape.ranks - 1) * SummaryBytes(spec);
}

int64_t StateScanBytes(const proto::LinearSpec& spec, const PromptShape& shape) {
  return std::bit_width(static_cast<uint64_t>(shape.ranks - 1)) * SummaryBytes(spec);
}

int64_t LinearSwitchBytes(const proto::LinearSpec& spec, const PromptShape& shape) {
  if (shape.ranks < 2 || shape.ranks > spec.heads) return 0;
  proto::SoftmaxSpec view;  // as AttentionTable has it
  view.query_heads = view.kv_heads = spec.heads;
  view.key_dim = spec.key_dim;
  view.value_dim = spec.value_dim;
  view.kv = spec.wire;
  view.gates = spec.gates();
  view.state_bytes = spec.state_bytes();
  view.token_bytes = spec.token_bytes();
  proto::SwitchRank rank{.base = shape.earlier_tokens,
                         .end = shape.earlier_tokens + shape.new_tokens,
                         .tokens = {},
                         .rank = 0,
                         .ranks = static_cast<int>(shape.ranks)};
  const auto cut = [&](int64_t r) {
    if (r == 0 || r == shape.ranks) return r == 0 ? rank.base : rank.end;
    return (rank.base + r * shape.new_tokens / shape.ranks) / kSegmentTokens * kSegmentTokens;
  };
  int64_t most = 0;
  for (; rank.rank < rank.ranks; ++rank.rank) {
    rank.tokens = {cut(rank.rank), cut(rank.rank + 1)};
    most = std::max(most, proto::LinearSwitchBytesTo(view, rank));
  }
  return most;
}

int64_t TensorParallelBytes(int64_t hidden, int64_t element, const PromptShape& shape) {
  return 4 * Others(shape.new_tokens * hidden * element, shape);
}

}  // namespace dovetail::scheduler
