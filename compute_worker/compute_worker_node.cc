#include "compute_worker/compute_worker_node.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "base/log.h"
#include "compute_worker/cpu/cpu_dense.h"
#include "compute_worker/prompt_scratch_size.h"
#include "compute_worker/tuned_options.h"
#include "proto/gather_frames.h"
#include "proto/rank_frames.h"
#include "proto/trace_frame.h"

namespace dovetail::compute {
namespace {

constexpr size_t kWaitsKept = 63;
constexpr absl::Duration kLeastPatience = absl::Milliseconds(100);
constexpr absl::Duration kFirstPatience = absl::Seconds(1);  // before anything is usual
constexpr int kUsualWaits = 5;

// What is done for a step that has ended, too.
bool IsOfEndedStep(const Action& action) {
  return std::holds_alternative<FinishStep>(action) || std::holds_alternative<KeepRankRows>(action) ||
         std::holds_alternative<SendRankAttended>(action) || std::holds_alternative<SendRankOutputs>(action);
}

}  // namespace

using proto::FrameType;
using proto::MakeHeader;
using proto::StepStatus;

ComputeWorkerNode::ComputeWorkerNode(const model::LoadedModel& model, const proto::AttentionTable& table,
                                     const ComputeWorkerOptions& options, NodeId scheduler, kernels::Device& device,
                                     transport::Port& port, Clock& clock, const ComputeWorkerTuning& tuning)
    : ComputeWorkerNode(model, table, Tuned(options, tuning, table), scheduler, device, port, clock, tuning, nullptr) {}

absl::StatusOr<std::unique_ptr<ComputeWorkerNode>> ComputeWorkerNode::Create(
    const model::LoadedModel& model, const proto::AttentionTable& table, const ComputeWorkerOptions& options,
    NodeId scheduler, kernels::Device& device, transport::Port& port, Clock& clock, const ComputeWorkerTuning& tuning) {
  const ComputeWorkerOptions tuned = Tuned(options, tuning, table);
  std::unique_ptr<DenseBackend> dense;
  if (tuning.dense != nullptr) {
    DT_ASSIGN_OR_RETURN(dense, tuning.dense->Create(table, tuned, tuning.shared_gpu));
  }
  return std::unique_ptr<ComputeWorkerNode>(
      new ComputeWorkerNode(model, table, tuned, scheduler, device, port, clock, tuning, std::move(dense)));
}

ComputeWorkerNode::ComputeWorkerNode(const model::LoadedModel& model, const proto::AttentionTable& table,
                                     const ComputeWorkerOptions& options, NodeId scheduler, kernels::Device& device,
                                     transport::Port& port, Clock& clock, const ComputeWorkerTuning& tuning,
                                     std::unique_ptr<DenseBackend> dense)
    : scheduler_(scheduler),
      trace_(tuning.trace),
      spans_(tuning.spans),
      core_(table, ProgramOf(model, tuning.q_first), options),
      device_(device),
      dense_(dense != nullptr
                 ? std::move(dense)
                 : std::make_unique<CpuDense>(model, core_.table(), device, options.micro_batches, tuning.kv_storage)),
      port_(port),
      clock_(clock),
      links_(core_, port, tuning.exchange),
      rank_links_(port, clock, dense_->rank_memory()),
      rank_reach_(tuning.names_rank_memory ? dense_->rank_memory() : nullptr, rank_links_),
      rank_exchange_(core_, *dense_, rank_links_),
      earlier_rows_(core_, port),
      seam_(core_, WaysOf(core_, *dense_, links_, port, tuning.shared_gpu, tuning.exchange.required)),
      timers_(options.micro_batches) {
  actions_.reserve(64);
  waits_.reserve(kWaitsKept);
}

void ComputeWorkerNode::AddAttentionWorker(const AttentionWorkerAddress& address) {
  core_.AddAttentionWorker(address);
  links_.AddPeer(address);
}

void ComputeWorkerNode::LoseAttentionWorker(WorkerId worker, Epoch epoch) {
  links_.LosePeer(worker, epoch);
  Feed(AttentionWorkerLost{worker, epoch});
}

void ComputeWorkerNode::OnFrame(const transport::Delivery& delivery) {
  const proto::FrameHeader& header = delivery.header;
  if (!proto::Validate(header).ok() || header.payload_bytes != delivery.payload.size()) return;
  const StepId step(header.step);
  if (header.type == proto::kTraceSequence) return spans_.Trace(delivery.payload);
  const MicroBatchId id(header.micro_batch);
  if (header.type == proto::kLinkAnswer || header.type == proto::kLinkThere) return links_.OnFrame(delivery);
  if (proto::IsMemoryFrame(header.type)) return rank_reach_.OnFrame(delivery);
  if (proto::IsRankFrame(header.type) || header.type == proto::kEarlierRows) return OnRankFrame(delivery);
  switch (header.type) {
    case FrameType::kStepPlan: {
      auto plan = proto::DecodeStepPlan(delivery.payload);
      if (!plan.ok()) return Refuse(id, step, StepStatus::kWorkerFailed, plan.status());
      if (const absl::Status known = lists_.Complete(*plan); !known.ok())
        return Refuse(id, step, StepStatus::kForgotten, known);
      if (auto pending = dense_->PendingGrammars(*plan); !pending.empty())
        return Postpone(id, step, std::move(pending));
      links_.TellLinked(core_);
      return Feed(PlanArrived{*std::move(plan)});
    }
    case FrameType::kWithdrawStep: return Withdraw(id, step);
    case FrameType::kPartial:
      NoteBusy(header);
      if (header.micro_batch < timers_.size()) Note("partial arrives", id, header.op);
      return Feed(PartialArrived{delivery.from, Epoch(header.epoch), step, id, header.op, delivery.payload});
    case FrameType::kStepRefused: {
      auto refused = proto::Decode<proto::StepRefused>(delivery.payload);
      if (id.value() < timers_.size() && core_.running(id) && core_.PlanOf(id).step == step)
        seam_.Of(id).EndFailed(id, step);
      if (!refused.ok()) refused = proto::StepRefused{.reason = "the refusal itself cannot be read"};
      Feed(StepRefused{delivery.from, Epoch(header.epoch), step, id, *std::move(refused)});
      return;
    }
    default: return;
  }
}

void ComputeWorkerNode::Withdraw(MicroBatchId id, StepId step) {
  if (id.value() < timers_.size() && core_.running(id) && core_.PlanOf(id).step == step)
    seam_.Of(id).EndFailed(id, step);
  Feed(StepWithdrawn{step, id});
}

void ComputeWorkerNode::Refuse(MicroBatchId id, StepId step, StepStatus status, const absl::Status& why) {
  LogError("compute worker: ", std::string(why.message()));
  core_.DropBefore(id, step);
  FinishStep finish{id, {.step = step, .micro_batch = id, .status = status, .error = std::string(why.message())}};
  if (absl::Status sent = Perform(finish); !sent.ok()) LogError("compute worker: ", std::string(sent.message()));
}

void ComputeWorkerNode::Postpone(MicroBatchId id, StepId step, std::vector<SequenceId> pending) {
  core_.DropBefore(id, step);
  FinishStep finish{id, {.step = step, .micro_batch = id, .status = StepStatus::kGrammarPending}};
  finish.result.pending = std::move(pending);
  if (absl::Status sent = Perform(finish); !sent.ok()) LogError("compute worker: ", std::string(sent.message()));
}

// Until now, or an instant.
void ComputeWorkerNode::Note(const char* what, MicroBatchId id, int op, absl::Time begin) {
  if (trace_ == nullptr || !core_.running(id)) return;
  const absl::Time now = clock_.Now();
  const absl::Time since = begin == absl::InfinitePast() ? now : begin;
  trace_->Add({what, since, now - since, core_.PlanOf(id).step, id, op});
}

void ComputeWorkerNode::NoteBusy(const proto::FrameHeader& partial) {
  if (partial.micro_batch >= timers_.size()) return;
  Timer& timer = timers_[partial.micro_batch];
  if (timer.op != partial.op) {
    timer.attention += timer.op_busy;
    timer.op_busy = absl::ZeroDuration();
    timer.op = partial.op;
  }
  timer.op_busy = std::max(timer.op_busy, absl::Microseconds(partial.busy_us));
}

// Performing an action may feed the core again (a dense piece is done when Perform returns), so actions wait in a list.
void ComputeWorkerNode::Feed(Event event) {
  const bool outermost = actions_.empty();
  if (const auto* arrived = std::get_if<PlanArrived>(&event); arrived != nullptr) {
    const size_t id = arrived->plan.micro_batch.value();
    if (id < timers_.size() && !core_.CameBefore(arrived->plan)) {
      timers_[id] = Timer{.begun = clock_.Now()};
      spans_.Begin(arrived->plan, timers_[id].begun);
    }
  }
  if (const auto* partial = std::get_if<PartialArrived>(&event); partial != nullptr) {
    Timer& timer = timers_[partial->micro_batch.value() < timers_.size() ? partial->micro_batch.value() : 0];
    const absl::Time now = clock_.Now();
    Waited(timer, now);
    if (waits_.size() < kWaitsKept) waits_.resize(waits_.size() + 1);
    waits_[next_wait_++ % kWaitsKept] = now - timer.sent;
  }
  if (const std::optional<MicroBatchId> id = RankExchange::MicroBatchOf(event);
      id && id->value() < timers_.size() && core_.running(*id))
    Waited(timers_[id->value()], clock_.Now());
  core_.Handle(std::move(event), actions_);
  if (outermost) PerformAll();
}

void ComputeWorkerNode::PerformAll() {
  for (size_t i = 0; i < actions_.size(); ++i) {
    Action action = std::move(actions_[i]);
    const MicroBatchId id = std::visit([](const auto& a) { return a.micro_batch; }, action);
    // What was asked for before a step failed is void.
    if (!core_.running(id) && !IsOfEndedStep(action)) continue;
    if (const absl::Status status = Perform(action); !status.ok()) {
      LogError("compute worker: ", std::string(status.message()));
      FailStep(id, status);
      if (!health_.ok()) break;
    }
  }
  actions_.clear();
}

absl::Status ComputeWorkerNode::Perform(Action& action) {
  struct Visitor {
    ComputeWorkerNode& node;
    absl::Status operator()(SendStepBegin& a) { return node.Perform(a); }
    absl::Status operator()(PrepareStep& a) {
      return node.dense_->PrepareStep(node.core_, a.micro_batch, node.seam_.Of(a.micro_batch).SeamOf(a.micro_batch));
    }
    absl::Status operator()(RunDense& a) { return node.Perform(a); }
    absl::Status operator()(SendQuery& a) {
      node.timers_[a.micro_batch.value()].sent = node.clock_.Now();
      node.Note("send q", a.micro_batch, a.op);
      DT_RETURN_IF_ERROR(node.seam_.Of(a.micro_batch).SendQuery(a.micro_batch, a.op));
      node.NoteLate(a.micro_batch);
      return absl::OkStatus();
    }
    absl::Status operator()(SendKeyValue& a) { return node.Perform(a); }
    absl::Status operator()(AskRows& a) { return node.earlier_rows_.Ask(a, node.IsLate(a.micro_batch)); }
    absl::Status operator()(KeepEarlierRows& a) { return node.Perform(a); }
    absl::Status operator()(AttendPrompts& a) { return node.Perform(a); }
    absl::Status operator()(SendRankState& a) { return node.SendToRanks("send state", a, &RankExchange::SendState); }
    absl::Status operator()(AttendShard& a) {
      return node.AttendForRanks("attend shard", a, &DenseBackend::AttendRankShard);
    }
    absl::Status operator()(SendRankRows& a) { return node.SendToRanks("send rows", a, &RankExchange::SendRows); }
    absl::Status operator()(ForwardRankRows& a) { return node.SendToRanks("hand on rows", a, &RankExchange::HandOn); }
    absl::Status operator()(KeepRankRows& a) { return node.Perform(a); }
    absl::Status operator()(SendRankAttended& a) { return node.rank_links_.SendAttended(a.to, a.op, a.rank); }
    absl::Status operator()(SendRankHeads& a) { return node.SendToRanks("send heads", a, &RankExchange::SendHeads); }
    absl::Status operator()(AttendHeads& a) {
      return node.AttendForRanks("attend heads", a, &DenseBackend::AttendRankHeads);
    }
    absl::Status operator()(SendRankQueries& a) {
      node.Note("send queries", a.micro_batch, a.op);
      return node.rank_exchange_.SendQueries(a);
    }
    absl::Status operator()(AttendQueries& a) {
      return node.AttendForRanks("attend queries", a, &DenseBackend::AttendRankQueries);
    }
    absl::Status operator()(SendRankOutputs& a) {
      node.Note("send outputs", a.micro_batch, a.op);
      DT_RETURN_IF_ERROR(node.rank_exchange_.SendOutputs(a));
      if (node.core_.running(a.micro_batch)) node.NoteLate(a.micro_batch);
      return absl::OkStatus();
    }
    absl::Status operator()(PlaceRankOutputs& a) { return node.dense_->PlaceOutputs(node.core_, a); }
    absl::Status operator()(Sample& a) { return node.Perform(a); }
    absl::Status operator()(FinishStep& a) { return node.Perform(a); }
  };
  return std::visit(Visitor{*this}, action);
}

absl::Status ComputeWorkerNode::Perform(SendStepBegin& send) {
  DT_RETURN_IF_ERROR(seam_.Choose(send.micro_batch));
  return seam_.Of(send.micro_batch).SendBegin(send);
}

absl::Status ComputeWorkerNode::Perform(SendKeyValue& send) {
  Crossing& way = seam_.Of(send.micro_batch);
  BeginWaiting(timers_[send.micro_batch.value()], clock_.Now());
  Note("send k, v", send.micro_batch, send.op);
  DT_RETURN_IF_ERROR(way.SendKeyValue(send.micro_batch, send.op));
  NoteLate(send.micro_batch);
  const int parts = static_cast<int>(core_.PartsOf(send.micro_batch).size());
  for (int p = 0; p < parts; ++p)
    if (auto answer = way.Answer(send.micro_batch, send.op, p); answer.has_value()) core_.Handle(*answer, actions_);
  return absl::OkStatus();
}

void ComputeWorkerNode::BeginWaiting(Timer& timer, absl::Time now) {
  timer.waiting_since = now;
  timer.worked_at_waiting = worked_;
}

// Something that it may have waited for has come.
void ComputeWorkerNode::Waited(Timer& timer, absl::Time now) {
  timer.waiting += now - timer.waiting_since;
  timer.overlapped += worked_ - timer.worked_at_waiting;
  BeginWaiting(timer, now);
}

// A step's own work has ended, to which `part` adds; it may wait from now on.
void ComputeWorkerNode::Worked(absl::Duration& part, Timer& timer, absl::Time begun) {
  const absl::Time now = clock_.Now();
  part += now - begun;
  worked_ += now - begun;
  BeginWaiting(timer, now);
}

absl::Status ComputeWorkerNode::Perform(RunDense& run) {
  const absl::Time begun = clock_.Now();
  DT_RETURN_IF_ERROR(dense_->Run(core_, run.micro_batch, run.index));
  Note("dense", run.micro_batch, run.index, begun);
  Timer& timer = timers_[run.micro_batch.value()];
  Worked(timer.dense, timer, begun);
  core_.Handle(DenseDone{run.micro_batch}, actions_);
  return absl::OkStatus();
}

absl::Status ComputeWorkerNode::Perform(AttendPrompts& attend) {
  const absl::Time begun = clock_.Now();
  DT_RETURN_IF_ERROR(dense_->AttendPrompts(core_, attend.micro_batch, attend.op));
  Note("attend prompts", attend.micro_batch, attend.op, begun);
  Timer& timer = timers_[attend.micro_batch.value()];
  const absl::Duration before = timer.prompts;
  Worked(timer.prompts, timer, begun);
  if (core_.table().linear(core_.table().op_group[attend.op]) != nullptr) timer.linear += timer.prompts - before;
  core_.Handle(DenseDone{attend.micro_batch}, actions_);
  return absl::OkStatus();
}

// Attention to what another rank has sent, or for it.
template <typename Attend>
absl::Status ComputeWorkerNode::AttendForRanks(const char* what, const Attend& attend,
                                               absl::Status (DenseBackend::*run)(const ComputeWorkerCore&,
                                                                                 const Attend&)) {
  const absl::Time begun = clock_.Now();
  DT_RETURN_IF_ERROR((dense_.get()->*run)(core_, attend));
  Note(what, attend.micro_batch, attend.op, begun);
  Timer& timer = timers_[attend.micro_batch.value()];
  const absl::Duration before = timer.prompts;
  Worked(timer.prompts, timer, begun);
  if (core_.table().linear(core_.table().op_group[attend.op]) != nullptr) timer.linear += timer.prompts - before;
  core_.Handle(DenseDone{attend.micro_batch}, actions_);
  return absl::OkStatus();
}

// Now, or when the device has it.
template <typename Send, typename By>
absl::Status ComputeWorkerNode::SendToRanks(const char* what, Send& send, By by) {
  Note(what, send.micro_batch, send.op);
  DT_RETURN_IF_ERROR((rank_exchange_.*by)(send));
  NoteLate(send.micro_batch);
  return absl::OkStatus();
}

// The attention worker is not late while pieces come.
absl::Status ComputeWorkerNode::Perform(KeepEarlierRows& keep) {
  timers_[keep.micro_batch.value()].sent = clock_.Now();
  return dense_->KeepEarlierRows(core_, keep);
}

// A cache: what goes wrong here ends no step.
absl::Status ComputeWorkerNode::Perform(KeepRankRows& keep) {
  Note("keep rows", keep.micro_batch, keep.op);
  RankRowsKept kept{keep.micro_batch, keep.step, keep.op, keep.rank, /*kept=*/false};
  if (const PromptScratch::Part* const part = core_.PartToKeepIn(keep.micro_batch, keep.step); part != nullptr) {
    const absl::Status status = dense_->KeepRankRows(core_, keep, *part);
    if (!status.ok()) LogError("compute worker: K and V of a later rank: ", std::string(status.message()));
    kept.kept = status.ok();
  }
  core_.Handle(kept, actions_);
  return absl::OkStatus();
}

// Tensors are copied before they are answered: from then on their sender may use that memory again.
void ComputeWorkerNode::OnRankFrame(const transport::Delivery& delivery) {
  const proto::FrameHeader& header = delivery.header;
  const MicroBatchId id(header.micro_batch);
  if (header.type == proto::kRankTaken) return rank_links_.OnTaken(delivery.from, header);
  if (header.type == proto::kRankAttended)
    return Feed(RankAttended{StepId(header.step), id, header.op, proto::RankOf(header)});
  rank_exchange_.Take(delivery);
  TakeFromRanks();
}

int ComputeWorkerNode::TakeFromRanks() {
  for (auto next = rank_exchange_.Next(); health_.ok(); next = rank_exchange_.Next()) {
    if (!next.ok()) {
      LogError("compute worker: from another rank: ", std::string(next.status().message()));
      health_ = device_.Health();
      break;
    }
    if (!next->has_value()) break;
    const proto::FrameHeader header = (*next)->header;
    const MicroBatchId id(header.micro_batch);
    if (!(*next)->taken.ok()) {
      FailOfRank(header, (*next)->taken);
      continue;
    }
    if (id.value() < timers_.size()) Note(RankExchange::NameOf(header.type), id, header.op);
    Feed(RankExchange::EventOf(*std::move(*next)));
  }
  return rank_exchange_.copies() ? 1 : 0;
}

// A later rank, whose rows would have been kept, waits for that.
void ComputeWorkerNode::FailOfRank(const proto::FrameHeader& header, const absl::Status& why) {
  LogError("compute worker: from another rank: ", std::string(why.message()));
  const MicroBatchId id(header.micro_batch);
  if (id.value() >= timers_.size()) return;
  if (core_.running(id) && core_.PlanOf(id).step == StepId(header.step)) FailStep(id, why);
  if (header.type == proto::kRankRows)
    core_.Handle(RankRowsKept{id, StepId(header.step), header.op, proto::RankOf(header)}, actions_);
  PerformAll();
}

// Drawing waits for the device, and what is late would wait with it.
absl::Status ComputeWorkerNode::Perform(Sample& sample) {
  const MicroBatchId id = sample.micro_batch;
  if (IsLate(id)) {
    undrawn_.push_back(id);
    return absl::OkStatus();
  }
  DT_ASSIGN_OR_RETURN(const bool begun, dense_->BeginSample(core_.PlanOf(id), id));
  if (!begun) {
    // Results come in the order of draws.
    const std::optional<MicroBatchId> before = core_.DrawnBy(id);
    if (before.has_value() && std::erase(drawing_, *before) > 0) EndDraw(*before);
    return health_.ok() && core_.running(id) ? FinishSample(id) : absl::OkStatus();
  }
  drawing_.push_back(id);
  core_.Handle(SampleBegun{id}, actions_);
  return absl::OkStatus();
}

absl::Status ComputeWorkerNode::FinishSample(MicroBatchId id) {
  const absl::Time begun = clock_.Now();
  const proto::StepPlan& plan = core_.PlanOf(id);
  proto::StepResult result;
  result.step = plan.step;
  result.micro_batch = plan.micro_batch;
  DT_RETURN_IF_ERROR(dense_->Sample(plan, id, result));
  Timer& timer = timers_[id.value()];
  Worked(timer.sampling, timer, begun);
  const auto times = dense_->TimesOf(id);
  timer.measured = times.has_value() || !dense_->only_enqueues();
  if (times.has_value()) {
    timer.dense = times->busy;
    timer.prompts = times->prompts;
    timer.linear = times->linear;
    timer.waiting = times->waited;
    if (times->attention) {
      timer.attention = *times->attention;
      timer.op_busy = absl::ZeroDuration();
    }
    timer.sampling = timer.overlapped = absl::ZeroDuration();
  }
  Note("sample", id, -1, begun);
  core_.Handle(SampleDone{id, std::move(result)}, actions_);
  return absl::OkStatus();
}

int ComputeWorkerNode::Poll() {
  if (!health_.ok()) return 0;
  const int frames = SendUnsent() + SendLate() + rank_links_.SendWaiting() + port_.Poll(*this, kFramesPerPoll) +
                     TakeFromRanks() + (links_.Progress() ? 1 : 0);
  // What has arrived goes first: a step that failed elsewhere may end its waits on the device.
  if (frames > 0 || drawing_.empty()) return frames;
  const auto drawn = std::find_if(drawing_.begin(), drawing_.end(), [this](MicroBatchId id) {
    return !core_.running(id) || dense_->Drawn(id);  // its attention worker may be lost meanwhile
  });
  if (drawn == drawing_.end()) return 1;  // the device is looked at again at once
  const MicroBatchId id = *drawn;
  drawing_.erase(drawn);
  EndDraw(id);
  if (health_.ok()) PerformAll();
  return 1;
}

// Waits for the device. The step may have ended meanwhile.
void ComputeWorkerNode::EndDraw(MicroBatchId id) {
  if (!core_.running(id)) return;
  if (const absl::Status status = FinishSample(id); !status.ok()) {
    LogError("compute worker: ", std::string(status.message()));
    FailStep(id, status);
  }
}

absl::Status ComputeWorkerNode::Perform(FinishStep& finish) {
  if (finish.micro_batch.value() < timers_.size()) {
    const Timer& timer = timers_[finish.micro_batch.value()];
    finish.result.timings = {absl::ToInt64Microseconds(clock_.Now() - timer.begun),
                             absl::ToInt64Microseconds(timer.dense),
                             absl::ToInt64Microseconds(timer.waiting),
                             absl::ToInt64Microseconds(timer.sampling),
                             absl::ToInt64Microseconds(std::min(timer.attention + timer.op_busy, timer.waiting)),
                             absl::ToInt64Microseconds(timer.prompts),
                             absl::ToInt64Microseconds(std::min(timer.overlapped, timer.waiting)),
                             absl::ToInt64Microseconds(timer.linear)};
    if (!timer.measured) finish.result.work = {};
  }
  if (finish.result.status == StepStatus::kOk) finish.result.transfers = rank_links_.TakeTransfers();
  spans_.End(finish.result, clock_.Now());
  if (!unsent_.empty() || !Sent(finish.result)) unsent_.push_back(std::move(finish.result));
  return absl::OkStatus();
}

absl::Status ComputeWorkerNode::SendResult(const proto::StepResult& result) {
  std::vector<std::byte> message;
  proto::Encode(result, message);
  const auto header = MakeHeader(FrameType::kStepResult, Epoch(0), result.step, result.micro_batch, 0, message.size());
  return port_.SendMessage(scheduler_, header, std::move(message));
}

// A scheduler that has left needs no answer. For any other reason this result never can be sent, and one that says so
// can.
bool ComputeWorkerNode::Sent(proto::StepResult& result) {
  absl::Status sent = SendResult(result);
  if (sent.ok()) return true;
  if (absl::IsResourceExhausted(sent)) return false;
  LogError("compute worker: the result of step ", result.step.value(), ": ", std::string(sent.message()));
  if (absl::IsUnavailable(sent) || absl::IsNotFound(sent)) return true;
  result = {.step = result.step,
            .micro_batch = result.micro_batch,
            .status = StepStatus::kWorkerFailed,
            .error = absl::StrCat("the step's result cannot be sent: ", std::string(sent.message())),
            .timings = result.timings};
  sent = SendResult(result);
  return !absl::IsResourceExhausted(sent);
}

bool ComputeWorkerNode::IsLate(MicroBatchId id) const {
  return std::find(late_.begin(), late_.end(), id) != late_.end();
}

void ComputeWorkerNode::NoteLate(MicroBatchId id) {
  if ((seam_.Of(id).HasLate(id) || rank_exchange_.HasLate(id)) && !IsLate(id)) late_.push_back(id);
}

// Not 0 while a payload is late: the device does not announce when it has it.
int ComputeWorkerNode::SendLate() {
  const int late = static_cast<int>(late_.size());
  for (size_t i = 0; i < late_.size();) {
    const MicroBatchId id = late_[i];
    absl::StatusOr<Crossing::Late> sent = Crossing::Late();
    const absl::StatusOr<int> rows = rank_exchange_.SendLate(id);
    if (!rows.ok()) sent = rows.status();
    if (sent.ok() && core_.running(id)) sent = seam_.Of(id).SendLate(id);
    if (sent.ok()) sent->waiting += *rows;
    if (sent.ok() && sent->sent > 0) {  // until now its device has computed them
      Timer& timer = timers_[id.value()];
      timer.sent = clock_.Now();
      timer.dense += timer.sent - timer.waiting_since;
      BeginWaiting(timer, timer.sent);
    }
    if (sent.ok() && sent->waiting > 0) {
      ++i;
      continue;
    }
    late_.erase(late_.begin() + static_cast<std::ptrdiff_t>(i));
    const bool draws = std::erase(undrawn_, id) > 0 && core_.running(id);
    Sample sample{id};
    absl::Status status = sent.ok() ? earlier_rows_.AskLate(id) : sent.status();
    if (status.ok() && draws) status = Perform(sample);
    if (status.ok()) continue;
    LogError("compute worker: ", std::string(status.message()));
    FailStep(id, status);
    if (!health_.ok()) return late;
  }
  if (late > 0) PerformAll();
  return late;
}

int ComputeWorkerNode::SendUnsent() {
  int sent = 0;
  for (; !unsent_.empty() && Sent(unsent_.front()); ++sent) unsent_.pop_front();
  return sent;
}

std::vector<NodeId> ComputeWorkerNode::Overdue() const {
  const absl::Time now = clock_.Now();
  std::vector<NodeId> overdue;
  absl::Duration patience = absl::ZeroDuration();
  for (size_t id = 0; id < timers_.size(); ++id) {
    const MicroBatchId micro_batch(static_cast<uint16_t>(id));
    if (!core_.running(micro_batch) || now - timers_[id].sent < kLeastPatience) continue;
    if (core_.PlanOf(micro_batch).part.rank > 0) continue;  // it also waits for the ranks before it
    if (IsLate(micro_batch)) continue;                      // for its own device
    if (patience == absl::ZeroDuration()) {
      std::vector<absl::Duration> waits = waits_;
      const auto median = waits.begin() + static_cast<int64_t>(waits.size() / 2);
      std::nth_element(waits.begin(), median, waits.end());
      patience = waits.empty() ? kFirstPatience : std::max(kLeastPatience, kUsualWaits * *median);
    }
    if (now - timers_[id].sent < patience) continue;
    for (const WorkerPart& part : core_.PartsOf(micro_batch))
      if ((part.awaited || part.pieces_kept < part.pieces_asked || !part.unanswered.empty()) &&
          std::find(overdue.begin(), overdue.end(), part.node) == overdue.end())
        overdue.push_back(part.node);
  }
  return overdue;
}

// A kernel or a send failed: the step ends as failed, whatever state its machine was in. Unless the device is lost:
// then nothing is wrong with the step, and peers that lose this worker repeat it.
void ComputeWorkerNode::FailStep(MicroBatchId id, const absl::Status& status) {
  health_ = device_.Health();
  if (!health_.ok()) return;
  int unanswered = -1;
  if (core_.running(id)) {
    const StepId step = core_.PlanOf(id).step;
    if (absl::IsUnavailable(status)) unanswered = seam_.Of(id).Unanswered(id, step);
    seam_.Of(id).EndFailed(id, step);
  }
  core_.Handle(StepFailed{id, status, unanswered}, actions_);
}

}  // namespace dovetail::compute
