#include "scheduler/core/step_results.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"

namespace dovetail::scheduler {
void StepResults::On(const StepUnreadable& event) {
  MicroBatch* const batch = batches_.InFlight(event.micro_batch, event.step, event.compute_worker);
  if (batch == nullptr) return turn_.CountLate();
  batch->unreadable = true;
  On(StepFinished{event.compute_worker,
                  {.step = event.step,
                   .micro_batch = event.micro_batch,
                   .status = proto::StepStatus::kWorkerFailed,
                   .error = event.error}});
}

void StepResults::On(const StepFinished& event) {
  const proto::StepResult& result = event.result;
  MicroBatch* const found = batches_.InFlight(result.micro_batch, result.step, event.compute_worker);
  if (found == nullptr) return turn_.CountLate();
  MicroBatch& batch = *found;
  if (batch.group != StepId()) return EndGroup(groups_.Finish(batch, result));
  MicroBatch* const before = batch.voided ? nullptr : batches_.FollowedBy(batch);
  if (before != nullptr) {  // results come in order: its own is lost
    before->unreadable = batch.voided = true;
    batches_.Drain(batch.home);
    failed_[batch.home] = {.step = before->step,
                           .micro_batch = MicroBatchId(static_cast<uint16_t>(batches_.IndexOf(*before))),
                           .status = proto::StepStatus::kWorkerFailed,
                           .error = "its result was lost"};
  }
  const bool complete = result.status != proto::StepStatus::kOk || batch.IsAnsweredBy(result);
  MicroBatch* const follower = batches_.FollowerOf(batch);
  if (follower != nullptr && (result.status != proto::StepStatus::kOk || !complete)) {
    // Nothing of either was committed. What the failure asks for is done when no sequence is in a step any more.
    follower->voided = true;
    batches_.Drain(batch.home);
    failed_[batch.home] = result;
    return;
  }
  if (batch.voided) {
    if (result.status == proto::StepStatus::kOk) failures_.LoseSequences(batch);
    batch.in_flight = batch.voided = false;
    failures_.Repeat(batch);
    const auto failed = failed_.extract(batch.home);
    if (!failed.empty()) FinishStep(batches_[failed.mapped().micro_batch.value()], failed.mapped());
    return;
  }
  FinishStep(batch, result);
}

// A prefill group has ended, if one has: it is one step from here on.
void StepResults::EndGroup(const std::optional<PrefillGroups::Ended>& group) {
  if (!group.has_value()) return;
  switch (group->outcome) {
    case PrefillGroups::Ended::Outcome::kFinished: return FinishStep(*group->batch, group->result);
    case PrefillGroups::Ended::Outcome::kRepeat: return failures_.Repeat(*group->batch);
    case PrefillGroups::Ended::Outcome::kTryElsewhere: return failures_.TryElsewhere(*group->batch, group->error);
  }
}

void StepResults::FinishStep(MicroBatch& batch, const proto::StepResult& result) {
  batch.in_flight = false;
  for (MicroBatch& other : batches_) other.held = false;
  if (result.status == proto::StepStatus::kOutOfMemory) return failures_.OutOfMemory(batch, result);
  if (result.status == proto::StepStatus::kWorkerUnreachable) return failures_.Unreachable(batch, result);
  if (result.status == proto::StepStatus::kDamaged) return failures_.RestartDamaged(batch, result);
  if (result.status == proto::StepStatus::kGrammarPending) return failures_.AwaitGrammars(batch, result);
  const bool forgotten = result.status == proto::StepStatus::kForgotten;  // a repeated step gives everything again
  if (std::exchange(batch.unreadable, false) || forgotten) return failures_.TryElsewhere(batch, result.error);
  batches_.HomeOf(batch).failed_attempts = 0;
  if (result.status == proto::StepStatus::kWorkerFailed) {
    // The step of a worker that is known to be lost has nothing wrong with it.
    if (failures_.NamesLost(batch, result.failed_worker)) return failures_.Repeat(batch);
    return failures_.Fail(batch, absl::StrCat("worker ", result.failed_worker.value(), " failed: ", result.error));
  }
  if (!batch.IsAnsweredBy(result)) return failures_.Fail(batch, "the step's result does not list the step's sequences");
  ++counts_.steps;
  pool_.NoteTimes(result.timings, batches_.members(),
                  std::all_of(batch.entries.begin(), batch.entries.end(),
                              [](const PlannedEntry& entry) { return entry.q_len == 1; }));
  counts_.prefix_asked_bytes += static_cast<uint64_t>(std::max<int64_t>(0, result.prefix.asked_bytes));
  counts_.prefix_gathered_bytes += static_cast<uint64_t>(std::max<int64_t>(0, result.prefix.gathered_bytes));
  counts_.prefix_state_bytes += static_cast<uint64_t>(std::max<int64_t>(0, result.prefix.state_bytes));
  counts_.prefix_chain_bytes += static_cast<uint64_t>(std::max<int64_t>(0, result.prefix.chain_bytes));
  counts_.prefix_direct_bytes += static_cast<uint64_t>(std::max<int64_t>(0, result.prefix.direct_bytes));
  counts_.prefix_ring_bytes += static_cast<uint64_t>(std::max<int64_t>(0, result.prefix.ring_bytes));
  counts_.prefix_switch_bytes += static_cast<uint64_t>(std::max<int64_t>(0, result.prefix.switch_bytes));
  counts_.prefix_pass_q_bytes += static_cast<uint64_t>(std::max<int64_t>(0, result.prefix.pass_q_bytes));
  if (!batch.entries.empty() && batch.entries.front().group) {  // its ranks were learnt from as they came
    batch.forecast = {};
  } else {
    LearnRates(batch, result);
    batches_.HomeOf(batch).finished = turn_.now();
  }
  if (batch.work > 0) pool_.patience().Note(batch.compute_worker, batch.work, turn_.now() - batch.sent);
  admission_.EndHold();
  batches_.HomeOf(batch).out_of_memory_in_a_row = 0;
  batches_.HomeOf(batch).unreachable_since = absl::InfiniteFuture();
  for (size_t i = 0; i < batch.entries.size(); ++i) {
    --batch.entries[i].sequence->in_flight;
    batch.entries[i].sequence->flying -= batch.entries[i].q_len;
    Commit(batch.entries[i], result.entries[i]);
    choices_.Settle(*batch.entries[i].sequence);
  }
  batch.entries.clear();
}

// What the step's prompts took, of the time since it was sent or, if that was later, since the last one of the same
// sequences ended: what is more than streams take without prompts, of which prompts that were read together have their
// shares. As much as streams take may hide behind that, so a prediction that is longer by less is right (StreamPace).
double StepResults::PromptSeconds(const MicroBatch& batch, double took_s) {
  const ChunkForecast& chunk = batch.chunk;
  if (chunk.streams_s <= 0) return took_s;
  double added_s = std::max(0.0, took_s - chunk.streams_s);
  if (chunk.predicted_s > 0) added_s *= chunk.predicted_s / (chunk.predicted_s + chunk.others_s);
  pool_.pace().NoteAdded(batch.compute_worker, chunk.predicted_s, added_s);
  return std::clamp(chunk.predicted_s, added_s, added_s + chunk.streams_s);
}

void StepResults::LearnPace(const MicroBatch& batch, double took_s) {
  StreamPace& pace = pool_.pace();
  // A step with a prompt takes longer than one without.
  if (!batch.beside_prompt || (batch.chunk.streams_s > 0 && took_s < batch.chunk.streams_s))
    pace.Note(batch.compute_worker, took_s);
}

// Of an ordinary step.
void StepResults::LearnRates(MicroBatch& batch, const proto::StepResult& result) {
  PrefillForecast forecast = std::exchange(batch.forecast, {});
  PrefillPlanner& planner = pool_.planner();
  const double took_s = absl::ToDoubleSeconds(turn_.now() - std::max(batch.sent, batches_.HomeOf(batch).finished));
  LearnPace(batch, took_s);
  const bool shortened = batch.chunk.shortened;
  if (forecast.ranks == 0) {
    planner.Learn(batch.compute_worker, {}, result, /*follows_a_rank=*/false, shortened);
    if (shortened && batch.chunk.predicted_s > 0)
      planner.LearnCorrection(1, batch.chunk.by, batch.chunk.predicted_s, PromptSeconds(batch, took_s));
    return;
  }
  // The one prompt lies where the entry with most tokens does.
  const auto prompt = std::max_element(batch.entries.begin(), batch.entries.end(),
                                       [](const PlannedEntry& a, const PlannedEntry& b) { return a.q_len < b.q_len; });
  const auto attention_workers = AttentionWorkersOf(prompt->sequence->placement);
  planner.Learn(batch.compute_worker, attention_workers, result, /*follows_a_rank=*/false, shortened);
  forecast.measured_s = PromptSeconds(batch, took_s);
  planner.LearnTime(forecast);
}

void StepResults::Commit(const PlannedEntry& entry, const proto::EntryResult& result) {
  Sequence& sequence = *entry.sequence;
  sequence.stepped = true;
  sequence.moved = false;
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
    return choices_.End(sequence, FinishReason::kError, Internal(what, " at position ", sequence.ctx_len));
  }
  GenerationUpdate update = choices_.UpdateFor(sequence);
  TakePromptOutputs(entry, result, update);
  if (!TakePooled(entry, result, update))
    return choices_.End(
        sequence, FinishReason::kError,
        Internal("the step's hidden states do not continue those of the prompt before position ", sequence.ctx_len));
  if (entry.sample) return TakeToken(entry, result, std::move(update));
  if (sequence.ctx_len == sequence.size()) {  // max_tokens is 0: the prompt was all
    update.reason = FinishReason::kLength;
    RequestState& request = *sequence.request;
    for (auto& other : request.choices) {  // nothing is forked from a prompt that is not continued
      if (other->phase == Phase::kUnforked) choices_.End(*other, FinishReason::kLength);
    }
    return choices_.End(sequence, std::move(update));
  }
  if (!update.prompt_logprobs.empty() || !update.prompt_logits.empty() || !update.pooled.empty() ||
      update.prompt_done > 0)
    turn_.Emit(std::move(update));
  if (sequence.leads() && sequence.ctx_len == sequence.prefill_end() && !sequence.lost) choices_.Fork(sequence);
}

