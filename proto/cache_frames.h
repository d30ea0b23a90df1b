#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "proto/block_hash.h"
#include "proto/frame.h"
#include "proto/placement.h"
#include "proto/sequence_frames.h"

// Encode and Decode are exact inverses, and Decode checks what it reads.
// Errors: kInvalidArgument names the field.
// Threads: plain values and pure functions.

namespace dovetail::proto {

// Attention worker, to the scheduler: what can be found in its prefix cache has changed. Sent when the frame that
// changed it has been handled, before the answer to a later one. Not answered and not numbered.
inline constexpr FrameType kCacheChanged{6};
inline constexpr int kMaxCacheChanges = 4096;  // of a frame; more come in several

struct CacheChange {
  BlockHash block{};
  LayerGroup group;
  HeadRange kv_heads;  // of the shard that the block set belongs to
  bool held = false;   // false: it cannot be found any more
  bool operator==(const CacheChange&) const = default;
};

struct CacheChanged {
  std::vector<CacheChange> changes;  // in order
  bool operator==(const CacheChanged&) const = default;
};

void Encode(const CacheChanged& message, std::vector<std::byte>& out);
template <>
absl::StatusOr<CacheChanged> Decode<CacheChanged>(std::span<const std::byte> bytes);

}  // namespace dovetail::proto
