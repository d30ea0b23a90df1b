#include "scheduler/simulation/willing_workers.h"

#include <utility>

#include "base/segment_tree.h"

namespace dovetail::scheduler {

SequenceOpened AnswerTo(const OpenSequence& action, std::vector<uint32_t> resumable) {
  return {action.worker, action.epoch, {.sequence = action.message.sequence, .resumable = std::move(resumable)}};
}

SequenceOpened AnswerTo(const ForkSequence& action) {
  const auto blocks = static_cast<uint32_t>(action.message.ctx_len / kSegmentTokens);
  std::vector<uint32_t> resumable = {0};
  if (blocks > 0) resumable.insert(resumable.begin(), blocks);
  return {action.worker, action.epoch, {.sequence = action.message.child, .resumable = std::move(resumable)}};
}

PrefixProbed AnswerTo(const ProbePrefix& action, std::vector<uint32_t> resumable) {
  return {action.worker, action.epoch, {.pin_id = action.message.pin_id, .resumable = std::move(resumable)}};
}

SequenceMoved AnswerTo(const MoveSequence& action) {
  return {action.worker,
          action.epoch,
          {.sequence = action.message.sequence, .step = action.message.step, .moved = true, .reason = ""}};
}

StepFinished AnswerTo(const RunStep& action, absl::FunctionRef<TokenId()> draw) {
  StepFinished finished{action.compute_worker, {.step = action.plan.step, .micro_batch = action.plan.micro_batch}};
  finished.result.entries.reserve(action.plan.entries.size());
  for (const proto::StepEntry& entry : action.plan.entries) {
    proto::EntryResult& result = finished.result.entries.emplace_back();
    result.sequence = entry.sequence;
    result.position = entry.ctx_len + static_cast<Position>(entry.tokens.size());
    if (entry.sample) result.token = draw();
  }
  return finished;
}

}  // namespace dovetail::scheduler
