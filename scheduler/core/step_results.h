#pragma once
#include <cstdint>
#include <map>
#include <optional>

#include "scheduler/core/admission.h"
#include "scheduler/core/choices.h"
#include "scheduler/core/compute_pool.h"
#include "scheduler/core/events.h"
#include "scheduler/core/kv_accounts.h"
#include "scheduler/core/micro_batches.h"
#include "scheduler/core/prefill_groups.h"
#include "scheduler/core/scheduler.h"
#include "scheduler/core/step_failures.h"
#include "scheduler/core/turn.h"

namespace dovetail::scheduler {

// What came of steps: tokens enter the log, and only then may be shown.
// Threads: thread-compatible; deterministic.
class StepResults {
 public:
  // All outlive this.
  StepResults(const SchedulerOptions& options, ComputePool& pool, MicroBatches& batches, KvAccounts& accounts,
              PrefillGroups& groups, Choices& choices, Admission& admission, StepFailures& failures, Turn& turn)
      : options_(options),
        pool_(pool),
        batches_(batches),
        accounts_(accounts),
        groups_(groups),
        choices_(choices),
        admission_(admission),
        failures_(failures),
        turn_(turn) {}

  void On(const StepFinished& event);
  void On(const StepUnreadable& event);
  // The compute worker is not there any more, and neither are its steps.
  void LoseSteps(WorkerId compute_worker);

  struct Counts {
    uint64_t steps = 0;
    uint64_t generation_tokens = 0;
    uint64_t prefix_asked_bytes = 0, prefix_gathered_bytes = 0, prefix_state_bytes = 0;  // SchedulerStats'
    uint64_t prefix_chain_bytes = 0, prefix_direct_bytes = 0, prefix_ring_bytes = 0, prefix_switch_bytes = 0,
             prefix_pass_q_bytes = 0;
  };
  const Counts& counts() const { return counts_; }

 private:
  void EndGroup(const std::optional<PrefillGroups::Ended>& group);
  void FinishStep(MicroBatch& batch, const proto::StepResult& result);
  double PromptSeconds(const MicroBatch& batch, double took_s);
  void LearnPace(const MicroBatch& batch, double took_s);
  void LearnRates(MicroBatch& batch, const proto::StepResult& result);
  void Commit(const PlannedEntry& entry, const proto::EntryResult& result);
  void TakePromptOutputs(const PlannedEntry& entry, const proto::EntryResult& result, GenerationUpdate& update);
  bool TakePooled(const PlannedEntry& entry, const proto::EntryResult& result, GenerationUpdate& update);
  void TakeToken(const PlannedEntry& entry, const proto::EntryResult& result, GenerationUpdate&& update);

  const SchedulerOptions& options_;
  ComputePool& pool_;
  MicroBatches& batches_;
  KvAccounts& accounts_;
  PrefillGroups& groups_;
  Choices& choices_;
  Admission& admission_;
  StepFailures& failures_;
  Turn& turn_;
  std::map<int, proto::StepResult> failed_;  // by MicroBatch::home: of a step whose follower is still in flight
  Counts counts_;
};

}  // namespace dovetail::scheduler
