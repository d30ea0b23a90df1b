#pragma once
#include <cstddef>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "compute_worker/core/rank_tensor.h"

namespace dovetail::compute {

// What other ranks have sent for the ops of a step: states of linear ops, K and V of softmax ops. It may come before
// the step's plan does, and twice. It holds that of one step a micro-batch: of every op and rank at most one tensor.
//   Bytes:     states until the step has ended; K and V until they were attended to (and handed on), and since their
//              senders wait for that, of at most kRankOpsAhead ops, or kRingShards tensors
//   Ownership: of the tensors, with what hands them on
//   Threads:   thread-compatible
class RankInbox {
 public:
  explicit RankInbox(int micro_batches) : of_batches_(micro_batches) {}

  // False, and nothing is kept: one came before from this rank for this op, or the step has ended, or a later one has
  // begun to come.
  bool Put(MicroBatchId id, StepId step, int op, int rank, RankTensor tensor) {
    Batch& batch = of_batches_[id.value()];
    if (step < batch.step || (step == batch.step && batch.ended)) return false;
    if (step > batch.step) batch = {step, false, {}};
    return batch.tensors.emplace(std::pair(op, rank), std::move(tensor)).second;
  }

  // A step begins: what came for earlier ones is dropped.
  void Begin(MicroBatchId id, StepId step) {
    Batch& batch = of_batches_[id.value()];
    if (step > batch.step) batch = {step, false, {}};
  }

  // What came from a rank for an op of the step that began last; empty: nothing, or it was dropped. Valid until it is
  // dropped or the step ends.
  std::span<const std::byte> Find(MicroBatchId id, int op, int rank) const {
    const Batch& batch = of_batches_[id.value()];
    const auto found = batch.tensors.find({op, rank});
    return found == batch.tensors.end() ? std::span<const std::byte>() : found->second.bytes;
  }

  // The same, with what keeps it.
  RankTensor Share(MicroBatchId id, int op, int rank) const {
    const auto& tensors = of_batches_[id.value()].tensors;
    const auto found = tensors.find({op, rank});
    return found == tensors.end() ? RankTensor() : found->second;
  }

  // Whether it came, whatever became of it since.
  bool Came(MicroBatchId id, int op, int rank) const { return of_batches_[id.value()].tensors.contains({op, rank}); }

  // Its bytes are needed no more. That it came is remembered.
  void Drop(MicroBatchId id, int op, int rank) {
    const auto found = of_batches_[id.value()].tensors.find({op, rank});
    if (found != of_batches_[id.value()].tensors.end()) found->second = {};
  }

  // As if it had not come.
  void Forget(MicroBatchId id, int op, int rank) { of_batches_[id.value()].tensors.erase({op, rank}); }

  // (op, rank) of all that came for the step that began last and was not dropped, in order.
  std::vector<std::pair<int, int>> kept(MicroBatchId id) const {
    std::vector<std::pair<int, int>> kept;
    for (const auto& [from, tensor] : of_batches_[id.value()].tensors)
      if (!tensor.empty()) kept.push_back(from);
    return kept;
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
      for (const auto& [from, tensor] : batch.tensors) bytes += tensor.size();
    return bytes;
  }

 private:
  struct Batch {
    StepId step;
    bool ended = false;
    std::map<std::pair<int, int>, RankTensor> tensors;  // by (op, rank)
  };

  std::vector<Batch> of_batches_;
};

}  // namespace dovetail::compute
