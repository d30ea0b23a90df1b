#pragma once
#include <cstdint>

#include "base/ids.h"

namespace dovetail::proto {

inline constexpr int kMaxPrefillRanks = 16;

// A prefill group is one step of one sequence that several compute workers take together. Each of them, a rank, has a
// step of its own with consecutive new tokens; together they are tokens [base, end) of the sequence, in the order of
// the ranks. PrefillPart says which part of a group a rank's step is.
//   Units:  tokens
//   Rules:  rank 0 begins at base and the last rank ends at end; the others begin on a multiple of kSegmentTokens.
//           Only the last rank may draw a token. A sequence has one group at a time: a later one has a greater id.
// Threads: plain values.
struct PrefillPart {
  StepId group;       // the step of rank 0, less than that of any other rank
  Position base = 0;  // tokens before it are committed when the group begins
  Position end = 0;
  int32_t rank = 0;
  int32_t ranks = 0;  // 2..kMaxPrefillRanks; 0: the step is not a part of a group

  bool in_group() const { return ranks > 0; }
  bool operator==(const PrefillPart&) const = default;
};

// A rank of a group, as the others address what they send it (rank_frames.h).
struct RankAddress {
  WorkerId worker;  // its compute worker
  StepId step;
  MicroBatchId micro_batch;
  Position begin = 0;  // its first token; it ends where the next rank begins, the last one at PrefillPart::end
  bool operator==(const RankAddress&) const = default;
};

}  // namespace dovetail::proto
