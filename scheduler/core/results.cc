#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/core/limits.h"
#include "scheduler/core/scheduler_impl.h"

// What came of a step: tokens enter the log, then may be shown.

namespace dovetail::scheduler {

void SchedulerCore::Impl::On(const StepUnreadable& event) {
  MicroBatch* const batch = batches_.InFlight(event.micro_batch, event.step, event.compute_worker);
  if (batch == nullptr) {
    turn_.CountLate();
    return;
  }
  batch->unreadable = true;
  On(StepFinished{event.compute_worker,
                  {.step = event.step,
                   .micro_batch = event.micro_batch,
                   .status = proto::StepStatus::kWorkerFailed,
                   .error = event.error}});
}

void SchedulerCore::Impl::On(const StepFinished& event) {
  const proto::StepResult& result = event.result;
  MicroBatch* const found = batches_.InFlight(result.micro_batch, result.step, event.compute_worker);
  if (found == nullptr) {
    turn_.CountLate();
    return;
  }
  MicroBatch& batch = *found;
  if (batch.group != StepId()) return EndGroup(groups_.Finish(batch, result));
  MicroBatch* const before = batch.voided ? nullptr : batches_.FollowedBy(batch);
  if (before != nullptr) {  // results come in order: its own is lost
    before->unreadable = batch.voided = true;
    batches_.Drain();
    failed_ = proto::StepResult{.step = before->step,
                                .micro_batch = MicroBatchId(static_cast<uint16_t>(batches_.IndexOf(*before))),
                                .status = proto::StepStatus::kWorkerFailed,
                                .error = "its result was lost"};
  }
  const bool complete = result.status != proto::StepStatus::kOk || batch.IsAnsweredBy(result);
  MicroBatch* const follower = batches_.FollowerOf(batch);
  if (follower != nullptr && (result.status != proto::StepStatus::kOk || !complete)) {
    // Nothing of either was committed. What the failure asks for is done when no sequence is in a step any more.
    follower->voided = true;
    batches_.Drain();
    failed_ = result;
    return;
  }
  if (batch.voided) {
    if (result.status == proto::StepStatus::kOk) LoseSequences(batch);
    batch.in_flight = batch.voided = false;
    RepeatStep(batch);
    const std::optional<proto::StepResult> failed = std::exchange(failed_, std::nullopt);
    if (failed.has_value()) FinishStep(batches_[failed->micro_batch.value()], *failed);
    return;
  }
  FinishStep(batch, result);
}

// The step before is to be repeated, which attention workers that have gone on to this one would refuse: its sequences
// begin again, and nothing of them is kept there.
void SchedulerCore::Impl::LoseSequences(const MicroBatch& follower) {
  for (const PlannedEntry& entry : follower.entries) {
    entry.sequence->lost = true;
    entry.sequence->stepped = false;
  }
}

// A prefill group has ended, if one has: it is one step from here on.
void SchedulerCore::Impl::EndGroup(const std::optional<PrefillGroups::Ended>& group) {
  if (!group.has_value()) return;
  switch (group->outcome) {
    case PrefillGroups::Ended::Outcome::kFinished: return FinishStep(*group->batch, group->result);
    case PrefillGroups::Ended::Outcome::kRepeat: return RepeatStep(*group->batch);
    case PrefillGroups::Ended::Outcome::kTryElsewhere: return TryElsewhere(*group->batch, group->error);
  }
}

void SchedulerCore::Impl::FinishStep(MicroBatch& batch, const proto::StepResult& result) {
  batch.in_flight = false;
  for (MicroBatch& other : batches_) other.held = false;
  if (result.status == proto::StepStatus::kOutOfMemory) return OutOfMemory(batch, result);
  if (result.status == proto::StepStatus::kWorkerUnreachable) return Unreachable(batch, result);
  if (result.status == proto::StepStatus::kDamaged) return RestartDamaged(batch, result);
  if (result.status == proto::StepStatus::kGrammarPending) return AwaitGrammars(batch, result);
  const bool forgotten = result.status == proto::StepStatus::kForgotten;  // a repeated step gives everything again
  if (std::exchange(batch.unreadable, false) || forgotten) return TryElsewhere(batch, result.error);
  batches_.HomeOf(batch).failed_attempts = 0;
  if (result.status == proto::StepStatus::kWorkerFailed) {
    // The step of a worker that is known to be lost has nothing wrong with it.
    if (NamesLost(batch, result.failed_worker)) return RepeatStep(batch);
    return Fail(batch, absl::StrCat("worker ", result.failed_worker.value(), " failed: ", result.error));
  }
  if (!batch.IsAnsweredBy(result)) return Fail(batch, "the step's result does not list the step's sequences");
  ++stats_.steps;
  pool_.NoteTimes(result.timings, batches_.members(),
                  std::all_of(batch.entries.begin(), batch.entries.end(),
                              [](const PlannedEntry& entry) { return entry.q_len == 1; }));
  stats_.prefix_asked_bytes += static_cast<uint64_t>(std::max<int64_t>(0, result.prefix.asked_bytes));
  stats_.prefix_gathered_bytes += static_cast<uint64_t>(std::max<int64_t>(0, result.prefix.gathered_bytes));
  stats_.prefix_state_bytes += static_cast<uint64_t>(std::max<int64_t>(0, result.prefix.state_bytes));
  if (batch.work > 0) pool_.patience().Note(batch.compute_worker, batch.work, turn_.now() - batch.sent);
  admission_held_ = false;
  batches_.HomeOf(batch).out_of_memory_in_a_row = 0;
  batches_.HomeOf(batch).unreachable_since = absl::InfiniteFuture();
  for (size_t i = 0; i < batch.entries.size(); ++i) {
    --batch.entries[i].sequence->in_flight;
    batch.entries[i].sequence->flying -= batch.entries[i].q_len;
    Commit(batch.entries[i], result.entries[i]);
    Settle(*batch.entries[i].sequence);
  }
  batch.entries.clear();
}

// Nothing was done: the others go on, and those that the worker names are asked for again after a pause.
void SchedulerCore::Impl::AwaitGrammars(MicroBatch& batch, const proto::StepResult& result) {
  std::vector<Sequence*> pending;
  for (const PlannedEntry& entry : batch.entries)
    if (std::find(result.pending.begin(), result.pending.end(), entry.id) != result.pending.end())
      pending.push_back(entry.sequence);
  if (pending.empty())
    return Fail(batch, "the compute worker waits for grammars of sequences that are not in the step");
  RepeatStep(batch);
  for (Sequence* sequence : pending) {
    if (sequence->phase == Phase::kEnded) continue;
    if (!grammar_pauses_.Pause(*sequence, turn_.now()))
      EndRequest(*sequence->request, FinishReason::kError,
                 absl::UnavailableError("a compute worker did not compile the request's grammar in time"));
  }
}

void SchedulerCore::Impl::Commit(const PlannedEntry& entry, const proto::EntryResult& result) {
  Sequence& sequence = *entry.sequence;
  sequence.stepped = true;
  sequence.told_ctx_len = entry.ctx_len;
  // Behind a draw that failed there is a token that is none.
  sequence.ctx_len = std::min<Position>(entry.ctx_len + entry.q_len, sequence.size());
  sequence.named_blocks = entry.ctx_len / kSegmentTokens;
  if (!entry.group) accounts_.EndGroup(sequence);
  if (sequence.phase == Phase::kEnded) return;
  if (result.status != proto::StepStatus::kOk) {
    const char* what = result.status == proto::StepStatus::kBadLogits
                           ? "the model gave no usable logits (NaN, or no token is allowed)"
                           : "the step failed for this sequence";
    return EndChoice(sequence, FinishReason::kError, Internal(what, " at position ", sequence.ctx_len));
  }
  GenerationUpdate update = UpdateFor(sequence);
  TakePromptOutputs(entry, result, update);
  if (entry.sample) return TakeToken(entry, result, std::move(update));
  if (sequence.ctx_len == sequence.size()) {  // max_tokens is 0: the prompt was all
    update.reason = FinishReason::kLength;
    RequestState& request = *sequence.request;
    for (auto& other : request.choices) {  // nothing is forked from a prompt that nobody continues
      if (other->phase == Phase::kUnforked) EndChoice(*other, FinishReason::kLength);
    }
    return EndChoice(sequence, std::move(update));
  }
  if (!update.prompt_logprobs.empty() || !update.prompt_logits.empty()) turn_.Emit(std::move(update));
  if (sequence.leads() && sequence.ctx_len == sequence.prefill_end() && !sequence.lost) Fork(sequence);
}

void SchedulerCore::Impl::TakePromptOutputs(const PlannedEntry& entry, const proto::EntryResult& result,
                                            GenerationUpdate& update) {
  Sequence& sequence = *entry.sequence;
  RequestState& request = *sequence.request;
  if (sequence.choice != 0) return;
  Position position = entry.ctx_len + 1;
  for (const proto::PositionLogprobs& logprobs : result.prompt_logprobs) {
    if (position == request.prompt_logprobs_next && position < sequence.prompt_size()) {
      update.prompt_logprobs.push_back(logprobs);
      ++request.prompt_logprobs_next;
    }
    ++position;
  }
  const int wanted = sequence.params().logits_last;
  if (wanted == 0 || request.prompt_logits_done || entry.logits_rows == 0 || entry.ctx_len >= sequence.prompt_size())
    return;
  request.prompt_logits.insert(request.prompt_logits.end(), result.logits.begin(), result.logits.end());
  request.prompt_logits_rows += entry.logits_rows;
  if (request.prompt_logits_rows < wanted) return;
  update.prompt_logits = std::move(request.prompt_logits);
  request.prompt_logits.clear();
  request.prompt_logits_done = true;
}

void SchedulerCore::Impl::TakeToken(const PlannedEntry& entry, const proto::EntryResult& result,
                                    GenerationUpdate&& update) {
  Sequence& sequence = *entry.sequence;
  const GenerationRequest& params = sequence.params();
  const Position index = result.position - sequence.prompt_size();
  if (result.token < 0 || sequence.output.Record(index, result.token) != TokenLog::Outcome::kLogged) {
    return EndChoice(sequence, FinishReason::kError,
                     Internal("the step's token ", result.token, " for position ", result.position,
                              " does not continue this sequence of ", sequence.size(), " tokens"));
  }
  ++stats_.generation_tokens;
  GrammarPauses::Forget(sequence);
  sequence.damages_in_a_row = 0;
  update.tokens.push_back(result.token);
  if (result.has_logprobs) update.logprobs.push_back(result.logprobs);
  if (params.logits_of_output && entry.logits_rows > 0) {
    const size_t vocab = result.logits.size() / static_cast<size_t>(entry.logits_rows);
    update.logits.emplace_back(result.logits.end() - static_cast<std::ptrdiff_t>(vocab), result.logits.end());
  }
  const auto& stops = params.stop_token_ids;
  const bool stopped = index >= params.min_tokens && std::find(stops.begin(), stops.end(), result.token) != stops.end();
  const bool full = sequence.output.size() >= params.max_tokens || sequence.size() >= options_.max_model_len;
  if (!stopped && !full) return turn_.Emit(std::move(update));
  update.reason = stopped ? FinishReason::kStop : FinishReason::kLength;
  if (stopped) update.stop_token = result.token;
  EndChoice(sequence, std::move(update));
}

void SchedulerCore::Impl::Settle(Sequence& sequence) {
  if (sequence.placement.empty() || sequence.in_flight > 0) return;
  if (sequence.phase == Phase::kEnded) {
    Release(sequence);
  } else if (sequence.lost) {
    Preempt(sequence);
  }
}

// Nothing was committed: the entries are as before, and the step is planned again once somebody made room there: on an
// attention worker, or on the compute worker, where anybody's end may help.
void SchedulerCore::Impl::OutOfMemory(MicroBatch& failed, const proto::StepResult& result) {
  RepeatStep(failed);
  MicroBatch& batch = batches_.HomeOf(failed);
  admission_held_ = true;
  std::optional<int> full = budget_.IndexOf(result.failed_worker);
  const auto lies_there = [&](const Sequence* sequence) { return !full || KvAccounts::HoldsOn(*sequence, *full); };
  if (std::none_of(slots_.active().begin(), slots_.active().end(), lies_there)) full.reset();
  if (Sequence* victim = slots_.PickVictim(full, [](const Tenant&) { return true; }); victim != nullptr)
    return full ? GoElsewhere(*victim, {&result.failed_worker, 1}) : Preempt(*victim);
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
void SchedulerCore::Impl::HasNoRoomAlone(Sequence& sequence, const WorkerId* worker, const std::string& error) {
  if (worker != nullptr) {
    GoElsewhere(sequence, {worker, 1});
    if (Refusal* refusal = sequence.refusals.By(*worker, budget_)) refusal->alone = true;
    if (placer_.FitsElsewhere(sequence)) return;
    if (stranded_.MayFitAgain(sequence.size(), turn_.now())) {
      queues_.Remove(sequence);
      return stranded_.Add(sequence, turn_.now());
    }
  }
  EndChoice(sequence, FinishReason::kError,
            absl::UnavailableError(absl::StrCat("kv cache: an attention worker has no room for this request alone (",
                                                error, "); give the worker more memory")));
}

bool SchedulerCore::Impl::Names(const Sequence& sequence, WorkerId worker, bool current) const {
  return std::any_of(sequence.placement.begin(), sequence.placement.end(), [&](const proto::Shard& shard) {
    return shard.worker == worker && budget_.IsCurrent(shard.worker, shard.epoch) == current;
  });
}

bool SchedulerCore::Impl::NamesLost(const MicroBatch& batch, WorkerId worker) const {
  return std::any_of(batch.entries.begin(), batch.entries.end(),
                     [&](const PlannedEntry& entry) { return Names(*entry.sequence, worker, /*current=*/false); });
}

// The compute worker lost an attention worker. Steps and news of losses travel on different connections, so this may
// come first: until the loss is known here, the batch waits. It goes on when that news comes, or is tried again.
void SchedulerCore::Impl::Unreachable(MicroBatch& batch, const proto::StepResult& result) {
  const auto current = [&](const PlannedEntry& entry) {
    return Names(*entry.sequence, result.failed_worker, /*current=*/true);
  };
  const bool known = std::none_of(batch.entries.begin(), batch.entries.end(), current);
  if (known) return RepeatStep(batch);
  MicroBatch& home = batches_.HomeOf(batch);
  home.unreachable_since = std::min(home.unreachable_since, turn_.now());
  if (turn_.now() - home.unreachable_since < kUnreachablePatience) {
    home.not_before = turn_.now() + kUnreachablePause;
    return RepeatStep(batch);
  }
  home.unreachable_since = absl::InfiniteFuture();
  // Both still say that they are well, but they do not see each other.
  std::vector<Sequence*> cut_off;
  for (const PlannedEntry& entry : batch.entries)
    if (current(entry)) cut_off.push_back(entry.sequence);
  RepeatStep(batch);
  for (Sequence* sequence : cut_off)
    if (sequence->phase != Phase::kEnded)
      EndRequest(*sequence->request, FinishReason::kError, absl::UnavailableError(result.error));
}

// What lies on an attention worker is not what was written there. Nothing was committed: those sequences begin again
// from the token log, on another worker if one can hold them, and the step is planned again. Not for ever: where that
// does not help, their requests end.
void SchedulerCore::Impl::RestartDamaged(MicroBatch& batch, const proto::StepResult& result) {
  bool any = false;
  std::vector<Sequence*> given_up;
  for (const PlannedEntry& entry : batch.entries) {
    Sequence& sequence = *entry.sequence;
    if (std::find(result.damaged.begin(), result.damaged.end(), entry.id) == result.damaged.end()) continue;
    any = true;
    if (sequence.phase == Phase::kEnded) continue;
    sequence.lost = true;
    if (Names(sequence, result.failed_worker, /*current=*/true))
      sequence.refusals.By(result.failed_worker, budget_)->damaged = true;
    ++stats_.damaged;
    ++sequence.damages;
    ++sequence.damages_in_a_row;
    if (sequence.damages > kMostDamages || sequence.damages_in_a_row > kMostDamagesInARow)
      given_up.push_back(&sequence);
  }
  if (!any) return TryElsewhere(batch, absl::StrCat("it names damaged sequences that are not in it: ", result.error));
  RepeatStep(batch);
  for (Sequence* sequence : given_up)
    if (sequence->phase != Phase::kEnded)
      EndRequest(*sequence->request, FinishReason::kError,
                 Internal("the KV of this request was damaged again and again, last on attention worker ",
                          result.failed_worker.value(), ", whose memory may be failing: ", result.error));
}

// The compute worker failed, not the step: nothing is known to be wrong with that. Unless it fails again and again.
void SchedulerCore::Impl::TryElsewhere(MicroBatch& batch, const std::string& error) {
  if (++batches_.HomeOf(batch).failed_attempts < kStepAttempts) return RepeatStep(batch);
  batches_.HomeOf(batch).failed_attempts = 0;
  Fail(batch, absl::StrCat("compute worker ", batch.compute_worker.value(), " failed, the last of ", kStepAttempts,
                           " attempts at this step: ", error));
}

void SchedulerCore::Impl::Fail(MicroBatch& batch, const std::string& error) {
  for (const PlannedEntry& entry : batch.entries) {
    --entry.sequence->in_flight;
    entry.sequence->flying -= entry.q_len;
  }
  for (const PlannedEntry& entry : batch.entries) {
    Sequence& sequence = *entry.sequence;
    if (sequence.phase != Phase::kEnded)
      EndRequest(*sequence.request, FinishReason::kError, absl::UnavailableError(error));
    Settle(sequence);
  }
  batch.entries.clear();
}

}  // namespace dovetail::scheduler
