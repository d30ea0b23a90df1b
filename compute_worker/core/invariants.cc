#include <algorithm>

#include "absl/container/flat_hash_map.h"
#include "compute_worker/core/compute_worker_core.h"

namespace dovetail::compute {

absl::Status ComputeWorkerCore::CheckInvariants() const {
  absl::flat_hash_map<SequenceId, const MicroBatch*> steps;
  for (const MicroBatch& batch : micro_batches_) {
    if (!batch.running) continue;
    const auto broken = [&](const auto&... what) { return Internal("step ", batch.plan.step.value(), ": ", what...); };
    if (&micro_batches_[batch.plan.micro_batch.value()] != &batch) return broken("runs in another micro-batch");
    if (batch.stage > program_.size()) return broken("is at stage ", batch.stage, " of ", program_.size());
    const auto awaited =
        std::count_if(batch.parts.begin(), batch.parts.end(), [](const WorkerPart& part) { return part.awaited; });
    if (awaited != batch.awaiting) return broken(awaited, " partials are awaited, not ", batch.awaiting);
    bool unanswered = false;
    for (const WorkerPart& part : batch.parts) {
      unanswered = unanswered || !part.unanswered.empty();
      if (!std::is_sorted(part.unanswered.begin(), part.unanswered.end())) return broken("answers are not in order");
    }
    if (batch.aborted && !batch.dense_in_flight) return broken("has failed and does not end");
    const bool for_rank =
        batch.stage < program_.size() &&
        ((program_[batch.stage].kind == StageKind::kAttendPrompts && AwaitsRank(batch, program_[batch.stage].index)) ||
         IsAhead(batch) || !RingIsDone(batch) || !SwitchIsDone(batch) || !PassQIsDone(batch));
    const bool for_piece = std::any_of(batch.parts.begin(), batch.parts.end(),
                                       [](const WorkerPart& part) { return part.pieces_kept < part.pieces_asked; });
    if (int op = 0, rank = 0; !batch.dense_in_flight && HasQueries(batch, op, rank))
      return broken("does not answer rank ", rank, " about op ", op);
    const bool for_end = batch.done.has_value() && !MayFinish(batch);
    if (!batch.dense_in_flight && batch.awaiting == 0 && !unanswered && !for_rank && !for_piece && !for_end)
      return broken("waits for nothing");
    if (batch.done.has_value() && MayFinish(batch)) return broken("is done and does not end");
    for (const proto::StepEntry& entry : batch.plan.entries) {
      const auto [other, is_first] = steps.emplace(entry.sequence, &batch);
      const bool follows = !is_first && (batch.drawn_by == other->second->plan.micro_batch ||
                                         other->second->drawn_by == batch.plan.micro_batch);
      if (!is_first && !follows) return broken("sequence ", entry.sequence.value(), " is in another step as well");
    }
  }
  if (waiting_.has_value() && !micro_batches_[waits_for_.value()].running)
    return Internal("step ", waiting_->step.value(), " waits for one that has ended");
  return absl::OkStatus();
}

}  // namespace dovetail::compute
