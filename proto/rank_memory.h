#pragma once
#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "proto/frame.h"

namespace dovetail::proto {

// The payload of kRankMemory (rank_frames.h).
// Threads: a plain value and pure functions.
struct RankMemoryName {
  FrameType type{};       // of the tensor's frame
  std::string_view name;  // of its bytes; points into the payload
};

std::vector<std::byte> EncodeRankMemory(FrameType type, std::string_view name);
// kInvalidArgument: too short, or no tensor that lies on a device has this type.
absl::StatusOr<RankMemoryName> DecodeRankMemory(std::span<const std::byte> payload);

}  // namespace dovetail::proto
