#pragma once
#include <cstdint>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "base/ids.h"
#include "scheduler/core/kv_budget.h"

namespace dovetail::scheduler {

// An attention worker that had no room for a sequence although the budget said so, or on which its KV was damaged.
struct Refusal {
  static constexpr uint64_t kHadRoom = ~uint64_t{0};
  WorkerId worker;
  Epoch epoch;
  uint64_t freed = kHadRoom;  // KvBudget::Worker's, then: nothing has changed there until it grows
  bool alone = false;         // nothing else lay there: what others give back changes nothing
  bool damaged = false;       // its KV was: it goes there again only if nothing else holds it
  int opens = 0;              // that it refused in a row
};

// What one sequence remembers of attention workers that refused it. Workers are given by their index in the budget. A
// worker that was started again counts as another one.
// Threads: thread-compatible.
class Refusals {
 public:
  bool empty() const { return refusals_.empty(); }

  // What is remembered of this worker as it is now: an entry is made if there is none. Null: the worker is not there.
  // The pointer is good until the next call.
  Refusal* By(WorkerId worker, const KvBudget& budget);
  // A worker opened it: those that refused to do that before did not do so in a row.
  void WasOpened();

  // It had no room, and nothing has changed there since.
  bool HadNoRoomOn(int worker, const KvBudget& budget) const;
  // That, or its KV was damaged there.
  bool Include(int worker, const KvBudget& budget) const;
  // The budget's workers, of which those that refuse count as draining.
  std::vector<KvBudget::Worker> Others(const KvBudget& budget) const;

 private:
  const Refusal* Find(int worker, const KvBudget& budget) const;

  absl::InlinedVector<Refusal, 1> refusals_;
};

}  // namespace dovetail::scheduler
