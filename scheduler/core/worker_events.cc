#include "scheduler/core/worker_events.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "scheduler/core/limits.h"

namespace dovetail::scheduler {

void WorkerEvents::On(const AttentionWorkerJoined& event) {
  const bool restarted = budget().IndexOf(event.worker).has_value();
  if (!restarted) ForgetLostWorkers();
  budget().Join(event.worker, event.epoch, event.kv_blocks, event.rate, event.pair);
  if (restarted) {
    moves_.ForgetTo(event.worker, event.epoch);
    RestartSequencesOn(event.worker, event.epoch);
  }
  relocation_.WorkerJoined();
  choices_.EndStranding();
}

void WorkerEvents::On(const AttentionWorkerLost& event) {
  if (!budget().IsCurrent(event.worker, event.epoch)) return turn_.CountLate();
  const int index = *budget().IndexOf(event.worker);
  stranded_.NoteLoss(placer_.LongestSequence(), turn_.now());
  pool_.planner().ForgetAttentionWorker(event.worker);
  budget().Lose(event.worker);
  admission_.LoseProbesOf(index);
  moves_.ForgetTo(event.worker, /*but_not_of=*/std::nullopt);
  RestartSequencesOn(event.worker, /*but_not_of=*/std::nullopt);
}

void WorkerEvents::On(const AttentionWorkerDraining& event) {
  if (!budget().IsCurrent(event.worker, event.epoch)) return turn_.CountLate();
  stranded_.NoteLoss(placer_.LongestSequence(), turn_.now());
  budget().Drain(event.worker);
}

void WorkerEvents::On(const ComputeWorkerJoined& event) {
  if (!pool_.Join(event.worker, event.leaves_states, event.kind)) return turn_.CountLate();
  NoteLinearPrompts();
}

void WorkerEvents::On(const ComputeWorkerLost& event) {
  if (!pool_.Leave(event.worker)) return turn_.CountLate();
  results_.LoseSteps(event.worker);
  NoteLinearPrompts();
}

// A step may run on any compute worker, so all of them must leave states if attention workers are to hold no more than
// these. Where one joins that does not, sequences are charged for the blocks that its steps take, and those for which
// there are none begin again.
void WorkerEvents::NoteLinearPrompts() {
  using proto::LinearPrompts;
  if (pool_.empty()) return;  // what the last of them did may still be held
  const LinearPrompts where =
      pool_.all_leave_states() ? LinearPrompts::kOnComputeWorkers : LinearPrompts::kOnAttentionWorkers;
  if (where == budget().linear_prompts()) return;
  budget().SetLinearPrompts(where);
  if (where == LinearPrompts::kOnComputeWorkers) return choices_.EndStranding();
  const std::vector<Sequence*> before = slots_.active();
  for (Sequence* sequence : before)
    if (sequence->phase >= Phase::kOpening && sequence->phase != Phase::kMoving && !accounts_.Renew(*sequence))
      BeginAgain(*sequence);
}

// At once, or when its steps have returned.
void WorkerEvents::BeginAgain(Sequence& sequence) {
  if (sequence.in_flight > 0) {
    sequence.lost = true;
  } else {
    choices_.Preempt(sequence);
  }
}

void WorkerEvents::On(const ComputeWorkersLinked& event) {
  const std::vector<WorkerId>& workers = pool_.workers();
  for (const WorkerId worker : {event.one, event.other})
    if (std::find(workers.begin(), workers.end(), worker) == workers.end()) return turn_.CountLate();
  pool_.planner().Link(event.one, event.other, event.linked);
  if (!event.linked) groups_.LoseLink(event.one, event.other);
}

void WorkerEvents::On(const Tick& /*tick*/) {
  for (MicroBatch& batch : batches_) {
    if (!batch.Overdue(turn_.now())) continue;
    if (turn_.now() - batch.deadline > kLateTick) {
      batch.deadline = turn_.now() + kLateTick;
      continue;
    }
    if (batch.group != StepId() && groups_.WithdrawOverdue(batch)) continue;
    const WorkerId worker = batch.compute_worker;
    turn_.Act(DismissComputeWorker{worker, absl::StrCat("step ", batch.step.value(), " had no result within ",
                                                        absl::FormatDuration(batch.deadline - batch.sent),
                                                        " (--step-timeout and what its tokens need)")});
    pool_.Leave(worker);
    results_.LoseSteps(worker);
  }
}

// What lay there is gone: those sequences begin again from the token log.
void WorkerEvents::RestartSequencesOn(WorkerId worker, std::optional<Epoch> but_not_of) {
  for (MicroBatch& batch : batches_) batch.EndWait();  // for this news
  const std::vector<Sequence*> before = slots_.active();
  for (Sequence* sequence : before) {
    const bool on_it =
        std::any_of(sequence->placement.begin(), sequence->placement.end(),
                    [&](const proto::Shard& shard) { return shard.worker == worker && shard.epoch != but_not_of; });
    if (!on_it || sequence->phase < Phase::kOpening) continue;
    BeginAgain(*sequence);
  }
}

bool WorkerEvents::IsNamed(WorkerId worker) const {
  return std::any_of(slots_.active().begin(), slots_.active().end(),
                     [&](const Sequence* sequence) { return sequence->LiesOn(worker); });
}

void WorkerEvents::ForgetLostWorkers() {
  for (size_t i = 0; i < budget().workers().size(); ++i) {
    const KvBudget::Worker& worker = budget().workers()[i];
    if (worker.lost && worker.used == 0 && !IsNamed(worker.id)) budget().Forget(static_cast<int>(i));
  }
}

bool WorkerEvents::HoldsNothing(WorkerId worker) const {
  const auto index = budget().IndexOf(worker);
  return !index || (budget().workers()[*index].used == 0 && !IsNamed(worker));
}

}  // namespace dovetail::scheduler
