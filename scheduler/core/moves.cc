#include "scheduler/core/moves.h"

#include <algorithm>
#include <utility>

#include "scheduler/core/limits.h"

namespace dovetail::scheduler {
namespace {

// Both hold it for a while.
Charges WhileMoving(const Sequence& sequence, int from, const Charges& after) {
  Charges both = after;
  const struct Charge kept { from, BlocksOn(sequence.charges, from) };
  auto* at = std::find_if(both.begin(), both.end(), [&](const struct Charge& c) { return c.worker >= from; });
  if (at != both.end() && at->worker == from) return both;
  if (kept.blocks > 0) both.insert(at, kept);
  return both;
}

}  // namespace

std::optional<uint16_t> Moves::FreeSlot() const {
  for (uint16_t slot = 0; slot < proto::kMoveSlots; ++slot) {
    if (std::none_of(moving_.begin(), moving_.end(), [&](const Sequence* s) { return s->move.slot == slot; }))
      return slot;
  }
  return std::nullopt;
}

bool Moves::Begin(Sequence& sequence, int from, int to) {
  const KvBudget& budget = accounts_.budget();
  const KvBudget::Worker giver = budget.workers()[from], taker = budget.workers()[to];
  Move move{.from = giver.id,
            .to = taker.id,
            .from_epoch = giver.epoch,
            .to_epoch = taker.epoch,
            .slot = *FreeSlot(),
            .step = StepId(0),
            .deadline = turn_.now() + kMoveTimeout};
  // A worker's shards are numbered in the order in which it was given them: the new ones come last.
  proto::OpenSequence message{.sequence = sequence.id, .shards = {}, .hashes = {}};
  for (const proto::Shard& shard : sequence.placement) {
    move.extends = move.extends || shard.worker == taker.id;
    if (shard.worker != giver.id) {
      move.placement.push_back(shard);
      continue;
    }
    message.shards.push_back(shard);
    message.shards.back().worker = taker.id;
    message.shards.back().epoch = taker.epoch;
    message.shards.back().generation = KvGeneration(0);
  }
  move.placement.insert(move.placement.end(), message.shards.begin(), message.shards.end());
  const Charges after = budget.CostOf(move.placement, {.end = sequence.reserved, .ctx_len = sequence.told_ctx_len});
  const Charges both = WhileMoving(sequence, from, after);
  if (budget.Lacking(both, sequence.charges)) return false;
  accounts_.LeaveShare(sequence);  // it gets a copy of its own
  sequence.shared_blocks = 0;
  accounts_.Charge(sequence, both);
  if (move.extends) {
    message.extend = true;
    message.ctx_len = sequence.ctx_len;
    message.steps_from = batches_.step_to_come();
  }
  names_.Append(sequence, 0, sequence.ctx_len / kSegmentTokens, message.hashes);
  sequence.phase = Phase::kMoving;
  sequence.awaited.assign(1, taker.id);
  sequence.refused.clear();
  sequence.resumable.clear();
  sequence.move = std::move(move);
  moving_.push_back(&sequence);
  turn_.Act(OpenSequence{
      .worker = taker.id, .epoch = taker.epoch, .message = std::move(message), .trace = sequence.params().trace});
  return true;
}

void Moves::Send(Sequence& sequence) {
  const Position held = sequence.ctx_len / kSegmentTokens;
  Position begin = 0;
  for (const uint32_t start : sequence.resumable) begin = std::max<Position>(begin, start <= held ? start : 0);
  begin *= kSegmentTokens;
  Move& move = sequence.move;
  move.step = batches_.NextStep(1 + static_cast<uint64_t>((sequence.ctx_len - begin) / proto::kMoveChunkTokens));
  if (begin == sequence.ctx_len) return Finish(sequence);  // its cache had everything
  move.sent = turn_.now();
  move.sent_tokens = sequence.ctx_len - begin;
  turn_.Act(MoveSequence{.worker = move.from,
                         .epoch = move.from_epoch,
                         .to = move.to,
                         .message = {.sequence = sequence.id,
                                     .begin = begin,
                                     .end = sequence.ctx_len,
                                     .slot = move.slot,
                                     .step = move.step,
                                     .target = NodeId(0),
                                     .target_epoch = move.to_epoch,
                                     .generation = proto::GenerationAt(sequence.placement, move.from),
                                     .target_generation = proto::GenerationAt(move.placement, move.to)}});
}

Sequence* Moves::Take(const SequenceMoved& event) {
  const auto at = std::find_if(moving_.begin(), moving_.end(), [&](const Sequence* sequence) {
    const Move& move = sequence->move;
    return sequence->id == event.moved.sequence && move.step == event.moved.step && move.from == event.worker &&
           move.from_epoch == event.epoch;
  });
  if (at == moving_.end()) {
    turn_.CountLate();
    return nullptr;
  }
  Sequence& sequence = **at;
  if (!event.moved.moved) return &sequence;
  const Move& move = sequence.move;
  rate_.Note(static_cast<double>(move.sent_tokens), absl::ToDoubleSeconds(turn_.now() - move.sent));
  Finish(sequence);
  return nullptr;
}

void Moves::Finish(Sequence& sequence) {
  Move& move = sequence.move;
  proto::ReleaseSequence message{.sequence = sequence.id, .ctx_len = sequence.ctx_len, .hashes = {}};
  message.generation = proto::GenerationAt(sequence.placement, move.from);
  names_.Append(sequence, sequence.named_blocks, sequence.ctx_len / kSegmentTokens, message.hashes);
  turn_.Act(ReleaseSequence{.worker = move.from, .epoch = move.from_epoch, .message = std::move(message)});
  sequence.placement = std::move(move.placement);
  Sequence::RanOn(sequence.attention_workers, move.to);
  accounts_.Charge(sequence, accounts_.CostOf(sequence, sequence.reserved));
  sequence.moved = true;
  ++finished_;
  End(sequence);
}

void Moves::End(Sequence& sequence) {
  std::erase(moving_, &sequence);
  sequence.phase = Phase::kReady;
  sequence.awaited.clear();
}

void Moves::Abandon(Sequence& sequence) {
  const Move& move = sequence.move;
  // Where it held some of the sequence before, the release that follows does for all.
  if (!move.extends && accounts_.budget().IsCurrent(move.to, move.to_epoch)) {
    turn_.Act(ReleaseSequence{.worker = move.to,
                              .epoch = move.to_epoch,
                              .message = {.sequence = sequence.id,
                                          .ctx_len = sequence.ctx_len,
                                          .hashes = {},
                                          .generation = proto::GenerationAt(move.placement, move.to)}});
  }
  End(sequence);
}

void Moves::ForgetTo(WorkerId worker, std::optional<Epoch> but_not_of) {
  const std::vector<Sequence*> before = moving_;
  for (Sequence* sequence : before) {
    if (sequence->move.to != worker || sequence->move.to_epoch == but_not_of) continue;
    accounts_.Charge(*sequence, accounts_.CostOf(*sequence, sequence->reserved));
    End(*sequence);
  }
}

Sequence* Moves::Expired() const {
  return !moving_.empty() && moving_.front()->move.deadline <= turn_.now() ? moving_.front() : nullptr;
}

bool Moves::AnyFrom(WorkerId worker) const {
  return std::any_of(moving_.begin(), moving_.end(), [&](const Sequence* s) { return s->move.from == worker; });
}

absl::Time Moves::NextDeadline() const {
  return moving_.empty() ? absl::InfiniteFuture() : moving_.front()->move.deadline;
}

}  // namespace dovetail::scheduler
