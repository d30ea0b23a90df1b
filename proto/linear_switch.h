#pragma once
#include <cstdint>

#include "proto/attention_spec.h"
#include "proto/head_switch.h"

// A switch of linear layers between the ranks of a prefill group: LinearExchange::kSwitch. In each linear op a rank,
// which has all heads of its tokens, gets some heads of all tokens of the group, runs these through their states, one
// rank's tokens after the other, and gives back what that made of the others' tokens: their outputs, and the states
// that they leave (state_blocks.h), which each rank hands to the attention workers with those of its own heads. All
// follows from values that every rank has, so both ends of a transfer compute the same.
//   Units:   tokens, heads, bytes on the wire
//   Threads: pure
//   Source:  DeepSpeed Ulysses, arXiv 2309.14509, for layers whose heads have a state each

namespace dovetail::proto {

// How many ranks may switch the heads of linear layers: each has at least one in every linear op (HeadsOfRank). 0:
// there is no such op.
int MostLinearSwitchRanks(const AttentionTable& table);

// q, k, v and gates of a rank's tokens for a rank with so many heads (kRankHeads in rank_frames.h). Rank 0 adds the
// states before the group, which it gets from attention workers.
int64_t LinearRowsBytes(const SoftmaxSpec& spec, const TokenRange& tokens, int rank, int heads);

// What so many heads made of `tokens`: outputs, and the states that the tokens leave (kRankOutputs).
int64_t LinearOutputBytes(const SoftmaxSpec& spec, const TokenRange& tokens, int heads);

// All that a rank gets from the others in one op.
int64_t LinearSwitchBytesTo(const SoftmaxSpec& spec, const SwitchRank& rank);

}  // namespace dovetail::proto
