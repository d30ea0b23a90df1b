#include "scheduler/core/relocation.h"

#include <algorithm>
#include <vector>

#include "scheduler/core/placement_policy.h"

namespace dovetail::scheduler {

void Relocation::Start() {
  LeaveDrainingWorkers();
  if (!rebalance_) return;
  const std::vector<int> tiers = TiersOf(budget().workers());
  const bool apart = options_.placement == PlacementPolicy::kTiers;
  const int last = apart ? *std::max_element(tiers.begin(), tiers.end()) : 0;
  bool balanced = true;
  for (int tier = 0; tier <= last; ++tier) {
    balanced = Rebalance([&](int worker) { return !apart || tiers[worker] == tier; }) && balanced;
  }
  if (balanced && moves_.empty()) rebalance_ = false;
}

void Relocation::LeaveDrainingWorkers() {
  for (int from = 0; from < static_cast<int>(budget().workers().size()); ++from) {
    const KvBudget::Worker worker = budget().workers()[from];
    if (!worker.draining || worker.lost) continue;
    const std::vector<Sequence*> before = slots_.active();
    for (Sequence* sequence : before) {
      if (moves_.full()) return;
      if (!sequence->LiesOn(worker.id) || !sequence->MayMove()) continue;
      if (!sequence->stepped) {  // nothing was computed yet
        if (budget().any_usable()) choices_.Preempt(*sequence);
        continue;
      }
      // Where none has room it stays: it ends there, or another one ends first.
      for (const int to : placer_.TakersOf(*sequence))
        if (moves_.Begin(*sequence, from, to)) break;
    }
  }
}

// A newcomer takes from the worker that has most, as long as that brings them closer. False: it has to wait for a step.
bool Relocation::Rebalance(absl::FunctionRef<bool(int)> among) {
  while (!moves_.full()) {
    std::vector<int> order = EmptiestFirst(budget().workers());
    std::erase_if(order, [&](int worker) { return !among(worker); });
    if (order.size() < 2) break;
    const int to = order.front();
    const int from = order.back();
    const std::vector<double> parts = FairParts(budget().workers());
    const double giver = static_cast<double>(budget().workers()[from].used) / parts[from];
    const double taker = static_cast<double>(budget().workers()[to].used) / parts[to];
    Sequence* best = nullptr;
    for (Sequence* sequence : slots_.active()) {
      const double blocks = static_cast<double>(BlocksOn(sequence->charges, from));
      if (blocks == 0 || sequence->phase != Phase::kReady || !sequence->stepped || sequence->shares_prefix) continue;
      if (sequence->refusals.Include(to, budget())) continue;
      if (giver - taker <= blocks / parts[from] + blocks / parts[to]) continue;
      if (best == nullptr || BlocksOn(best->charges, from) < blocks) best = sequence;
    }
    if (best == nullptr) break;
    if (!best->MayMove()) return false;  // when its step is done
    if (!moves_.Begin(*best, from, to)) break;
  }
  return true;
}

void Relocation::On(const SequenceMoved& event) {
  if (Sequence* const failed = moves_.Take(event)) choices_.Preempt(*failed);
}

void Relocation::Expire() {
  while (Sequence* const sequence = moves_.Expired()) choices_.Preempt(*sequence);
}

}  // namespace dovetail::scheduler
