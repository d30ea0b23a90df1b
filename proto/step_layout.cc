#include "proto/step_layout.h"

namespace dovetail::proto {

void StepLayout::Add(int entry, int shard, const HeadRange& heads, const TokenRange& tokens, Position ctx_len,
                     int q_len, const SoftmaxSpec& spec, const EntryExchange& exchange) {
  const EntryExchange own = spec.linear() && !exchange.moved ? EntryExchange{.states = exchange.states} : exchange;
  ShardStep item;
  item.entry = entry;
  item.shard = shard;
  item.kv_heads = heads;
  item.tokens = tokens;
  item.ctx_len = ctx_len;
  item.q_len = q_len;
  item.attend_end = own.attend_end;
  item.query_heads = heads.size() * spec.group_size();
  if (spec.linear() && own.states != StateExchange::kTokens) {
    item.states = own.states;
    with_states = true;
    items.push_back(item);
    return;
  }
  item.rows = RowsOf(tokens, spec.window, ctx_len, q_len, own.attend_end);
  Position visible = std::max(own.gather_begin, tokens.begin);
  if (spec.window > 0) visible = std::max(visible, (ctx_len - spec.window + 1) / kSegmentTokens * kSegmentTokens);
  item.gather_first = visible;
  item.gather_count = std::max<Position>(0, std::min({tokens.end, ctx_len, own.gather_end}) - visible);
  if (item.rows.q_count > 0 || item.rows.kv_count > 0 || item.gather_count > 0) items.push_back(item);
}

// The queries of other items go with k and v, and states follow all else.
void StepLayout::FinishStates(const SoftmaxSpec& spec) {
  const int64_t queries = query_bytes;
  for (ShardStep& item : items) {
    item.key_offset += queries;
    item.value_offset += queries;
    item.gate_offset += queries;
  }
  key_value_bytes += queries;
  query_bytes = 0;
  for (ShardStep& item : items) {
    if (item.states == StateExchange::kTokens) continue;
    item.state_offset = key_value_bytes;
    key_value_bytes += item.kv_heads.size() * BytesOf(item.states_left(), spec);
    if (item.states != StateExchange::kFetch) continue;
    item.before_offset = before_bytes;
    before_bytes += item.kv_heads.size() * BytesOf(StatesBefore(item.ctx_len), spec);
  }
}

namespace {

int64_t RowBytes(const ShardStep& item, const SoftmaxSpec& spec) {
  return item.kv_heads.size() * (spec.key_dim + spec.value_dim) * static_cast<int64_t>(SizeOf(spec.kv));
}

// At least one, and whole segments if it is more than one of them.
int64_t TokensOfPiece(const ShardStep& item, const SoftmaxSpec& spec, int64_t piece_bytes) {
  const int64_t tokens = std::max<int64_t>(1, piece_bytes / RowBytes(item, spec));
  return tokens < kSegmentTokens ? tokens : tokens / kSegmentTokens * kSegmentTokens;
}

}  // namespace

void StepLayout::FinishGathers(const SoftmaxSpec& spec) {
  const int64_t element = SizeOf(spec.kv);
  gather_bytes = largest_piece = pieces = 0;
  int64_t end = partial_bytes;
  for (ShardStep& item : items) {
    if (item.gather_count == 0) continue;
    end = (end + 3) / 4 * 4;
    const int64_t rows = element * item.gather_count * item.kv_heads.size();
    item.gather_key_offset = end;
    item.gather_value_offset = item.gather_key_offset + rows * spec.key_dim;
    end = item.gather_value_offset + rows * spec.value_dim;
  }
  gather_bytes = end - partial_bytes;
  if (piece_bytes == 0 || gather_bytes <= piece_bytes) {
    partial_bytes = end;
    return;
  }
  for (const ShardStep& item : items) {
    if (item.gather_count == 0) continue;
    const int64_t tokens = TokensOfPiece(item, spec, piece_bytes);
    pieces += static_cast<int>((item.gather_count + tokens - 1) / tokens);
    largest_piece = std::max(largest_piece, std::min(tokens, item.gather_count) * RowBytes(item, spec));
  }
}

StepLayout::Piece StepLayout::PieceAt(int piece, const SoftmaxSpec& spec) const {
  for (const ShardStep& item : items) {
    if (item.gather_count == 0) continue;
    const int64_t tokens = TokensOfPiece(item, spec, piece_bytes);
    const int64_t of_item = (item.gather_count + tokens - 1) / tokens;
    if (piece >= of_item) {
      piece -= static_cast<int>(of_item);
      continue;
    }
    const Position begin = item.gather_first + piece * tokens;
    const Position end = std::min<Position>(begin + tokens, item.gather_first + item.gather_count);
    const int64_t keys = (end - begin) * item.kv_heads.size() * spec.key_dim * static_cast<int64_t>(SizeOf(spec.kv));
    return {&item, {begin, end}, keys, (end - begin) * RowBytes(item, spec)};
  }
  return {};
}

void StepLayout::Finish(const SoftmaxSpec& spec) {
  const int64_t element = SizeOf(spec.kv);
  query_bytes = key_value_bytes = partial_bytes = before_bytes = 0;
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
  FinishGathers(spec);
  // Gates are floats: with queries before them, those count.
  const int64_t before_gates = with_states ? query_bytes : 0;
  if (spec.gates > 0) {
    key_value_bytes = (before_gates + key_value_bytes + 3) / 4 * 4 - before_gates;
    for (ShardStep& item : items) {
      item.gate_offset = key_value_bytes;
      key_value_bytes += int64_t{4} * item.rows.kv_count * item.kv_heads.size() * spec.gates;
    }
  }
  if (with_states) FinishStates(spec);
}

}  // namespace dovetail::proto
