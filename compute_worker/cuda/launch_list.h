#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "compute_worker/cuda/launch_records.h"

namespace dovetail::compute {

// The launches of all steps of a model, in order. What lower.h makes and fuse.h rewrites.
struct Launch {
  int32_t step = 0;  // of the model; ascending
  LaunchRecord record;
};
using LaunchList = std::vector<Launch>;

// A list that changes no more, by step, and the words that tell a step's launches from any others.
// Threads: immutable, thread-safe.
class LaunchProgram {
 public:
  // `steps`: how many the model has.
  LaunchProgram(LaunchList list, size_t steps);

  // Empty for a step that launches nothing of its own.
  std::span<const Launch> StepLaunches(size_t step) const;
  // KeyOf all of them, one after the other.
  std::span<const uint64_t> StepKey(size_t step) const;

 private:
  LaunchList list_;
  std::vector<uint64_t> key_;
  std::vector<size_t> launch_begin_, key_begin_;  // by step, and the end
};

// Appends the record's kind and all of its bytes: two records are the same exactly if these words are.
void AppendKey(const LaunchRecord& record, std::vector<uint64_t>& key);

}  // namespace dovetail::compute
