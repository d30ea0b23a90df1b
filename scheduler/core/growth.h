#pragma once
#include "scheduler/core/choices.h"
#include "scheduler/core/kv_accounts.h"
#include "scheduler/core/placer.h"
#include "scheduler/core/replacement_wait.h"
#include "scheduler/core/slots.h"
#include "scheduler/core/tiering.h"
#include "scheduler/core/turn.h"

namespace dovetail::scheduler {

// Room for the next token of a running sequence.
// Threads: thread-compatible; deterministic.
class Growth {
 public:
  // All outlive this.
  Growth(KvAccounts& accounts, const Placer& placer, const Slots& slots, const ReplacementWait& stranded,
         Tiering& tiering, Choices& choices, Turn& turn)
      : accounts_(accounts),
        placer_(placer),
        slots_(slots),
        stranded_(stranded),
        tiering_(tiering),
        choices_(choices),
        turn_(turn) {}

  // Room for the tokens before `end`; others give way if need be. Returns false if there is none now: the sequence may
  // have been preempted, may have begun to move to another worker, or have ended, since it is too long for any worker.
  bool Grow(Sequence& sequence, Position end);
  // The same for a step that is planned before the tokens of the one before are known. Nothing gives way for it.
  bool GrowAhead(Sequence& sequence);

 private:
  void OutgrewItsWorker(Sequence& sequence, Position end);

  KvAccounts& accounts_;
  const Placer& placer_;
  const Slots& slots_;
  const ReplacementWait& stranded_;
  Tiering& tiering_;
  Choices& choices_;
  Turn& turn_;
};

}  // namespace dovetail::scheduler
