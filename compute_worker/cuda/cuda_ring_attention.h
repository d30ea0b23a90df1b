#pragma once
#include <cstddef>
#include <memory>
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

namespace dovetail::compute {

// K and V that come round a ring of ranks (AttendShard), attended on a compute worker's GPU one earlier rank's at a
// time. They are laid out in blocks of their own, which the next rank's overwrite, and give partial results: a subtree
// for each row of the step, which CudaPartialJoin joins once the op ends.
//
// Order: Prepare, then Plan for each softmax group; for each op Attend of each earlier rank whose rows come, in any
// order. All are enqueued into the stream of the step's lane; the host waits for nothing.
// Memory: the blocks of the longest shard, of one op, for each micro-batch that has run such a step. Prepare grows it;
// nothing gives it back.
// Errors: kResourceExhausted: no memory; kInternal: the device is lost, or rows of another size came.
// Ownership: must not outlive the device.
// Threads: reactor-owned, as CudaDense.
class CudaRingAttention {
 public:
  // All outlive it. `block_bytes`: of a block of any softmax op.
  CudaRingAttention(kernels::cuda::CudaDevice& device, const proto::AttentionTable& table, size_t block_bytes,
                    int micro_batches, CudaRankRows& rank_rows);

  // For the plan that `core` runs in this micro-batch, whose prompt is attended in a ring (PromptEntry::ring).
  absl::Status Prepare(const ComputeWorkerCore& core, CudaBatch& batch);

  // Which subtrees of the step's partial results an earlier rank's tokens give: `join` numbers them by `locals`.
  // `shape`: of the group, but for where the blocks lie.
  absl::Status Plan(const ComputeWorkerCore& core, LayerGroup group, const kernels::cuda::CudaAttentionShape& shape,
                    std::span<const StepWire::LocalPartial> locals, const CudaPartialJoin& join, CudaBatch& batch);

  // K and V of shard.rank, RankRows of the core, into the blocks, with what was gathered of the segment in which the
  // group begins; and attention of all rows over them. `run`: the step's q and partial results.
  absl::Status Attend(const ComputeWorkerCore& core, const AttendShard& shard,
                      const kernels::cuda::CudaAttentionShape& shape, const kernels::cuda::CudaAttentionRun& run,
                      CudaBatch& batch);

 private:
  using BufferPtr = std::unique_ptr<kernels::Buffer>;
  // An earlier rank's tokens of which some come.
  struct Shard {
    int rank = 0;
    proto::TokenRange blocks;  // from a multiple of 64 on
    proto::TokenRange comes;
    int64_t table_row = 0;
  };
  // Tokens before the group's first, in rank 0's first segment, that come with an answer.
  struct GatherRun {
    int part = 0, item = 0;  // of its layout
    int64_t rows = 0;
    int64_t table_row = 0;
    int64_t at = 0;  // bytes into the staging memory: keys, then values
  };
  struct GroupStep {
    std::vector<Shard> shards;
    std::vector<GatherRun> gathers;
    std::unique_ptr<kernels::cuda::StagedUpload> tables;  // items, positions, their items, block pointers
    RowTables into;
    const std::byte* const* block_pointers = nullptr;                      // on the device
    std::vector<std::unique_ptr<kernels::cuda::CudaAttention>> attention;  // by rank
  };
  struct Step {
    std::vector<GroupStep> groups;
    BufferPtr blocks, gathered;
  };

  int64_t FindShards(const ComputeWorkerCore& core, MicroBatchId id, LayerGroup group, GroupStep& step) const;
  void FindGathers(const ComputeWorkerCore& core, MicroBatchId id, LayerGroup group, int64_t table_row,
                   GroupStep& step) const;
  absl::Status UploadTables(const ComputeWorkerCore& core, LayerGroup group, CudaBatch& batch);
  std::vector<kernels::cuda::CudaAttentionItem> ItemsOf(const Shard& shard, const proto::SoftmaxSpec& spec,
                                                        std::span<const StepWire::LocalPartial> locals,
                                                        const CudaPartialJoin& join,
                                                        const std::byte* const* blocks) const;
  kernels::cuda::CudaAttentionShape WithBlocks(kernels::cuda::CudaAttentionShape shape, const Step& step) const;
  absl::Status AppendGathered(const ComputeWorkerCore& core, LayerGroup group, CudaBatch& batch);

  kernels::cuda::CudaDevice& device_;
  const proto::AttentionTable& table_;
  const size_t block_bytes_;
  CudaRankRows& rank_rows_;
  std::vector<Step> steps_;  // by micro-batch
};

}  // namespace dovetail::compute
