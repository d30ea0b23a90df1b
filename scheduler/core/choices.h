#pragma once
#include <cstdint>

#include "absl/types/span.h"
#include "base/status.h"
#include "scheduler/core/ended_prefixes.h"
#include "scheduler/core/events.h"
#include "scheduler/core/incarnations.h"
#include "scheduler/core/kv_accounts.h"
#include "scheduler/core/prefill_groups.h"
#include "scheduler/core/probes.h"
#include "scheduler/core/replacement_wait.h"
#include "scheduler/core/request_table.h"
#include "scheduler/core/sequence.h"
#include "scheduler/core/slots.h"
#include "scheduler/core/tenant_queues.h"
#include "scheduler/core/turn.h"

namespace dovetail::scheduler {

// The life of a choice, from waiting to its end: it waits, runs, gives way and waits again, forks siblings, ends. Each
// of these leaves all other parts of the core as they must be. Whether and when any of it happens is decided elsewhere.
// Threads: thread-compatible; deterministic.
class Choices {
 public:
  // What it puts in order. All outlive this.
  struct Parts {
    KvAccounts& accounts;
    TenantQueues& queues;
    RequestTable& requests;
    Slots& slots;
    Probes& probes;
    PrefillGroups& groups;
    ReplacementWait& stranded;
    Incarnations& incarnations;
    EndedPrefixes& ended;
  };
  Choices(const Parts& parts, Turn& turn) : parts_(parts), turn_(turn) {}

  // Into its tenant's queue, or kept out of it while its request is paused.
  void Wait(Sequence& sequence);
  // It was admitted: it is in no queue any more.
  void EndWait(Sequence& sequence);
  // A request that spills (cache_spill.h) takes a slot, and is paused for good: it takes no steps, and gives way first.
  void AdmitSpill(Sequence& sequence);
  // No worker can hold it since one was lost: others need not wait behind it.
  void Strand(Sequence& sequence);
  // A worker joined that may be large enough for those.
  void EndStranding();

  // Ends the incarnation; the choice begins again when it is admitted, at the front of its tenant's queue. One that
  // spills ends.
  // Requires: no step in flight contains it.
  void Preempt(Sequence& sequence);
  // Preempts it, since these workers had no room for it: it goes there only when that has changed.
  void GoElsewhere(Sequence& sequence, absl::Span<const WorkerId> refused_by);
  // After a step with it returned: carries out what had to wait for that.
  void Settle(Sequence& sequence);

  // `parent` holds the prompt but its last token, which is what all choices have in common. Those that find no room are
  // admitted on their own.
  void Fork(Sequence& parent);
  // A fork of the request was opened, or has failed: when none is under way any more, the parent goes on.
  static void FinishForks(RequestState& request);

  // Ends the choice. If a step contains it, it is released when that returns. `update` says reason and error.
  void End(Sequence& sequence, GenerationUpdate&& update);
  void End(Sequence& sequence, FinishReason reason, const absl::Status& status = absl::OkStatus());
  void EndAll(RequestState& request, FinishReason reason, const absl::Status& status);  // that have not ended

  // The request's client reads slowly: no steps for it. Both return false if nothing changes.
  bool Pause(RequestState& request);
  bool Resume(RequestState& request);

  // An update that says where the choice stands.
  GenerationUpdate UpdateFor(const Sequence& sequence) const;

  int waiting() const { return waiting_; }  // sequences, paused and stranded ones included
  int paused() const { return paused_; }    // requests
  uint64_t preemptions() const { return preemptions_; }

 private:
  void LeaveWhereItIs(Sequence& sequence);
  void LetNextLead(RequestState& request);

  const Parts parts_;
  Turn& turn_;
  int waiting_ = 0;
  int paused_ = 0;
  uint64_t preemptions_ = 0;
};

}  // namespace dovetail::scheduler
