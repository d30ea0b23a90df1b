#pragma once
#include <cstdint>
#include <optional>

#include "scheduler/core/choices.h"
#include "scheduler/core/ended_prefixes.h"
#include "scheduler/core/incarnations.h"
#include "scheduler/core/kv_accounts.h"
#include "scheduler/core/moves.h"
#include "scheduler/core/request_table.h"
#include "scheduler/core/slots.h"
#include "scheduler/core/turn.h"

namespace dovetail::scheduler {

// Copies what ended sequences left in the prefix cache of a fast tier to a slower one, before the fast one needs the
// room and drops it. A copy is a request of the core's own (RequestState::spills) that takes no steps: it is opened on
// what the fast worker has cached, moves, and ends, so that both workers have it cached. It takes a slot and room that
// are free, one at a time, and gives them back to the first request that needs them.
// Threads: thread-compatible; deterministic.
class CacheSpill {
 public:
  // All outlive this.
  CacheSpill(KvAccounts& accounts, EndedPrefixes& ended, RequestTable& requests, Slots& slots, Moves& moves,
             Incarnations& incarnations, Choices& choices, Turn& turn)
      : accounts_(accounts),
        ended_(ended),
        requests_(requests),
        slots_(slots),
        moves_(moves),
        incarnations_(incarnations),
        choices_(choices),
        turn_(turn) {}

  // Takes the copy under way further, or begins the next one if nothing else is to be done first.
  void Run();

  bool running() const { return Current() != nullptr; }
  uint64_t tokens() const { return tokens_; }  // that slower tiers have by this, so far

 private:
  Sequence* Current() const;
  void GoOn(Sequence& sequence);
  bool Begin(EndedPrefixes::Prefix&& prefix);
  std::optional<int> TakerOf(const Sequence& sequence, int from) const;
  const KvBudget& budget() const { return accounts_.budget(); }

  KvAccounts& accounts_;
  EndedPrefixes& ended_;
  RequestTable& requests_;
  Slots& slots_;
  Moves& moves_;
  Incarnations& incarnations_;
  Choices& choices_;
  Turn& turn_;
  std::optional<RequestId> current_;
  uint64_t begun_ = 0;
  uint64_t tokens_ = 0;
};

}  // namespace dovetail::scheduler
