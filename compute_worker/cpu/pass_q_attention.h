#pragma once
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "base/status.h"
#include "compute_worker/core/compute_worker_core.h"
#include "compute_worker/step_wire.h"
#include "kernels/device.h"
#include "kernels/kv_append.h"
#include "kernels/paged_attention.h"

namespace dovetail::compute {

// Attention of ranks of a prefill group that ask each other (proto/pass_q.h): of a step's own queries, and of those of
// later ranks, over the step's own tokens. The same kernels and the same order of sums as elsewhere, so the same bits.
//   Bytes:     K and V of the step's own tokens, of at most kRankOpsAhead ops; not of the prompt scratch
//   Ownership: of all that it computes, until TakeOutputs
//   Threads:   owned by the node's event loop; Run, Answer and Place do not lock
class PassQAttention {
 public:
  // Both outlive it.
  PassQAttention(kernels::Device& device, const proto::AttentionTable& table, int micro_batches,
                 KvStorage storage = KvStorage::kAsSent);

  // For the plan that `core` runs in this micro-batch, after wire.Prepare; the others will use `threads`. Does nothing
  // unless that is a rank which asks others.
  //   Errors: kResourceExhausted: no memory
  absl::Status Prepare(const ComputeWorkerCore& core, MicroBatchId id, int threads, StepWire& wire);

  // The step's own part of an op: appends k and v, and what was gathered, to the blocks, attends, and leaves the
  // results where JoinPartials finds them.
  //   Errors: those of the kernels
  absl::Status Run(const ComputeWorkerCore& core, MicroBatchId id, int op, StepWire& wire, kernels::Stream& stream);

  // q of the step's first rows, as kRankHeads has them (proto/rank_frames.h).
  std::vector<std::byte> Pack(int op, int64_t rows, StepWire& wire) const;

  // The queries of a later rank, over what Run has appended of that op.
  //   Errors: those of the kernels
  absl::Status Answer(const ComputeWorkerCore& core, const AttendQueries& attend, kernels::Stream& stream);
  // What that gave (kRankOutputs). Once.
  std::vector<std::byte> TakeOutputs(MicroBatchId id) { return std::move(micro_batches_[id.value()].outputs); }

  // What an earlier rank gave for the step's tokens goes to where JoinPartials finds it.
  void Place(const ComputeWorkerCore& core, const PlaceRankOutputs& place, StepWire& wire);

 private:
  struct MicroBatch {
    std::vector<std::byte*> table;  // blocks of the op at hand: [KV head][segment]
    std::vector<kernels::KvAppendItem> appends;
    std::vector<kernels::AttentionItem> items;
    std::vector<std::byte> outputs;
    size_t place_bytes = 0;  // of each of kRankOpsAhead places in `blocks`
    std::unique_ptr<kernels::Buffer> blocks, scratch;
    std::unique_ptr<kernels::Buffer> partial;  // of the step's tokens: what wire.locals() point to
  };

  kernels::AttentionShape ShapeOf(LayerGroup group) const;
  absl::Status Grow(std::unique_ptr<kernels::Buffer>& buffer, size_t bytes);
  size_t ScratchOf(LayerGroup group, int64_t rows, int items, const proto::TokenRange& shard, int threads) const;
  void FillTable(const ComputeWorkerCore& core, MicroBatchId id, int op);
  kernels::KvBlockTable TableOf(const ComputeWorkerCore& core, MicroBatchId id, int first_head) const;
  void FillAppends(const ComputeWorkerCore& core, MicroBatchId id, int op, StepWire& wire);
  void FillItems(const ComputeWorkerCore& core, MicroBatchId id, int op, StepWire& wire);
  absl::Status Attend(MicroBatch& batch, LayerGroup group, kernels::Stream& stream) const;

  kernels::Device& device_;
  const proto::AttentionTable& table_;
  const KvStorage storage_;
  const size_t block_bytes_;
  std::vector<MicroBatch> micro_batches_;
};

}  // namespace dovetail::compute
