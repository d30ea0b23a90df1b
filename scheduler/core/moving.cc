#include <algorithm>
#include <utility>

#include "scheduler/core/limits.h"
#include "scheduler/core/placement_policy.h"
#include "scheduler/core/scheduler_impl.h"

// Sequences that move between attention workers, KV and all: away from one that drains, towards one that has less to
// do. The taker opens the sequence (or is given more shards of it), the giver sends it the K and V, then the placement
// changes. Whatever goes wrong meanwhile, the sequence begins anew from the token log.

namespace dovetail::scheduler {

void SchedulerCore::Impl::StartMoves() {
  LeaveDrainingWorkers();
  if (rebalance_) Rebalance();
}

std::optional<uint16_t> SchedulerCore::Impl::FreeMoveSlot() const {
  for (uint16_t slot = 0; slot < proto::kMoveSlots; ++slot) {
    if (std::none_of(moving_.begin(), moving_.end(), [&](const Sequence* s) { return s->move.slot == slot; }))
      return slot;
  }
  return std::nullopt;
}

bool SchedulerCore::Impl::MayMove(const Sequence& sequence) const {
  return sequence.phase == Phase::kReady && sequence.in_flight == 0 && !sequence.awaits_forks && sequence.planned == 0;
}

// The emptiest first; last those on which its KV was damaged.
std::vector<int> SchedulerCore::Impl::TakersOf(const Sequence& sequence) const {
  std::vector<int> takers = EmptiestFirst(budget_.workers());
  std::erase_if(takers, [&](int worker) { return HasNoRoomFor(sequence, worker); });
  std::stable_partition(takers.begin(), takers.end(), [&](int worker) { return !Refuses(sequence, worker); });
  return takers;
}

void SchedulerCore::Impl::LeaveDrainingWorkers() {
  for (int from = 0; from < static_cast<int>(budget_.workers().size()); ++from) {
    const KvBudget::Worker worker = budget_.workers()[from];
    if (!worker.draining || worker.lost) continue;
    const std::vector<Sequence*> before = active_;
    for (Sequence* sequence : before) {
      if (!FreeMoveSlot()) return;
      const bool lies_there = std::any_of(sequence->placement.begin(), sequence->placement.end(),
                                          [&](const proto::Shard& shard) { return shard.worker == worker.id; });
      if (!lies_there || !MayMove(*sequence)) continue;
      if (!sequence->stepped) {  // nothing was computed yet
        if (budget_.any_usable()) Preempt(*sequence);
        continue;
      }
      // Where nobody has room it stays: it ends there, or somebody else ends first.
      for (const int to : TakersOf(*sequence))
        if (MoveAway(*sequence, from, to)) break;
    }
  }
}

// A newcomer takes from the worker that has most, as long as that brings them closer.
void SchedulerCore::Impl::Rebalance() {
  while (FreeMoveSlot()) {
    const std::vector<int> order = EmptiestFirst(budget_.workers());
    if (order.size() < 2) break;
    const int to = order.front();
    const int from = order.back();
    const std::vector<double> parts = FairParts(budget_.workers());
    const double giver = static_cast<double>(budget_.workers()[from].used) / parts[from];
    const double taker = static_cast<double>(budget_.workers()[to].used) / parts[to];
    Sequence* best = nullptr;
    for (Sequence* sequence : active_) {
      const double blocks = static_cast<double>(BlocksOn(sequence->charges, from));
      if (blocks == 0 || sequence->phase != Phase::kReady || !sequence->stepped || sequence->shares_prefix) continue;
      if (Refuses(*sequence, to)) continue;
      if (giver - taker <= blocks / parts[from] + blocks / parts[to]) continue;
      if (best == nullptr || BlocksOn(best->charges, from) < blocks) best = sequence;
    }
    if (best == nullptr) break;
    if (!MayMove(*best)) return;  // when its step is done
    if (!MoveAway(*best, from, to)) break;
  }
  if (moving_.empty()) rebalance_ = false;
}

// Both hold it for a while.
Charges SchedulerCore::Impl::WhileMoving(const Sequence& sequence, int from, const Charges& after) const {
  Charges both = after;
  const struct Charge kept { from, BlocksOn(sequence.charges, from) };
  auto* at = std::find_if(both.begin(), both.end(), [&](const struct Charge& c) { return c.worker >= from; });
  if (at != both.end() && at->worker == from) return both;
  if (kept.blocks > 0) both.insert(at, kept);
  return both;
}

bool SchedulerCore::Impl::MoveAway(Sequence& sequence, int from, int to) {
  const KvBudget::Worker giver = budget_.workers()[from], taker = budget_.workers()[to];
  Move move{.from = giver.id,
            .to = taker.id,
            .from_epoch = giver.epoch,
            .to_epoch = taker.epoch,
            .slot = *FreeMoveSlot(),
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
  const Charges after = budget_.CostOf(move.placement, {.end = sequence.reserved, .ctx_len = sequence.told_ctx_len});
  const Charges both = WhileMoving(sequence, from, after);
  if (budget_.Lacking(both, sequence.charges)) return false;
  accounts_.LeaveShare(sequence);  // it gets a copy of its own
  sequence.shared_blocks = 0;
  accounts_.Charge(sequence, both);
  message.extend = move.extends;
  names_.Append(sequence, 0, sequence.ctx_len / kSegmentTokens, message.hashes);
  sequence.phase = Phase::kMoving;
  sequence.awaited.assign(1, taker.id);
  sequence.refused.clear();
  sequence.resumable.clear();
  sequence.move = std::move(move);
  moving_.push_back(&sequence);
  turn_.Act(OpenSequence{.worker = taker.id, .epoch = taker.epoch, .message = std::move(message)});
  return true;
}

void SchedulerCore::Impl::OpenedByTaker(Sequence& sequence) {
  if (!sequence.refused.empty()) return GoElsewhere(sequence, sequence.refused);
  const Position held = sequence.ctx_len / kSegmentTokens;
  Position begin = 0;
  for (const uint32_t start : sequence.resumable) begin = std::max<Position>(begin, start <= held ? start : 0);
  begin *= kSegmentTokens;
  Move& move = sequence.move;
  move.step = batches_.NextStep(1 + static_cast<uint64_t>((sequence.ctx_len - begin) / proto::kMoveChunkTokens));
  if (begin == sequence.ctx_len) return FinishMove(sequence);  // its cache had everything
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

void SchedulerCore::Impl::On(const SequenceMoved& event) {
  const auto at = incarnations_.find(event.moved.sequence);
  Sequence* sequence = at == incarnations_.end() ? nullptr : at->second;
  const bool expected = sequence != nullptr && sequence->phase == Phase::kMoving &&
                        sequence->move.step == event.moved.step && sequence->move.from == event.worker &&
                        sequence->move.from_epoch == event.epoch;
  if (!expected) {
    ++stats_.late_events;
  } else if (event.moved.moved) {
    FinishMove(*sequence);
  } else {
    Preempt(*sequence);
  }
}

void SchedulerCore::Impl::FinishMove(Sequence& sequence) {
  Move& move = sequence.move;
  proto::ReleaseSequence message{.sequence = sequence.id, .ctx_len = sequence.ctx_len, .hashes = {}};
  message.generation = proto::GenerationAt(sequence.placement, move.from);
  names_.Append(sequence, sequence.named_blocks, sequence.ctx_len / kSegmentTokens, message.hashes);
  turn_.Act(ReleaseSequence{.worker = move.from, .epoch = move.from_epoch, .message = std::move(message)});
  sequence.placement = std::move(move.placement);
  Sequence::RanOn(sequence.attention_workers, move.to);
  accounts_.Charge(sequence, accounts_.CostOf(sequence, sequence.reserved));
  ++stats_.moves;
  EndMove(sequence);
}

void SchedulerCore::Impl::EndMove(Sequence& sequence) {
  std::erase(moving_, &sequence);
  sequence.phase = Phase::kReady;
  sequence.awaited.clear();
}

// Where it held some of the sequence before, the release that follows does for all.
void SchedulerCore::Impl::ReleaseAtTaker(const Sequence& sequence) {
  const Move& move = sequence.move;
  if (move.extends || !budget_.IsCurrent(move.to, move.to_epoch)) return;
  turn_.Act(ReleaseSequence{.worker = move.to,
                            .epoch = move.to_epoch,
                            .message = {.sequence = sequence.id,
                                        .ctx_len = sequence.ctx_len,
                                        .hashes = {},
                                        .generation = proto::GenerationAt(move.placement, move.to)}});
}

// The giver still has everything.
void SchedulerCore::Impl::ForgetMovesTo(WorkerId worker, std::optional<Epoch> but_not_of) {
  const std::vector<Sequence*> before = moving_;
  for (Sequence* sequence : before) {
    if (sequence->move.to != worker || sequence->move.to_epoch == but_not_of) continue;
    accounts_.Charge(*sequence, accounts_.CostOf(*sequence, sequence->reserved));
    EndMove(*sequence);
  }
}

void SchedulerCore::Impl::ExpireMoves() {
  while (!moving_.empty() && moving_.front()->move.deadline <= turn_.now()) Preempt(*moving_.front());
}

}  // namespace dovetail::scheduler
