#include "attention_worker/core/attention_worker_core.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "proto/gather_frames.h"
#include "proto/link_frames.h"

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
  if (options_.poison_freed) sequences_.pool().KeepFreed();
  if (options_.reports_cache) sequences_.index().KeepChanges();
}

void AttentionWorkerCore::Handle(const FrameArrived& frame, std::vector<Action>& actions) {
  const size_t first = actions.size();
  HandleFrame(frame, actions);
  if (options_.reports_cache && sequences_.index().has_changes()) ReportCache(first, actions);
}

void AttentionWorkerCore::HandleFrame(const FrameArrived& frame, std::vector<Action>& actions) {
  const FrameHeader& header = frame.header;
  const bool answer = header.type == FrameType::kPartial || header.type == FrameType::kStepRefused;
  if (answer) return OnMoveAnswer(frame, actions);
  if (header.epoch != options_.epoch.value() || std::holds_alternative<WrongSize>(frame.body)) {
    ++counters_.dropped_frames;
    return;
  }
  const bool order = header.type >= FrameType::kOpenSequence && header.type < FrameType::kStepBegin;
  if (order && CameBefore(header)) {
    ++counters_.dropped_frames;
    return;
  }
  if (order) scheduler_ = frame.from;
  if (header.type == FrameType::kStepBegin || header.type == proto::kStepBeginOnDevice)
    return OnStepBegin(frame, actions);
  if (header.type == proto::kAskRows) return OnAskRows(frame.from, header, actions);
  if (const auto* tensor = std::get_if<TensorBytes>(&frame.body)) {
    if (header.type == FrameType::kQuery) return OnQuery(frame.from, header, tensor->bytes, actions);
    return OnKeyValue(frame.from, header, tensor->bytes, actions);
  }
  OnOrder(frame, actions);
}

