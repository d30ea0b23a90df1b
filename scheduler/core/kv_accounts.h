#pragma once
#include <optional>

#include "base/status.h"
#include "scheduler/core/kv_budget.h"
#include "scheduler/core/scheduler.h"
#include "scheduler/core/sequence.h"

namespace dovetail::scheduler {

// What sequences, and prompts that several choices share, are charged for KV, and how much that makes for each tenant.
// It owns the budget: nothing else changes what is used of it.
// Threads: thread-compatible.
class KvAccounts {
 public:
  // `options` outlives the accounts.
  explicit KvAccounts(const SchedulerOptions& options) : budget_(options.attention, options.max_num_batched_tokens) {}

  KvBudget& budget() { return budget_; }
  const KvBudget& budget() const { return budget_; }

  // What the sequence costs where it lies, without the blocks that its request is charged for.
  // end: tokens before it are charged. chunk: new tokens of its largest step; 0: those of an ordinary one.
  Charges CostOf(const Sequence& sequence, Position end, int chunk = 0) const;
  void Charge(Sequence& sequence, const Charges& cost);

  // Room for the tokens before `end`. Returns the worker where there is none; then nothing has changed.
  std::optional<int> Reserve(Sequence& sequence, Position end);

  // Layers with windows and linear states take more room while a step has `tokens` of the sequence, and until the next
  // one begins. ReserveForGroup returns false if there is not as much; then nothing has changed.
  bool ReserveForGroup(Sequence& sequence, int tokens);
  void EndGroup(Sequence& sequence);

  // From now on the request is charged for the first sequence.shared_blocks blocks, as long as a choice uses them.
  void Share(Sequence& sequence);
  void TakeShare(Sequence& sequence);   // one more choice uses them
  void LeaveShare(Sequence& sequence);  // nothing happens if it does not
  void Return(Sequence& sequence);      // all that it is charged for

  // It uses blocks there, shared ones included.
  static bool HoldsOn(const Sequence& sequence, int worker);

 private:
  void ChargeShared(RequestState& request, const Charges& cost);

  KvBudget budget_;
};

}  // namespace dovetail::scheduler
