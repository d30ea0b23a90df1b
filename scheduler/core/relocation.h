#pragma once
#include "absl/functional/function_ref.h"
#include "scheduler/core/choices.h"
#include "scheduler/core/events.h"
#include "scheduler/core/kv_accounts.h"
#include "scheduler/core/moves.h"
#include "scheduler/core/placer.h"
#include "scheduler/core/scheduler.h"
#include "scheduler/core/slots.h"

namespace dovetail::scheduler {

// Which sequences move between attention workers: away from one that drains, and towards one that has just joined. With
// kTiers a newcomer takes from those of its tier only.
// Threads: thread-compatible; deterministic.
class Relocation {
 public:
  // All outlive this.
  Relocation(const SchedulerOptions& options, KvAccounts& accounts, const Placer& placer, const Slots& slots,
             Moves& moves, Choices& choices)
      : options_(options), accounts_(accounts), placer_(placer), slots_(slots), moves_(moves), choices_(choices) {}

  // Begins what moves can begin now.
  void Start();
  void WorkerJoined() { rebalance_ = true; }  // others may have much more to do than it
  void On(const SequenceMoved& event);
  // A move has a time limit: sequences that exceed it begin again.
  void Expire();

 private:
  void LeaveDrainingWorkers();
  bool Rebalance(absl::FunctionRef<bool(int)> among);
  const KvBudget& budget() const { return accounts_.budget(); }

  const SchedulerOptions& options_;
  KvAccounts& accounts_;
  const Placer& placer_;
  const Slots& slots_;
  Moves& moves_;
  Choices& choices_;
  bool rebalance_ = false;
};

}  // namespace dovetail::scheduler
