#pragma once
#include <deque>
#include <map>
#include <vector>

#include "absl/time/time.h"
#include "scheduler/core/block_names.h"
#include "scheduler/core/events.h"
#include "scheduler/core/kv_budget.h"
#include "scheduler/core/scheduler.h"
#include "scheduler/core/sequence.h"
#include "scheduler/core/turn.h"

namespace dovetail::scheduler {

// Sequences whose prompt attention workers were asked about: how much of it each has cached. What they find they pin
// until the probe ends. A probe is over when all have answered, or after kProbeTimeout; then the sequence is placed,
// and the probe ended.
// Threads: thread-compatible; deterministic.
class Probes {
 public:
  // All outlive this.
  Probes(const SchedulerOptions& options, const KvBudget& budget, const BlockNames& names, Turn& turn)
      : options_(options), budget_(budget), names_(names), turn_(turn) {}

  // Whether asking may change where the sequence is placed.
  bool IsWorthwhile(const Sequence& sequence, PlacementPolicy policy) const;
  // Asks all usable workers. The sequence is kProbing from here on.
  void Begin(Sequence& sequence);
  // An answer came. Returns the sequence that waits for no other; null: none does. Counts late answers.
  Sequence* Take(const PrefixProbed& event);
  // The worker with this index was lost. Returns sequences that wait for no other.
  std::vector<Sequence*> Lose(int worker);
  // A sequence whose time is over; null: none. It is the same one until its probe has ended.
  Sequence* Expired() const;
  // Workers may release what they pinned for it.
  void End(Sequence& sequence);

  absl::Time NextDeadline() const;
  const std::deque<Sequence*>& probing() const { return probing_; }

 private:
  const SchedulerOptions& options_;
  const KvBudget& budget_;
  const BlockNames& names_;
  Turn& turn_;
  std::deque<Sequence*> probing_;  // by deadline
  std::map<uint64_t, Sequence*> by_pin_;
  uint64_t next_pin_ = 1;
};

}  // namespace dovetail::scheduler
