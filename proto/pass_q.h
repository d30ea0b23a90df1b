#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "base/ids.h"
#include "proto/attention_spec.h"
#include "proto/placement.h"
#include "proto/step_plan.h"

// What the ranks of a prefill group exchange with PrefixExchange::kPassQ. In each softmax op a rank sends its queries
// to the ranks before it that hold K and V which they see, those attend and give back partials, and the rank joins
// these with its own. Pure functions of values that every rank has, so both ends of a transfer compute the same.
//   Shapes:  `cuts` is where each rank of the group begins, and where the group ends: P + 1 positions
//   Units:   tokens, bytes on the wire
//   Errors:  none; cuts ascend, 0 <= asker, holder, rank < P
//   Threads: thread-safe
//   Source:  pass-Q of arXiv 2411.01783, in one shot, and only to earlier ranks: attention is causal

namespace dovetail::proto {

// The cuts of a plan's group.
//   Requires: plan.ranks, of plan.part.ranks ranks
std::vector<Position> PassQCuts(const StepPlan& plan);

// The tokens whose K and V a rank attends to for itself and later ranks: its own. With rank 0's, earlier ones of the
// segment in which the group begins, which it gathers from attention workers: a token shard begins on a segment.
TokenRange PassQShard(std::span<const Position> cuts, int rank);

// Of the asker's tokens, those that see tokens of the holder: its first ones. Empty: none does.
//   Requires: holder < asker
TokenRange PassQQueries(const SoftmaxSpec& spec, std::span<const Position> cuts, int asker, int holder);

// q of those with all heads (kRankHeads in rank_frames.h), and what comes back (kRankOutputs): partials of the maximal
// aligned subtrees (base/segment_tree.h) that each of them sees of the holder's shard.
int64_t PassQQueryBytes(const SoftmaxSpec& spec, std::span<const Position> cuts, int asker, int holder);
int64_t PassQPartialBytes(const SoftmaxSpec& spec, std::span<const Position> cuts, int asker, int holder);

// All that a rank gets from the others in one op: the queries of later ranks, and the partials of earlier ones.
int64_t PassQBytesTo(const SoftmaxSpec& spec, std::span<const Position> cuts, int rank);

// Floating-point operations of the attention to its shard that a rank does in one op, for itself and later ranks.
double PassQFlopsOf(const SoftmaxSpec& spec, std::span<const Position> cuts, int rank);

}  // namespace dovetail::proto
