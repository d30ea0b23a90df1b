#pragma once
#include <cstddef>
#include <span>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "base/trace_context.h"
#include "proto/frame.h"
#include "proto/sequence_frames.h"

// Encode and Decode are exact inverses, and Decode checks what it reads.
// Errors: kInvalidArgument names the field.
// Threads: plain values and pure functions.

namespace dovetail::proto {

// Scheduler, to a worker of either kind: what is done for this sequence belongs to a sampled trace. Not answered and
// not numbered; a worker that records no traces ignores it, and one that does not know the type drops it.
inline constexpr FrameType kTraceSequence{4};

struct TraceSequence {
  SequenceId sequence;
  TraceContext trace;
  bool operator==(const TraceSequence&) const = default;
};

void Encode(const TraceSequence& message, std::vector<std::byte>& out);
template <>
absl::StatusOr<TraceSequence> Decode<TraceSequence>(std::span<const std::byte> bytes);

}  // namespace dovetail::proto
