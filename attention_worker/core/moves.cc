#include <algorithm>
#include <string>
#include <utility>

#include "attention_worker/core/attention_worker_core.h"

// Sequences that move between attention workers: the giver plays the compute worker's part of steps that have no
// queries, the taker runs them as it runs any step.

namespace dovetail::attention {

using proto::FrameHeader;
using proto::FrameType;

// ---- the taker ----

void AttentionWorkerCore::OnFill(NodeId from, const FrameHeader& header, const proto::StepBeginEntry& entry,
                                 std::vector<Action>& actions) {
  MicroBatch& batch = micro_batches_[header.micro_batch];
  SequenceState* sequence = sequences_.Find(entry.sequence);
  const SequenceTable::Part part{entry.ctx_len, entry.ctx_len + entry.q_len, entry.fill_end};
  absl::Status status;
  if (sequence == nullptr) {
    status = NotFound("sequence ", entry.sequence.value(), " is not open here");
  } else if (!SequenceTable::Speaks(*sequence, entry.generation)) {
    status = FailedPrecondition("sequence ", entry.sequence.value(), " was opened again since");
  } else {
    status = sequences_.CheckFill(*sequence, part);
  }
  if (!status.ok()) return Refuse(from, header, {.reason = std::string(status.message())}, actions);
  const int64_t blocks = sequences_.BlocksToFill(*sequence, part);
  if (!sequences_.MakeRoom(blocks))
    return Refuse(from, header, {.out_of_memory = true, .reason = absl::StrCat("a move needs ", blocks, " KvBlocks")},
                  actions);
  EndStepOf(entry.sequence);
  sequences_.Fill(*sequence, part);
  sequence->micro_batches = BitOf(batch);
  sequence->last_step = StepId(header.step);
  sequence->joint = JointAppend();
  batch.sequences.assign(1, sequence);
  batch.part = proto::PrefillPart();
  batch.step = StepId(header.step);
  batch.compute = from;
  for (proto::StepLayout& layout : batch.layouts) layout.Clear();
  AddPart(*sequence, sequence->fill_shard, part, batch.layouts);
  FinishPart(batch.layouts);
  batch.next_op = NextOp(batch, 0);
  batch.phase = PhaseAt(batch);
  ++counters_.moved_parts;
  actions.push_back(PrepareStep{MicroBatchId(header.micro_batch), from});
  if (batch.phase != Phase::kIdle) return;
  sequence->NoteArrival();
  // No op will be answered.
  actions.push_back(
      SendFrame{from, FrameType::kPartial, batch.step, MicroBatchId(header.micro_batch), {}, options_.epoch});
}

void AttentionWorkerCore::AddPart(const SequenceState& sequence, size_t first_shard, const SequenceTable::Part& part,
                                  std::vector<proto::StepLayout>& layouts) const {
  for (size_t s = first_shard; s < sequence.shards.size(); ++s) {
    const proto::Shard& shard = sequence.shards[s].shard;
    const Position begin = sequences_.FillBegin(shard, part);
    if (begin == part.end) continue;
    proto::StepLayout& layout = layouts[shard.group.value()];
    layout.Add(0, static_cast<int>(s), shard.kv_heads, shard.tokens, begin, static_cast<int>(part.end - begin),
               table_.softmax(shard.group), {.attend_end = 0, .moved = true});
  }
}

// Of linear states whole blocks go, each item's after the header that names it.
void AttentionWorkerCore::FinishPart(std::vector<proto::StepLayout>& layouts) const {
  FinishLayouts(layouts);
  for (int group = 0; group < table_.group_count(); ++group) {
    const LayerGroup id(static_cast<uint16_t>(group));
    const proto::LinearSpec* spec = table_.linear(id);
    if (spec == nullptr) continue;
    proto::StepLayout& layout = layouts[group];
    layout.key_value_bytes = 0;
    for (proto::ShardStep& item : layout.items) {
      item.key_offset = layout.key_value_bytes;
      layout.key_value_bytes += static_cast<int64_t>(
          attention::SnapshotOf(item, 0, 0, spec->blocks_per_head, options_.block_bytes).payload_bytes());
    }
  }
}

StateSnapshot AttentionWorkerCore::SnapshotOf(const proto::ShardStep& item, int op) const {
  return attention::SnapshotOf(item, options_.model_digest, op, table_.linear(table_.op_group[op])->blocks_per_head,
                               options_.block_bytes);
}

// ---- the giver ----

void AttentionWorkerCore::OnMove(NodeId from, const proto::MoveSequence& order, std::vector<Action>& actions) {
  OutgoingMove& move = moves_[order.slot];
  move.active = true;  // a former one in this slot was given up by the scheduler
  move.order = order;
  move.scheduler = from;
  move.layouts.resize(table_.group_count());
  if (table_.has_linear() && options_.block_bytes == 0)
    return EndMove(move, false, "linear states do not travel from this worker", actions);
  SequenceState* const sequence = sequences_.Find(move.order.sequence);
  // It may begin with what the prefix cache has, and move before a step says so.
  if (sequence != nullptr && !sequence->started && SequenceTable::Speaks(*sequence, move.order.generation))
    (void)sequences_.Commit(*sequence, order.end, {});
  if (sequence == nullptr || !SequenceTable::Speaks(*sequence, move.order.generation) ||
      move.order.end < sequence->ctx_len || SequenceTable::LacksTokens(*sequence, sequence->end(), move.order.end))
    return EndMove(move, false, "the sequence does not stand there", actions);
  if (!WithDigests()) return BeginMove(move.order.slot, actions);
  actions.push_back(DigestBlocks{sequences_.Digested(*sequence)});
  actions.push_back(SendMove{move.order.slot});
}

void AttentionWorkerCore::BeginMove(int slot, std::vector<Action>& actions) {
  OutgoingMove& move = moves_[slot];
  if (!move.active) return;
  SequenceState& sequence = *sequences_.Find(move.order.sequence);
  if (!sequences_.CheckHeld(sequence) || !sequences_.CheckPlaces(sequence)) {
    ++counters_.damaged_sequences;
    return EndMove(move, false, "KV blocks of the sequence are not what was written", actions);
  }
  SendPart(move, move.order.begin, actions);
}

void AttentionWorkerCore::SendPart(OutgoingMove& move, Position begin, std::vector<Action>& actions) {
  const proto::MoveSequence& order = move.order;
  move.part = {begin, std::min(begin + proto::kMoveChunkTokens, order.end), order.end};
  move.step = StepId(order.step.value() + static_cast<uint64_t>((begin - order.begin) / proto::kMoveChunkTokens));
  proto::StepBegin message;
  message.entries.push_back({.sequence = order.sequence,
                             .ctx_len = begin,
                             .q_len = static_cast<int32_t>(move.part.end - begin),
                             .hashes = {},
                             .attend_end = 0,
                             .fill_end = order.end,
                             .generation = order.target_generation});
  SendFrame frame{order.target, FrameType::kStepBegin,
                  move.step,    MicroBatchId(static_cast<uint16_t>(options_.micro_batches + order.slot)),
                  {},           order.target_epoch};
  proto::Encode(message, frame.message);
  actions.push_back(std::move(frame));
  for (proto::StepLayout& layout : move.layouts) layout.Clear();
  AddPart(*sequences_.Find(order.sequence), 0, move.part, move.layouts);
  FinishPart(move.layouts);
  // Of tokens that lie on other workers there is nothing to send. The taker must have begun the part all the same
  // before the move ends: the sequence's next step reaches it by another way.
  move.next = NextOp(move.layouts, 0);
  move.op = move.next < table_.op_count() ? move.next : 0;
  move.unanswered = 0;
  SendOps(move, actions);
}

// A few at a time: what the taker has not answered does not pile up before the steps of others.
void AttentionWorkerCore::SendOps(OutgoingMove& move, std::vector<Action>& actions) const {
  const MicroBatchId id(static_cast<uint16_t>(options_.micro_batches + move.order.slot));
  for (; move.unanswered < proto::kMoveOpsAhead && move.next < table_.op_count(); ++move.unanswered) {
    actions.push_back(SendMovedKeyValue{id, move.order.slot, move.next});
    move.next = NextOp(move.layouts, move.next + 1);
  }
}

void AttentionWorkerCore::TakeAnswer(OutgoingMove& move, std::vector<Action>& actions) {
  move.op = NextOp(move.layouts, move.op + 1);
  if (move.op < table_.op_count()) {
    --move.unanswered;
    SendOps(move, actions);
  } else if (move.part.end < move.order.end) {
    SendPart(move, move.part.end, actions);
  } else {
    EndMove(move, true, "", actions);
  }
}

void AttentionWorkerCore::OnMoveAnswer(const FrameArrived& frame, std::vector<Action>& actions) {
  const FrameHeader& header = frame.header;
  const int slot = static_cast<int>(header.micro_batch) - options_.micro_batches;
  OutgoingMove* move = slot >= 0 && slot < proto::kMoveSlots ? &moves_[slot] : nullptr;
  const bool expected = !std::holds_alternative<WrongSize>(frame.body) && move != nullptr && move->active &&
                        move->order.target == frame.from && move->order.target_epoch.value() == header.epoch &&
                        move->step.value() == header.step;
  if (expected && header.type == FrameType::kStepRefused) {
    const auto* const refused = std::get_if<proto::StepRefused>(&frame.body);
    return EndMove(*move, false, refused != nullptr ? refused->reason : "refused", actions);
  }
  if (expected && header.op == move->op && std::holds_alternative<NoMessage>(frame.body))
    return TakeAnswer(*move, actions);
  ++counters_.dropped_frames;
}

void AttentionWorkerCore::EndMove(OutgoingMove& move, bool moved, std::string reason, std::vector<Action>& actions) {
  move.active = false;
  SendFrame frame{move.scheduler, FrameType::kSequenceMoved, move.order.step, MicroBatchId(0), {}, options_.epoch};
  proto::Encode(proto::SequenceMoved{move.order.sequence, move.order.step, moved, std::move(reason)}, frame.message);
  actions.push_back(std::move(frame));
}

void AttentionWorkerCore::ForgetMoveOf(SequenceId id) {
  for (OutgoingMove& move : moves_)
    if (move.order.sequence == id) move.active = false;
}

}  // namespace dovetail::attention