void StepResults::TakePromptOutputs(const PlannedEntry& entry, const proto::EntryResult& result,
                                    GenerationUpdate& update) {
  Sequence& sequence = *entry.sequence;
  RequestState& request = *sequence.request;
  if (sequence.choice != 0) return;
  if (sequence.params().prompt_progress && sequence.ctx_len > request.prompt_told &&
      request.prompt_told < sequence.prompt_size()) {
    request.prompt_told = std::min<Position>(sequence.ctx_len, sequence.prompt_size());
    update.prompt_done = static_cast<int>(request.prompt_told);
  }
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

// A prompt that begins again has the same hidden states: those that were taken stay. False: they are not as asked.
bool StepResults::TakePooled(const PlannedEntry& entry, const proto::EntryResult& result, GenerationUpdate& update) {
  if (entry.pool_from == entry.pool_to) return true;
  RequestState& request = *entry.sequence->request;
  const RequestState::Pooled range = request.pooled_range();
  if (entry.pool_from != std::max(range.begin, request.pooled_next) || !request.pooled.AddWords(result.pooled))
    return false;
  request.pooled_next = entry.pool_to;
  if (request.pooled_next == range.end) update.pooled = request.pooled.Mean(range.end - range.begin);
  return true;
}

void StepResults::TakeToken(const PlannedEntry& entry, const proto::EntryResult& result, GenerationUpdate&& update) {
  Sequence& sequence = *entry.sequence;
  const GenerationRequest& params = sequence.params();
  const Position index = result.position - sequence.prompt_size();
  if (result.token < 0 || sequence.output.Record(index, result.token) != TokenLog::Outcome::kLogged) {
    return choices_.End(sequence, FinishReason::kError,
                        Internal("the step's token ", result.token, " for position ", result.position,
                                 " does not continue this sequence of ", sequence.size(), " tokens"));
  }
  ++counts_.generation_tokens;
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
  choices_.End(sequence, std::move(update));
}

void StepResults::LoseSteps(WorkerId compute_worker) {
  for (const MicroBatch& batch : batches_)
    if (batch.in_flight && batch.compute_worker == compute_worker) failed_.erase(batch.home);
  groups_.LoseEndedRanks(compute_worker);
  for (const MicroBatch& batch : batches_)
    if (batch.in_flight && batch.compute_worker == compute_worker && batches_.FollowedBy(batch) != nullptr)
      failures_.LoseSequences(batch);
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
      failures_.TryElsewhere(batch, why);
    } else {
      failures_.Repeat(batch);
    }
  }
}

}  // namespace dovetail::scheduler
