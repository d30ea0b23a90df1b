#pragma once
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "scheduler/core/events.h"

// What workers answer that agree to everything and hold what they are told to hold: the events for a SchedulerCore's
// actions, without any work behind them. When an answer comes is for the caller to decide.
// Threads: pure.

namespace dovetail::scheduler {

// `resumable`: what the worker has cached of the sequence, in blocks, falling and ending with 0.
SequenceOpened AnswerTo(const OpenSequence& action, std::vector<uint32_t> resumable = {0});
SequenceOpened AnswerTo(const ForkSequence& action);
PrefixProbed AnswerTo(const ProbePrefix& action, std::vector<uint32_t> resumable = {0});
SequenceMoved AnswerTo(const MoveSequence& action);

// A result for every entry; `draw` gives the token of each entry that samples, in order. Timings and work are 0.
StepFinished AnswerTo(const RunStep& action, absl::FunctionRef<TokenId()> draw);

}  // namespace dovetail::scheduler
