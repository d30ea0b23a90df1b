#include "scheduler/core/step_failures.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "scheduler/core/limits.h"

namespace dovetail::scheduler {

void StepFailures::Repeat(MicroBatch& batch) {
  for (const PlannedEntry& entry : batch.entries) {
    Sequence& sequence = *entry.sequence;
    --sequence.in_flight;
    sequence.flying -= entry.q_len;
    sequence.history_seen = false;
    sequence.request->tenant->served -= static_cast<uint64_t>(entry.q_len);
    choices_.Settle(sequence);
  }
  batch.entries.clear();
}

void StepFailures::LoseSequences(const MicroBatch& follower) {
  for (const PlannedEntry& entry : follower.entries) {
    entry.sequence->lost = true;
    entry.sequence->stepped = false;
  }
}

void StepFailures::AwaitGrammars(MicroBatch& batch, const proto::StepResult& result) {
  std::vector<Sequence*> pending;
  for (const PlannedEntry& entry : batch.entries)
    if (std::find(result.pending.begin(), result.pending.end(), entry.id) != result.pending.end())
      pending.push_back(entry.sequence);
  if (pending.empty())
    return Fail(batch, "the compute worker waits for grammars of sequences that are not in the step");
  Repeat(batch);
  for (Sequence* sequence : pending) {
    if (sequence->phase == Phase::kEnded) continue;
    if (!grammar_pauses_.Pause(*sequence, turn_.now()))
      choices_.EndAll(*sequence->request, FinishReason::kError,
                      absl::UnavailableError("a compute worker did not compile the request's grammar in time"));
  }
}

void StepFailures::OutOfMemory(MicroBatch& failed, const proto::StepResult& result) {
  Repeat(failed);
  MicroBatch& batch = batches_.HomeOf(failed);
  admission_.Hold();
  std::optional<int> full = budget().IndexOf(result.failed_worker);
  const auto lies_there = [&](const Sequence* sequence) { return !full || KvAccounts::HoldsOn(*sequence, *full); };
  if (std::none_of(slots_.active().begin(), slots_.active().end(), lies_there)) full.reset();
  if (Sequence* victim = slots_.PickVictim(full, [](const Tenant&) { return true; }); victim != nullptr)
    return full ? choices_.GoElsewhere(*victim, {&result.failed_worker, 1}) : choices_.Preempt(*victim);
  batch.held = std::any_of(batches_.begin(), batches_.end(), [&](const MicroBatch& other) {
    return other.in_flight && std::any_of(other.entries.begin(), other.entries.end(),
                                          [&](const PlannedEntry& entry) { return lies_there(entry.sequence); });
  });
  if (batch.held || slots_.active().empty()) return;
  if (++batch.out_of_memory_in_a_row < kOutOfMemoryRetries) return;
  batch.out_of_memory_in_a_row = 0;
  if (const Sequence* oldest = slots_.Oldest(); oldest != nullptr)
    HasNoRoomAlone(*oldest->request->choices[oldest->choice], full ? &result.failed_worker : nullptr, result.error);
}

// Where other workers can hold it, it begins again there; where one that was lost could, it waits for another one.
void StepFailures::HasNoRoomAlone(Sequence& sequence, const WorkerId* worker, const std::string& error) {
  if (worker != nullptr) {
    choices_.GoElsewhere(sequence, {worker, 1});
    if (Refusal* refusal = sequence.refusals.By(*worker, budget())) refusal->alone = true;
    if (placer_.FitsElsewhere(sequence)) return;
    if (stranded_.MayFitAgain(sequence.size(), turn_.now())) return choices_.Strand(sequence);
  }
  choices_.End(sequence, FinishReason::kError,
               absl::UnavailableError(absl::StrCat("kv cache: an attention worker has no room for this request alone (",
                                                   error, "); give the worker more memory")));
}

void StepFailures::Unreachable(MicroBatch& batch, const proto::StepResult& result) {
  const auto current = [&](const PlannedEntry& entry) {
    return Names(*entry.sequence, result.failed_worker, /*current=*/true);
  };
  const bool known = std::none_of(batch.entries.begin(), batch.entries.end(), current);
  if (known) return Repeat(batch);
  MicroBatch& home = batches_.HomeOf(batch);
  home.unreachable_since = std::min(home.unreachable_since, turn_.now());
  if (turn_.now() - home.unreachable_since < kUnreachablePatience) {
    home.not_before = turn_.now() + kUnreachablePause;
    return Repeat(batch);
  }
  home.unreachable_since = absl::InfiniteFuture();
  // Both still say that they are well, but they do not see each other.
  std::vector<Sequence*> cut_off;
  for (const PlannedEntry& entry : batch.entries)
    if (current(entry)) cut_off.push_back(entry.sequence);
  Repeat(batch);
  for (Sequence* sequence : cut_off)
    if (sequence->phase != Phase::kEnded)
      choices_.EndAll(*sequence->request, FinishReason::kError, absl::UnavailableError(result.error));
}

void StepFailures::RestartDamaged(MicroBatch& batch, const proto::StepResult& result) {
  bool any = false;
  std::vector<Sequence*> given_up;
  for (const PlannedEntry& entry : batch.entries) {
    Sequence& sequence = *entry.sequence;
    if (std::find(result.damaged.begin(), result.damaged.end(), entry.id) == result.damaged.end()) continue;
    any = true;
    if (sequence.phase == Phase::kEnded) continue;
    sequence.lost = true;
    if (Names(sequence, result.failed_worker, /*current=*/true))
      sequence.refusals.By(result.failed_worker, budget())->damaged = true;
    ++damaged_;
    ++sequence.damages;
    ++sequence.damages_in_a_row;
    if (sequence.damages > kMostDamages || sequence.damages_in_a_row > kMostDamagesInARow)
      given_up.push_back(&sequence);
  }
  if (!any) return TryElsewhere(batch, absl::StrCat("it names damaged sequences that are not in it: ", result.error));
  Repeat(batch);
  for (Sequence* sequence : given_up)
    if (sequence->phase != Phase::kEnded)
      choices_.EndAll(*sequence->request, FinishReason::kError,
                      Internal("the KV of this request was damaged again and again, last on attention worker ",
                               result.failed_worker.value(), ", whose memory may be failing: ", result.error));
}

void StepFailures::TryElsewhere(MicroBatch& batch, const std::string& error) {
  if (++batches_.HomeOf(batch).failed_attempts < kStepAttempts) return Repeat(batch);
  batches_.HomeOf(batch).failed_attempts = 0;
  Fail(batch, absl::StrCat("compute worker ", batch.compute_worker.value(), " failed, the last of ", kStepAttempts,
                           " attempts at this step: ", error));
}

void StepFailures::Fail(MicroBatch& batch, const std::string& error) {
  for (const PlannedEntry& entry : batch.entries) {
    --entry.sequence->in_flight;
    entry.sequence->flying -= entry.q_len;
  }
  for (const PlannedEntry& entry : batch.entries) {
    Sequence& sequence = *entry.sequence;
    if (sequence.phase != Phase::kEnded)
      choices_.EndAll(*sequence.request, FinishReason::kError, absl::UnavailableError(error));
    choices_.Settle(sequence);
  }
  batch.entries.clear();
}

bool StepFailures::Names(const Sequence& sequence, WorkerId worker, bool current) const {
  return std::any_of(sequence.placement.begin(), sequence.placement.end(), [&](const proto::Shard& shard) {
    return shard.worker == worker && budget().IsCurrent(shard.worker, shard.epoch) == current;
  });
}

bool StepFailures::NamesLost(const MicroBatch& batch, WorkerId worker) const {
  return std::any_of(batch.entries.begin(), batch.entries.end(),
                     [&](const PlannedEntry& entry) { return Names(*entry.sequence, worker, /*current=*/false); });
}

}  // namespace dovetail::scheduler
