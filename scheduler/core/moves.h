#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/time/time.h"
#include "scheduler/core/block_names.h"
#include "scheduler/core/events.h"
#include "scheduler/core/kv_accounts.h"
#include "scheduler/core/micro_batches.h"
#include "scheduler/core/rate_estimator.h"
#include "scheduler/core/sequence.h"
#include "scheduler/core/turn.h"

namespace dovetail::scheduler {

// Sequences on their way from one attention worker to another, KV and all. The taker opens the sequence, or is given
// more shards of it; the giver sends it K and V; then the placement changes. Whatever goes wrong meanwhile, the
// sequence begins again from the token log: that is the caller's to do.
// Threads: thread-compatible; deterministic.
class Moves {
 public:
  // All outlive this.
  Moves(KvAccounts& accounts, const BlockNames& names, MicroBatches& batches, Turn& turn)
      : accounts_(accounts), names_(names), batches_(batches), turn_(turn) {}

  bool full() const { return !FreeSlot().has_value(); }  // no other move may begin
  bool empty() const { return moving_.empty(); }

  // Moves what the sequence has on one worker (an index in the budget) to another. It is kMoving from here on. Returns
  // false, and changes nothing, if the taker has no room.
  // Requires: the sequence is ready and in no step; not full().
  bool Begin(Sequence& sequence, int from, int to);
  // The taker has opened it: the giver is asked to send what the taker does not have.
  void Send(Sequence& sequence);
  // The giver has ended. Returns the sequence if it must begin again, since its move failed. Counts late events.
  Sequence* Take(const SequenceMoved& event);
  // A sequence whose move takes too long; null: none. It is the same one until its move has ended.
  Sequence* Expired() const;
  // The sequence is to be released: the taker releases it, and it is ready again.
  void Abandon(Sequence& sequence);
  // Moves to this worker end, unless it is of that epoch: the giver still has everything.
  void ForgetTo(WorkerId worker, std::optional<Epoch> but_not_of);

  bool AnyFrom(WorkerId worker) const;  // something moves away from it
  absl::Time NextDeadline() const;
  uint64_t finished() const { return finished_; }
  // That a token takes, by the last moves; nothing: none has ended.
  std::optional<double> SecondsPerToken() const { return rate_.usual(); }
  const std::vector<Sequence*>& moving() const { return moving_; }

 private:
  std::optional<uint16_t> FreeSlot() const;
  void Finish(Sequence& sequence);
  void End(Sequence& sequence);

  KvAccounts& accounts_;
  const BlockNames& names_;
  MicroBatches& batches_;
  Turn& turn_;
  std::vector<Sequence*> moving_;  // at most proto::kMoveSlots, by deadline
  uint64_t finished_ = 0;
  RateEstimator rate_;
};

}  // namespace dovetail::scheduler
