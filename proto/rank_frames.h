#pragma once
#include <algorithm>

#include "proto/frame.h"
#include "proto/prefill_part.h"

// Frames between the compute workers that are ranks of one prefill group (prefill_part.h). `epoch`, `step` and
// `micro_batch` are those of the rank that the frame goes to, but in kRankTaken those of the frame that it answers, and
// `op` is the attention op. `digest` is the sender's rank; but in a ring that whose K and V they are, in kRankTaken
// that of the frame, in kRankOutputs kMaxPrefillRanks more, so that answers tell it from a kRankHeads, and in
// kRankState 0. A step's number is used once, so it tells what came late or twice.
// Threads: plain values and pure functions.

namespace dovetail::proto {

// Tensor: the state of a linear op after the sender's last token, for the next rank. Each head's, in order, as
// state_blocks.h has a full block. Its size does not depend on how many tokens the sender has.
inline constexpr FrameType kRankState{28};
// Tensor: K and V of a softmax op that a later rank needs of the sender's tokens, or in a ring of an earlier rank's
// (RowsForLaterRank in prefix_traffic.h), n of them: [n, kv_heads, key_dim], then [n, kv_heads, value_dim], wire dtype.
inline constexpr FrameType kRankRows{29};
// Message without payload, to the rank that sent kRankRows of that op: they have been attended to and are kept no more.
inline constexpr FrameType kRankAttended{30};
// Tensor: of a head switch (head_switch.h), for the sender's n tokens, what a rank needs of a softmax op that attends
// to `kv` KV heads of all tokens: [n, kv x group, key_dim] queries, then K and V [n, kv, key_dim], [n, kv, value_dim],
// wire dtype. Rank 0's K and V begin with those of earlier tokens of the segment in which the group begins.
// Of a linear op (linear_switch.h): gates [n, heads, gates], f32, then q, k and v, and from rank 0 each head's states
// before the group.
// With pass-q (pass_q.h), from a later rank to an earlier one: the queries of its first n tokens alone, with all heads.
inline constexpr FrameType kRankHeads{31};
// Tensor: what the sender's attention gave for the receiver's n tokens and the sender's KV heads: o [n, heads,
// value_dim], wire dtype, with all heads that read those KV heads. Where attention workers attend to earlier tokens,
// f32: o [nodes, heads, value_dim], then m and l [nodes, heads, 2], of the subtrees that each token sees (SubtreesOf),
// or from GPUs of each token (HeadPartials).
// Of a linear op: o, and then each head's states that the n tokens leave.
// With pass-q such partials of the sender's tokens, for the queries that came and all heads.
inline constexpr FrameType kRankOutputs{23};
inline constexpr FrameType kRankTaken{42};  // message without payload: the tensor has been copied
// Message, in place of a kRankRows, kRankHeads or kRankOutputs whose bytes lie in memory of the sender's device that
// the receiver reads by itself: the type of that frame [2 bytes], then the memory's name
// (compute_worker/rank_memory.h). Answered as the tensor is, by kRankTaken.
inline constexpr FrameType kRankMemory{7};

// Messages between compute workers that know each other, of no step: memory of the sender's device that the receiver is
// to read; and the answer, kMemoryRead and what it read, or kMemoryNotRead and the reason.
inline constexpr FrameType kMemoryOffer{8};
inline constexpr FrameType kMemoryAnswer{9};
inline constexpr char kMemoryRead = 'y', kMemoryNotRead = 'n';

// Two compute workers may be ranks of two groups, in either order: a tensor must not answer those of the other way
// (numbers from 32 on do, transport/ucx/send_window.h). Only kRankTaken does, and its sender has copied all tensors of
// that micro-batch which it was handed before.
static_assert(kRankState < FrameType::kStepBegin && kRankRows < FrameType::kStepBegin);
static_assert(kRankAttended < FrameType::kStepBegin);
static_assert(kRankHeads < FrameType::kStepBegin && kRankOutputs < FrameType::kStepBegin);
static_assert(kRankMemory < FrameType::kStepBegin);
static_assert(kRankTaken >= FrameType::kStepBegin);

inline bool IsRankFrame(FrameType type) {
  return type == kRankState || type == kRankRows || type == kRankAttended || type == kRankHeads ||
         type == kRankOutputs || type == kRankMemory || type == kRankTaken;
}
// Which rank's it is, of frames whose digest says so; kMaxPrefillRanks: none of a group.
inline int RankOf(const FrameHeader& header) {
  return static_cast<int>(std::min<uint64_t>(header.digest, kMaxPrefillRanks));
}
inline bool IsMemoryFrame(FrameType type) { return type == kMemoryOffer || type == kMemoryAnswer; }

}  // namespace dovetail::proto
