#pragma once
#include <cstddef>
#include <cstdint>
#include <list>

#include "absl/container/flat_hash_map.h"
#include "base/ids.h"
#include "base/status.h"
#include "proto/step_plan.h"

namespace dovetail::compute {

// The lists of sequences' sampling, given once in a step plan and kept for later ones: at most `max_bytes`, those used
// least recently are dropped (the scheduler gives them again).
// Threads: thread-compatible.
class SamplingListsCache {
 public:
  static constexpr size_t kMaxBytes = size_t{1} << 30;

  explicit SamplingListsCache(size_t max_bytes = kMaxBytes) : max_bytes_(max_bytes) {}

  // Keeps what the plan gives, and fills in what it leaves out: after that each entry with has_lists has them, and
  // keeps them alive. kNotFound names the first sequence whose lists are not known here.
  absl::Status Complete(proto::StepPlan& plan);

  size_t bytes() const { return bytes_; }

 private:
  struct Kept {
    proto::SharedLists lists;
    std::list<SequenceId>::iterator used;
  };
  void Keep(SequenceId sequence, const proto::SharedLists& lists);
  void Drop(SequenceId sequence);

  const size_t max_bytes_;
  size_t bytes_ = 0;
  absl::flat_hash_map<SequenceId, Kept> kept_;
  std::list<SequenceId> used_;  // front: last
};

}  // namespace dovetail::compute
