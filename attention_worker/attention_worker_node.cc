#include "attention_worker/attention_worker_node.h"

#include <algorithm>
#include <bitset>
#include <utility>
#include <variant>

#include "attention_worker/block_digest.h"
#include "attention_worker/cpu/attention_executor.h"
#include "base/log.h"
#include "exchange/cuda/shared_gpu.h"
#include "exchange/divided_payloads.h"
#include "proto/cache_frames.h"
#include "proto/gather_frames.h"
#include "proto/trace_frame.h"

namespace dovetail::attention {

using proto::FrameType;
using proto::MakeHeader;

namespace {

constexpr int kMostComputeMicroBatches = 16;  // of compute workers

// Erases entries that `done` says are done, in their order; one that is not holds up those of its micro-batch.
template <typename Entry, typename MicroBatch, typename Done>
void EraseDone(std::vector<Entry>& entries, MicroBatch micro_batch, Done done) {
  std::bitset<kMostComputeMicroBatches + proto::kMoveSlots> waiting;
  std::erase_if(entries, [&](const Entry& entry) {
    const MicroBatchId id = micro_batch(entry);
    waiting[id.value()] = waiting[id.value()] || !done(entry);
    return !waiting[id.value()];
  });
}

}  // namespace

absl::StatusOr<std::unique_ptr<AttentionWorkerNode>> AttentionWorkerNode::Create(
    const proto::AttentionTable& table, const AttentionWorkerOptions& options, kernels::Device& device,
    transport::Port& port, Clock& clock, exchange::SharedGpu* shared_gpu, KvStorage storage) {
  if (options.micro_batches < 1 || options.micro_batches > kMostComputeMicroBatches)
    return InvalidArgument("micro_batches: ", options.micro_batches, " is outside 1..", kMostComputeMicroBatches);
  if (options.snapshot_percent < 0 || options.snapshot_percent > 100)
    return InvalidArgument("snapshot_percent: ", options.snapshot_percent, " is outside 0..100");
  if (options.kv_blocks < 1) return InvalidArgument("kv_blocks: the KV cache has no block");
  AttentionWorkerOptions own = options;
  own.block_bytes = KvBlockBytes(table, storage);
  std::unique_ptr<AttentionWorkerNode> node(new AttentionWorkerNode(table, own, device, port, clock, shared_gpu));
  DT_ASSIGN_OR_RETURN(node->executor_,
                      MakeAttentionBackend(device, node->core_, options.kv_blocks, options.micro_batches, shared_gpu,
                                           storage, options.deterministic));
  node->actions_.reserve(16);
  node->queries_.reserve(options.micro_batches);
  return node;
}

void AttentionWorkerNode::LosePeer(NodeId node) {
  party_->Lose(node);
  core_.LosePeer(node);
}

int AttentionWorkerNode::Poll() {
  SendReports();
  int frames = port_.Poll(*this, kFramesPerPoll);
  for (int look = 0; look < kLooksForKeyValues && !queries_.empty(); ++look)
    frames += port_.Poll(*this, kFramesPerPoll);
  AttendEarlier();
  std::vector<exchange::ExchangeParty::Frame> out;
  const bool making = party_->Progress(out);
  Send(out);
  if (unanswered_.empty() && gathering_.empty()) return frames + (making ? 1 : 0);
  SendWhatIsGathered();
  AnswerWhatIsDone();
  return frames + 1;  // the device is looked at again at once
}

// No step fails because of one. A scheduler that cannot be reached at all loses this worker, and with it what was told.
void AttentionWorkerNode::SendReports() {
  for (; !reports_.empty(); reports_.pop_front()) {
    SendFrame& report = reports_.front();
    const auto header =
        MakeHeader(report.type, report.epoch, report.step, report.micro_batch, 0, report.message.size());
    std::vector<std::byte> message = report.message;
    const absl::Status sent = port_.SendMessage(report.to, header, std::move(message));
    if (absl::IsResourceExhausted(sent) && reports_.size() <= kMaxReports) return;
    if (!sent.ok())
      LogError("attention worker ", options_.worker.value(),
               ": what its cache holds is not told to the scheduler: ", std::string(sent.message()));
  }
}

// A GPU sends k and v right behind q, and all of an op is attended at once. Elsewhere they take a while.
void AttentionWorkerNode::AttendEarlier() {
  for (const Query& query : queries_) {
    if (core_.StepOf(query.micro_batch) != query.step) continue;
    const absl::Time begun = clock_.Now();
    executor_->AttendEarlier(query.micro_batch, query.op);
    query_busy_[query.micro_batch.value()] += clock_.Now() - begun;
    Note("attend before k, v", query.step, query.micro_batch, query.op, begun);
  }
  queries_.clear();
}

void AttentionWorkerNode::Send(std::vector<exchange::ExchangeParty::Frame>& frames) {
  for (exchange::ExchangeParty::Frame& frame : frames) {
    const auto* const bytes = reinterpret_cast<const std::byte*>(frame.bytes.data());
    std::vector<std::byte> message(bytes, bytes + frame.bytes.size());
    const auto header = MakeHeader(frame.type, options_.epoch, StepId(), MicroBatchId(), 0, message.size());
    if (const absl::Status sent = port_.SendMessage(frame.to, header, std::move(message)); !sent.ok())
      LogError("attention worker ", options_.worker.value(), ": ", std::string(sent.message()));
  }
}

void AttentionWorkerNode::OnLinkFrame(const transport::Delivery& delivery) {
  if (Epoch(delivery.header.epoch) != options_.epoch) return;
  std::vector<exchange::ExchangeParty::Frame> out;
  const std::string_view bytes(reinterpret_cast<const char*>(delivery.payload.data()), delivery.payload.size());
  party_->OnFrame(delivery.from, options_.epoch, delivery.header.type, bytes, out);
  Send(out);
}

// Whether a step can cross here as the frame that begins it says. kUnavailable: there is no link to its sender.
absl::Status AttentionWorkerNode::CheckSeam(const transport::Delivery& delivery) const {
  if (delivery.header.type != proto::kStepBeginOnDevice) return absl::OkStatus();
  const exchange::GpuExchange* const peer = party_->With(delivery.from);
  if (peer == nullptr ||
      delivery.header.micro_batch >= std::min<uint32_t>(peer->room().micro_batches, options_.micro_batches))
    return absl::UnavailableError("no link between this worker's GPU and the compute worker's");
  return absl::OkStatus();
}

exchange::Seam AttentionWorkerNode::SeamOf(const PrepareStep& prepare) const {
  if (shared_gpu_ != nullptr && shared_gpu_->Carries(prepare.micro_batch, core_.StepOf(prepare.micro_batch)))
    return exchange::OnOneGpu{shared_gpu_};
  if (prepare.in_frames) return exchange::ThroughHosts();
  return exchange::BetweenGpus{{party_->With(prepare.compute)}};
}

absl::Status AttentionWorkerNode::Perform(const PrepareStep& prepare) {
  const exchange::Seam seam = SeamOf(prepare);
  DT_RETURN_IF_ERROR(executor_->PrepareStep(prepare.micro_batch, seam));
  const auto* const between = std::get_if<exchange::BetweenGpus>(&seam);
  return between != nullptr ? RunOps(prepare.micro_batch, *between->peers.front()) : absl::OkStatus();
}

// kInvalidArgument: the payloads of a step do not fit into its slots.
absl::Status AttentionWorkerNode::CheckRoom(MicroBatchId id, const exchange::GpuExchange& peer) const {
  const size_t slot_bytes = peer.room().slot_bytes();
  for (int g = 0; g < core_.table().group_count(); ++g) {
    const LayerGroup group(static_cast<uint16_t>(g));
    const proto::StepLayout& layout = core_.LayoutOf(id, group);
    auto query = static_cast<size_t>(layout.query_bytes), answer = static_cast<size_t>(layout.partial_bytes);
    const bool whole = std::all_of(layout.items.begin(), layout.items.end(),
                                   [](const proto::ShardStep& item) { return item.tokens.whole(); });
    if (!whole) {
      const exchange::DividedPayloads payloads = exchange::DividedPayloadsOf(layout, core_.table().softmax(group));
      query = static_cast<size_t>(payloads.query_bytes);
      answer = static_cast<size_t>(payloads.answer_bytes);
    }
    if (query > peer.key_value_at() || answer > slot_bytes ||
        peer.key_value_at() + static_cast<size_t>(layout.key_value_bytes) > slot_bytes)
      return InvalidArgument("a step of more rows than its exchange has room for");
  }
  return absl::OkStatus();
}

// All ops at once: kernels wait for q, k and v of each in this worker's slot, and store o into the peer's.
absl::Status AttentionWorkerNode::RunOps(MicroBatchId id, const exchange::GpuExchange& peer) {
  DT_RETURN_IF_ERROR(CheckRoom(id, peer));
  while (const std::optional<int> op = core_.TakeOp(id)) {
    const proto::StepLayout& layout = core_.LayoutOf(id, core_.table().op_group[*op]);
    const std::byte* const slot = peer.own_slot(id);
    const auto query = static_cast<size_t>(layout.query_bytes), key_value = static_cast<size_t>(layout.key_value_bytes);
    DT_RETURN_IF_ERROR(executor_->TakeQuery(id, *op, {slot, query}));
    DT_RETURN_IF_ERROR(executor_->AppendAndFinish(id, *op, {slot + peer.key_value_at(), key_value}).status());
  }
  spans_.Worked(id, core_.table().op_count() - 1, core_.table().op_count(), clock_.Now());
  return executor_->Launch(id);
}

// A step that this frame began has failed here: the GPUs of both sides wait for no more of it.
void AttentionWorkerNode::EndFailed(const transport::Delivery& delivery) {
  exchange::GpuExchange* const exchange = party_->With(delivery.from);
  if (exchange == nullptr || delivery.header.type != proto::kStepBeginOnDevice) return;
  const absl::Status ended =
      exchange->EndFailed(MicroBatchId(delivery.header.micro_batch), StepId(delivery.header.step));
  if (!ended.ok()) LogError("attention worker ", options_.worker.value(), ": ", std::string(ended.message()));
}

void AttentionWorkerNode::OnFrame(const transport::Delivery& delivery) {
  if (!health_.ok() || !proto::Validate(delivery.header).ok()) return;
  const FrameType type = delivery.header.type;
  if (type == proto::kLinkOffer || type == proto::kLinkThere) return OnLinkFrame(delivery);
  spans_.OnFrame(delivery.header, delivery.payload, clock_);
  if (type == proto::kTraceSequence) return;
  absl::Status possible = CheckPayload(delivery);
  if (possible.ok()) possible = CheckSeam(delivery);
  if (!possible.ok()) {
    LogError("attention worker ", options_.worker.value(), ": ", std::string(possible.message()));
    RefuseStep(delivery, possible);
    return EndFailed(delivery);
  }
  actions_.clear();
  core_.Handle(ReadFrame(delivery.from, delivery.header, delivery.payload), actions_);
  for (Action& action : actions_) {
    const absl::Status status = Perform(action);
    if (status.ok()) continue;
    LogError("attention worker ", options_.worker.value(), ": ", std::string(status.message()));
    if (IsLost()) return;
    if (const int slot = MoveSlotOf(action); slot >= 0) return FailMove(slot, status);
    RefuseStep(delivery, status);
    return EndFailed(delivery);
  }
  if (options_.poison_freed) PoisonFreed();
}

// K and V of a move come with the digest that they had where they were sent.
absl::Status AttentionWorkerNode::CheckPayload(const transport::Delivery& delivery) const {
  if (delivery.header.type != FrameType::kKeyValue || delivery.header.digest == 0 ||
      delivery.header.digest == Digest(delivery.payload))
    return absl::OkStatus();
  return DataLoss("what came of a moving sequence (op ", delivery.header.op, ", ", delivery.payload.size(),
                  " bytes) is not what node ", delivery.from.value(), " sent");
}

absl::Status AttentionWorkerNode::DigestSets(std::span<const BlockSetId> sets) {
  for (const BlockSetId set : sets) {
    if (!core_.Holds(set)) continue;  // given back because an earlier one was damaged
    DT_ASSIGN_OR_RETURN(const uint64_t digest, executor_->DigestOf(core_.BlocksOf(set)));
    core_.TakeDigest(set, digest);
  }
  if (core_.counters().damaged_sets > damaged_told_) {
    LogError("attention worker ", options_.worker.value(), ": ", core_.counters().damaged_sets - damaged_told_,
             " sets of KV blocks do not hold what was written; they are used no more. Is this host's memory sound?");
    damaged_told_ = core_.counters().damaged_sets;
  }
  return absl::OkStatus();
}

// Actions that the core gives outside Handle().
absl::Status AttentionWorkerNode::PerformAll(std::vector<Action> actions) {
  for (Action& action : actions) DT_RETURN_IF_ERROR(Perform(action));
  return absl::OkStatus();
}

// After what the frame asked for is done: it may have copied from blocks that it freed.
void AttentionWorkerNode::PoisonFreed() {
  const std::vector<KvBlockId> freed = core_.TakeFreed();
  if (const absl::Status status = executor_->Poison(freed); !status.ok())
    LogError("attention worker ", options_.worker.value(), ": ", std::string(status.message()));
}

void AttentionWorkerNode::Note(const char* what, StepId step, MicroBatchId id, int op, absl::Time begin) {
  if (trace_ != nullptr) trace_->Add({what, begin, clock_.Now() - begin, step, id, op});
}

int AttentionWorkerNode::MoveSlotOf(const Action& action) const {
  if (const auto* send = std::get_if<SendMovedKeyValue>(&action)) return send->slot;
  if (const auto* send = std::get_if<SendMove>(&action)) return send->slot;
  const auto* begin = std::get_if<SendFrame>(&action);
  return begin != nullptr && begin->type == FrameType::kStepBegin ? begin->micro_batch.value() - options_.micro_batches
                                                                  : -1;
}

// Asked when something has failed. Nothing is wrong with a step then, nor with a move: peers that lose this worker
// rebuild.
bool AttentionWorkerNode::IsLost() {
  health_ = device_.Health();
  return !health_.ok();
}

// The target cannot be reached, or the rows cannot be gathered: the scheduler finds another way.
void AttentionWorkerNode::FailMove(int slot, const absl::Status& status) {
  std::vector<Action> actions;
  core_.FailMove(slot, std::string(status.message()), actions);
  for (Action& action : actions)
    if (const absl::Status sent = Perform(action); !sent.ok())
      LogError("attention worker ", options_.worker.value(), ": ", std::string(sent.message()));
}

void AttentionWorkerNode::RefuseStep(const transport::Delivery& delivery, const absl::Status& status) {
  std::vector<std::byte> message;
  proto::Encode(proto::StepRefused{absl::IsResourceExhausted(status), std::string(status.message())}, message);
  const auto header = MakeHeader(FrameType::kStepRefused, options_.epoch, StepId(delivery.header.step),
                                 MicroBatchId(delivery.header.micro_batch), delivery.header.op, message.size());
  if (const absl::Status sent = port_.SendMessage(delivery.from, header, std::move(message)); !sent.ok())
    LogError("attention worker ", options_.worker.value(), ": cannot refuse a step: ", std::string(sent.message()));
}

absl::Status AttentionWorkerNode::Perform(Action& action) {
  struct Visitor {
    AttentionWorkerNode& node;

    absl::Status operator()(SendFrame& send) {
      if (send.type == proto::kCacheChanged) {
        node.reports_.push_back(std::move(send));
        node.SendReports();
        return absl::OkStatus();
      }
      const auto header = MakeHeader(send.type, send.epoch, send.step, send.micro_batch, 0, send.message.size());
      return node.port_.SendMessage(send.to, header, std::move(send.message));
    }
    absl::Status operator()(SendMovedKeyValue& send) {
      Gathering rows{send, node.core_.OutgoingMoveOf(send.slot).step, {}};
      DT_ASSIGN_OR_RETURN(rows.rows, node.executor_->Gather(send.slot, send.op));
      if (node.gathering_.empty()) {
        DT_ASSIGN_OR_RETURN(const bool there, node.executor_->TakeGathered(send.slot));
        if (there) return node.SendGathered(rows);
      }
      node.gathering_.push_back(std::move(rows));
      return absl::OkStatus();
    }
    absl::Status operator()(CopyBlocks& copy) { return node.executor_->Copy(copy.copies); }
    absl::Status operator()(DigestBlocks& digest) { return node.DigestSets(digest.sets); }
    absl::Status operator()(AnswerOpened& answer) {
      std::vector<Action> actions;
      node.core_.AnswerOpen(answer, actions);
      return node.PerformAll(std::move(actions));
    }
    absl::Status operator()(SendMove& send) {
      std::vector<Action> actions;
      node.core_.BeginMove(send.slot, actions);
      return node.PerformAll(std::move(actions));
    }
    absl::Status operator()(PrepareStep& prepare) { return node.Perform(prepare); }
    absl::Status operator()(AttendComplete& attend) {
      const absl::Time begun = node.clock_.Now();
      const absl::Status status = node.executor_->TakeQuery(attend.micro_batch, attend.op, attend.query);
      node.query_busy_[attend.micro_batch.value()] = node.clock_.Now() - begun;
      node.queries_.push_back({attend.micro_batch, attend.op, node.core_.StepOf(attend.micro_batch)});
      return status;
    }
    absl::Status operator()(AnswerStates& answer) {
      const absl::Time begun = node.clock_.Now();
      DT_ASSIGN_OR_RETURN(auto states, node.executor_->GiveStates(answer.micro_batch, answer.op));
      node.query_busy_[answer.micro_batch.value()] = node.clock_.Now() - begun;
      node.Note("give states", answer.step, answer.micro_batch, answer.op, begun);
      const auto header = MakeHeader(FrameType::kPartial, node.options_.epoch, answer.step, answer.micro_batch,
                                     answer.op, states.size());
      return node.port_.SendTensor(answer.reply_to, header, std::move(states));
    }
    absl::Status operator()(AppendAndFinish& finish) { return node.Perform(finish); }
    absl::Status operator()(GiveRows& give) { return node.Perform(give); }
  };
  return std::visit(Visitor{*this}, action);
}

// Unless the move was given up meanwhile.
absl::Status AttentionWorkerNode::SendGathered(const Gathering& rows) {
  const OutgoingMove& move = core_.OutgoingMoveOf(rows.send.slot);
  if (!move.active || move.step != rows.step) return absl::OkStatus();
  const auto header = MakeHeader(FrameType::kKeyValue, move.order.target_epoch, move.step, rows.send.micro_batch,
                                 rows.send.op, rows.rows.size(), /*busy_us=*/0, Digest(rows.rows));
  return port_.SendTensor(move.order.target, header, rows.rows);
}

void AttentionWorkerNode::SendWhatIsGathered() {
  const auto micro_batch = [](const Gathering& rows) { return rows.send.micro_batch; };
  EraseDone(gathering_, micro_batch, [this](const Gathering& rows) {
    const absl::StatusOr<bool> there = executor_->TakeGathered(rows.send.slot);
    if (there.ok() && !*there) return false;
    const absl::Status sent = there.ok() ? SendGathered(rows) : there.status();
    if (!sent.ok() && !IsLost()) FailMove(rows.send.slot, sent);
    return true;
  });
}

absl::Status AttentionWorkerNode::Perform(const AppendAndFinish& finish) {
  const absl::Time begun = clock_.Now();
  std::erase_if(queries_, [&](const Query& query) { return query.micro_batch == finish.micro_batch; });
  DT_ASSIGN_OR_RETURN(auto partial, executor_->AppendAndFinish(finish.micro_batch, finish.op, finish.key_value));
  Note("append, attend", finish.step, finish.micro_batch, finish.op, begun);
  absl::Duration& query_busy = query_busy_[finish.micro_batch.value()];
  HeldAnswer answer{std::move(partial), query_busy + (clock_.Now() - begun)};
  query_busy = absl::ZeroDuration();
  spans_.Worked(finish.micro_batch, finish.op, core_.table().op_count(), clock_.Now());
  if (finish.pieces_first) {
    held_answers_[finish.micro_batch.value()] = std::move(answer);
    return absl::OkStatus();
  }
  const Unanswered op{finish.micro_batch, finish.op, finish.step, finish.reply_to, std::move(answer)};
  if (unanswered_.empty()) {
    DT_ASSIGN_OR_RETURN(const bool done, executor_->TakeAppended(op.micro_batch));
    if (done) return Answer(op);
  }
  unanswered_.push_back(op);
  return absl::OkStatus();
}

void AttentionWorkerNode::AnswerWhatIsDone() {
  const auto micro_batch = [](const Unanswered& op) { return op.micro_batch; };
  EraseDone(unanswered_, micro_batch, [this](const Unanswered& op) {
    const absl::StatusOr<bool> done = executor_->TakeAppended(op.micro_batch);
    if (done.ok() && !*done) return false;
    const absl::Status answered = done.ok() ? Answer(op) : done.status();
    if (!answered.ok() && !IsLost())
      LogError("attention worker ", options_.worker.value(), ": ", std::string(answered.message()));
    return true;
  });
}

// A piece at a time, so that other steps' frames are answered in between.
absl::Status AttentionWorkerNode::Perform(const GiveRows& give) {
  const absl::Time begun = clock_.Now();
  HeldAnswer& answer = held_answers_[give.micro_batch.value()];
  DT_ASSIGN_OR_RETURN(auto rows, executor_->GiveRows(give.micro_batch, give.op, give.piece));
  Note("give rows", give.step, give.micro_batch, give.op, begun);
  answer.busy += clock_.Now() - begun;
  const auto header = MakeHeader(proto::kEarlierRows, options_.epoch, give.step, give.micro_batch, give.op, rows.size(),
                                 /*busy_us=*/0, static_cast<uint64_t>(give.piece));
  DT_RETURN_IF_ERROR(port_.SendTensor(give.reply_to, header, std::move(rows)));
  if (!give.last) return absl::OkStatus();
  return Answer({give.micro_batch, give.op, give.step, give.reply_to, std::exchange(answer, {})});
}

absl::Status AttentionWorkerNode::Answer(const Unanswered& op) {
  const auto header =
      MakeHeader(FrameType::kPartial, options_.epoch, op.step, op.micro_batch, op.op, op.answer.partial.size(),
                 static_cast<uint32_t>(absl::ToInt64Microseconds(op.answer.busy)));
  return port_.SendTensor(op.reply_to, header, op.answer.partial);
}

}  // namespace dovetail::attention
