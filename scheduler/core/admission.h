#pragma once
#include <optional>

#include "base/status.h"
#include "scheduler/core/choices.h"
#include "scheduler/core/compute_pool.h"
#include "scheduler/core/events.h"
#include "scheduler/core/incarnations.h"
#include "scheduler/core/kv_accounts.h"
#include "scheduler/core/moves.h"
#include "scheduler/core/placer.h"
#include "scheduler/core/prefix_fetch.h"
#include "scheduler/core/probes.h"
#include "scheduler/core/replacement_wait.h"
#include "scheduler/core/scheduler.h"
#include "scheduler/core/slots.h"
#include "scheduler/core/tenant_queues.h"
#include "scheduler/core/turn.h"

namespace dovetail::scheduler {

// Which sequences may start, and where: from the queue over a slot, room and perhaps a probe to workers that have
// opened them.
// Threads: thread-compatible; deterministic.
class Admission {
 public:
  // All outlive this.
  Admission(const SchedulerOptions& options, KvAccounts& accounts, const ComputePool& pool, Placer& placer,
            Slots& slots, TenantQueues& queues, Probes& probes, Moves& moves, PrefixFetch& fetch,
            Incarnations& incarnations, const ReplacementWait& stranded, Choices& choices, Turn& turn)
      : options_(options),
        accounts_(accounts),
        pool_(pool),
        placer_(placer),
        slots_(slots),
        queues_(queues),
        probes_(probes),
        moves_(moves),
        fetch_(fetch),
        incarnations_(incarnations),
        stranded_(stranded),
        choices_(choices),
        turn_(turn) {}

  // Admits sequences that wait, in the order of the queue, as long as there is room for the first of them.
  void Admit();
  // A worker ran out of memory: nothing is admitted until a step went well.
  void Hold() { held_ = true; }
  void EndHold() { held_ = false; }
  bool held() const { return held_; }

  void On(const PrefixProbed& event);
  void On(const SequenceOpened& event);
  void LoseProbesOf(int worker);  // an index in the budget: it answers nothing any more
  // Sequences whose probes have lasted long enough are placed with what is known.
  void ExpireProbes();
  // Ends sequences for which no worker that is large enough came in time.
  void ExpireStranded();

 private:
  bool AdmitOne(Sequence& sequence);
  bool FreeSlots(const Tenant& tenant, int needed);
  bool FreeBlocksFor(const Sequence& sequence, PlacementPolicy policy);
  bool PreemptPaused(std::optional<int> worker);
  absl::Status TooLarge(const Sequence& sequence) const;
  void PlaceProbed(Sequence& sequence);
  void RefusedToOpen(Sequence& sequence);
  const KvBudget& budget() const { return accounts_.budget(); }

  const SchedulerOptions& options_;
  KvAccounts& accounts_;
  const ComputePool& pool_;
  Placer& placer_;
  Slots& slots_;
  TenantQueues& queues_;
  Probes& probes_;
  Moves& moves_;
  PrefixFetch& fetch_;
  Incarnations& incarnations_;
  const ReplacementWait& stranded_;
  Choices& choices_;
  Turn& turn_;
  bool held_ = false;
};

}  // namespace dovetail::scheduler
