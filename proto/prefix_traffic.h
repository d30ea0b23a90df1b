#pragma once
#include <cstdint>

#include "base/ids.h"
#include "proto/step_layout.h"
#include "proto/step_plan.h"

// What prompts' steps move and compute so that their tokens see earlier ones. Both the code that measures a step and
// the code that predicts one count with these.
// Threads: plain values and pure functions.

namespace dovetail::proto {

// Of the tokens of a rank, those whose K and V a later rank needs in an op with this window (0: none), because its
// first token sees them or one of their segment.
//   Units:  tokens; `begin` is where the later rank begins, at or after of_rank.end
//   Result: empty (begin == end) if it needs none
TokenRange RowsForLaterRank(const TokenRange& of_rank, Position begin, int window);

// `traffic` and `more` together.
PrefixTraffic Sum(const PrefixTraffic& traffic, const PrefixTraffic& more);
int64_t BytesOf(const PrefixTraffic& traffic);       // of all kinds
int64_t PlaneBytesOf(const PrefixTraffic& traffic);  // between compute and attention workers
int64_t RankBytesOf(const PrefixTraffic& traffic);   // between compute workers

// Of one op. Entries that are attended on attention workers from their beginning on count nothing.
PrefixTraffic TrafficOf(const StepLayout& layout, const SoftmaxSpec& spec);

// How many tokens t in [begin, end) the rows at positions [ctx_len, ctx_len + q_len) see, all rows together: t <= p,
// and p - t < window if window > 0.
int64_t SeenTokens(Position ctx_len, int64_t q_len, int window, Position begin, Position end);

// Floating-point operations of softmax attention for so many (row, token) pairs: a multiplication and an addition for
// each of key_dim and value_dim, for each of `query_heads`.
double AttentionFlops(int64_t pairs, int query_heads, const SoftmaxSpec& spec);

}  // namespace dovetail::proto
