#include "scheduler/core/incarnations.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/check.h"

namespace dovetail::scheduler {
namespace {

// The workers of a placement, each once, in its order.
absl::InlinedVector<WorkerId, 4> WorkersOf(const proto::Placement& placement) {
  absl::InlinedVector<WorkerId, 4> workers;
  for (const proto::Shard& shard : placement)
    if (std::find(workers.begin(), workers.end(), shard.worker) == workers.end()) workers.push_back(shard.worker);
  return workers;
}

Epoch EpochOf(const proto::Placement& placement, WorkerId worker) {
  return std::find_if(placement.begin(), placement.end(), [&](const proto::Shard& s) { return s.worker == worker; })
      ->epoch;
}

}  // namespace

const Sequence* Incarnations::Find(SequenceId id) const {
  const auto at = by_id_.find(id);
  return at == by_id_.end() ? nullptr : at->second;
}

void Incarnations::BeginWith(Sequence& sequence, const proto::Placement& placement) {
  sequence.id = SequenceId(next_id_++);
  by_id_[sequence.id] = &sequence;
  sequence.placement = placement;
  sequence.awaited = WorkersOf(placement);
  sequence.refused.clear();
  sequence.resumable.clear();
  for (const WorkerId worker : sequence.awaited) Sequence::RanOn(sequence.attention_workers, worker);
}

void Incarnations::Open(Sequence& sequence, const proto::Placement& placement) {
  sequence.phase = Phase::kOpening;
  BeginWith(sequence, placement);
  sequence.ctx_len = sequence.told_ctx_len = 0;
  sequence.shared_blocks = sequence.named_blocks = 0;
  sequence.divided = 0;
  sequence.prefill_due = absl::InfiniteFuture();
  sequence.stepped = sequence.moved = sequence.awaits_forks = sequence.history_seen = sequence.group_charged = false;
  sequence.reserved = BlocksOf(sequence.size()) * kSegmentTokens;
  accounts_.Charge(sequence, accounts_.CostOf(sequence, sequence.reserved));
  if (sequence.choice == 0 && !sequence.request->prompt_logits_done) {
    sequence.request->prompt_logits.clear();
    sequence.request->prompt_logits_rows = 0;
  }
  sequence.hashes_sent = names_.Usable(sequence);
  std::vector<proto::BlockHash> hashes;
  names_.Append(sequence, 0, sequence.hashes_sent, hashes);
  for (const WorkerId worker : sequence.awaited) {
    OpenSequence open{.worker = worker,
                      .epoch = EpochOf(sequence.placement, worker),
                      .message = {.sequence = sequence.id, .shards = {}, .hashes = hashes},
                      .trace = sequence.params().trace};
    for (const proto::Shard& shard : sequence.placement)
      if (shard.worker == worker) open.message.shards.push_back(shard);
    turn_.Act(std::move(open));
  }
}

bool Incarnations::Fork(const Sequence& parent, Sequence& child) {
  if (!slots_.Has(1)) return false;
  const Position common = parent.prompt_size() - 1;
  const Position reserved = BlocksOf(parent.prompt_size()) * kSegmentTokens;
  const Charges cost = accounts_.CostOf(parent, reserved);
  if (accounts_.budget().Lacking(cost, {}).has_value()) return false;

  child.phase = Phase::kForking;
  child.restarted = true;
  BeginWith(child, parent.placement);
  for (proto::Shard& shard : child.placement) shard.generation = KvGeneration(0);
  child.ctx_len = common;
  child.told_ctx_len = parent.told_ctx_len;
  child.named_blocks = parent.named_blocks;
  child.shared_blocks = parent.shared_blocks;
  child.reserved = reserved;
  child.stepped = true;
  slots_.Take(child, turn_.now());
  accounts_.Charge(child, cost);
  accounts_.TakeShare(child);
  for (const WorkerId worker : child.awaited) {
    turn_.Act(ForkSequence{.worker = worker,
                           .epoch = EpochOf(child.placement, worker),
                           .message = {.parent = parent.id,
                                       .child = child.id,
                                       .ctx_len = common,
                                       .generation = proto::GenerationAt(parent.placement, worker)},
                           .trace = child.params().trace});
  }
  return true;
}

Sequence* Incarnations::Take(const SequenceOpened& event) {
  const auto at = by_id_.find(event.opened.sequence);
  Sequence* const sequence = at == by_id_.end() ? nullptr : at->second;
  const bool expected =
      sequence != nullptr && accounts_.budget().IsCurrent(event.worker, event.epoch) &&
      (sequence->phase == Phase::kOpening || sequence->phase == Phase::kForking || sequence->phase == Phase::kMoving);
  auto* const awaited =
      expected ? std::find(sequence->awaited.begin(), sequence->awaited.end(), event.worker) : nullptr;
  if (!expected || awaited == sequence->awaited.end()) {
    turn_.CountLate();
    return nullptr;
  }
  const bool first = sequence->resumable.empty();
  sequence->awaited.erase(awaited);
  if (event.opened.resumable.empty()) sequence->refused.push_back(event.worker);
  proto::Placement& opened_in = sequence->phase == Phase::kMoving ? sequence->move.placement : sequence->placement;
  proto::SetGeneration(opened_in, event.worker, event.opened.generation);
  std::vector<uint32_t> offered = event.opened.resumable;
  offered.push_back(0);
  if (first) {
    sequence->resumable = std::move(offered);
  } else {
    std::erase_if(sequence->resumable,
                  [&](uint32_t start) { return std::find(offered.begin(), offered.end(), start) == offered.end(); });
  }
  return sequence->awaited.empty() ? sequence : nullptr;
}

void Incarnations::Start(Sequence& sequence) {
  sequence.refusals.WasOpened();
  uint32_t start = 0;
  for (const uint32_t offered : sequence.resumable) {
    if (offered <= sequence.hashes_sent) start = std::max(start, offered);
  }
  sequence.ctx_len = sequence.told_ctx_len = Position{start} * kSegmentTokens;
  sequence.named_blocks = start;
  if (names_.MayLookUp(sequence) && !sequence.request->spills) {
    prefix_queries_ += sequence.size();
    prefix_hits_ += sequence.ctx_len;
  }
  if (!sequence.request->started) {
    sequence.request->started = true;
    if (!sequence.request->spills) prompt_tokens_ += sequence.prompt_size();
    sequence.request->cached_tokens = static_cast<int>(sequence.ctx_len);
  }
  MakeReady(sequence);
}

void Incarnations::MakeReady(Sequence& sequence) {
  sequence.phase = Phase::kReady;
  batches_.Enlist(sequence);
}

void Incarnations::Release(Sequence& sequence) {
  DT_CHECK(sequence.in_flight == 0, "a sequence was released under a step");
  ++released_;
  if (sequence.phase == Phase::kMoving) moves_.Abandon(sequence);
  proto::ReleaseSequence message{
      .sequence = sequence.id, .ctx_len = sequence.stepped ? sequence.ctx_len : 0, .hashes = {}};
  if (sequence.stepped)
    names_.Append(sequence, sequence.named_blocks, sequence.ctx_len / kSegmentTokens, message.hashes);
  for (const WorkerId worker : WorkersOf(sequence.placement)) {
    const Epoch epoch = EpochOf(sequence.placement, worker);
    if (!accounts_.budget().IsCurrent(worker, epoch)) continue;
    message.generation = proto::GenerationAt(sequence.placement, worker);
    turn_.Act(ReleaseSequence{.worker = worker, .epoch = epoch, .message = message});
  }
  accounts_.Return(sequence);
  sequence.fetched_to.reset();
  sequence.awaits_forks = false;
  batches_.Leave(sequence);
  sequence.placement.clear();
  sequence.awaited.clear();
  sequence.lost = false;
  by_id_.erase(sequence.id);
  slots_.GiveBack(sequence);
}

}  // namespace dovetail::scheduler
