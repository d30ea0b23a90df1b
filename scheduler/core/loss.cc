#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/core/limits.h"
#include "scheduler/core/scheduler_impl.h"

// Workers that go: lost ones at once, draining ones when what lay on them has moved (moving.cc).

namespace dovetail::scheduler {

void SchedulerCore::Impl::On(const AttentionWorkerLost& event) {
  if (!budget_.IsCurrent(event.worker, event.epoch)) {
    turn_.CountLate();
    return;
  }
  const int index = *budget_.IndexOf(event.worker);
  stranded_.NoteLoss(placer_.LongestSequence(), turn_.now());
  budget_.Lose(event.worker);
  for (Sequence* sequence : probes_.Lose(index)) PlaceProbed(*sequence);
  moves_.ForgetTo(event.worker, /*but_not_of=*/std::nullopt);
  RestartSequencesOn(event.worker, /*but_not_of=*/std::nullopt);
}

void SchedulerCore::Impl::On(const AttentionWorkerDraining& event) {
  if (!budget_.IsCurrent(event.worker, event.epoch)) {
    turn_.CountLate();
    return;
  }
  stranded_.NoteLoss(placer_.LongestSequence(), turn_.now());
  budget_.Drain(event.worker);
}

void SchedulerCore::Impl::On(const ComputeWorkerLost& event) {
  if (!pool_.Leave(event.worker)) {
    turn_.CountLate();
    return;
  }
  LoseSteps(event.worker);
}

void SchedulerCore::Impl::LoseSteps(WorkerId compute_worker) {
  failed_.reset();
  for (const MicroBatch& batch : batches_)
    if (batch.in_flight && batch.compute_worker == compute_worker && batches_.FollowedBy(batch) != nullptr)
      LoseSequences(batch);
  for (MicroBatch& batch : batches_) {
    batch.held = false;
    if (!batch.in_flight || batch.compute_worker != compute_worker) continue;
    const bool failed =
        batch.Overdue(turn_.now()) && batch.follows == StepId();  // one that follows fails with that before it
    const std::string why =
        failed ? absl::StrCat("no result for ", absl::FormatDuration(turn_.now() - batch.sent)) : "";
    if (batch.group != StepId()) {
      EndGroup(groups_.Lose(batch, why));
      continue;
    }
    batch.in_flight = batch.voided = false;
    if (failed) {
      TryElsewhere(batch, why);
    } else {
      RepeatStep(batch);
    }
  }
}

// A worker whose step has passed its deadline is not waited for any longer. Only a tick says so, for the shell has read
// all results that are there when it ticks.
void SchedulerCore::Impl::On(const Tick&) {
  for (MicroBatch& batch : batches_) {
    if (!batch.Overdue(turn_.now())) continue;
    if (turn_.now() - batch.deadline > kLateTick) {
      batch.deadline = turn_.now() + kLateTick;
      continue;
    }
    const WorkerId worker = batch.compute_worker;
    turn_.Act(DismissComputeWorker{worker, absl::StrCat("step ", batch.step.value(), " had no result within ",
                                                        absl::FormatDuration(batch.deadline - batch.sent),
                                                        " (--step-timeout and what its tokens need)")});
    pool_.Leave(worker);
    LoseSteps(worker);
  }
}

// Whatever lay there is gone: those sequences begin again from the token log.
void SchedulerCore::Impl::RestartSequencesOn(WorkerId worker, std::optional<Epoch> but_not_of) {
  for (MicroBatch& batch : batches_) batch.EndWait();  // for this news
  const std::vector<Sequence*> before = slots_.active();
  for (Sequence* sequence : before) {
    const bool on_it =
        std::any_of(sequence->placement.begin(), sequence->placement.end(),
                    [&](const proto::Shard& shard) { return shard.worker == worker && shard.epoch != but_not_of; });
    if (!on_it || sequence->phase < Phase::kOpening) continue;
    if (sequence->in_flight > 0) {
      sequence->lost = true;
    } else {
      Preempt(*sequence);
    }
  }
}

// A worker joined that may be large enough.
void SchedulerCore::Impl::EndStranding() {
  for (Sequence* sequence : stranded_.TakeAll())
    if (!sequence->request->paused) queues_.Push(*sequence);
}

void SchedulerCore::Impl::ExpireStranded() {
  for (Sequence* sequence : stranded_.Expired(turn_.now())) {
    const Position longest = placer_.LongestSequence();
    const std::string left =
        sequence->size() <= longest
            ? "have no room for it"
            : absl::StrCat("hold ", longest, " tokens of one sequence, not its ", sequence->size());
    EndChoice(
        *sequence, FinishReason::kError,
        absl::UnavailableError(absl::StrCat("kv cache: an attention worker that could hold this request was lost, "
                                            "and those that are left ",
                                            left, "; try again later")));
  }
}

bool SchedulerCore::Impl::NamedByAnyone(WorkerId worker) const {
  return std::any_of(slots_.active().begin(), slots_.active().end(), [&](const Sequence* sequence) {
    return std::any_of(sequence->placement.begin(), sequence->placement.end(),
                       [&](const proto::Shard& shard) { return shard.worker == worker; });
  });
}

void SchedulerCore::Impl::ForgetLostWorkers() {
  for (size_t i = 0; i < budget_.workers().size(); ++i) {
    const KvBudget::Worker& worker = budget_.workers()[i];
    if (worker.lost && worker.used == 0 && !NamedByAnyone(worker.id)) budget_.Forget(static_cast<int>(i));
  }
}

bool SchedulerCore::Impl::HoldsNothing(WorkerId worker) const {
  const auto index = budget_.IndexOf(worker);
  return !index || (budget_.workers()[*index].used == 0 && !NamedByAnyone(worker));
}

// Nothing was committed: the entries are as before, and the step is planned again.
void SchedulerCore::Impl::RepeatStep(MicroBatch& batch) {
  for (const PlannedEntry& entry : batch.entries) {
    Sequence& sequence = *entry.sequence;
    --sequence.in_flight;
    sequence.flying -= entry.q_len;
    sequence.history_seen = false;
    sequence.request->tenant->served -= static_cast<uint64_t>(entry.q_len);
    Settle(sequence);
  }
  batch.entries.clear();
}

}  // namespace dovetail::scheduler
