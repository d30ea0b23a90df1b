#pragma once
#include <map>

#include "absl/time/time.h"
#include "base/ids.h"

namespace dovetail::scheduler {

// How long a compute worker may take for a step before it counts as failed: `least`, and for each unit of work ten
// times what the slowest finished step of this worker took for one, at most kSlowest. Before a step of it has finished:
// kSlowest. A unit of work is a new token and what it costs to attend over 1024 tokens.
// Threads: thread-compatible; deterministic.
class StepPatience {
 public:
  // Of a CPU that does some 100 GFLOP/s for a model of 70 billion parameters.
  static constexpr absl::Duration kSlowest = absl::Seconds(2);

  explicit StepPatience(absl::Duration least) : least_(least) {}

  // Of `new_tokens` that follow `ctx_len` others.
  static double WorkOf(Position ctx_len, int new_tokens);

  // A step of so much work finished.
  void Note(WorkerId worker, double work, absl::Duration took);
  void Forget(WorkerId worker) { slowest_.erase(worker); }

  // absl::InfiniteDuration() if `least` is.
  absl::Duration For(WorkerId worker, double work) const;

 private:
  const absl::Duration least_;
  std::map<WorkerId, absl::Duration> slowest_;  // for a unit of work
};

}  // namespace dovetail::scheduler
