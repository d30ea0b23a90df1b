#include "scheduler/scheduler_node.h"

#include <algorithm>
#include <string>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "proto/cache_frames.h"
#include "proto/sequence_frames.h"
#include "proto/trace_frame.h"
#include "scheduler/core/limits.h"

namespace dovetail::scheduler {

using proto::FrameType;
using proto::MakeHeader;

namespace {
constexpr int kFramesPerPoll = 64;
constexpr size_t kMaxUnsent = 16384;  // orders to one peer
constexpr uint64_t kRepeatedDamage = 3;
constexpr absl::Duration kPrefillSaid = absl::Seconds(10);
constexpr absl::Duration kReplayPause = absl::Seconds(1);  // once one gave way
}  // namespace

SchedulerNode::SchedulerNode(const SchedulerOptions& options, uint64_t seed, transport::Port& port, Clock& clock,
                             EmitFn emit, StepFn on_step)
    : core_(options, seed),
      max_model_len_(options.max_model_len),
      replays_(options.replay_one_in > 0),
      replay_(options.replay_one_in),
      port_(port),
      clock_(clock),
      emit_(std::move(emit)),
      on_step_(std::move(on_step)),
      step_tokens_(kMaxMicroBatches) {}

void SchedulerNode::AddAttentionWorker(WorkerId worker, Epoch epoch, NodeId node, uint64_t kv_blocks, double rate,
                                       std::optional<WorkerId> pair) {
  attention_.push_back(Peer{worker, epoch, node});
  Handle(AttentionWorkerJoined{worker, epoch, kv_blocks, rate, pair});
  NoteWhatFits();
}

void SchedulerNode::NoteWhatFits() {
  longest_ = core_.LongestSequence();
  if (longest_ == 0 || longest_ == std::exchange(said_longest_, longest_) || longest_ >= max_model_len_) return;
  LogWarning("the attention workers hold sequences of ", longest_, " tokens at most, less than --max-model-len ",
             max_model_len_,
             ": longer prompts are refused, and answers end there with finish_reason length; give them "
             "more memory, or lower --max-model-len");
}

void SchedulerNode::AddComputeWorker(WorkerId worker, NodeId node, bool leaves_states, int kind) {
  compute_.push_back(Peer{worker, Epoch(0), node});
  Handle(ComputeWorkerJoined{worker, leaves_states, kind});
  NoteWhatFits();
}

void SchedulerNode::LoseAttentionWorker(WorkerId worker, Epoch epoch) {
  std::erase_if(attention_, [&](const Peer& peer) { return peer.worker == worker && peer.epoch == epoch; });
  Handle(AttentionWorkerLost{worker, epoch});
  NoteWhatFits();
}

void SchedulerNode::DrainAttentionWorker(WorkerId worker, Epoch epoch) {
  Handle(AttentionWorkerDraining{worker, epoch});
  NoteWhatFits();
}

void SchedulerNode::LoseComputeWorker(WorkerId worker) {
  const auto left = std::erase_if(compute_, [&](const Peer& peer) { return peer.worker == worker; });
  if (left > 0) Handle(ComputeWorkerLost{worker});  // else the core dismissed it
}

void SchedulerNode::Handle(const Event& event) {
  if (const auto* arrived = std::get_if<RequestArrived>(&event); replays_ && arrived != nullptr)
    replay_.Arrived(arrived->request);
  Apply(event);
  ApplyFailures();
  if (!replays_) return;
  TendReplay();
  ApplyFailures();
}

void SchedulerNode::ApplyFailures() {
  while (!failures_.empty()) {
    const Event failure = std::move(failures_.front());
    failures_.pop_front();
    Apply(failure);
  }
}

void SchedulerNode::NotePrefill() {
  const PrefillForecast& last = core_.last_prefill();
  const bool same = last.ranks == said_prefill_.ranks && last.way() == said_prefill_.way();
  if (same || last.ranks == 0 || clock_.Now() < say_prefill_after_) return;
  if (said_prefill_.ranks > 0 || last.ranks > 1 || last.way() != proto::PrefillWay())
    LogInfo("prompts: ", Describe(last));
  said_prefill_ = last;
  say_prefill_after_ = clock_.Now() + kPrefillSaid;
}

void SchedulerNode::TendReplay() {
  for (const std::string& finding : replay_.TakeFindings()) LogError(finding);
  const bool others_wait = core_.stats().waiting_requests > 0;
  if (const std::optional<RequestId> running = replay_.running()) {
    if (others_wait) Apply(RequestCancelled{*running});
    return;
  }
  if (!replay_.due() || clock_.Now() < replay_not_before_) return;
  replay_not_before_ = clock_.Now() + kReplayPause;
  if (others_wait) return;
  ReplayWorkers workers;
  for (const Peer& peer : attention_) workers.attention.push_back(peer.worker);
  for (const Peer& peer : compute_) workers.compute.push_back(peer.worker);
  if (auto request = replay_.Next(workers)) Apply(RequestArrived{std::move(request)});
}

absl::Time SchedulerNode::NextDeadline() const {
  return replay_.due() ? std::min(core_.NextDeadline(), replay_not_before_) : core_.NextDeadline();
}

SchedulerStats SchedulerNode::stats() const {
  SchedulerStats stats = core_.stats();
  stats.longest_sequence = longest_;
  stats.replays_same = replay_.stats().same;
  stats.replays_different = replay_.stats().different;
  stats.replays_unclear = replay_.stats().unclear;
  return stats;
}

void SchedulerNode::NoteEvent(const Event& event) {
  const absl::Time now = clock_.Now();
  if (const auto* arrived = std::get_if<RequestArrived>(&event)) spans_.Arrived(*arrived->request, now);
  if (const auto* lost = std::get_if<AttentionWorkerLost>(&event)) spans_.AttentionWorkerLost(lost->worker, now);
  if (const auto* lost = std::get_if<ComputeWorkerLost>(&event)) spans_.ComputeWorkerLost(lost->worker, now);
  if (const auto* done = std::get_if<StepFinished>(&event)) spans_.StepEnded(done->result.step, &done->result, "", now);
  if (const auto* bad = std::get_if<StepUnreadable>(&event)) spans_.StepEnded(bad->step, nullptr, bad->error, now);
  if (const auto* moved = std::get_if<SequenceMoved>(&event)) spans_.MoveEnded(moved->moved, now);
}

void SchedulerNode::TellTrace(NodeId node, Epoch epoch, SequenceId sequence, const TraceContext& trace) {
  std::vector<std::byte> bytes;
  proto::Encode(proto::TraceSequence{sequence, trace}, bytes);
  const auto header = MakeHeader(proto::kTraceSequence, epoch, StepId(), MicroBatchId(0), 0, bytes.size());
  port_.SendMessage(node, header, std::move(bytes)).IgnoreError();
}

void SchedulerNode::Apply(const Event& event) {
  NoteEvent(event);
  actions_.clear();
  core_.Handle(event, clock_.Now(), actions_);
  for (Action& action : actions_) SendOrKeep(std::move(action));
}

SchedulerNode::Peer* SchedulerNode::PeerOf(const Action& action) {
  const auto find = [](std::vector<Peer>& peers, WorkerId worker, Epoch epoch) -> Peer* {
    const auto at = std::find_if(peers.begin(), peers.end(),
                                 [&](const Peer& peer) { return peer.worker == worker && peer.epoch == epoch; });
    return at == peers.end() ? nullptr : &*at;
  };
  return std::visit(
      [&](const auto& order) -> Peer* {
        if constexpr (requires { order.compute_worker; })
          return find(compute_, order.compute_worker, Epoch(0));
        else if constexpr (requires { order.worker, order.epoch; })
          return find(attention_, order.worker, order.epoch);
        else
          return nullptr;
      },
      action);
}

// Orders to one peer stay in order; one that reads slowly holds up no other.
void SchedulerNode::SendOrKeep(Action action) {
  Peer* const peer = PeerOf(action);
  if (peer != nullptr && (peer->dismissed || !peer->unsent.empty())) return Keep(*peer, std::move(action));
  if (!Done(action, Perform(action)) && peer != nullptr) Keep(*peer, std::move(action));
}

void SchedulerNode::Keep(Peer& peer, Action action) {
  if (peer.dismissed) return;
  peer.unsent.push_back(std::move(action));
  if (peer.unsent.size() <= kMaxUnsent) return;
  Dismiss(peer, absl::StrCat("it has left ", kMaxUnsent, " orders unread"));
  peer.unsent.clear();
}

// What was to be done there, or was done, is not known on both sides any more: its sequences begin again elsewhere.
void SchedulerNode::Dismiss(Peer& peer, std::string why) {
  if (std::exchange(peer.dismissed, true)) return;
  dismissals_.push_back({peer.worker, std::move(why)});
}

namespace {

// A peer that has left is lost in a moment, and its steps are repeated then. A plan that cannot be sent for any other
// reason never can.
bool NeverSent(const absl::Status& status) {
  return !status.ok() && !absl::IsUnavailable(status) && !absl::IsNotFound(status);
}

Event Unsendable(const RunStep& run, const absl::Status& status) {
  return StepFinished{run.compute_worker,
                      {.step = run.plan.step,
                       .micro_batch = run.plan.micro_batch,
                       .status = proto::StepStatus::kWorkerFailed,
                       .error = absl::StrCat("the step's plan cannot be sent: ", std::string(status.message()))}};
}

}  // namespace

bool SchedulerNode::Done(const Action& action, const absl::Status& status) {
  if (absl::IsResourceExhausted(status)) return false;
  if (!status.ok()) LogError("scheduler: ", std::string(status.message()));
  if (!NeverSent(status)) return true;
  if (const auto* run = std::get_if<RunStep>(&action); run != nullptr)
    failures_.push_back(Unsendable(*run, status));
  else if (Peer* const peer = PeerOf(action); peer != nullptr)
    Dismiss(*peer, absl::StrCat("an order to it cannot be sent: ", std::string(status.message())));
  return true;
}

int SchedulerNode::SendUnsentTo(std::vector<Peer>& peers) {
  int sent = 0;
  for (Peer& peer : peers) {
    while (!peer.dismissed && !peer.unsent.empty() && Done(peer.unsent.front(), Perform(peer.unsent.front()))) {
      peer.unsent.pop_front();
      ++sent;
    }
  }
  return sent;
}

int SchedulerNode::SendUnsent() {
  const int sent = SendUnsentTo(attention_) + SendUnsentTo(compute_);
  ApplyFailures();
  return sent;
}

int SchedulerNode::Poll() {
  const int frames = SendUnsent() + port_.Poll(*this, kFramesPerPoll);
  if (clock_.Now() >= NextDeadline()) Handle(Tick{});
  return frames;
}

SchedulerNode::Peer* SchedulerNode::AttentionPeer(NodeId node) {
  for (Peer& peer : attention_)
    if (peer.node == node) return &peer;
  return nullptr;
}

int SchedulerNode::TokensOf(const proto::StepResult& result) const {
  const size_t index = result.micro_batch.value();
  return index < step_tokens_.size() && step_tokens_[index].step == result.step ? step_tokens_[index].new_tokens : 0;
}

void SchedulerNode::NoteDamage(const proto::StepResult& result) {
  if (result.status != proto::StepStatus::kDamaged) return;
  for (Peer& peer : attention_) {
    if (peer.worker != result.failed_worker) continue;
    const uint64_t steps = ++peer.damaged_steps;
    const uint64_t times = steps / kRepeatedDamage;
    if (steps % kRepeatedDamage != 0 || (times & (times - 1)) != 0) continue;
    LogWarning("attention worker ", peer.worker.value(), ": KV was not what was written in ", steps,
               " steps since it joined, the last time: ", result.error,
               "; unless workers were killed meanwhile, its memory may be failing: drain it");
  }
}

uint64_t SchedulerNode::DamagedSteps(WorkerId worker) const {
  for (const Peer& peer : attention_)
    if (peer.worker == worker) return peer.damaged_steps;
  return 0;
}

void SchedulerNode::OnFrame(const transport::Delivery& delivery) {
  if (!proto::Validate(delivery.header).ok()) return;
  if (delivery.header.type == FrameType::kStepResult) {
    for (const Peer& peer : compute_) {
      if (peer.node != delivery.from) continue;
      auto result = proto::DecodeStepResult(delivery.payload);
      if (!result.ok()) {
        const std::string error(result.status().message());
        LogError("scheduler: compute worker ", peer.worker.value(), ": ", error);
        return Handle(StepUnreadable{peer.worker, StepId(delivery.header.step),
                                     MicroBatchId(delivery.header.micro_batch), error});
      }
      NoteDamage(*result);
      on_step_(*result, static_cast<int>(result->entries.size()), TokensOf(*result));
      Handle(StepFinished{peer.worker, *std::move(result)});
      return NotePrefill();
    }
    return;
  }
  Peer* const peer = AttentionPeer(delivery.from);
  if (peer == nullptr) return;
  if (delivery.header.type == proto::kCacheChanged)
    return TakeAnswer<proto::CacheChanged, CacheChanged>(*peer, delivery);
  switch (delivery.header.type) {
    case FrameType::kSequenceOpened: return TakeAnswer<proto::SequenceOpened, SequenceOpened>(*peer, delivery);
    case FrameType::kSequenceMoved: return TakeAnswer<proto::SequenceMoved, SequenceMoved>(*peer, delivery);
    case FrameType::kPrefixProbed: return TakeAnswer<proto::PrefixProbed, PrefixProbed>(*peer, delivery);
    default: return;
  }
}

template <typename Message, typename Answer>
void SchedulerNode::TakeAnswer(Peer& peer, const transport::Delivery& delivery) {
  auto message = proto::Decode<Message>(delivery.payload);
  if (message.ok()) return Handle(Answer{peer.worker, Epoch(delivery.header.epoch), *std::move(message)});
  LogError("scheduler: attention worker ", peer.worker.value(), ": ", std::string(message.status().message()));
  Dismiss(peer, absl::StrCat("its answer cannot be read: ", std::string(message.status().message())));
}

template <typename Message>
absl::Status SchedulerNode::SendTo(WorkerId worker, Epoch epoch, FrameType type, const Message& message) {
  for (Peer& peer : attention_) {
    if (peer.worker != worker || peer.epoch != epoch) continue;
    std::vector<std::byte> bytes;
    proto::Encode(message, bytes);
    const auto header = MakeHeader(type, epoch, StepId(++peer.orders), MicroBatchId(0), 0, bytes.size());
    return port_.SendMessage(peer.node, header, std::move(bytes));
  }
  return NotFound("attention worker ", worker.value(), " of epoch ", epoch.value(), " is not connected");
}

absl::Status SchedulerNode::SendStep(const RunStep& step) {
  for (const Peer& peer : compute_) {
    if (peer.worker != step.compute_worker) continue;
    std::vector<std::byte> bytes;
    proto::Encode(step.plan, bytes);
    StepTokens& tokens = step_tokens_[step.plan.micro_batch.value()];
    tokens = {step.plan.step, 0};
    for (const proto::StepEntry& entry : step.plan.entries) tokens.new_tokens += static_cast<int>(entry.tokens.size());
    for (const RequestSpans::Told& told : spans_.ToTell(step))
      TellTrace(peer.node, Epoch(0), told.sequence, told.trace);
    spans_.StepSent(step, clock_.Now());
    const auto header =
        MakeHeader(FrameType::kStepPlan, Epoch(0), step.plan.step, step.plan.micro_batch, 0, bytes.size());
    return port_.SendMessage(peer.node, header, std::move(bytes));
  }
  return NotFound("compute worker ", step.compute_worker.value(), " is not connected");
}

absl::Status SchedulerNode::Perform(Action& action) {
  struct Visitor {
    SchedulerNode& node;
    void Trace(WorkerId worker, Epoch epoch, SequenceId sequence, const TraceContext& trace) {
      if (!trace.sampled) return;
      node.spans_.Opened(trace, sequence, worker, node.clock_.Now());
      for (const Peer& peer : node.attention_)
        if (peer.worker == worker && peer.epoch == epoch) node.TellTrace(peer.node, epoch, sequence, trace);
    }
    absl::Status operator()(OpenSequence& a) {
      Trace(a.worker, a.epoch, a.message.sequence, a.trace);
      return node.SendTo(a.worker, a.epoch, FrameType::kOpenSequence, a.message);
    }
    absl::Status operator()(ForkSequence& a) {
      Trace(a.worker, a.epoch, a.message.child, a.trace);
      return node.SendTo(a.worker, a.epoch, FrameType::kForkSequence, a.message);
    }
    absl::Status operator()(ReleaseSequence& a) {
      node.spans_.Released(a.message.sequence);
      return node.SendTo(a.worker, a.epoch, FrameType::kReleaseSequence, a.message);
    }
    absl::Status operator()(ProbePrefix& a) {
      return node.SendTo(a.worker, a.epoch, FrameType::kPrefixProbe, a.message);
    }
    absl::Status operator()(MoveSequence& a) {
      for (const Peer& peer : node.attention_)
        if (peer.worker == a.to && peer.epoch == a.message.target_epoch) a.message.target = peer.node;
      node.spans_.MoveBegan(a, node.clock_.Now());
      return node.SendTo(a.worker, a.epoch, FrameType::kMoveSequence, a.message);
    }
    absl::Status operator()(Unpin& a) { return node.SendTo(a.worker, a.epoch, FrameType::kUnpin, a.message); }
    absl::Status operator()(RunStep& a) { return node.SendStep(a); }
    absl::Status operator()(WithdrawStep& a) {
      for (const Peer& peer : node.compute_) {
        if (peer.worker != a.compute_worker) continue;
        return node.port_.SendMessage(peer.node,
                                      MakeHeader(FrameType::kWithdrawStep, Epoch(0), a.step, a.micro_batch, 0, 0), {});
      }
      return absl::OkStatus();  // its steps went with it
    }
    absl::Status operator()(DismissComputeWorker& a) {
      std::erase_if(node.compute_, [&](const Peer& peer) { return peer.worker == a.worker; });
      node.dismissals_.push_back({a.worker, std::move(a.why)});
      return absl::OkStatus();
    }
    absl::Status operator()(EmitUpdate& a) {
      node.spans_.Updated(a.update, node.clock_.Now());
      if (node.replays_) node.replay_.Take(a.update);
      if (!Replay::Is(a.update.request)) node.emit_(std::move(a.update));
      return absl::OkStatus();
    }
    absl::Status operator()(EmitCacheEvents& a) {
      if (node.tell_cache_) node.tell_cache_(std::move(a.events));
      return absl::OkStatus();
    }
  };
  return std::visit(Visitor{*this}, action);
}

}  // namespace dovetail::scheduler
