#pragma once
#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/ids.h"
#include "base/status.h"

namespace dovetail::sequence_parallel {

inline constexpr int64_t kMinChunkBytes = 4096;
inline constexpr int64_t kMaxChunkBytes = int64_t{64} << 20;
inline constexpr int kMaxChunksInFlight = 64;

// How one rank takes part in the switches of its group.
// Threads: thread-compatible; a value.
struct ExchangeOptions {
  std::vector<NodeId> members;  // by rank, equal on every rank; 1..proto::kMaxLayoutRanks of them, each once
  int rank = 0;                 // of this node
  Epoch group;                  // this forming of the group, equal on every rank; a group of the same nodes has another
  MicroBatchId lane;            // of all frames; no other tensor travels between members in this micro-batch

  // What is sent but not yet in place at its receiver: to each rank at most chunks_in_flight pieces of chunk_bytes,
  // smaller ones where all of them together would exceed max_staging_bytes. Ranks need not agree on these.
  int64_t chunk_bytes = int64_t{1} << 20;  // kMinChunkBytes..kMaxChunkBytes
  int chunks_in_flight = 4;                // 1..kMaxChunksInFlight
  int64_t max_staging_bytes = int64_t{256} << 20;

  // A switch in which nothing of what is missing has come for so long ends with kDeadlineExceeded. Longer than a rank
  // may compute between two switches.
  absl::Duration stall = absl::Seconds(30);

  absl::Status Validate() const;  // kInvalidArgument names the field
  // Of the pieces for `peers` ranks, within max_staging_bytes.
  int64_t ChunkBytesFor(int peers) const;
};

// Which switch: the caller's step, and the switch's number in that step. Grows from one switch of a group to the next.
struct SwitchId {
  StepId step;
  uint16_t index = 0;
  auto operator<=>(const SwitchId&) const = default;
  std::string DebugString() const;  // "switch 3 of step 7"
};

}  // namespace dovetail::sequence_parallel
