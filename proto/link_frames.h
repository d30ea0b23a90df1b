#pragma once
#include "proto/frame.h"

// Frames between a compute worker and an attention worker whose GPUs exchange layers by themselves
// (exchange/cuda/gpu_exchange.h). Their epoch is the attention worker's.
// Threads: plain values.

namespace dovetail::proto {

inline constexpr FrameType kStepBeginOnDevice{37};  // as kStepBegin; q, k, v and o cross without frames
inline constexpr FrameType kLinkOffer{38};          // compute worker: room and memory, opaque
inline constexpr FrameType kLinkAnswer{39};         // attention worker: its own offer; or the reason
inline constexpr FrameType kLinkThere{40};          // either: kernels here reach the other side's memory

inline constexpr char kLinkAccepted = 'y', kLinkRefused = 'n', kLinkOnCpu = 'c';  // the first byte of kLinkAnswer

}  // namespace dovetail::proto
