#include "compute_worker/core/compute_worker_core.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "proto/drawn_token.h"

namespace dovetail::compute {

using proto::StepEntry;
using proto::StepPlan;
using proto::StepResult;
using proto::StepStatus;

ComputeWorkerCore::ComputeWorkerCore(const proto::AttentionTable& table, StepProgram program,
                                     const ComputeWorkerOptions& options)
    : table_(table),
      program_(std::move(program)),
      options_(options),
      micro_batches_(options.micro_batches),
      scratch_(table_, options.prompt_blocks),
      state_slots_(options.state_slots),
      inbox_(options.micro_batches) {}

void ComputeWorkerCore::SetLinked(NodeId node, bool linked) {
  for (AttentionWorkerAddress& known : workers_)
    if (known.node == node) known.linked = linked;
}

void ComputeWorkerCore::AddAttentionWorker(const AttentionWorkerAddress& address) {
  for (AttentionWorkerAddress& known : workers_)
    if (known.worker == address.worker) {
      known = address;
      return;
    }
  workers_.push_back(address);
}

bool ComputeWorkerCore::idle() const {
  return std::none_of(micro_batches_.begin(), micro_batches_.end(), [](const MicroBatch& b) { return b.running; });
}

void ComputeWorkerCore::Handle(Event event, std::vector<Action>& actions) {
  std::visit([&](auto&& e) { On(std::forward<decltype(e)>(e), actions); }, std::move(event));
}

absl::Status ComputeWorkerCore::CheckPlan(const StepPlan& plan, std::optional<MicroBatchId> drawn_by) const {
  size_t tokens = 0;
  absl::flat_hash_set<SequenceId> seen;
  for (const StepEntry& entry : plan.entries) {
    if (!seen.insert(entry.sequence).second)
      return InvalidArgument("sequence ", entry.sequence.value(), " is in the step twice");
    tokens += entry.tokens.size();
    DT_RETURN_IF_ERROR(CheckExchange(plan, entry));
    DT_RETURN_IF_ERROR(proto::Validate(entry.placement, table_));
    if (drawn_by.has_value() && proto::IsDrawnBefore(entry)) continue;
    for (const TokenId token : entry.tokens)
      if (token < 0 || token >= options_.vocab_size)
        return InvalidArgument("sequence ", entry.sequence.value(), ": token ", token, " is outside the vocabulary of ",
                               options_.vocab_size);
  }
  for (const MicroBatch& batch : micro_batches_) {
    if (!batch.running) continue;
    if (drawn_by.has_value() && &batch == &micro_batches_[drawn_by->value()]) continue;  // FillDrawn looks at it
    for (const StepEntry& entry : batch.plan.entries)
      if (seen.contains(entry.sequence))
        return InvalidArgument("sequence ", entry.sequence.value(), " is in step ", batch.plan.step.value(),
                               " of micro-batch ", batch.plan.micro_batch.value(), ", which is still running");
  }
  if (tokens == 0 || tokens > static_cast<size_t>(options_.max_step_tokens))
    return InvalidArgument("step ", plan.step.value(), ": ", tokens, " tokens; this worker takes 1..",
                           options_.max_step_tokens);
  return absl::OkStatus();
}

// One entry's shards, worker by worker in the order of its placement: the order in which OpenSequence named them.
absl::Status ComputeWorkerCore::AddEntry(MicroBatch& batch, int index, StepResult& failure) const {
  const StepEntry& entry = batch.plan.entries[index];
  const int q_len = static_cast<int>(entry.tokens.size());
  std::vector<int> shards_of_part(batch.parts.size(), 0);
  const proto::EntryExchange exchange = ExchangeOf(batch, index);
  for (const proto::Shard& shard : entry.placement) {
    auto part = std::find_if(batch.parts.begin(), batch.parts.end(),
                             [&](const WorkerPart& p) { return p.worker == shard.worker && p.epoch == shard.epoch; });
    if (part == batch.parts.end()) {
      const auto address = std::find_if(workers_.begin(), workers_.end(), [&](const AttentionWorkerAddress& a) {
        return a.worker == shard.worker && a.epoch == shard.epoch;
      });
      if (address == workers_.end()) {
        failure.status = StepStatus::kWorkerUnreachable;
        failure.failed_worker = shard.worker;
        return NotFound("sequence ", entry.sequence.value(), ": attention worker ", shard.worker.value(), " of epoch ",
                        shard.epoch.value(), " is not connected");
      }
      WorkerPart fresh{.worker = address->worker, .epoch = address->epoch, .node = address->node};
      fresh.unanswered.reserve(options_.key_values_in_flight);
      fresh.layouts.resize(table_.group_count());
      part = batch.parts.insert(batch.parts.end(), std::move(fresh));
      shards_of_part.push_back(0);
    }
    const size_t p = part - batch.parts.begin();
    auto& begin = part->begin.entries;
    if (begin.empty() || begin.back().sequence != entry.sequence)
      begin.push_back({.sequence = entry.sequence,
                       .ctx_len = entry.ctx_len,
                       .q_len = q_len,
                       .hashes = entry.block_hashes,
                       .attend_end = exchange.attend_end,
                       .gather_begin = exchange.gather_begin,
                       .gather_end = exchange.gather_end,
                       .states = exchange.states,
                       .generation = shard.generation});
    // Layout entries index the step's entries of this worker on its side and of the plan on ours; offsets agree.
    part->layouts[shard.group.value()].Add(index, shards_of_part[p]++, shard.kv_heads, shard.tokens, entry.ctx_len,
                                           q_len, table_.softmax(shard.group), exchange);
  }
  return absl::OkStatus();
}

absl::Status ComputeWorkerCore::BuildParts(MicroBatch& batch, StepResult& failure) const {
  batch.parts.clear();
  // Some exchanges have no blocks for earlier tokens, of which they gather less than a segment.
  const bool pieces = std::none_of(batch.prompts.begin(), batch.prompts.end(),
                                   [](const PromptEntry& prompt) { return prompt.part == nullptr || prompt.ring; });
  for (size_t entry = 0; entry < batch.plan.entries.size(); ++entry)
    DT_RETURN_IF_ERROR(AddEntry(batch, static_cast<int>(entry), failure));
  for (WorkerPart& part : batch.parts) {
    part.begin.part = batch.plan.part;
    part.begin.gather_piece_bytes = pieces ? options_.gather_piece_bytes : 0;
    for (int group = 0; group < table_.group_count(); ++group) {
      part.layouts[group].piece_bytes = part.begin.gather_piece_bytes;
      part.layouts[group].Finish(table_.softmax(LayerGroup(static_cast<uint16_t>(group))));
    }
  }
  return absl::OkStatus();
}

bool ComputeWorkerCore::CameBefore(const StepPlan& plan) const {
  if (plan.micro_batch.value() >= micro_batches_.size()) return false;
  const StepId newest = micro_batches_[plan.micro_batch.value()].newest;
  return newest != StepId() && plan.step <= newest;
}

void ComputeWorkerCore::On(PlanArrived event, std::vector<Action>& actions) {
  const MicroBatchId id = event.plan.micro_batch;
  if (CameBefore(event.plan)) {
    ++counters_.dropped_frames;
    return;
  }
  if (id.value() < micro_batches_.size()) micro_batches_[id.value()].newest = event.plan.step;
  if (!proto::FollowsAnother(event.plan)) return Begin(std::move(event.plan), std::nullopt, actions);
  if (waiting_.has_value()) {
    StepResult failure{event.plan.step, id, StepStatus::kWorkerFailed, {}, {}, {}, {}};
    failure.error = absl::StrCat("step ", waiting_->step.value(), " already waits for the tokens of another");
    ++counters_.refused_plans;
    actions.push_back(FinishStep{id, std::move(failure)});
    return;
  }
  waiting_ = std::move(event.plan);
  waits_for_ = last_begun_;
  BeginWaiting(actions);
}

void ComputeWorkerCore::Begin(StepPlan plan, std::optional<MicroBatchId> drawn_by, std::vector<Action>& actions) {
  const MicroBatchId id = plan.micro_batch;
  StepResult failure{plan.step, id, StepStatus::kWorkerFailed, {}, {}, {}, {}};
  if (id.value() >= micro_batches_.size() || micro_batches_[id.value()].running) {
    failure.error =
        absl::StrCat("micro-batch ", id.value(), " is busy or not one of this worker's ", micro_batches_.size());
    ++counters_.refused_plans;
    actions.push_back(FinishStep{id, std::move(failure)});
    return;
  }
  MicroBatch& batch = micro_batches_[id.value()];
  batch.plan = std::move(plan);
  ChainStates(batch.plan);
  batch.keeping = {};
  absl::Status status = CheckPlan(batch.plan, drawn_by);
  if (status.ok()) {
    BeginPrompts(batch);
    BeginStates(batch);
    status = BuildParts(batch, failure);
  }
  if (!status.ok()) {
    EndPrompts(batch, /*went_well=*/false);
    batch.keeping = {};
    inbox_.End(id, batch.plan.step);
    failure.error = std::string(status.message());
    ++counters_.refused_plans;
    if (!waiting_.has_value()) {  // what follows fails as it did
      last_begun_ = id;
      batch.last = failure;
    }
    actions.push_back(FinishStep{id, std::move(failure)});
    return;
  }
  batch.running = true;
  batch.aborted = false;
  batch.dense_in_flight = false;
  batch.drawing = false;
  batch.drawn_by = drawn_by;
  batch.drawn_in = drawn_by.has_value() ? PlanOf(*drawn_by).step : StepId();
  last_begun_ = id;
  batch.stage = 0;
  batch.awaiting = 0;
  batch.done.reset();
  batch.behind.reset();
  batch.ring = {};
  batch.heads = {};
  batch.pass_q = {};
  batch.hold_key_values = MayHoldKeyValues(batch);
  ++counters_.steps;
  for (const WorkerPart& part : batch.parts)
    actions.push_back(SendStepBegin{part.node, part.epoch, batch.plan.step, id, part.begin});
  actions.push_back(PrepareStep{id});
  BeginRanks(batch, actions);
  Advance(id, actions);
}

// Emits actions up to the next thing that must be waited for.
void ComputeWorkerCore::Advance(MicroBatchId id, std::vector<Action>& actions) {
  MicroBatch& batch = micro_batches_[id.value()];
  while (batch.stage < program_.size()) {
    if (AnswerQueries(batch, actions)) return;
    const Stage& stage = program_[batch.stage];
    switch (stage.kind) {
      case StageKind::kDense:
        batch.dense_in_flight = true;
        actions.push_back(RunDense{id, stage.index});
        return;
      case StageKind::kSendQuery:
        batch.awaiting = ExpectPartials(batch, stage.index);
        actions.push_back(SendQuery{id, stage.index});
        SendQueries(batch, stage.index, actions);
        break;
      case StageKind::kSendKeyValue:
        SendToRanks(batch, stage.index, actions);
        if (batch.hold_key_values) break;
        actions.push_back(SendKeyValue{id, stage.index});
        ExpectAnswers(batch, stage.index);
        AskForRows(batch, stage.index, actions);
        break;
      case StageKind::kAttendPrompts:
        if (SwitchesStates(batch.plan) && table_.linear(table_.op_group[stage.index]) != nullptr) {
          BeginSwitch(batch, stage.index, actions);
          if (AttendsNextHeads(batch, actions) || !SwitchIsDone(batch)) return;
          break;
        }
        if (!AttendsHere(batch, stage.index)) break;
        if (AwaitsWhatItAttends(batch, stage.index)) return;
        batch.dense_in_flight = true;
        actions.push_back(AttendPrompts{id, stage.index});
        return;
      case StageKind::kAwaitPartials:
        if (const int shard = ShardToAttend(batch); shard >= 0) {
          batch.ring.attending = shard;
          batch.dense_in_flight = true;
          actions.push_back(AttendShard{id, stage.index, shard});
          return;
        }
        SendHeads(batch, actions);
        if (AttendsNextHeads(batch, actions)) return;
        if (!MayGoOn(batch)) return;
        break;
    }
    ++batch.stage;
  }
  SendHeldKeyValues(id, actions);
  batch.dense_in_flight = true;
  actions.push_back(Sample{id});
}

void ComputeWorkerCore::SendHeldKeyValues(MicroBatchId id, std::vector<Action>& actions) {
  MicroBatch& batch = micro_batches_[id.value()];
  if (!batch.hold_key_values) return;
  for (const Stage& stage : program_) {
    if (stage.kind != StageKind::kSendKeyValue) continue;
    actions.push_back(SendKeyValue{id, stage.index});
    ExpectAnswers(batch, stage.index);
  }
}

// All partials of the op are there, and the k and v of the next op have somewhere to go: the memory of those that were
// sent key_values_in_flight ops before. A part that has no tokens in the ops between has not been asked since.
bool ComputeWorkerCore::MayGoOn(const MicroBatch& batch) const {
  if (batch.awaiting > 0 || IsAhead(batch) || !RingIsDone(batch) || !SwitchIsDone(batch) || !PassQIsDone(batch))
    return false;
  const int before = program_[batch.stage].index + 1 - options_.key_values_in_flight;
  return batch.hold_key_values || std::all_of(batch.parts.begin(), batch.parts.end(), [&](const WorkerPart& part) {
           return part.unanswered.empty() || part.unanswered.front() > before;
         });
}

// At kAwaitPartials: there is a piece of work that needs no other answer, or nothing is awaited any more.
bool ComputeWorkerCore::MayAdvance(const MicroBatch& batch) const {
  return MayGoOn(batch) || ShardToAttend(batch) >= 0 || HeadsToAttend(batch) >= 0;
}

bool ComputeWorkerCore::TakeAnswer(MicroBatch& batch, const PartialArrived& event) {
  for (WorkerPart& part : batch.parts) {
    if (part.node != event.from || part.epoch != event.epoch || part.unanswered.empty() ||
        part.unanswered.front() != event.op || !event.payload.empty())
      continue;
    part.unanswered.erase(part.unanswered.begin());
    return true;
  }
  return false;
}

int ComputeWorkerCore::ExpectPartials(MicroBatch& batch, int op) {
  const uint16_t group = table_.op_group[op].value();
  int expected = 0;
  for (WorkerPart& part : batch.parts) {
    part.partial = {};
    part.pieces_asked = part.pieces_kept = 0;
    part.awaited = part.layouts[group].asks();
    expected += part.awaited;
  }
  return expected;
}

void ComputeWorkerCore::On(DenseDone event, std::vector<Action>& actions) {
  MicroBatch& batch = micro_batches_[event.micro_batch.value()];
  if (!batch.running) return;
  batch.dense_in_flight = false;
  if (batch.aborted) return Finish(batch, std::move(batch.failure), actions);
  if (const int shard = std::exchange(batch.ring.attending, -1); shard >= 0) {
    batch.ring.attended |= uint32_t{1} << shard;
    TendRing(batch, actions);
    return Advance(event.micro_batch, actions);
  }
  if (const int rank = std::exchange(batch.heads.attending, -1); rank >= 0) {
    AttendedHeads(batch, rank, actions);
    return Advance(event.micro_batch, actions);
  }
  if (AnsweredQueries(batch, actions)) return;
  const Stage& stage = program_[batch.stage];
  if (stage.kind == StageKind::kAttendPrompts) AttendedToRanks(batch, stage.index, actions);
  ++batch.stage;
  Advance(event.micro_batch, actions);
}

ComputeWorkerCore::MicroBatch* ComputeWorkerCore::Running(MicroBatchId id, StepId step) {
  if (id.value() >= micro_batches_.size()) return nullptr;
  MicroBatch& batch = micro_batches_[id.value()];
  return batch.running && batch.plan.step == step ? &batch : nullptr;
}

void ComputeWorkerCore::On(PartialArrived event, std::vector<Action>& actions) {
  MicroBatch* batch = Running(event.micro_batch, event.step);
  if (batch != nullptr && TakeAnswer(*batch, event)) {
    if (batch->done.has_value()) {
      if (MayFinish(*batch)) Finish(*batch, *std::move(batch->done), actions);
      return;
    }
    const bool waits = batch->stage < program_.size() && program_[batch->stage].kind == StageKind::kAwaitPartials;
    if (waits && !batch->dense_in_flight && !batch->aborted && MayGoOn(*batch)) Advance(event.micro_batch, actions);
    return;
  }
  // Decode rows may be answered while the op's prompts are attended here.
  const bool in_program = batch != nullptr && event.op < table_.op_count() && batch->stage < program_.size() &&
                          program_[batch->stage].index == event.op &&
                          (program_[batch->stage].kind == StageKind::kAwaitPartials ||
                           program_[batch->stage].kind == StageKind::kAttendPrompts);
  if (in_program) {
    for (WorkerPart& part : batch->parts) {
      if (part.node != event.from || part.epoch != event.epoch || !part.awaited ||
          AnswerBytes(*batch, part, event.op) != static_cast<int64_t>(event.payload.size()))
        continue;
      part.awaited = false;
      part.partial = event.payload;
      --batch->awaiting;
      const bool may_go_on = program_[batch->stage].kind == StageKind::kAttendPrompts
                                 ? !AwaitsWhatItAttends(*batch, event.op)
                                 : MayAdvance(*batch);
      if (may_go_on && !batch->aborted && !batch->dense_in_flight) Advance(event.micro_batch, actions);
      return;
    }
  }
  ++counters_.dropped_frames;
}

void ComputeWorkerCore::On(StepRefused event, std::vector<Action>& actions) {
  MicroBatch* batch = Running(event.micro_batch, event.step);
  const WorkerPart* from = nullptr;
  if (batch != nullptr)
    for (const WorkerPart& part : batch->parts)
      if (part.node == event.from && part.epoch == event.epoch) from = &part;
  if (from == nullptr || batch->aborted) {
    ++counters_.dropped_frames;
    return;
  }
  const StepStatus status = event.refused.out_of_memory      ? StepStatus::kOutOfMemory
                            : !event.refused.damaged.empty() ? StepStatus::kDamaged
                                                             : StepStatus::kWorkerFailed;
  Abort(*batch, *from, status, event.refused.reason, actions, std::move(event.refused.damaged));
}

void ComputeWorkerCore::Abort(MicroBatch& batch, const WorkerPart& by, StepStatus status, const std::string& reason,
                              std::vector<Action>& actions, std::vector<SequenceId> damaged) {
  Abort(batch,
        {.step = batch.plan.step,
         .micro_batch = batch.plan.micro_batch,
         .status = status,
         .error = absl::StrCat("attention worker ", by.worker.value(), ": ", reason),
         .failed_worker = by.worker,
         .damaged = std::move(damaged)},
        actions);
}

void ComputeWorkerCore::Abort(MicroBatch& batch, StepResult failure, std::vector<Action>& actions) {
  batch.aborted = true;
  batch.failure = std::move(failure);
  if (!batch.dense_in_flight) Finish(batch, std::move(batch.failure), actions);
}

void ComputeWorkerCore::DropBefore(MicroBatchId id, StepId step) {
  if (id.value() < micro_batches_.size() && Running(id, step) == nullptr) inbox_.End(id, step);
}

void ComputeWorkerCore::On(StepWithdrawn event, std::vector<Action>& actions) {
  StepResult withdrawn{.step = event.step,
                       .micro_batch = event.micro_batch,
                       .status = StepStatus::kWorkerFailed,
                       .error = "the scheduler has withdrawn the step"};
  if (waiting_.has_value() && waiting_->step == event.step) {
    waiting_.reset();
    actions.push_back(FinishStep{event.micro_batch, std::move(withdrawn)});
    return;
  }
  MicroBatch* const batch = Running(event.micro_batch, event.step);
  if (batch == nullptr) DropBefore(event.micro_batch, event.step);
  if (batch == nullptr || batch->aborted) return;  // it has ended, or is about to
  Abort(*batch, std::move(withdrawn), actions);
}

void ComputeWorkerCore::On(AttentionWorkerLost event, std::vector<Action>& actions) {
  std::erase_if(workers_,
                [&](const AttentionWorkerAddress& a) { return a.worker == event.worker && a.epoch == event.epoch; });
  for (MicroBatch& batch : micro_batches_) {
    if (!batch.running || batch.aborted) continue;
    for (const WorkerPart& part : batch.parts) {
      if (part.worker != event.worker || part.epoch != event.epoch) continue;
      Abort(batch, part, StepStatus::kWorkerUnreachable, "lost", actions);
      break;
    }
  }
}

void ComputeWorkerCore::On(SampleBegun event, std::vector<Action>& actions) {
  MicroBatch& batch = micro_batches_[event.micro_batch.value()];
  if (!batch.running) return;
  batch.drawing = true;
  if (event.micro_batch == waits_for_) BeginWaiting(actions);
}

void ComputeWorkerCore::On(SampleDone event, std::vector<Action>& actions) {
  MicroBatch& batch = micro_batches_[event.micro_batch.value()];
  if (!batch.running) return;
  batch.dense_in_flight = false;
  if (batch.aborted) return Finish(batch, std::move(batch.failure), actions);
  if (MayFinish(batch)) return Finish(batch, std::move(event.result), actions);
  batch.done = std::move(event.result);
  AnswerQueries(batch, actions);
}

void ComputeWorkerCore::On(const StepFailed& event, std::vector<Action>& actions) {
  MicroBatch& batch = micro_batches_[event.micro_batch.value()];
  if (!batch.running) return;
  batch.dense_in_flight = false;
  // Its first failure is what ended it.
  if (batch.aborted) return Finish(batch, std::move(batch.failure), actions);
  const bool only = absl::IsUnavailable(event.status) && batch.parts.size() == 1;
  if (const int part = only ? 0 : event.unanswered; part >= 0) {
    const std::string why(event.status.message());
    return Abort(batch, batch.parts[part], StepStatus::kWorkerUnreachable, why, actions);
  }
  const StepStatus status =
      absl::IsResourceExhausted(event.status) ? StepStatus::kOutOfMemory : StepStatus::kWorkerFailed;
  Finish(batch,
         StepResult{.step = batch.plan.step,
                    .micro_batch = event.micro_batch,
                    .status = status,
                    .error = std::string(event.status.message())},
         actions);
}

void ComputeWorkerCore::Finish(MicroBatch& batch, StepResult result, std::vector<Action>& actions) {
  const MicroBatchId id = batch.plan.micro_batch;
  batch.running = batch.drawing = false;
  if (result.status == StepStatus::kOk) {
    result.prefix = PrefixTrafficOf(batch);
    result.work = PromptWorkOf(batch);
  }
  EndPrompts(batch, result.status == StepStatus::kOk);
  if (!batch.plan.ranks.empty()) inbox_.End(id, batch.plan.step);
  // Only what a step to come may ask for: one that waits or began with these tokens.
  batch.last = StepResult{.step = result.step,
                          .micro_batch = id,
                          .status = result.status,
                          .error = result.error,
                          .failed_worker = result.failed_worker,
                          .damaged = result.damaged};
  for (const proto::EntryResult& entry : result.entries) {
    proto::EntryResult& kept = batch.last->entries.emplace_back();
    kept.sequence = entry.sequence;
    kept.position = entry.position;
    kept.token = entry.status == StepStatus::kOk ? entry.token : -1;
  }
  EndInOrder(batch, std::move(result), actions);
  if (batch.last->status != StepStatus::kOk) FailFollower(id, actions);
  if (id == waits_for_) BeginWaiting(actions);
}

}  // namespace dovetail::compute
