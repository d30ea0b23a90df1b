#pragma once
#include <optional>

#include "scheduler/core/admission.h"
#include "scheduler/core/choices.h"
#include "scheduler/core/compute_pool.h"
#include "scheduler/core/events.h"
#include "scheduler/core/kv_accounts.h"
#include "scheduler/core/micro_batches.h"
#include "scheduler/core/moves.h"
#include "scheduler/core/placer.h"
#include "scheduler/core/relocation.h"
#include "scheduler/core/replacement_wait.h"
#include "scheduler/core/slots.h"
#include "scheduler/core/step_results.h"
#include "scheduler/core/turn.h"

namespace dovetail::scheduler {

// Workers that come and go: what lay on lost ones begins again at once, what lies on draining ones moves. Late events
// are counted.
// Threads: thread-compatible; deterministic.
class WorkerEvents {
 public:
  // All outlive this.
  WorkerEvents(ComputePool& pool, MicroBatches& batches, KvAccounts& accounts, const Placer& placer, const Slots& slots,
               Moves& moves, ReplacementWait& stranded, Choices& choices, Admission& admission, Relocation& relocation,
               StepResults& results, PrefillGroups& groups, Turn& turn)
      : pool_(pool),
        batches_(batches),
        accounts_(accounts),
        placer_(placer),
        slots_(slots),
        moves_(moves),
        stranded_(stranded),
        choices_(choices),
        admission_(admission),
        relocation_(relocation),
        results_(results),
        groups_(groups),
        turn_(turn) {}

  void On(const AttentionWorkerJoined& event);
  void On(const AttentionWorkerLost& event);
  void On(const AttentionWorkerDraining& event);
  void On(const ComputeWorkerJoined& event);
  void On(const ComputeWorkerLost& event);
  void On(const ComputeWorkersLinked& event);
  // A worker whose step has passed its deadline is dismissed. Only a tick says so, for the shell has read all results
  // that are there when it ticks.
  void On(const Tick& tick);

  bool HoldsNothing(WorkerId worker) const;  // SchedulerCore's

 private:
  void RestartSequencesOn(WorkerId worker, std::optional<Epoch> but_not_of);
  void NoteLinearPrompts();
  void BeginAgain(Sequence& sequence);
  bool IsNamed(WorkerId worker) const;
  void ForgetLostWorkers();
  KvBudget& budget() { return accounts_.budget(); }
  const KvBudget& budget() const { return accounts_.budget(); }

  ComputePool& pool_;
  MicroBatches& batches_;
  KvAccounts& accounts_;
  const Placer& placer_;
  const Slots& slots_;
  Moves& moves_;
  ReplacementWait& stranded_;
  Choices& choices_;
  Admission& admission_;
  Relocation& relocation_;
  StepResults& results_;
  PrefillGroups& groups_;
  Turn& turn_;
};

}  // namespace dovetail::scheduler