void AttentionWorkerCore::OnOrder(const FrameArrived& frame, std::vector<Action>& actions) {
  if (const auto* open = std::get_if<proto::OpenSequence>(&frame.body))
    return OnOpen(frame.from, frame.header, *open, actions);
  if (const auto* fork = std::get_if<proto::ForkSequence>(&frame.body))
    return OnFork(frame.from, frame.header, *fork, actions);
  if (const auto* move = std::get_if<proto::MoveSequence>(&frame.body)) return OnMove(frame.from, *move, actions);
  if (const auto* probe = std::get_if<proto::PrefixProbe>(&frame.body))
    return OnProbe(frame.from, frame.header, *probe, actions);
  if (const auto* unpin = std::get_if<proto::Unpin>(&frame.body)) return sequences_.Unpin(unpin->pin_id);
  if (const auto* release = std::get_if<proto::ReleaseSequence>(&frame.body)) {
    OnRelease(*release);
    return DigestFinished(actions);
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

void AttentionWorkerCore::Refuse(NodeId to, const FrameHeader& header, const proto::StepRefused& refusal,
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
  const size_t blocks = compared ? sequences_.pool().blocks(set).size() : 0;
  if (sequences_.TakeDigest(set, digest)) return;
  ++counters_.damaged_sets;
  counters_.damaged_blocks += blocks;
}

absl::Status AttentionWorkerCore::CheckShardsAreOurs(const std::vector<proto::Shard>& shards) const {
  for (const proto::Shard& shard : shards)
    if (shard.worker != options_.worker || shard.epoch != options_.epoch)
      return InvalidArgument(DebugString(shard), ": this is worker ", options_.worker.value(), ", epoch ",
                             options_.epoch.value());
  return absl::OkStatus();
}

void AttentionWorkerCore::OnOpen(NodeId from, const FrameHeader& header, const proto::OpenSequence& message,
                                 std::vector<Action>& actions) {
  if (!CheckShardsAreOurs(message.shards).ok()) {
    ++counters_.dropped_frames;
    return;
  }
  EndStepOf(message.sequence);  // of a sequence that this one replaces
  ForgetMoveOf(message.sequence);
  const auto opened = sequences_.Open(message);
  if (message.extend && opened.ok()) EndStepsBefore(message);
  const AnswerOpened answer{from, header, message.sequence};
  // An empty list says no: not even a fresh start is possible here.
  if (!opened.ok())
    return Reply(from, header, FrameType::kSequenceOpened, proto::SequenceOpened{message.sequence, {}}, actions);
  std::vector<BlockSetId> cached = WithDigests() ? sequences_.Digested(**opened) : std::vector<BlockSetId>();
  if (cached.empty()) return AnswerOpen(answer, actions);
  actions.push_back(DigestBlocks{std::move(cached)});
  actions.push_back(answer);
}

// Another connection brings the begins of steps, so those of steps that are over may come yet. Where nothing of a step
// belongs here, its compute worker went on without an answer.
void AttentionWorkerCore::EndStepsBefore(const proto::OpenSequence& message) {
  SequenceState& sequence = *sequences_.Find(message.sequence);
  sequence.joint = JointAppend();
  sequence.steps_from = std::max(sequence.steps_from, message.steps_from);
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

void AttentionWorkerCore::OnFork(NodeId from, const FrameHeader& header, const proto::ForkSequence& message,
                                 std::vector<Action>& actions) {
  proto::SequenceOpened reply{message.child, {}};
  if (message.child != message.parent) {  // a sequence that the child replaces
    EndStepOf(message.child);
    ForgetMoveOf(message.child);
  }
  if (const auto forked = sequences_.Fork(message); forked.ok()) {
    reply.resumable.push_back(static_cast<uint32_t>(message.ctx_len / kSegmentTokens));
    reply.generation = (*forked)->generation;
  }
  Reply(from, header, FrameType::kSequenceOpened, reply, actions);
}

void AttentionWorkerCore::OnRelease(const proto::ReleaseSequence& message) {
  const SequenceState* const sequence = sequences_.Find(message.sequence);
  if (sequence != nullptr && !SequenceTable::Speaks(*sequence, message.generation)) {
    ++counters_.dropped_frames;
    return;
  }
  EndStepOf(message.sequence);
  ForgetMoveOf(message.sequence);
  sequences_.Release(message);
}

// A step that was still running can never finish: its frames are dropped from here on.
void AttentionWorkerCore::EndStep(MicroBatch& batch) {
  for (SequenceState* sequence : batch.sequences) sequence->micro_batches &= ~BitOf(batch);
  batch.sequences.clear();
  batch.phase = Phase::kIdle;
  batch.part = proto::PrefillPart();
  batch.held_query.reset();
  batch.held_key_value.reset();
  batch.pieces_asked = batch.pieces_given = 0;
}

void AttentionWorkerCore::EndStepOf(SequenceId id) {
  const SequenceState* sequence = sequences_.Find(id);
  if (sequence == nullptr || sequence->micro_batches == 0) return;
  for (MicroBatch& batch : micro_batches_)
    if ((sequence->micro_batches & BitOf(batch)) != 0) EndStep(batch);
}

void AttentionWorkerCore::LosePeer(NodeId node) {
  for (MicroBatch& batch : micro_batches_)
    if (batch.phase != Phase::kIdle && batch.compute == node) EndStep(batch);
}

void AttentionWorkerCore::OnProbe(NodeId from, const FrameHeader& header, const proto::PrefixProbe& message,
                                  std::vector<Action>& actions) {
  if (!CheckShardsAreOurs(message.shards).ok()) {
    ++counters_.dropped_frames;
    return;
  }
  Reply(from, header, FrameType::kPrefixProbed, proto::PrefixProbed{message.pin_id, sequences_.Probe(message)},
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

// A compute worker waits for no answer where nothing but the begin of a step goes to a worker: the next step may come
// from another one before that begin, or without it. Only tokens and names that belong here must not be missing then.
// They are where a compute worker, or its link, was lost after it went on without an answer.
std::vector<SequenceId> AttentionWorkerCore::IncompleteIn(StepId step, const proto::StepBegin& message) const {
  std::vector<SequenceId> incomplete;
  for (const proto::StepBeginEntry& entry : message.entries) {
    const SequenceState* const sequence = sequences_.Find(entry.sequence);
    if (sequence == nullptr || step <= sequence->last_step || step < sequence->steps_from) continue;
    const Position ctx_len = message.part.in_group() ? message.part.base : entry.ctx_len;
    const auto misses = [&](Position end) {
      return !sequences_.HoldsVisible(*sequence, ctx_len) || SequenceTable::LacksTokens(*sequence, end, ctx_len) ||
             !SequenceTable::NamesContinue(*sequence, ctx_len, entry.hashes);
    };
    if (!sequence->started) {
      if (misses(SequenceTable::Offers(*sequence, ctx_len) ? ctx_len : 0)) incomplete.push_back(entry.sequence);
      continue;
    }
    const bool running =
        std::any_of(micro_batches_.begin(), micro_batches_.end(),
                    [&](const MicroBatch& batch) {
                      return (sequence->micro_batches & BitOf(batch)) != 0 && batch.phase != Phase::kIdle;
                    }) ||
        (sequence->joint.active() && !sequence->joint.complete(table_.op_count()));
    if (misses(running ? sequence->ctx_len : sequence->end())) incomplete.push_back(entry.sequence);
  }
  return incomplete;
}

// A rank of a group whose first rank has made room for it.
bool AttentionWorkerCore::JoinsGroup(const proto::StepBegin& message) const {
  if (!message.part.in_group()) return false;
  const SequenceState* const sequence = sequences_.Find(message.entries[0].sequence);
  return sequence != nullptr && sequence->joint.active() && sequence->joint.group() == message.part.group;
}

// Whether the sequence may begin a step, or a group whose first step is `begins`, that commits ctx_len.
absl::Status AttentionWorkerCore::CheckEntry(const FrameHeader& header, const proto::StepBeginEntry& entry,
                                             StepId begins, Position ctx_len) const {
  const SequenceState* const sequence = sequences_.Find(entry.sequence);
  if (sequence == nullptr) return NotFound("sequence ", entry.sequence.value(), " is not open here");
  for (size_t i = 0; i < micro_batches_.size(); ++i) {
    const MicroBatch& other = micro_batches_[i];
    if ((sequence->micro_batches & BitOf(other)) == 0 || other.phase == Phase::kIdle) continue;
    if (other.step >= begins)
      return FailedPrecondition("sequence ", entry.sequence.value(), " is in step ", other.step.value(),
                                " of micro-batch ", i);
  }
  if (begins < sequence->steps_from)
    return FailedPrecondition("sequence ", entry.sequence.value(), " got more shards after step ", begins.value());
  if (begins < sequence->last_step)
    return FailedPrecondition("sequence ", entry.sequence.value(), " was in step ", sequence->last_step.value(),
                              " since step ", header.step);
  return sequences_.CheckCommit(*sequence, ctx_len, entry.hashes);
}

absl::Status AttentionWorkerCore::CommitEntries(const FrameHeader& header, const proto::StepBegin& message) {
  absl::flat_hash_set<SequenceId> seen;
  for (const proto::StepBeginEntry& entry : message.entries)
    if (!seen.insert(entry.sequence).second)
      return InvalidArgument("sequence ", entry.sequence.value(), " is in the step twice");
  const bool group = message.part.in_group();
  const StepId begins = group ? message.part.group : StepId(header.step);
  const auto commits = [&](const proto::StepBeginEntry& entry) { return group ? message.part.base : entry.ctx_len; };
  for (const proto::StepBeginEntry& entry : message.entries)
    DT_RETURN_IF_ERROR(CheckEntry(header, entry, begins, commits(entry)));
  for (const proto::StepBeginEntry& entry : message.entries) {
    EndStepOf(entry.sequence);
    ForgetMoveOf(entry.sequence);
    SequenceState& sequence = *sequences_.Find(entry.sequence);
    DT_RETURN_IF_ERROR(sequences_.Commit(sequence, commits(entry), entry.hashes));
    sequence.joint = JointAppend();
    sequence.last_step = begins;
  }
  return absl::OkStatus();
}

// Of a group: the first rank makes room for the K and V of all; each has its own states. kResourceExhausted: there is
// no room, and nothing has been appended.
absl::Status AttentionWorkerCore::AppendEntries(const proto::StepBegin& message, bool joins,
                                                std::vector<Action>& actions) {
  const auto appends = [&](const proto::StepBeginEntry& entry) {
    if (joins) return 0;
    return message.part.in_group() ? static_cast<int>(message.part.end - message.part.base) : entry.q_len;
  };
  std::vector<SequenceTable::Growth> growth;
  for (const proto::StepBeginEntry& entry : message.entries)
    growth.push_back({sequences_.Find(entry.sequence), appends(entry), entry.ctx_len, entry.ctx_len + entry.q_len,
                      entry.states != proto::StateExchange::kTokens});
  const int64_t blocks = sequences_.BlocksToAppend(growth);
  if (!sequences_.MakeRoom(blocks)) {
    const WorkerStatus now = sequences_.status();
    return ResourceExhausted("the step needs ", blocks, " KvBlocks; ", now.blocks_total - now.blocks_in_use, " of ",
                             now.blocks_total, " are free");
  }
  CopyBlocks copies;
  for (const SequenceTable::Growth& part : growth) {
    sequences_.Append(part, copies.copies);
    if (message.part.in_group() && !joins) part.sequence->joint = JointAppend(message.part);
  }
  if (!copies.copies.empty()) actions.push_back(std::move(copies));
  return absl::OkStatus();
}

void AttentionWorkerCore::OnStepBegin(const FrameArrived& frame, std::vector<Action>& actions) {
  const NodeId from = frame.from;
  const FrameHeader& header = frame.header;
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
  const auto* const message = std::get_if<proto::StepBegin>(&frame.body);
  if (message == nullptr) return Refuse(from, header, {.reason = std::get<Unreadable>(frame.body).why}, actions);
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
  if (message->part.in_group() && header.type != FrameType::kStepBegin)
    return Refuse(from, header, {.reason = "the ranks of a prompt exchange through the hosts"}, actions);
  const bool joins = JoinsGroup(*message);
  if (joins) {
    const SequenceState& sequence = *sequences_.Find(message->entries[0].sequence);
    if (absl::Status status = sequence.joint.CheckBegin(message->part); !status.ok())
      return Refuse(from, header, {.reason = std::string(status.message())}, actions);
  } else if (!CommitsStep(from, header, *message, actions)) {
    return;
  }
  if (absl::Status status = AppendEntries(*message, joins, actions); !status.ok())
    return Refuse(from, header, {.out_of_memory = true, .reason = std::string(status.message())}, actions);
  BeginStep(from, header, *message, actions);
}

// Commits what came before a step, or refuses it: false.
bool AttentionWorkerCore::CommitsStep(NodeId from, const FrameHeader& header, const proto::StepBegin& message,
                                      std::vector<Action>& actions) {
  if (std::vector<SequenceId> incomplete = IncompleteIn(StepId(header.step), message); !incomplete.empty()) {
    Refuse(from, header,
           {.reason = "steps before this one did not reach this worker as a whole", .damaged = std::move(incomplete)},
           actions);
    return false;
  }
  if (absl::Status status = CommitEntries(header, message); !status.ok()) {
    Refuse(from, header, {.reason = std::string(status.message())}, actions);
    return false;
  }
  DigestFinished(actions);
  return true;
}

// There is room for what it appends.
void AttentionWorkerCore::BeginStep(NodeId from, const FrameHeader& header, const proto::StepBegin& message,
                                    std::vector<Action>& actions) {
  MicroBatch& batch = micro_batches_[header.micro_batch];
  for (const proto::StepBeginEntry& entry : message.entries) {
    SequenceState* const sequence = sequences_.Find(entry.sequence);
    sequence->micro_batches |= BitOf(batch);
    batch.sequences.push_back(sequence);
  }
  batch.step = StepId(header.step);
  batch.compute = from;
  batch.in_frames = header.type == FrameType::kStepBegin;
  batch.part = message.part;
  BuildLayouts(message, batch);
  batch.next_op = NextOp(batch, 0);
  batch.phase = PhaseAt(batch);
  ++counters_.steps;
  actions.push_back(PrepareStep{MicroBatchId(header.micro_batch), from, batch.in_frames});
  if (!batch.part.in_group()) return;
  Reached(batch, batch.next_op);
  LetGroupGoOn(*batch.sequences[0], actions);
}

void AttentionWorkerCore::BuildLayouts(const proto::StepBegin& message, MicroBatch& batch) const {
  for (proto::StepLayout& layout : batch.layouts) {
    layout.Clear();
    layout.piece_bytes = message.gather_piece_bytes;
  }
  for (size_t e = 0; e < message.entries.size(); ++e) {
    const proto::StepBeginEntry& entry = message.entries[e];
    const std::vector<ShardState>& shards = batch.sequences[e]->shards;
    for (size_t s = 0; s < shards.size(); ++s) {
      const proto::Shard& shard = shards[s].shard;
      batch.layouts[shard.group.value()].Add(static_cast<int>(e), static_cast<int>(s), shard.kv_heads, shard.tokens,
                                             entry.ctx_len, entry.q_len, table_.softmax(shard.group), entry.exchange());
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
  return layout.asks() ? Phase::kAwaitQuery : Phase::kAwaitKeyValue;
}

AttentionWorkerCore::MicroBatch* AttentionWorkerCore::Expecting(NodeId from, const FrameHeader& header, Phase phase,
                                                                int64_t payload_bytes) {
  if (header.micro_batch >= micro_batches_.size()) return nullptr;
  MicroBatch& batch = micro_batches_[header.micro_batch];
  if (batch.phase != phase || batch.step.value() != header.step || batch.next_op != header.op ||
      batch.compute != from || !batch.in_frames)
    return nullptr;
  const proto::StepLayout& layout = batch.layouts[table_.op_group[header.op].value()];
  const int64_t expected = phase == Phase::kAwaitQuery ? layout.query_bytes : layout.key_value_bytes;
  return payload_bytes == expected ? &batch : nullptr;
}

std::optional<int> AttentionWorkerCore::TakeOp(MicroBatchId micro_batch) {
  MicroBatch& batch = micro_batches_[micro_batch.value()];
  if (batch.in_frames || batch.phase == Phase::kIdle) return std::nullopt;
  const int op = batch.next_op;
  batch.next_op = NextOp(batch, op + 1);
  batch.phase = PhaseAt(batch);
  return op;
}

// A rank that has written its tokens of the ops before next_op lets those after it go on.
void AttentionWorkerCore::Reached(MicroBatch& batch, int next_op) {
  if (batch.part.in_group()) batch.sequences[0]->joint.Reached(batch.part.rank, next_op);
}

bool AttentionWorkerCore::MayUse(const MicroBatch& batch, int op) const {
  return !batch.part.in_group() || AsksBeforeGroup(batch, op) || batch.sequences[0]->joint.MayUse(batch.part.rank, op);
}

// What a rank asks of the op here is of tokens before the group: it has those of the ranks before it by another way.
bool AttentionWorkerCore::AsksBeforeGroup(const MicroBatch& batch, int op) const {
  if (op >= table_.op_count()) return false;  // it has ended
  const LayerGroup group = table_.op_group[op];
  if (table_.linear(group) != nullptr) return false;
  const auto& items = batch.layouts[group.value()].items;
  return std::all_of(items.begin(), items.end(), [base = batch.part.base](const proto::ShardStep& item) {
    return (item.rows.q_count == 0 || item.attended_end() <= base) &&
           (item.gather_count == 0 || item.gather_first + item.gather_count <= base);
  });
}

// By rank, since one that goes on may let the next one go on.
void AttentionWorkerCore::LetGroupGoOn(const SequenceState& sequence, std::vector<Action>& actions) {
  std::array<MicroBatch*, proto::kMaxPrefillRanks> by_rank{};
  for (MicroBatch& batch : micro_batches_)
    if (batch.part.in_group() && batch.sequences[0] == &sequence) by_rank[batch.part.rank] = &batch;
  for (MicroBatch* const batch : by_rank) {
    if (batch == nullptr || !MayUse(*batch, batch->next_op)) continue;
    if (const auto query = std::exchange(batch->held_query, std::nullopt)) TakeQuery(*batch, *query, actions);
    if (const auto key_value = std::exchange(batch->held_key_value, std::nullopt))
      TakeKeyValue(*batch, *key_value, actions);
  }
}

void AttentionWorkerCore::TakeQuery(MicroBatch& batch, std::span<const std::byte> query, std::vector<Action>& actions) {
  const MicroBatchId id(static_cast<uint16_t>(&batch - micro_batches_.data()));
  if (batch.layouts[table_.op_group[batch.next_op].value()].with_states)
    actions.push_back(AnswerStates{id, batch.next_op, batch.compute, batch.step});
  else
    actions.push_back(AttendComplete{id, batch.next_op, query});
}

void AttentionWorkerCore::TakeKeyValue(MicroBatch& batch, std::span<const std::byte> key_value,
                                       std::vector<Action>& actions) {
  const MicroBatchId id(static_cast<uint16_t>(&batch - micro_batches_.data()));
  const int op = batch.next_op, next = NextOp(batch, op + 1);
  const bool pieces = batch.layouts[table_.op_group[op].value()].pieces > 0;
  actions.push_back(AppendAndFinish{id, op, key_value, batch.compute, batch.step, pieces});
  Reached(batch, next);
  if (pieces) {
    batch.phase = Phase::kGiveRows;
    return GiveAskedRows(batch, actions);
  }
  batch.next_op = next;
  batch.phase = PhaseAt(batch);
  if (batch.phase == Phase::kIdle)
    for (SequenceState* sequence : batch.sequences) sequence->NoteArrival();
}

// The next piece of the op at hand. It may be asked for while k and v wait for the ranks before.
void AttentionWorkerCore::OnAskRows(NodeId from, const FrameHeader& header, std::vector<Action>& actions) {
  const bool known = header.micro_batch < micro_batches_.size();
  MicroBatch* const batch = known ? &micro_batches_[header.micro_batch] : nullptr;
  if (batch == nullptr || batch->phase == Phase::kIdle || batch->step.value() != header.step ||
      batch->next_op != header.op || batch->compute != from || !batch->in_frames ||
      header.digest != static_cast<uint64_t>(batch->pieces_asked) ||
      batch->pieces_asked >= batch->layouts[table_.op_group[header.op].value()].pieces) {
    ++counters_.dropped_frames;
    return;
  }
  ++batch->pieces_asked;
  if (batch->phase == Phase::kGiveRows) GiveAskedRows(*batch, actions);
}

// With the last piece the op ends.
void AttentionWorkerCore::GiveAskedRows(MicroBatch& batch, std::vector<Action>& actions) {
  const MicroBatchId id(static_cast<uint16_t>(&batch - micro_batches_.data()));
  const int op = batch.next_op, pieces = batch.layouts[table_.op_group[op].value()].pieces;
  for (; batch.pieces_given < batch.pieces_asked; ++batch.pieces_given)
    actions.push_back(
        GiveRows{id, op, batch.pieces_given, batch.compute, batch.step, batch.pieces_given + 1 == pieces});
  if (batch.pieces_given < pieces) return;
  batch.pieces_asked = batch.pieces_given = 0;
  batch.next_op = NextOp(batch, op + 1);
  batch.phase = PhaseAt(batch);
}

void AttentionWorkerCore::OnQuery(NodeId from, const FrameHeader& header, std::span<const std::byte> payload,
                                  std::vector<Action>& actions) {
  MicroBatch* batch = Expecting(from, header, Phase::kAwaitQuery, payload.size());
  if (batch == nullptr) {
    ++counters_.dropped_frames;
    return;
  }
  batch->phase = Phase::kAwaitKeyValue;
  if (MayUse(*batch, header.op)) return TakeQuery(*batch, payload, actions);
  batch->held_query = payload;
}

void AttentionWorkerCore::OnKeyValue(NodeId from, const FrameHeader& header, std::span<const std::byte> payload,
                                     std::vector<Action>& actions) {
  MicroBatch* batch = Expecting(from, header, Phase::kAwaitKeyValue, payload.size());
  if (batch == nullptr || batch->held_key_value.has_value()) {
    ++counters_.dropped_frames;
    return;
  }
  const LayerGroup group = table_.op_group[header.op];
  // States that a rank leaves need nothing of the ranks before it, from which it may have come by another way.
  const bool computes = table_.linear(group) != nullptr && !batch->layouts[group.value()].with_states;
  const bool waits = batch->held_query.has_value() || computes;
  if (waits && !MayUse(*batch, header.op)) {
    batch->held_key_value = payload;
    return;
  }
  TakeKeyValue(*batch, payload, actions);
  if (batch->part.in_group()) LetGroupGoOn(*batch->sequences[0], actions);
}

}  // namespace dovetail::attention
