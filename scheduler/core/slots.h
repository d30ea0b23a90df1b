#pragma once
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/time/time.h"
#include "scheduler/core/sequence.h"
#include "scheduler/core/tenant_queues.h"

namespace dovetail::scheduler {

// What runs: sequences that hold one of the max_num_seqs slots, and slots promised to choices that will be forked. Also
// which of them gives way to others.
// Threads: thread-compatible; deterministic.
class Slots {
 public:
  explicit Slots(int most) : most_(most) {}

  // Slots that the choices still to be forked from it are promised with its own.
  int PromisedTo(const Sequence& sequence) const;
  void Take(Sequence& sequence, absl::Time now);
  void GiveBack(Sequence& sequence);
  void DropPromises(RequestState& request);
  void DropPromiseOfOne(RequestState& request);  // one choice fewer is to be forked

  int used() const { return static_cast<int>(active_.size()) + promised_; }
  bool Has(int free) const { return used() + free <= most_; }
  int most() const { return most_; }
  const std::vector<Sequence*>& active() const { return active_; }  // in the order of admission

  // The oldest sequence that holds KV and is not paused. It never gives way, and therefore always ends.
  Sequence* Oldest() const;
  // Whose KV, and slot, others may have: paused ones first, then the newest of the tenant served most. It is in no
  // step, holds blocks on `worker` (an index; nothing: any), and its tenant is `allowed`. Null: there is none.
  Sequence* PickVictim(std::optional<int> worker, absl::FunctionRef<bool(const Tenant&)> allowed) const;
  // The newest of the paused ones, by the same rules.
  Sequence* PickPaused(std::optional<int> worker) const;

 private:
  const int most_;
  std::vector<Sequence*> active_;
  int promised_ = 0;
};

}  // namespace dovetail::scheduler
