#pragma once
#include <vector>

#include "absl/time/time.h"
#include "scheduler/core/sequence.h"

namespace dovetail::scheduler {

// Sequences whose grammar a compute worker still compiles: they are left out of steps for a pause that grows.
// Threads: thread-compatible.
class GrammarPauses {
 public:
  // A worker was asked for a step of the sequence, and still compiles. Returns false, and pauses nothing, if that has
  // gone on for kGrammarPatience.
  bool Pause(Sequence& sequence, absl::Time now);
  // A token of it came: the next pause is the first one again.
  static void Forget(Sequence& sequence);
  // Pauses that are over are forgotten. active: all sequences that may have one.
  void Renew(const std::vector<Sequence*>& active, absl::Time now);

  absl::Time NextDeadline() const { return next_; }  // when the next pause ends

 private:
  absl::Time next_ = absl::InfiniteFuture();
};

}  // namespace dovetail::scheduler
