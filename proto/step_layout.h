#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/ids.h"
#include "proto/attention_spec.h"
#include "proto/placement.h"
#include "proto/state_blocks.h"

namespace dovetail::proto {

// One shard's part of a step: which of an entry's new tokens it answers and appends, and where their bytes lie in the
// payloads.
struct ShardStep {
  int entry = 0;  // index among the step's entries
  int shard = 0;  // index among the sequence's shards on this worker, in the order of OpenSequence
  HeadRange kv_heads;
  TokenRange tokens;
  Position ctx_len = 0;
  int q_len = 0;
  Position attend_end = kOpenEnd;  // queries attend tokens before it here
  ShardRows rows;
  int query_heads = 0;         // of the shard: kv_heads.size() x group size
  int64_t query_offset = 0;    // bytes into kQuery: [rows.q_count, query_heads, key_dim]
  int64_t key_offset = 0;      // bytes into kKeyValue: [rows.kv_count, kv_heads, key_dim]
  int64_t value_offset = 0;    // bytes into kKeyValue: [rows.kv_count, kv_heads, value_dim]
  int64_t gate_offset = 0;     // bytes into kKeyValue: [rows.kv_count, kv_heads, gates], f32
  int64_t partial_offset = 0;  // bytes into kPartial
  Position gather_first = 0;   // tokens before the step whose K and V come with the answer
  int64_t gather_count = 0;
  int64_t gather_key_offset = 0;    // bytes into kPartial: [gather_count, kv_heads, key_dim]
  int64_t gather_value_offset = 0;  // bytes into kPartial: [gather_count, kv_heads, value_dim]
  int64_t nodes = 0;                // subtrees over all rows, unless finished()
  // Of a linear state that is computed on the compute worker, which has no rows here:
  StateExchange states = StateExchange::kTokens;
  int64_t state_offset = 0;   // bytes into kKeyValue: [head] of StatesLeft(ctx_len, ctx_len + q_len)
  int64_t before_offset = 0;  // bytes into the answer to kQuery: [head] of StatesBefore(ctx_len), with kFetch

  // All that its rows see is attended here: the answer is o itself.
  bool finished() const { return tokens.whole() && attend_end == kOpenEnd; }
  Position attended_end() const { return std::min({tokens.end, attend_end, ctx_len + q_len}); }
  StateBlocks states_left() const { return StatesLeft(ctx_len, ctx_len + q_len); }
};

// Where an entry's tokens are attended, as StepBeginEntry says.
struct EntryExchange {
  Position attend_end = kOpenEnd;
  Position gather_begin = kOpenEnd;
  Position gather_end = kOpenEnd;
  StateExchange states = StateExchange::kTokens;
  bool moved = false;  // a part of a move, of linear layers too; the rest speaks of softmax attention and of states
};

// How the tensors of one layer group and one attention worker lie in the payloads of a step. Compute and attention
// worker both build it from (placement, ctx_len, q_len), so nothing about it travels.
//   kQuery:    the items' query rows one after the other, wire dtype (SoftmaxSpec::kv)
//   kKeyValue: the items' key rows one after the other, then the items' value rows, wire dtype; of a linear state then,
//              from a multiple of 4 bytes on, the items' gates, f32
//   kPartial:  a finished() item: o [q_count, query_heads, value_dim], wire dtype.
//              Any other, f32: o [nodes, query_heads, value_dim], then m and l [nodes, query_heads, 2],
//              where the nodes are the maximal aligned subtrees that each row sees, row by row (base/segment_tree.h).
//              Begins at a multiple of 4 bytes.
//              Then, from a multiple of 4 bytes on, of each item with gather_count > 0 the key rows of those tokens and
//              their value rows, wire dtype. With a window, only of tokens that the first new one sees. Where these
//              rows have more than piece_bytes, they come in `pieces` before the kPartial instead (gather_frames.h).
// An op for which states cross (an item has `states`) has two answers. kQuery is empty, comes only where a state is
// asked for, and is answered by the states before the step at once; query rows of other items lie in kKeyValue, before
// all else, and what items leave behind all else. kKeyValue is answered by kPartial as described.
// Threads: thread-compatible; Clear keeps the capacity.
struct StepLayout {
  std::vector<ShardStep> items;
  int64_t query_bytes = 0;
  int64_t key_value_bytes = 0;
  int64_t partial_bytes = 0;
  int64_t gather_bytes = 0;  // of those, or in pieces
  // The most bytes of gathered rows that cross at once; set before Finish(). 0: all come with the answer.
  int64_t piece_bytes = 0;
  int pieces = 0;             // 0: gathered rows come with the answer
  int64_t largest_piece = 0;  // bytes
  bool with_states = false;   // an item has `states`
  int64_t before_bytes = 0;   // of the answer to kQuery, with_states

  // A kQuery is sent, and its answer waited for: attention, rows or states are asked for.
  bool asks() const { return query_bytes > 0 || gather_bytes > 0 || before_bytes > 0; }

  void Clear() {
    items.clear();
    query_bytes = key_value_bytes = partial_bytes = gather_bytes = before_bytes = piece_bytes = largest_piece = 0;
    pieces = 0;
    with_states = false;
  }

  // Appends an item; entries in order, and an entry's shards in order. Offsets become valid with Finish().
  void Add(int entry, int shard, const HeadRange& heads, const TokenRange& tokens, Position ctx_len, int q_len,
           const SoftmaxSpec& spec, const EntryExchange& exchange = {});
  void Finish(const SoftmaxSpec& spec);

  // A piece of gathered rows: keys [tokens, kv_heads, key_dim], then values [tokens, kv_heads, value_dim], wire dtype.
  struct Piece {
    const ShardStep* item = nullptr;  // whose they are; valid as long as `items`
    TokenRange tokens;
    int64_t value_offset = 0;  // bytes into the payload
    int64_t bytes = 0;
  };
  // Requires: 0 <= piece < pieces.
  Piece PieceAt(int piece, const SoftmaxSpec& spec) const;

 private:
  void FinishGathers(const SoftmaxSpec& spec);
  void FinishStates(const SoftmaxSpec& spec);
};

}  // namespace dovetail::proto
