#include "attention_worker/core/attention_worker_core.h"

#include <string>
#include <utility>

#include "absl/container/flat_hash_set.h"

namespace dovetail::attention {

using proto::FrameHeader;
using proto::FrameType;

AttentionWorkerCore::AttentionWorkerCore(const proto::AttentionTable& table, const AttentionWorkerOptions& options)
    : table_(table),
      options_(options),
      sequences_(table_, options.kv_blocks,
                 static_cast<uint32_t>(uint64_t{options.kv_blocks} * options.snapshot_percent / 100), options.digests),
      micro_batches_(options.micro_batches + proto::kMoveSlots) {
  for (MicroBatch& batch : micro_batches_) batch.layouts.resize(table_.group_count());
}

void AttentionWorkerCore::Handle(NodeId from, const FrameHeader& header, std::span<const std::byte> payload,
                                 std::vector<Action>& actions) {
  const bool answer = header.type == FrameType::kPartial || header.type == FrameType::kStepRefused;
  if (answer && header.payload_bytes == payload.size()) return OnMoveAnswer(from, header, payload, actions);
  if (header.epoch != options_.epoch.value() || header.payload_bytes != payload.size()) {
    ++counters_.dropped_frames;
    return;
  }
  const bool order = header.type >= FrameType::kOpenSequence && header.type < FrameType::kStepBegin;
  if (order && CameBefore(header)) {
    ++counters_.dropped_frames;
    return;
  }
  switch (header.type) {
    case FrameType::kOpenSequence: return OnOpen(from, header, payload, actions);
    case FrameType::kForkSequence: return OnFork(from, header, payload, actions);
    case FrameType::kReleaseSequence: OnRelease(payload); return DigestFinished(actions);
    case FrameType::kMoveSequence: return OnMove(from, payload, actions);
    case FrameType::kPrefixProbe: return OnProbe(from, header, payload, actions);
    case FrameType::kUnpin: {
      const auto message = proto::Decode<proto::Unpin>(payload);
      if (message.ok()) return sequences_.Unpin(message->pin_id);
      break;
    }
    case FrameType::kStepBegin: return OnStepBegin(from, header, payload, actions);
    case FrameType::kQuery: return OnQuery(from, header, payload, actions);
    case FrameType::kKeyValue: return OnKeyValue(from, header, payload, actions);
    default: break;
  }
  ++counters_.dropped_frames;
}

// What is said about sequences is numbered (proto::FrameHeader::step).
bool AttentionWorkerCore::CameBefore(const FrameHeader& order) {
  if (order.step == 0) return false;
  if (order.step <= last_order_) return true;
  last_order_ = order.step;
  return false;
}

template <typename Message>
void AttentionWorkerCore::Reply(NodeId to, const FrameHeader& header, FrameType type, const Message& message,
                                std::vector<Action>& actions) const {
  SendFrame frame{to, type, StepId(header.step), MicroBatchId(header.micro_batch), {}, options_.epoch};
  proto::Encode(message, frame.message);
  actions.push_back(std::move(frame));
}

void AttentionWorkerCore::Refuse(NodeId to, const FrameHeader& header, proto::StepRefused refusal,
                                 std::vector<Action>& actions) {
  ++counters_.refused_steps;
  Reply(to, header, FrameType::kStepRefused, refusal, actions);
}

// Blocks that can be found from now on get their digests before anything else is written.
void AttentionWorkerCore::DigestFinished(std::vector<Action>& actions) {
  if (!WithDigests()) return;
  if (std::vector<BlockSetId> sets = sequences_.TakeFinished(); !sets.empty())
    actions.push_back(DigestBlocks{std::move(sets)});
}

void AttentionWorkerCore::TakeDigest(BlockSetId set, uint64_t digest) {
  const bool compared = sequences_.pool().Holds(set) && sequences_.pool().digest(set).has_value();
  counters_.digests_compared += compared ? 1 : 0;
  if (!sequences_.TakeDigest(set, digest)) ++counters_.damaged_sets;
}

absl::Status AttentionWorkerCore::CheckShardsAreOurs(const std::vector<proto::Shard>& shards) const {
  for (const proto::Shard& shard : shards)
    if (shard.worker != options_.worker || shard.epoch != options_.epoch)
      return InvalidArgument(DebugString(shard), ": this is worker ", options_.worker.value(), ", epoch ",
                             options_.epoch.value());
  return absl::OkStatus();
}

void AttentionWorkerCore::OnOpen(NodeId from, const FrameHeader& header, std::span<const std::byte> payload,
                                 std::vector<Action>& actions) {
  const auto message = proto::Decode<proto::OpenSequence>(payload);
  if (!message.ok() || !CheckShardsAreOurs(message->shards).ok()) {
    ++counters_.dropped_frames;
    return;
  }
  EndStepOf(message->sequence);  // of a sequence that this one replaces
  ForgetMoveOf(message->sequence);
  const auto opened = sequences_.Open(*message);
  const AnswerOpened answer{from, header, message->sequence};
  // An empty list says no: not even a fresh start is possible here.
  if (!opened.ok())
    return Reply(from, header, FrameType::kSequenceOpened, proto::SequenceOpened{message->sequence, {}}, actions);
  std::vector<BlockSetId> cached = WithDigests() ? sequences_.Digested(**opened) : std::vector<BlockSetId>();
  if (cached.empty()) return AnswerOpen(answer, actions);
  actions.push_back(DigestBlocks{std::move(cached)});
  actions.push_back(answer);
}

void AttentionWorkerCore::AnswerOpen(const AnswerOpened& answer, std::vector<Action>& actions) {
  SequenceState* const sequence = sequences_.Find(answer.sequence);
  proto::SequenceOpened reply{answer.sequence, {}};
  if (sequence != nullptr && !sequence->damaged) {
    if (!sequence->started && WithDigests()) sequences_.OfferAgain(*sequence);
    reply.resumable = sequence->resumable;
    reply.generation = sequence->generation;
  }
  Reply(answer.to, answer.header, FrameType::kSequenceOpened, reply, actions);
}

void AttentionWorkerCore::OnFork(NodeId from, const FrameHeader& header, std::span<const std::byte> payload,
                                 std::vector<Action>& actions) {
  const auto message = proto::Decode<proto::ForkSequence>(payload);
  if (!message.ok()) {
    ++counters_.dropped_frames;
    return;
  }
  proto::SequenceOpened reply{message->child, {}};
  if (message->child != message->parent) EndStepOf(message->child);
  if (const auto forked = sequences_.Fork(*message); forked.ok()) {
    reply.resumable.push_back(static_cast<uint32_t>(message->ctx_len / kSegmentTokens));
    reply.generation = (*forked)->generation;
  }
  Reply(from, header, FrameType::kSequenceOpened, reply, actions);
}

void AttentionWorkerCore::OnRelease(std::span<const std::byte> payload) {
  const auto message = proto::Decode<proto::ReleaseSequence>(payload);
  if (!message.ok()) {
    ++counters_.dropped_frames;
    return;
  }
  const SequenceState* const sequence = sequences_.Find(message->sequence);
  if (sequence != nullptr && !SequenceTable::Speaks(*sequence, message->generation)) {
    ++counters_.dropped_frames;
    return;
  }
  EndStepOf(message->sequence);
  ForgetMoveOf(message->sequence);
  sequences_.Release(*message);
}

// A step that was still running can never finish: its frames are dropped from here on.
void AttentionWorkerCore::EndStep(MicroBatch& batch) {
  for (SequenceState* sequence : batch.sequences) sequence->micro_batch = SequenceState::kNoMicroBatch;
  batch.sequences.clear();
  batch.phase = Phase::kIdle;
}

void AttentionWorkerCore::EndStepOf(SequenceId id) {
  const SequenceState* sequence = sequences_.Find(id);
  if (sequence != nullptr && sequence->micro_batch != SequenceState::kNoMicroBatch)
    EndStep(micro_batches_[sequence->micro_batch]);
}

void AttentionWorkerCore::OnProbe(NodeId from, const FrameHeader& header, std::span<const std::byte> payload,
                                  std::vector<Action>& actions) {
  const auto message = proto::Decode<proto::PrefixProbe>(payload);
  if (!message.ok() || !CheckShardsAreOurs(message->shards).ok()) {
    ++counters_.dropped_frames;
    return;
  }
  Reply(from, header, FrameType::kPrefixProbed, proto::PrefixProbed{message->pin_id, sequences_.Probe(*message)},
        actions);
}

std::vector<SequenceId> AttentionWorkerCore::DamagedIn(const proto::StepBegin& message) {
  std::vector<SequenceId> damaged;
  for (const proto::StepBeginEntry& entry : message.entries) {
    SequenceState* const sequence = sequences_.Find(entry.sequence);
    if (sequence == nullptr) continue;
    if (!SequenceTable::Speaks(*sequence, entry.generation) || !sequences_.CheckHeld(*sequence))
      damaged.push_back(entry.sequence);
  }
  counters_.damaged_sequences += damaged.size();
  return damaged;
}

// A compute worker waits for no answer where only k and v go to a worker, or nothing but the begin of a step. If it or
// its link is lost then, the next step comes from another one although this worker lacks tokens before it.
std::vector<SequenceId> AttentionWorkerCore::IncompleteIn(StepId step, const proto::StepBegin& message) const {
  std::vector<SequenceId> incomplete;
  for (const proto::StepBeginEntry& entry : message.entries) {
    const SequenceState* const sequence = sequences_.Find(entry.sequence);
    if (sequence == nullptr || !sequence->started || step <= sequence->last_step) continue;
    const bool running = sequence->micro_batch != SequenceState::kNoMicroBatch &&
                         micro_batches_[sequence->micro_batch].phase != Phase::kIdle;
    const Position whole = sequence->ctx_len + (running ? 0 : sequence->q_len);
    if (entry.ctx_len > whole) incomplete.push_back(entry.sequence);
  }
  return incomplete;
}

absl::Status AttentionWorkerCore::CommitEntries(const FrameHeader& header, const proto::StepBegin& message) {
  absl::flat_hash_set<SequenceId> seen;
  for (const proto::StepBeginEntry& entry : message.entries)
    if (!seen.insert(entry.sequence).second)
      return InvalidArgument("sequence ", entry.sequence.value(), " is in the step twice");
  for (const proto::StepBeginEntry& entry : message.entries) {
    SequenceState* sequence = sequences_.Find(entry.sequence);
    if (sequence == nullptr) return NotFound("sequence ", entry.sequence.value(), " is not open here");
    if (sequence->micro_batch != SequenceState::kNoMicroBatch) {
      const MicroBatch& other = micro_batches_[sequence->micro_batch];
      if (other.phase != Phase::kIdle && other.step.value() >= header.step)
        return FailedPrecondition("sequence ", entry.sequence.value(), " is in step ", other.step.value(),
                                  " of micro-batch ", sequence->micro_batch);
    }
    if (StepId(header.step) < sequence->last_step)
      return FailedPrecondition("sequence ", entry.sequence.value(), " was in step ", sequence->last_step.value(),
                                " since");
    DT_RETURN_IF_ERROR(sequences_.CheckCommit(*sequence, entry.ctx_len, entry.hashes));
  }
  for (const proto::StepBeginEntry& entry : message.entries) {
    EndStepOf(entry.sequence);
    ForgetMoveOf(entry.sequence);
    DT_RETURN_IF_ERROR(sequences_.Commit(*sequences_.Find(entry.sequence), entry.ctx_len, entry.hashes));
  }
  return absl::OkStatus();
}

void AttentionWorkerCore::OnStepBegin(NodeId from, const FrameHeader& header, std::span<const std::byte> payload,
                                      std::vector<Action>& actions) {
  if (header.micro_batch >= micro_batches_.size()) {
    return Refuse(
        from, header,
        {.reason = absl::StrCat("micro-batch ", header.micro_batch, ": this worker has ", micro_batches_.size())},
        actions);
  }
  MicroBatch& batch = micro_batches_[header.micro_batch];
  // A step that is tried again has another number: this one begins once. What was appended since stays.
  if (StepId(header.step) <= batch.step && batch.step != StepId()) {
    ++counters_.dropped_frames;
    return;
  }
  auto message = proto::Decode<proto::StepBegin>(payload);
  if (!message.ok()) return Refuse(from, header, {.reason = std::string(message.status().message())}, actions);
  EndStep(batch);
  const bool fills = message->entries[0].fill_end > 0;
  const bool slot = header.micro_batch >= options_.micro_batches;
  if (fills != slot || (fills && message->entries.size() != 1))
    return Refuse(
        from, header,
        {.reason = absl::StrCat("micro-batch ", header.micro_batch, ": this worker has ", options_.micro_batches,
                                " for steps, and those after them for the parts of moves")},
        actions);
  if (fills) return OnFill(from, header, message->entries[0], actions);
  if (std::vector<SequenceId> damaged = DamagedIn(*message); !damaged.empty())
    return Refuse(from, header,
                  {.reason = "KV blocks of these sequences are not what was written", .damaged = std::move(damaged)},
                  actions);
  if (std::vector<SequenceId> incomplete = IncompleteIn(StepId(header.step), *message); !incomplete.empty())
    return Refuse(
        from, header,
        {.reason = "steps before this one did not reach this worker as a whole", .damaged = std::move(incomplete)},
        actions);
  if (absl::Status status = CommitEntries(header, *message); !status.ok())
    return Refuse(from, header, {.reason = std::string(status.message())}, actions);
  DigestFinished(actions);

  std::vector<SequenceTable::Growth> growth;
  for (const proto::StepBeginEntry& entry : message->entries)
    growth.push_back({sequences_.Find(entry.sequence), entry.q_len});
  const int64_t blocks = sequences_.BlocksToAppend(growth);
  if (!sequences_.MakeRoom(blocks)) {
    const WorkerStatus now = sequences_.status();
    return Refuse(from, header,
                  {.out_of_memory = true,
                   .reason = absl::StrCat("the step needs ", blocks, " KvBlocks; ",
                                          now.blocks_total - now.blocks_in_use, " of ", now.blocks_total, " are free")},
                  actions);
  }
  CopyBlocks copies;
  for (const proto::StepBeginEntry& entry : message->entries) {
    SequenceState* sequence = sequences_.Find(entry.sequence);
    sequences_.Append(*sequence, entry.q_len, copies.copies);
    sequence->micro_batch = header.micro_batch;
    sequence->last_step = StepId(header.step);
    batch.sequences.push_back(sequence);
  }
  if (!copies.copies.empty()) actions.push_back(std::move(copies));

  batch.step = StepId(header.step);
  batch.compute = from;
  BuildLayouts(*message, batch);
  batch.next_op = NextOp(batch, 0);
  batch.phase = PhaseAt(batch);
  ++counters_.steps;
  actions.push_back(PrepareStep{MicroBatchId(header.micro_batch)});
}

void AttentionWorkerCore::BuildLayouts(const proto::StepBegin& message, MicroBatch& batch) const {
  for (proto::StepLayout& layout : batch.layouts) layout.Clear();
  for (size_t e = 0; e < message.entries.size(); ++e) {
    const proto::StepBeginEntry& entry = message.entries[e];
    const std::vector<ShardState>& shards = batch.sequences[e]->shards;
    for (size_t s = 0; s < shards.size(); ++s) {
      const proto::Shard& shard = shards[s].shard;
      batch.layouts[shard.group.value()].Add(static_cast<int>(e), static_cast<int>(s), shard.kv_heads, shard.tokens,
                                             entry.ctx_len, entry.q_len, table_.softmax(shard.group), entry.attend_end);
    }
  }
  FinishLayouts(batch.layouts);
}

void AttentionWorkerCore::FinishLayouts(std::vector<proto::StepLayout>& layouts) const {
  for (int group = 0; group < table_.group_count(); ++group)
    layouts[group].Finish(table_.softmax(LayerGroup(static_cast<uint16_t>(group))));
}

int AttentionWorkerCore::NextOp(const std::vector<proto::StepLayout>& layouts, int op) const {
  while (op < table_.op_count() && layouts[table_.op_group[op].value()].items.empty()) ++op;
  return op;
}

// Where no q comes k and v are all there is.
AttentionWorkerCore::Phase AttentionWorkerCore::PhaseAt(const MicroBatch& batch) const {
  if (batch.next_op == table_.op_count()) return Phase::kIdle;
  const proto::StepLayout& layout = batch.layouts[table_.op_group[batch.next_op].value()];
  return layout.query_bytes > 0 ? Phase::kAwaitQuery : Phase::kAwaitKeyValue;
}

AttentionWorkerCore::MicroBatch* AttentionWorkerCore::Expecting(NodeId from, const FrameHeader& header, Phase phase,
                                                                int64_t payload_bytes) {
  if (header.micro_batch >= micro_batches_.size()) return nullptr;
  MicroBatch& batch = micro_batches_[header.micro_batch];
  if (batch.phase != phase || batch.step.value() != header.step || batch.next_op != header.op || batch.compute != from)
    return nullptr;
  const proto::StepLayout& layout = batch.layouts[table_.op_group[header.op].value()];
  const int64_t expected = phase == Phase::kAwaitQuery ? layout.query_bytes : layout.key_value_bytes;
  return payload_bytes == expected ? &batch : nullptr;
}

void AttentionWorkerCore::OnQuery(NodeId from, const FrameHeader& header, std::span<const std::byte> payload,
                                  std::vector<Action>& actions) {
  MicroBatch* batch = Expecting(from, header, Phase::kAwaitQuery, payload.size());
  if (batch == nullptr) {
    ++counters_.dropped_frames;
    return;
  }
  batch->phase = Phase::kAwaitKeyValue;
  actions.push_back(AttendComplete{MicroBatchId(header.micro_batch), header.op, payload});
}

void AttentionWorkerCore::OnKeyValue(NodeId from, const FrameHeader& header, std::span<const std::byte> payload,
                                     std::vector<Action>& actions) {
  MicroBatch* batch = Expecting(from, header, Phase::kAwaitKeyValue, payload.size());
  if (batch == nullptr) {
    ++counters_.dropped_frames;
    return;
  }
  batch->next_op = NextOp(*batch, header.op + 1);
  batch->phase = PhaseAt(*batch);
  actions.push_back(AppendAndFinish{MicroBatchId(header.micro_batch), header.op, payload, from, batch->step});
}

}  // namespace dovetail::attention
