#pragma once
#include <cstdint>

#include "base/status.h"
#include "control/messages.h"
#include "proto/attention_spec.h"

// An attention table is small, except for the constants of convolutions: 23 MB for Granite 4's 36 Mamba layers, 160 MB
// for the largest hybrids. It travels whole, in JoinRequest, Configuration and GetModelReply.

namespace dovetail::control {

inline constexpr uint64_t kMaxTableBytes = uint64_t{256} << 20;  // of an attention table's constants
// What a channel of the control plane takes; all else stays below kMaxMessageBytes by its own limits.
inline constexpr int kMaxChannelBytes = static_cast<int>(kMaxTableBytes) + kMaxMessageBytes;

// kInvalidArgument: more constants than travel.
// Threads: pure.
absl::Status CheckTableBytes(const proto::AttentionTable& table);

}  // namespace dovetail::control
