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

bool SchedulerCore::Impl::MayMove(const Sequence& sequence) const {
  return sequence.phase == Phase::kReady && sequence.in_flight == 0 && !sequence.awaits_forks && sequence.planned == 0;
}

void SchedulerCore::Impl::LeaveDrainingWorkers() {
  for (int from = 0; from < static_cast<int>(budget_.workers().size()); ++from) {
    const KvBudget::Worker worker = budget_.workers()[from];
    if (!worker.draining || worker.lost) continue;
    const std::vector<Sequence*> before = slots_.active();
    for (Sequence* sequence : before) {
      if (moves_.full()) return;
      const bool lies_there = std::any_of(sequence->placement.begin(), sequence->placement.end(),
                                          [&](const proto::Shard& shard) { return shard.worker == worker.id; });
      if (!lies_there || !MayMove(*sequence)) continue;
      if (!sequence->stepped) {  // nothing was computed yet
        if (budget_.any_usable()) Preempt(*sequence);
        continue;
      }
      // Where nobody has room it stays: it ends there, or somebody else ends first.
      for (const int to : placer_.TakersOf(*sequence))
        if (moves_.Begin(*sequence, from, to)) break;
    }
  }
}

// A newcomer takes from the worker that has most, as long as that brings them closer.
void SchedulerCore::Impl::Rebalance() {
  while (!moves_.full()) {
    const std::vector<int> order = EmptiestFirst(budget_.workers());
    if (order.size() < 2) break;
    const int to = order.front();
    const int from = order.back();
    const std::vector<double> parts = FairParts(budget_.workers());
    const double giver = static_cast<double>(budget_.workers()[from].used) / parts[from];
    const double taker = static_cast<double>(budget_.workers()[to].used) / parts[to];
    Sequence* best = nullptr;
    for (Sequence* sequence : slots_.active()) {
      const double blocks = static_cast<double>(BlocksOn(sequence->charges, from));
      if (blocks == 0 || sequence->phase != Phase::kReady || !sequence->stepped || sequence->shares_prefix) continue;
      if (sequence->refusals.Include(to, budget_)) continue;
      if (giver - taker <= blocks / parts[from] + blocks / parts[to]) continue;
      if (best == nullptr || BlocksOn(best->charges, from) < blocks) best = sequence;
    }
    if (best == nullptr) break;
    if (!MayMove(*best)) return;  // when its step is done
    if (!moves_.Begin(*best, from, to)) break;
  }
  if (moves_.empty()) rebalance_ = false;
}

void SchedulerCore::Impl::On(const SequenceMoved& event) {
  if (Sequence* failed = moves_.Take(event)) Preempt(*failed);
}

void SchedulerCore::Impl::ExpireMoves() {
  while (Sequence* sequence = moves_.Expired()) Preempt(*sequence);
}

}  // namespace dovetail::scheduler
