#pragma once
#include <cstddef>
#include <memory>
#include <vector>

#include "base/status.h"
#include "compute_worker/core/compute_worker_core.h"
#include "compute_worker/cuda/cuda_batch.h"
#include "compute_worker/cuda/cuda_state_plan.h"
#include "compute_worker/step_wire.h"
#include "kernels/cuda/runtime/cuda_device.h"
#include "kernels/cuda/runtime/staged_upload.h"

namespace dovetail::compute {

// Runs the linear layers of prompts on a compute worker's GPU, a block of 64 tokens at a time, with the kernels that
// attention workers on GPUs have (kernels/cuda/state/). What PromptStates does on a CPU: the state before a step comes
// from a slot on the GPU, with the op's answer, or from the rank before; those that the step leaves are packed on the
// GPU and copied to pinned memory, where they go with k and v (proto/state_blocks.h).
//
// Order: Prepare for a step with StateEntries; for each linear op Run, once the op's q, k, v and gates are in
// batch.query and batch.key_value and its answers are there; LeaveStates behind it.
// Memory: Prepare grows it to what steps need, and nothing gives it back: the blocks of entries that run at once, at
// most 256 MiB unless one entry needs more, and a slot for each prompt that has parts to come (SlotBytes).
// Numbers: those of kernels/cuda/state/cuda_state.h: keys, values and vector decays of an open block have 16 bits.
// Errors: kResourceExhausted from Prepare: no memory; kInternal: the device is lost.
// Threads: those of CudaDense.
// Source: Sun et al. 2024 (LASP).
class CudaPromptStates {
 public:
  // Whether all linear layers of such a table run here. kUnimplemented says which do not: rank-one updates, float32 on
  // the wire, keys of more than 128 dimensions; and GPUs without the shared memory that chunks need.
  static absl::Status Takes(const kernels::cuda::CudaDevice& device, const proto::AttentionTable& table);

  // For a table that it takes. Uploads what is fixed for an op. kResourceExhausted. All outlive it.
  static absl::StatusOr<std::unique_ptr<CudaPromptStates>> Create(kernels::cuda::CudaDevice& device,
                                                                  kernels::cuda::CudaStream& stream,
                                                                  const proto::AttentionTable& table,
                                                                  int micro_batches);

  // For the plan that `core` runs in this micro-batch, whose rows begin where `wire` says; both are prepared.
  absl::Status Prepare(const ComputeWorkerCore& core, CudaBatch& batch, const StepWire& wire);

  // Enqueues a linear op of all its entries into the step's stream. States for attention workers go on into the wire in
  // `copies`, behind what that stream has: they are there when it has come so far.
  absl::Status Run(const ComputeWorkerCore& core, int op, CudaBatch& batch, StepWire& wire,
                   kernels::cuda::CudaStream& copies);

  // What Run of an op leaves for the next rank of a group, and whether it is there. kInternal: the device is lost.
  std::vector<std::byte> TakeRankState(MicroBatchId id, int op) const;
  absl::StatusOr<bool> RankStateReady(MicroBatchId id, int op) const;

  // o of the op at hand, [rows, heads * value_dim] in the wire type; rows of other entries are the caller's to fill.
  // Valid until the micro-batch's next Prepare.
  std::byte* attended(const CudaBatch& batch) const { return steps_[batch.id.value()].attended->data(); }

 private:
  using BufferPtr = std::unique_ptr<kernels::Buffer>;
  struct OpConstants {
    BufferPtr log_decay, conv, conv_bias, skip;
  };
  struct GroupStep {
    std::unique_ptr<kernels::cuda::StagedUpload> tables;
    StatePlan plan;
    const std::byte* blocks = nullptr;  // that the tables name: another step may have replaced them since
  };
  // States that go to the next rank of a group, or come from the one before, in pinned memory: each op has its own,
  // since the GPU may be several ops behind.
  struct RankStates {
    struct Op {
      int64_t at = 0, bytes = 0;
      kernels::cuda::CudaEvent there;  // of those that go
    };
    BufferPtr memory;
    std::vector<Op> ops;
    int64_t all_bytes = 0;
    std::byte* of(int op) const { return memory->data() + ops[op].at; }
  };
  struct Step {
    std::vector<GroupStep> groups;
    BufferPtr attended;
    RankStates given, taken;
  };
  // What Run needs of one wave of entries.
  struct WaveView;

  CudaPromptStates(kernels::cuda::CudaDevice& device, kernels::cuda::CudaStream& stream,
                   const proto::AttentionTable& table)
      : device_(device), stream_(stream), table_(table) {}
  absl::Status Allocate(int micro_batches);
  absl::Status Upload(const std::vector<float>& values, BufferPtr& out);
  absl::Status Grow(BufferPtr& buffer, size_t bytes, bool pinned = false);
  absl::Status GrowSlots(const ComputeWorkerCore& core, MicroBatchId id);
  absl::Status GrowRankStates(Step& step);
  absl::Status SendTables(GroupStep& step);
  absl::Status LoadBefore(const WaveView& view);
  absl::Status Append(const WaveView& view);
  absl::Status LeaveStates(const WaveView& view);
  absl::Status LeaveForNextRank(const WaveView& view, const StatePlan::Entry& entry);
  std::byte* SlotAt(int slot, int op) const { return slots_[slot]->data() + slot_at_[op]; }

  kernels::cuda::CudaDevice& device_;
  kernels::cuda::CudaStream& stream_;
  const proto::AttentionTable& table_;
  std::vector<StateShapeOnGpu> shapes_;  // by group
  std::vector<OpConstants> constants_;   // by op
  std::vector<int64_t> slot_at_;         // by op: bytes from the begin of a slot
  int64_t slot_bytes_ = 0;
  std::vector<BufferPtr> slots_;
  BufferPtr blocks_;     // of the entries that run at once
  BufferPtr workspace_;  // of chunks
  BufferPtr arriving_;   // packed states before the entries that run at once
  BufferPtr leaving_;    // and those after them, on their way to the wire
  kernels::cuda::CudaEvent packed_, leaving_free_;
  bool leaving_used_ = false;
  std::vector<Step> steps_;  // by micro-batch
};

}  // namespace dovetail::compute
