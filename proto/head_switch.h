#pragma once
#include <cstdint>

#include "base/ids.h"
#include "proto/attention_spec.h"
#include "proto/placement.h"
#include "proto/step_plan.h"

// A head switch between the ranks of a prefill group: PrefixExchange::kSwitch. In each softmax op a rank, which has all
// heads of its tokens, gets some KV heads of all tokens of the group, attends to them, and gives back what that made.
// The transfers of q, k, v and o are those of proto::Switch (token_layout.h) between a cut of the tokens and an even
// cut of the heads. All follows from values that every rank has, so both ends of a transfer compute the same.
//   Units:   tokens, KV heads, bytes on the wire
//   Threads: pure
//   Source:  DeepSpeed Ulysses, arXiv 2309.14509; forward only

namespace dovetail::proto {

// The KV heads of a rank: as Layout::Even cuts them.
//   Requires: 1 <= ranks <= kv_heads, 0 <= rank < ranks
HeadRange HeadsOfRank(int kv_heads, int rank, int ranks);

// How many ranks may switch heads: each has at least one KV head in every softmax op. 0: there is no such op.
int MostSwitchRanks(const AttentionTable& table);

// Tokens from here on are attended after the switch: the group's first one, or the first of its segment. If that is
// token 0, what a rank gives back is o itself; else it is partials, and attention workers attend to earlier tokens.
inline Position SwitchBegin(Position base) { return base / kSegmentTokens * kSegmentTokens; }

// The tokens of a rank.
//   Requires: plan.ranks, of plan.part.ranks ranks
TokenRange TokensOfRank(const StepPlan& plan, int rank);

// q of a rank's tokens and k and v of those from `first` on (kRankHeads in rank_frames.h), for a rank with so many KV
// heads. Rank 0 gives those from SwitchBegin on, which it gathers from attention workers, the others those of their
// own.
int64_t HeadRowsBytes(const SoftmaxSpec& spec, const TokenRange& tokens, Position first, int kv_heads);

// Subtrees of what `tokens` see of those from `begin` on (base/segment_tree.h), all of them together.
int64_t SubtreesOf(const TokenRange& tokens, int window, Position begin);

// What a rank gives back where attention workers attend to earlier tokens, too: a partial for each of those subtrees,
// or one for each token, of all that it sees of the group. The first is what the bits of CPUs are made of, which do not
// depend on the rank that attends; GPUs have no such bits to keep, and give the second.
enum class HeadPartials : uint8_t { kOfSubtrees, kOfTokens };

// What attention to those from `begin` on gave for `tokens` (kRankOutputs).
int64_t HeadOutputBytes(const SoftmaxSpec& spec, const TokenRange& tokens, Position begin, int kv_heads,
                        HeadPartials partials = HeadPartials::kOfSubtrees);

// A rank of a group, as far as a switch goes.
struct SwitchRank {
  Position base = 0, end = 0;  // of the group
  TokenRange tokens;           // of the rank
  int rank = 0, ranks = 2;
  HeadPartials partials = HeadPartials::kOfSubtrees;
};

// All that it gets from the others in one op.
int64_t SwitchBytesTo(const SoftmaxSpec& spec, const SwitchRank& rank);

// Floating-point operations of the attention that it does in one op.
double SwitchFlopsOf(const SoftmaxSpec& spec, const SwitchRank& rank);

}  // namespace dovetail::proto
