#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "proto/placement.h"
#include "scheduler/core/kv_budget.h"
#include "scheduler/core/placement_policy.h"
#include "scheduler/core/scheduler.h"
#include "scheduler/core/sequence.h"

namespace dovetail::scheduler {

// Where sequences may lie: placements by policy, by what the budget has left, and by what refused a sequence before. It
// decides, and changes nothing but whose turn it is.
// Threads: thread-compatible; deterministic.
class Placer {
 public:
  // Both outlive the placer. turn: of --placement mixed, at first.
  Placer(const SchedulerOptions& options, const KvBudget& budget, uint64_t turn)
      : options_(options), budget_(budget), turn_(turn) {}

  // The policy by which the sequence is to be placed next, on workers that do not refuse it if that can be. Nothing: no
  // worker can hold it, even if it held nothing else.
  std::optional<PlacementPolicy> NextPolicy(const Sequence& sequence) const;
  void TakeTurn() { ++turn_; }  // a sequence was admitted

  // Where it finds room now. Nothing: nowhere.
  std::optional<proto::Placement> Place(const Sequence& sequence, PlacementPolicy policy) const;
  // Where it would lie if there were room; not empty as long as a worker is usable.
  std::vector<proto::Placement> Possible(const Sequence& sequence, PlacementPolicy policy) const;
  // A worker of the placement that had no room for it, and may have some when others give theirs back.
  std::optional<int> LacksRoomOn(const Sequence& sequence, const proto::Placement& placement) const;
  // Workers that may take over what one holds of it: the emptiest first; last those on which its KV was damaged.
  std::vector<int> TakersOf(const Sequence& sequence) const;

  // The only worker that its request allows, if that is usable.
  std::optional<int> OnlyAttentionWorker(const Sequence& sequence) const;
  // A worker that does not refuse it could hold it, and its request does not name one.
  bool FitsElsewhere(const Sequence& sequence) const;
  bool FitsNowhere(Position tokens) const;  // even if nothing else lay on the attention workers
  // SchedulerCore's.
  Position LongestSequence() const;

 private:
  Position MostTokens(const Sequence& sequence) const;
  std::vector<proto::Placement> Candidates(const Sequence& sequence, PlacementPolicy policy,
                                           const std::vector<KvBudget::Worker>& workers) const;
  std::vector<proto::Placement> PlacementsOf(PlacementPolicy policy, Position most_tokens,
                                             const std::vector<uint32_t>& hits,
                                             const std::vector<KvBudget::Worker>& workers) const;
  std::optional<proto::Placement> Continued(const std::vector<int>& order,
                                            const std::vector<KvBudget::Worker>& workers) const;
  Position TokensIn(const KvBudget::Worker& worker, uint64_t blocks) const;
  std::vector<proto::Placement> ThatHold(std::vector<proto::Placement> candidates, Position tokens) const;
  std::optional<PlacementPolicy> PolicyThatFits(const Sequence& sequence, std::vector<KvBudget::Worker> workers) const;

  const SchedulerOptions& options_;
  const KvBudget& budget_;
  uint64_t turn_;
};

}  // namespace dovetail::scheduler
