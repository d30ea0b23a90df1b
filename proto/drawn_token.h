#pragma once
#include <algorithm>

#include "base/ids.h"
#include "proto/step_plan.h"

namespace dovetail::proto {

// In StepEntry::tokens, as the only one: the token at ctx_len is what the step that was sent to this compute worker
// just before draws for the sequence. That step may still run. If it fails, so does this one, with the same status.
// Threads: plain values and pure functions.
inline constexpr TokenId kDrawnBefore = -2;

inline bool IsDrawnBefore(const StepEntry& entry) {
  return entry.tokens.size() == 1 && entry.tokens[0] == kDrawnBefore;
}
inline bool FollowsAnother(const StepPlan& plan) {
  return std::any_of(plan.entries.begin(), plan.entries.end(), IsDrawnBefore);
}

}  // namespace dovetail::proto
