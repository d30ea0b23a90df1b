// Steps whose tokens the step before is still to draw: when they begin, and what becomes of them if it fails.
#include <algorithm>
#include <utility>

#include "compute_worker/core/compute_worker_core.h"
#include "proto/drawn_token.h"

namespace dovetail::compute {

using proto::StepEntry;
using proto::StepPlan;
using proto::StepResult;
using proto::StepStatus;

namespace {

// The place of a sequence's draw in a step: the position, and whether the step draws there.
bool Draws(const StepPlan& plan, const StepEntry& asks) {
  return std::any_of(plan.entries.begin(), plan.entries.end(), [&](const StepEntry& entry) {
    return entry.sequence == asks.sequence && entry.sample &&
           entry.ctx_len + static_cast<Position>(entry.tokens.size()) == asks.ctx_len;
  });
}

TokenId DrawnIn(const StepResult& result, const StepEntry& asks) {
  for (const proto::EntryResult& entry : result.entries)
    if (entry.sequence == asks.sequence && entry.position == asks.ctx_len) return entry.token;
  return -1;
}

}  // namespace

// If the step before has come so far. On a device that draws tokens for the next step to take, that is before they are
// known here.
void ComputeWorkerCore::BeginWaiting(std::vector<Action>& actions) {
  if (!waiting_.has_value()) return;
  const MicroBatch& before = micro_batches_[waits_for_.value()];
  const bool answered = std::all_of(before.parts.begin(), before.parts.end(),
                                    [](const WorkerPart& part) { return part.unanswered.empty(); });
  if (before.running && (!before.drawing || before.aborted || !answered)) return;
  StepPlan plan = *std::exchange(waiting_, std::nullopt);
  const bool on_device = before.running;
  StepResult failure{plan.step, plan.micro_batch, StepStatus::kWorkerFailed, {}, {}, {}, {}};
  if (!on_device && before.last.has_value() && before.last->status != StepStatus::kOk) {
    failure.status = before.last->status;
    failure.error = before.last->error;
    failure.failed_worker = before.last->failed_worker;
  }
  for (StepEntry& entry : plan.entries) {
    if (!proto::IsDrawnBefore(entry) || !failure.error.empty()) continue;
    if (on_device ? Draws(before.plan, entry) : before.last.has_value() && DrawnIn(*before.last, entry) >= 0) {
      if (!on_device) entry.tokens[0] = DrawnIn(*before.last, entry);
      continue;
    }
    // A draw that failed, whose sequence therefore ends: any token will do.
    if (!on_device && before.last.has_value() && Draws(before.plan, entry)) {
      entry.tokens[0] = 0;
      continue;
    }
    failure.error =
        absl::StrCat("sequence ", entry.sequence.value(), ": the step before draws no token at ", entry.ctx_len);
  }
  if (failure.error.empty())
    return Begin(std::move(plan), on_device ? std::optional(waits_for_) : std::nullopt, actions);
  ++counters_.refused_plans;
  const MicroBatchId id = plan.micro_batch;
  actions.push_back(FinishStep{id, std::move(failure)});
}

// Results are in the order of draws: a step that fails while the one before draws for it is answered for behind that.
void ComputeWorkerCore::EndInOrder(MicroBatch& batch, StepResult result, std::vector<Action>& actions) {
  if (batch.drawn_by.has_value()) {
    MicroBatch& before = micro_batches_[batch.drawn_by->value()];
    if (before.running && before.plan.step == batch.drawn_in) {
      before.behind = std::move(result);
      return;
    }
  }
  actions.push_back(FinishStep{batch.plan.micro_batch, std::move(result)});
  auto behind = std::exchange(batch.behind, std::nullopt);
  if (behind.has_value()) actions.push_back(FinishStep{behind->micro_batch, *std::move(behind)});
}

// Its tokens were never drawn.
void ComputeWorkerCore::FailFollower(MicroBatchId of, std::vector<Action>& actions) {
  const StepResult& why = *micro_batches_[of.value()].last;
  for (MicroBatch& batch : micro_batches_) {
    if (!batch.running || batch.aborted || batch.drawn_by != of || batch.drawn_in != PlanOf(of).step) continue;
    Abort(batch,
          {.step = batch.plan.step,
           .micro_batch = batch.plan.micro_batch,
           .status = why.status,
           .error = why.error,
           .failed_worker = why.failed_worker,
           .damaged = why.damaged},
          actions);
  }
}

}  // namespace dovetail::compute
