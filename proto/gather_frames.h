#pragma once
#include "proto/frame.h"

// Frames by which K and V of earlier tokens come to a compute worker in pieces (StepLayout::pieces). `digest` is the
// number of the piece. The pieces of an op come between its k and v and its kPartial, and only as they are asked for.
// Threads: plain values and pure functions.

namespace dovetail::proto {

// Compute worker -> attention worker: message without payload. The piece may be sent. Pieces are asked for in order.
// A compute worker that asks for a piece has put away those that lie kGatherPiecesAhead or more before it.
inline constexpr FrameType kAskRows{43};
// Attention worker -> compute worker: tensor. Keys, then values of the piece's tokens, as StepLayout::PieceAt has them.
inline constexpr FrameType kEarlierRows{44};

// Of an op, so many pieces are asked for at a time: one is put away while the next ones are gathered and cross.
inline constexpr int kGatherPiecesAhead = 4;

inline bool IsPieceFrame(FrameType type) { return type == kAskRows || type == kEarlierRows; }

// Each answers tensors (transport/ucx/send_window.h). A piece comes after q, k and v of its op were used. Its receiver
// asks for more when all pieces that it was handed are copied.
static_assert(kAskRows >= FrameType::kStepBegin && kEarlierRows >= FrameType::kStepBegin);

}  // namespace dovetail::proto
