#pragma once
#include <algorithm>
#include <map>
#include <vector>

#include "absl/time/time.h"
#include "base/ids.h"
#include "proto/step_plan.h"
#include "scheduler/core/chunk_budget.h"
#include "scheduler/core/prefill_planner.h"
#include "scheduler/core/rotation.h"
#include "scheduler/core/scheduler.h"
#include "scheduler/core/sequence.h"
#include "scheduler/core/step_patience.h"

namespace dovetail::scheduler {

// The compute workers that serve, what is known of their speed, and how the micro-batches are divided between them:
// each has as many as the others, micro-batch i belongs to worker i modulo their number, and what is left over may be
// ranks of prefill groups.
// Threads: thread-compatible; deterministic.
class ComputePool {
 public:
  explicit ComputePool(const SchedulerOptions& options)  // `options` outlives the pool
      : options_(options),
        patience_(options.step_timeout),
        rotation_(options.micro_batches),
        planner_(options.attention, PlannerOptionsOf(options)) {}

  // Both return false, and change nothing, if the worker is there already, or is not.
  // kind: as ComputeWorkerJoined.
  bool Join(WorkerId worker, bool leaves_states = false, int kind = 0);
  bool Leave(WorkerId worker);
  // All of them, of which there is at least one, leave states of prompts (ComputeWorkerJoined).
  bool all_leave_states() const { return !workers_.empty() && leaving_states_.size() == workers_.size(); }

  const std::vector<WorkerId>& workers() const { return workers_; }  // in the order in which they joined
  bool empty() const { return workers_.empty(); }

  // Micro-batches of ordinary steps: [0, micro_batches_in_use()).
  int micro_batches_in_use() const;
  // As long as sequences of several tiers step, each compute worker has at least two.
  void PartTiers(bool apart) { tiers_apart_ = apart; }
  bool tiers_apart() const { return tiers_apart_; }
  // Whether each compute worker has one micro-batch only; and whether this one is the last of its compute worker: the
  // last ones of all of them have the highest indices in use.
  bool HasOneOfEach() const { return micro_batches_in_use() <= std::max(1, static_cast<int>(workers_.size())); }
  bool IsLastOfItsWorker(int micro_batch) const {
    return micro_batch >= micro_batches_in_use() - std::max(1, static_cast<int>(workers_.size()));
  }
  // Compute workers that may prefill one prompt together: at most 1 if none may.
  int most_prefill_ranks() const;
  // Of `workers`, which are in the pool, those of one kind, in the same order: of the kind that most of them are of, or
  // of that of the first where several kinds have as many.
  std::vector<WorkerId> MostAlike(const std::vector<WorkerId>& workers) const;
  // The worker of a micro-batch; after failed attempts at a step it is another one, where there is one.
  // Requires: not empty().
  WorkerId WorkerOf(int micro_batch, int failed_attempts = 0) const;
  // False if the request may run on another compute worker only, or the sequence lies with another (Sequence::pair),
  // and that one is there.
  bool MayStepIn(const Sequence& sequence, int micro_batch) const;

  // A step finished. `sequences`: members of all micro-batches; `decodes`: none of its entries read a prompt.
  void NoteTimes(const proto::StepTimings& timings, size_t sequences, bool decodes);
  StageTimes stage_times() const { return rotation_.times(); }
  StepPatience& patience() { return patience_; }
  StreamPace& pace() { return pace_; }
  const StreamPace& pace() const { return pace_; }
  PrefillPlanner& planner() { return planner_; }
  const PrefillPlanner& planner() const { return planner_; }

 private:
  static PrefillPlannerOptions PlannerOptionsOf(const SchedulerOptions& options);

  const SchedulerOptions& options_;
  std::vector<WorkerId> workers_;
  std::vector<WorkerId> leaving_states_;  // of them, those that leave states of prompts
  std::map<WorkerId, int> kinds_;
  int most_alike_ = 0;  // of them
  bool tiers_apart_ = false;
  StepPatience patience_;
  Rotation rotation_;  // micro-batches of each compute worker, with adapt_micro_batches
  StreamPace pace_;
  PrefillPlanner planner_;
};

}  // namespace dovetail::scheduler
