#include "proto/step_layout.h"

namespace dovetail::proto {

void StepLayout::Add(int entry, int shard, const HeadRange& heads, const TokenRange& tokens, Position ctx_len,
                     int q_len, const SoftmaxSpec& spec, Position attend_end, Position gather_begin) {
  ShardStep item;
  item.entry = entry;
  item.shard = shard;
  item.kv_heads = heads;
  item.tokens = tokens;
  item.ctx_len = ctx_len;
  item.q_len = q_len;
  item.attend_end = attend_end;
  item.rows = RowsOf(tokens, spec.window, ctx_len, q_len, attend_end);
  item.query_heads = heads.size() * spec.group_size();
  Position visible = std::max(gather_begin, tokens.begin);
  if (spec.window > 0) visible = std::max(visible, (ctx_len - spec.window + 1) / kSegmentTokens * kSegmentTokens);
  item.gather_first = visible;
  item.gather_count = std::max<Position>(0, std::min(tokens.end, ctx_len) - visible);
  if (item.rows.q_count > 0 || item.rows.kv_count > 0 || item.gather_count > 0) items.push_back(item);
}

void StepLayout::Finish(const SoftmaxSpec& spec) {
  const int64_t element = SizeOf(spec.kv);
  query_bytes = key_value_bytes = partial_bytes = gather_bytes = 0;
  for (ShardStep& item : items) {
    item.query_offset = query_bytes;
    query_bytes += element * item.rows.q_count * item.query_heads * spec.key_dim;
    item.key_offset = key_value_bytes;
    key_value_bytes += element * item.rows.kv_count * item.kv_heads.size() * spec.key_dim;
  }
  for (ShardStep& item : items) {
    item.value_offset = key_value_bytes;
    key_value_bytes += element * item.rows.kv_count * item.kv_heads.size() * spec.value_dim;
    if (item.finished()) {
      item.partial_offset = partial_bytes;
      partial_bytes += element * item.rows.q_count * item.query_heads * spec.value_dim;
      continue;
    }
    partial_bytes = (partial_bytes + 3) / 4 * 4;
    item.partial_offset = partial_bytes;
    item.nodes = 0;
    for (int row = 0; row < item.rows.q_count; ++row) {
      const Position position = item.ctx_len + item.rows.q_first + row;
      item.nodes += CountSubtrees(
          VisibleSegments(position, spec.window, item.tokens.begin, std::min(item.tokens.end, item.attend_end)));
    }
    partial_bytes += int64_t{4} * item.nodes * item.query_heads * (spec.value_dim + 2);
  }
  const int64_t partials_end = partial_bytes;
  for (ShardStep& item : items) {
    if (item.gather_count == 0) continue;
    partial_bytes = (partial_bytes + 3) / 4 * 4;
    const int64_t rows = element * item.gather_count * item.kv_heads.size();
    item.gather_key_offset = partial_bytes;
    item.gather_value_offset = item.gather_key_offset + rows * spec.key_dim;
    partial_bytes = item.gather_value_offset + rows * spec.value_dim;
  }
  gather_bytes = partial_bytes - partials_end;
  if (spec.gates == 0) return;
  key_value_bytes = (key_value_bytes + 3) / 4 * 4;
  for (ShardStep& item : items) {
    item.gate_offset = key_value_bytes;
    key_value_bytes += int64_t{4} * item.rows.kv_count * item.kv_heads.size() * spec.gates;
  }
}

}  // namespace dovetail::proto
