#pragma once
#include <cstddef>
#include <map>
#include <span>
#include <vector>

#include "base/ids.h"

namespace dovetail::compute {

// The states that the rank before this one has sent for the linear ops of a step, until the step has ended. They may
// come before the step's plan does, and twice. It holds those of one step a micro-batch: at most the state of every
// linear op.
//   Ownership: of the bytes
//   Threads:   thread-compatible
class ChainInbox {
 public:
  explicit ChainInbox(int micro_batches) : of_batches_(micro_batches) {}

  // False, and nothing is kept: one came before for this op, or the step has ended, or a later one has begun to come.
  bool Put(MicroBatchId id, StepId step, int op, std::vector<std::byte> state) {
    Batch& batch = of_batches_[id.value()];
    if (step < batch.step || (step == batch.step && batch.ended)) return false;
    if (step > batch.step) batch = {step, false, {}};
    return batch.states.emplace(op, std::move(state)).second;
  }

  // A step begins: what came for earlier ones is dropped.
  void Begin(MicroBatchId id, StepId step) {
    Batch& batch = of_batches_[id.value()];
    if (step > batch.step) batch = {step, false, {}};
  }

  // What came for an op of the step that began last; empty: nothing. Valid until it ends.
  std::span<const std::byte> Find(MicroBatchId id, int op) const {
    const Batch& batch = of_batches_[id.value()];
    const auto found = batch.states.find(op);
    return found == batch.states.end() ? std::span<const std::byte>() : found->second;
  }

  // The step that began last ends: what comes for it from now on is dropped.
  void End(MicroBatchId id, StepId step) {
    Batch& batch = of_batches_[id.value()];
    if (step >= batch.step) batch = {step, true, {}};
  }

  // Bytes that are held. For tests.
  size_t bytes() const {
    size_t bytes = 0;
    for (const Batch& batch : of_batches_)
      for (const auto& [op, state] : batch.states) bytes += state.size();
    return bytes;
  }

 private:
  struct Batch {
    StepId step;
    bool ended = false;
    std::map<int, std::vector<std::byte>> states;  // by op
  };

  std::vector<Batch> of_batches_;
};

}  // namespace dovetail::compute
