#pragma once
#include <vector>

#include "base/ids.h"
#include "scheduler/core/choices.h"
#include "scheduler/core/kv_accounts.h"
#include "scheduler/core/moves.h"
#include "scheduler/core/placer.h"
#include "scheduler/core/scheduler.h"
#include "scheduler/core/slots.h"

namespace dovetail::scheduler {

// Which sequences move between tiers of attention workers (PlacementPolicy::kTiers), as from the memory of a GPU to
// that of a host and back. With other policies it moves nothing.
// Threads: thread-compatible; deterministic.
class Tiering {
 public:
  // All outlive this.
  Tiering(const SchedulerOptions& options, KvAccounts& accounts, const Placer& placer, const Slots& slots, Moves& moves,
          const Choices& choices)
      : options_(options), accounts_(accounts), placer_(placer), slots_(slots), moves_(moves), choices_(choices) {}

  // There is to be room on `from` (an index in the budget), and `victim` gives way. True: it moves to another worker
  // that has room for it, or something else is on its way from there already, so there is room when that has ended.
  // False: the victim has to begin again.
  bool MakesRoom(Sequence& victim, int from);

  // Sequences on slower tiers move to faster ones that have room to spare, the oldest first, one at a time. Not while
  // requests wait for a place.
  void ComeBack();

 private:
  bool MayComeBack(const Sequence& sequence) const;
  bool HasRoomToSpare(int worker, const Sequence& sequence) const;
  const KvBudget& budget() const { return accounts_.budget(); }

  const SchedulerOptions& options_;
  KvAccounts& accounts_;
  const Placer& placer_;
  const Slots& slots_;
  Moves& moves_;
  const Choices& choices_;
};

}  // namespace dovetail::scheduler
