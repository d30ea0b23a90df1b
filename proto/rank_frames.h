#pragma once
#include "proto/frame.h"

// Frames between the compute workers that are ranks of one prefill group (prefill_part.h). In both, `epoch`, `step` and
// `micro_batch` are those of the rank that the state goes to, and `op` is the attention op. A step's number is used
// once, so it tells what came late or twice.

namespace dovetail::proto {

// Tensor: the state of a linear op after the sender's last token, for the next rank. Each head's, in order, as
// state_blocks.h has a full block. Its size does not depend on how many tokens the sender has.
inline constexpr FrameType kRankState{28};
inline constexpr FrameType kRankTaken{42};  // message without payload: the state has been copied

// Two compute workers may be ranks of two groups, in either order: a state must not answer those of the other way
// (numbers from 32 on do, transport/ucx/send_window.h). Only kRankTaken does, and its sender has copied all states of
// that micro-batch which it was handed before.
static_assert(kRankState < FrameType::kStepBegin);
static_assert(kRankTaken >= FrameType::kStepBegin);

inline bool IsRankFrame(FrameType type) { return type == kRankState || type == kRankTaken; }

}  // namespace dovetail::proto
