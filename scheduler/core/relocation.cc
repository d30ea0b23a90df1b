#include "scheduler/core/relocation.h"

#include <vector>

#include "scheduler/core/placement_policy.h"

namespace dovetail::scheduler {
namespace {

// It may be in no step meanwhile.
bool MayMove(const Sequence& sequence) {
  return sequence.phase == Phase::kReady && sequence.in_flight == 0 && !sequence.awaits_forks && sequence.planned == 0;
}

}  // namespace

void Relocation::Start() {
  LeaveDrainingWorkers();
  if (rebalance_) Rebalance();
}

void Relocation::LeaveDrainingWorkers() {
  for (int from = 0; from < static_cast<int>(budget().workers().size()); ++from) {
    const KvBudget::Worker worker = budget().workers()[from];
    if (!worker.draining || worker.lost) continue;
    const std::vector<Sequence*> before = slots_.active();
    for (Sequence* sequence : before) {
      if (moves_.full()) return;
      if (!sequence->LiesOn(worker.id) || !MayMove(*sequence)) continue;
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

// A newcomer takes from the worker that has most, as long as that brings them closer.
void Relocation::Rebalance() {
  while (!moves_.full()) {
    const std::vector<int> order = EmptiestFirst(budget().workers());
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
    if (!MayMove(*best)) return;  // when its step is done
    if (!moves_.Begin(*best, from, to)) break;
  }
  if (moves_.empty()) rebalance_ = false;
}

void Relocation::On(const SequenceMoved& event) {
  if (Sequence* const failed = moves_.Take(event)) choices_.Preempt(*failed);
}

void Relocation::Expire() {
  while (Sequence* const sequence = moves_.Expired()) choices_.Preempt(*sequence);
}

}  // namespace dovetail::scheduler
