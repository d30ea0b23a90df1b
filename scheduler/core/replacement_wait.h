#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "scheduler/core/sequence.h"

namespace dovetail::scheduler {

// Sequences that no attention worker can hold since one was lost or began to drain. For kReplacementPatience they wait
// for another that can, outside of the queue, so that others need not wait behind them.
// Threads: thread-compatible.
class ReplacementWait {
 public:
  // An attention worker is about to be lost or to drain. longest: SchedulerCore::LongestSequence(), before that.
  void NoteLoss(Position longest, absl::Time now);
  // So many tokens fitted before the loss, which was not long ago.
  bool MayFitAgain(Position tokens, absl::Time now) const;

  // It waits here from now on. Its time runs from when it was first added since it last ran.
  void Add(Sequence& sequence, absl::Time now);
  void Remove(Sequence& sequence) { std::erase(waiting_, &sequence); }  // nothing happens if it is not here
  bool Holds(const Sequence& sequence) const {
    return std::find(waiting_.begin(), waiting_.end(), &sequence) != waiting_.end();
  }
  // A worker joined that may be large enough: none waits here any more.
  std::vector<Sequence*> TakeAll() { return std::exchange(waiting_, {}); }
  std::vector<Sequence*> Expired(absl::Time now) const;

  absl::Time NextDeadline() const;
  const std::vector<Sequence*>& waiting() const { return waiting_; }

 private:
  std::vector<Sequence*> waiting_;
  absl::Time lost_at_ = absl::InfinitePast();  // the last time
  Position longest_before_ = 0;  // the longest sequence before the losses of the last kReplacementPatience
};

}  // namespace dovetail::scheduler
