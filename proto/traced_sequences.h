#pragma once
#include <cstddef>
#include <deque>

#include "absl/container/flat_hash_map.h"
#include "base/ids.h"
#include "base/trace_context.h"

namespace dovetail::proto {

// The sequences of sampled traces that a worker was told of: kMost of them, beyond which the oldest is forgotten. A
// worker that no trace concerns asks empty() and does nothing more.
// Threads: thread-compatible; a value.
class TracedSequences {
 public:
  static constexpr size_t kMost = 4096;

  void Set(SequenceId sequence, const TraceContext& trace) {
    if (contexts_.insert_or_assign(sequence, trace).second) order_.push_back(sequence);
    while (order_.size() > kMost) {
      contexts_.erase(order_.front());
      order_.pop_front();
    }
  }
  bool empty() const { return contexts_.empty(); }
  const TraceContext* Find(SequenceId sequence) const {
    const auto found = contexts_.find(sequence);
    return found == contexts_.end() ? nullptr : &found->second;
  }
  // Its place in the order stays until it is the oldest.
  void Forget(SequenceId sequence) { contexts_.erase(sequence); }

 private:
  absl::flat_hash_map<SequenceId, TraceContext> contexts_;  // looked up, never iterated
  std::deque<SequenceId> order_;
};

}  // namespace dovetail::proto
