#pragma once
#include <cstdint>
#include <optional>

#include "proto/placement.h"
#include "scheduler/core/compute_pool.h"
#include "scheduler/core/kv_accounts.h"
#include "scheduler/core/moves.h"
#include "scheduler/core/scheduler.h"
#include "scheduler/core/sequence.h"

namespace dovetail::scheduler {

// With PlacementPolicy::kTiers a sequence lies on a fast tier, also where a slower one has more of its prompt cached.
// Then what is cached there comes up: the sequence is opened on the slower worker, and moves before its first step.
// Threads: thread-compatible; deterministic.
class PrefixFetch {
 public:
  // All outlive this.
  PrefixFetch(const SchedulerOptions& options, const KvAccounts& accounts, const ComputePool& pool, Moves& moves)
      : options_(options), accounts_(accounts), pool_(pool), moves_(moves) {}

  // Where the sequence is to be opened, if not in `placement`, to which it then moves: on the slower worker with the
  // most of its prompt, if that is kLeastTokensFetched more than what is cached in `placement` and moving takes less
  // time than computing. Moves and steps say how long both take; while either is not known, it moves.
  std::optional<proto::Placement> OpenElsewhere(Sequence& sequence, const proto::Placement& placement) const;
  // It is open, where OpenElsewhere said: it moves. Where that cannot be, it goes on where it is.
  void Begin(Sequence& sequence);

  uint64_t tokens() const { return tokens_; }  // that came up so far, or are under way

 private:
  std::optional<int> HolderFor(const Sequence& sequence, int taker) const;
  bool IsFaster(int taker, Position begin, Position end) const;
  const KvBudget& budget() const { return accounts_.budget(); }

  const SchedulerOptions& options_;
  const KvAccounts& accounts_;
  const ComputePool& pool_;
  Moves& moves_;
  uint64_t tokens_ = 0;
};

}  // namespace dovetail::scheduler
