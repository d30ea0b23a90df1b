#pragma once
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"
#include "compute_worker/core/compute_worker_core.h"
#include "compute_worker/cuda/cuda_batch.h"
#include "compute_worker/cuda/cuda_partial_join.h"
#include "compute_worker/cuda/cuda_rank_rows.h"
#include "compute_worker/cuda/prompt_rows.h"
#include "compute_worker/step_wire.h"
#include "kernels/cuda/attention/cuda_attention.h"
#include "kernels/cuda/runtime/staged_upload.h"
#include "transport/lent_bytes.h"

namespace dovetail::compute {

// Attention of a head switch between ranks of a prefill group (proto/head_switch.h) on a compute worker's GPU: over all
// tokens of the group and the heads of one rank, one rank's tokens after the other. K and V lie in blocks of their own,
// which the next op's overwrite in the order of the stream. What attention gives for another rank's tokens is written
// where that one's copy engine takes it from; without such memory it is copied to pinned memory first.
//
// Order: Prepare, then Plan for each softmax group; for each op GiveHeads to each other rank, Attend of each rank in
// turn, TakeOutputs behind that of another rank, and Place of what the others gave. All are enqueued into the stream of
// the step's lane, and what leaves pinned memory's way into `copies`; the host waits for nothing.
// Memory: for each micro-batch that has run such a step, blocks of one op, of all tokens of the group and the heads of
// one rank: with equal parts as much as the step's own tokens have with all heads. Prepare grows it; nothing gives it
// back.
// Errors: kResourceExhausted: no memory; kInternal: the device is lost.
// Ownership: must not outlive the device.
// Source: DeepSpeed Ulysses, arXiv 2309.14509.
// Threads: reactor-owned, as CudaDense.
class CudaSwitchAttention {
 public:
  // All outlive it. `block_bytes`: of a block of any softmax op.
  CudaSwitchAttention(kernels::cuda::CudaDevice& device, const proto::AttentionTable& table, size_t block_bytes,
                      int micro_batches, CudaRankRows& rank_rows);

  // Where an op of the step has its parts.
  struct Step {
    kernels::cuda::CudaAttentionShape shape;  // of the group, but for where the blocks lie
    const float* sinks = nullptr;             // of the op, on the device
    std::byte* o = nullptr;                   // [rows, query_heads * value_dim], wire type: where nothing is joined
    std::span<const StepWire::LocalPartial> locals;
    const CudaPartialJoin* join = nullptr;
    float* partials = nullptr;  // the join's
  };

  // For the plan that `core` runs in this micro-batch, whose ranks switch heads (PromptEntry::switches).
  absl::Status Prepare(const ComputeWorkerCore& core, CudaBatch& batch);
  absl::Status Plan(const ComputeWorkerCore& core, LayerGroup group, const Step& step, CudaBatch& batch);

  // The step's own q, k and v for a rank with these KV heads (kRankHeads in proto/rank_frames.h); there once
  // CudaRankRows::Filled.
  absl::StatusOr<transport::LentBytes> GiveHeads(const ComputeWorkerCore& core, int op, const proto::HeadRange& heads,
                                                 kernels::cuda::CudaStream& copies, CudaBatch& batch);
  // One rank's tokens: K and V into the blocks, and attention over all blocks so far.
  absl::Status Attend(const ComputeWorkerCore& core, const AttendHeads& attend, const Step& step,
                      kernels::cuda::CudaStream& copies, CudaBatch& batch);
  // What that gave, if they were another rank's (kRankOutputs). Once; there once CudaRankRows::Filled.
  transport::LentBytes TakeOutputs(MicroBatchId id) { return std::move(batches_[id.value()].outputs); }
  // What a rank gave for the step's tokens goes to their rows, or to the join's partial results.
  absl::Status Place(const ComputeWorkerCore& core, const PlaceRankOutputs& place, const Step& step, CudaBatch& batch);

 private:
  using BufferPtr = std::unique_ptr<kernels::Buffer>;
  struct Group {
    std::unique_ptr<kernels::cuda::StagedUpload> tables;  // an item, positions, their items, block pointers
    RowTables into;                                       // by token, from SwitchBegin on
    const std::byte* const* block_pointers = nullptr;     // on the device
    std::vector<std::unique_ptr<kernels::cuda::CudaAttention>> attention;  // by rank
    int sinks_of = -1;                                                     // the op whose sinks the plans name
  };
  struct Batch {
    std::vector<Group> groups;
    BufferPtr blocks;
    BufferPtr gathered;  // K of earlier tokens with all heads, then V
    int gathered_op = -1;
    BufferPtr made;  // what attention gave, before it goes elsewhere
    kernels::cuda::CudaEvent ready, made_copied;
    transport::LentBytes outputs;
  };

  absl::Status UploadTables(const ComputeWorkerCore& core, LayerGroup group, CudaBatch& batch);
  absl::Status PlanRanks(const ComputeWorkerCore& core, LayerGroup group, const Step& step, CudaBatch& batch);
  absl::Status Gather(const ComputeWorkerCore& core, int op, CudaBatch& batch);
  absl::Status Append(const ComputeWorkerCore& core, const AttendHeads& attend, CudaBatch& batch);
  absl::StatusOr<std::byte*> OutputsOf(size_t bytes, kernels::cuda::CudaStream& copies, CudaBatch& batch);
  absl::Status GiveOutputs(size_t bytes, kernels::cuda::CudaStream& copies, CudaBatch& batch);
  absl::Status PlaceRows(const ComputeWorkerCore& core, LayerGroup group, int rank, std::span<const std::byte> outputs,
                         const Step& step, CudaBatch& batch) const;

  kernels::cuda::CudaDevice& device_;
  const proto::AttentionTable& table_;
  const size_t block_bytes_;
  CudaRankRows& rank_rows_;
  std::vector<Batch> batches_;  // by micro-batch
};

}  // namespace dovetail::compute
