#pragma once
#include <cstdint>

#include "absl/container/flat_hash_map.h"
#include "proto/placement.h"
#include "scheduler/core/block_names.h"
#include "scheduler/core/events.h"
#include "scheduler/core/kv_accounts.h"
#include "scheduler/core/micro_batches.h"
#include "scheduler/core/moves.h"
#include "scheduler/core/sequence.h"
#include "scheduler/core/slots.h"
#include "scheduler/core/turn.h"

namespace dovetail::scheduler {

// A sequence's time on attention workers: opened or forked, ready, released. Preemption ends one incarnation, and
// another begins later. Each has an id of its own, by which answers to a former one are recognised.
// Threads: thread-compatible; deterministic.
class Incarnations {
 public:
  // All outlive this.
  Incarnations(KvAccounts& accounts, const BlockNames& names, MicroBatches& batches, Moves& moves, Slots& slots,
               Turn& turn)
      : accounts_(accounts), names_(names), batches_(batches), moves_(moves), slots_(slots), turn_(turn) {}

  // Asks the workers of the placement to open it. It is kOpening from here on.
  // Requires: it holds a slot.
  void Open(Sequence& sequence, const proto::Placement& placement);
  // `child` gets what `parent` has of the prompt but its last token. It is kForking from here on, and holds a slot.
  // Returns false, and changes nothing, if there is no slot or no room.
  bool Fork(const Sequence& parent, Sequence& child);
  // A worker's answer to one of these, or to the opening of a move. Returns the sequence when the last one came, with
  // `refused` and `resumable` saying what was answered; else null. Counts late events.
  Sequence* Take(const SequenceOpened& event);
  // All workers have opened it: it begins with the most that all of them have cached.
  void Start(Sequence& sequence);
  void MakeReady(Sequence& sequence);
  // Ends the incarnation: workers release it, charges and slot are given back.
  // Requires: no step in flight contains it.
  void Release(Sequence& sequence);

  uint64_t released() const { return released_; }  // so far
  uint64_t prompt_tokens() const { return prompt_tokens_; }
  uint64_t prefix_queries() const { return prefix_queries_; }  // tokens asked for
  uint64_t prefix_hits() const { return prefix_hits_; }        // tokens found
  const Sequence* Find(SequenceId id) const;                   // null: no incarnation has that id now
  size_t size() const { return by_id_.size(); }

 private:
  void BeginWith(Sequence& sequence, const proto::Placement& placement);

  KvAccounts& accounts_;
  const BlockNames& names_;
  MicroBatches& batches_;
  Moves& moves_;
  Slots& slots_;
  Turn& turn_;
  absl::flat_hash_map<SequenceId, Sequence*> by_id_;  // looked up, never iterated
  uint64_t next_id_ = 1;
  uint64_t released_ = 0;
  uint64_t prompt_tokens_ = 0, prefix_queries_ = 0, prefix_hits_ = 0;
};

}  // namespace dovetail::scheduler
