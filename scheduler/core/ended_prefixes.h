#pragma once
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "base/ids.h"
#include "scheduler/core/kv_budget.h"
#include "scheduler/core/scheduler.h"
#include "scheduler/core/sequence.h"

namespace dovetail::scheduler {

// What sequences that ended have left in the prefix cache of a fast tier, oldest first: slower tiers are to have it,
// too (cache_spill.h). With other policies than kTiers, and without a prefix cache, it stays empty.
// Threads: thread-compatible; deterministic. At most kMostEndedPrefixes, with kMostEndedTokens tokens in all.
class EndedPrefixes {
 public:
  struct Prefix {
    WorkerId worker;
    Epoch epoch;
    std::string tenant, cache_salt;
    std::vector<TokenId> tokens;  // of which the last is not in the cache
  };

  // Both outlive this.
  EndedPrefixes(const SchedulerOptions& options, const KvBudget& budget) : options_(options), budget_(budget) {}

  // The choice is about to end, and to be released.
  void Note(const Sequence& sequence);
  std::optional<Prefix> TakeOldest();
  bool empty() const { return prefixes_.empty(); }

 private:
  bool IsWorthKeeping(const Sequence& sequence) const;
  void DropOldest();

  const SchedulerOptions& options_;
  const KvBudget& budget_;
  std::deque<Prefix> prefixes_;
  size_t tokens_ = 0;  // in all
};

}  // namespace dovetail::scheduler
