#pragma once
#include <optional>
#include <span>

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
  explicit KvAccounts(const SchedulerOptions& options)
      : options_(options), budget_(options.attention, options.max_num_batched_tokens) {}

  const proto::AttentionTable& table() const { return options_.attention; }
  KvBudget& budget() { return budget_; }
  const KvBudget& budget() const { return budget_; }

  // What the sequence costs where it lies, without the blocks that its request is charged for.
  // end: tokens before it are charged. cuts: where the ranks of a group begin that takes it further, and its end;
  // empty: there is none.
  Charges CostOf(const Sequence& sequence, Position end, std::span<const Position> cuts = {}) const;
  void Charge(Sequence& sequence, const Charges& cost);

  // Room for the tokens before `end`. Returns the worker where there is none; then nothing has changed.
  std::optional<int> Reserve(Sequence& sequence, Position end);

  // Layers with windows and linear states take more room while a group has the tokens between these cuts, and until the
  // next step begins. ReserveForGroup returns false if there is not as much; then nothing has changed.
  bool ReserveForGroup(Sequence& sequence, std::span<const Position> cuts);
  void EndGroup(Sequence& sequence);

  // Charges the sequence for what it holds already, by what the budget knows now. False, and nothing has changed: it
  // takes more now, and there is no room. Of a group under way EndGroup does so.
  bool Renew(Sequence& sequence);

  // From now on the request is charged for the first sequence.shared_blocks blocks, as long as a choice uses them.
  void Share(Sequence& sequence);
  void TakeShare(Sequence& sequence);   // one more choice uses them
  void LeaveShare(Sequence& sequence);  // nothing happens if it does not
  void Return(Sequence& sequence);      // all that it is charged for

  // It uses blocks there, shared ones included.
  static bool HoldsOn(const Sequence& sequence, int worker);

 private:
  void ChargeShared(RequestState& request, const Charges& cost);

  const SchedulerOptions& options_;
  KvBudget budget_;
};

}  // namespace dovetail::scheduler
