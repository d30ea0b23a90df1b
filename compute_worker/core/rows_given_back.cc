// K and V that later ranks of a prefill group give back to earlier ones, where the prompt goes on after the group
// (StepPlan::gives_back). An earlier rank needs them for the next group only. So it puts them into its scratch as they
// come and its own step does not wait for them, not even to end. But a later rank does not end before all of its own
// have been put there, or dropped where there is no room: when the group has ended, everything is in its place. An
// earlier rank never waits before it says so, so no two ranks wait for each other.
#include <utility>

#include "compute_worker/core/compute_worker_core.h"

namespace dovetail::compute {

using proto::StepPlan;
using proto::StepStatus;

bool ComputeWorkerCore::GivesBack(const StepPlan& plan) { return plan.gives_back && !plan.ranks.empty(); }

// The step's prompts have begun.
void ComputeWorkerCore::BeginKeeping(MicroBatch& batch) {
  const StepPlan& plan = batch.plan;
  if (!GivesBack(plan)) return;
  batch.keeping.came.assign(static_cast<size_t>(table_.op_count()), 0);
  batch.keeping.kept = batch.keeping.came;
  const bool room = FromRanks(batch) && batch.prompts[0].part->HasRoomTo(plan.part.end);
  batch.keeping.reserved = batch.keeping.on = room && plan.part.rank + 1 < plan.part.ranks;
}

// Another step of it begins: its group was given up.
void ComputeWorkerCore::StopKeeping(SequenceId sequence) {
  for (MicroBatch& batch : micro_batches_)
    if (batch.keeping.on && batch.plan.entries[0].sequence == sequence) batch.keeping.on = false;
}

const PromptScratch::Part* ComputeWorkerCore::PartToKeepIn(MicroBatchId id, StepId step) const {
  const MicroBatch& batch = micro_batches_[id.value()];
  if (batch.plan.step != step || !batch.keeping.on) return nullptr;
  const PromptScratch::Part* const part = scratch_.Find(batch.plan.entries[0].sequence);
  return part != nullptr && part->HasRoomTo(batch.plan.part.end) ? part : nullptr;
}

// Whether such a rank gives its rows back to the step that was planned last, which may have ended.
bool ComputeWorkerCore::IsOfLaterRank(const MicroBatch& batch, StepId step, int rank) const {
  const StepPlan& plan = batch.plan;
  const bool ended_well = batch.last.has_value() && batch.last->step == step && batch.last->status == StepStatus::kOk;
  return GivesBack(plan) && plan.step == step && rank > plan.part.rank && rank < plan.part.ranks &&
         (batch.running ? !batch.aborted : ended_well);
}

// False: they do not fit, or came before.
bool ComputeWorkerCore::TakeFromLaterRank(MicroBatch& batch, int op, int rank, RankTensor rows,
                                          std::vector<Action>& actions) {
  const StepPlan& plan = batch.plan;
  const uint32_t bit = uint32_t{1} << rank;
  uint32_t& came = batch.keeping.came[static_cast<size_t>(op)];
  const int64_t bytes = RankRowsBytes(plan, op, rank);
  if ((came & bit) != 0 || bytes == 0 || static_cast<int64_t>(rows.size()) != bytes) return false;
  came |= bit;
  if (batch.keeping.on)
    actions.push_back(KeepRankRows{plan.micro_batch, plan.step, op, rank, std::move(rows)});
  else
    actions.push_back(SendRankAttended{plan.micro_batch, op, plan.part.rank, plan.ranks[static_cast<size_t>(rank)]});
  return true;
}

// Of the ranks after this one: the end of the last one of which all is there, and of those before it.
Position ComputeWorkerCore::EndOfKept(const MicroBatch& batch) const {
  const StepPlan& plan = batch.plan;
  const auto end_of = [&](int rank) {
    return rank + 1 == plan.part.ranks ? plan.part.end : plan.ranks[static_cast<size_t>(rank) + 1].begin;
  };
  int rank = plan.part.rank;
  for (; rank + 1 < plan.part.ranks; ++rank)
    for (int op = 0; op < table_.op_count(); ++op) {
      const bool kept = (batch.keeping.kept[static_cast<size_t>(op)] >> (rank + 1) & 1) != 0;
      if (!kept && RankRowsBytes(plan, op, rank + 1) > 0) return end_of(rank);
    }
  return end_of(rank);
}

void ComputeWorkerCore::On(RankRowsKept event, std::vector<Action>& actions) {
  MicroBatch& batch = micro_batches_[event.micro_batch.value()];
  const StepPlan& plan = batch.plan;
  const bool later = GivesBack(plan) && event.rank > plan.part.rank && event.rank < plan.part.ranks;
  if (plan.step != event.step || !later || event.op >= table_.op_count()) return;
  if (event.kept && batch.keeping.on) {
    batch.keeping.kept[static_cast<size_t>(event.op)] |= uint32_t{1} << event.rank;
    if (!batch.running) scratch_.Extend(plan.entries[0].sequence, EndOfKept(batch), plan.part.end);
  } else {
    batch.keeping.on = false;
  }
  actions.push_back(
      SendRankAttended{plan.micro_batch, event.op, plan.part.rank, plan.ranks[static_cast<size_t>(event.rank)]});
}

}  // namespace dovetail::compute
