#pragma once
#include "proto/frame.h"

// Frames between ranks that change the layout of a tensor together (token_layout.h,
// sequence_parallel/switch_exchange.h). `epoch` is the group's: one forming of it. `step` and `op` number the group's
// switches, and grow. `digest` names the piece: the switch's fingerprint and, in the lowest kSwitchPieceBits, its
// number within what one rank sends to another.
// Threads: plain values and pure functions.

namespace dovetail::proto {

inline constexpr FrameType kSwitchPart{26};   // tensor: the next piece of a transfer, in the order of its bytes
inline constexpr FrameType kSwitchVoid{27};   // message: the group has ended, and why (text)
inline constexpr FrameType kSwitchTaken{41};  // message without payload: pieces up to this one are in place

// Both ways tensors travel between two ranks, so a part must not answer those of the other way (numbers from 32 on do,
// transport/ucx/send_window.h); only kSwitchTaken does.
static_assert(kSwitchPart < FrameType::kStepBegin && kSwitchVoid < FrameType::kStepBegin);
static_assert(kSwitchTaken >= FrameType::kStepBegin);

inline constexpr int kSwitchPieceBits = 20;
inline constexpr uint64_t kMaxSwitchPieces = uint64_t{1}
                                             << kSwitchPieceBits;  // from one rank to another, of one switch
inline constexpr uint64_t kMaxSwitchVoidBytes = 512;               // of the text

inline bool IsSwitchFrame(FrameType type) { return type == kSwitchPart || type == kSwitchVoid || type == kSwitchTaken; }

}  // namespace dovetail::proto
