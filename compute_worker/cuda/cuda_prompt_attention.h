#pragma once
#include <cstddef>
#include <memory>
#include <vector>

#include "base/status.h"
#include "compute_worker/core/compute_worker_core.h"
#include "compute_worker/cuda/cuda_batch.h"
#include "compute_worker/cuda/cuda_partial_join.h"
#include "compute_worker/cuda/cuda_rank_rows.h"
#include "compute_worker/cuda/cuda_ring_attention.h"
#include "compute_worker/cuda/cuda_switch_attention.h"
#include "compute_worker/cuda/prompt_rows.h"
#include "compute_worker/step_wire.h"
#include "kernels/cuda/attention/cuda_attention.h"
#include "kernels/cuda/runtime/staged_upload.h"

namespace dovetail::compute {

// Attends prompts on a compute worker's GPU, over the blocks that PromptScratch numbers, with the kernels that
// attention workers on GPUs have (kernels/cuda/attention/). K and V of earlier tokens that a step gathers are put into
// the same blocks; what is attended elsewhere is joined on the GPU.
//
// Order: Prepare for a step with prompts; for each softmax op Attend, then Join once the op's answers are there; Ended
// once it has run. All are enqueued into the stream of the step's lane. Steps of several lanes run side by side: they
// use different blocks. A step that failed may still use blocks that are another's by then, so Prepare waits for it,
// unless both have one stream.
// Memory: the blocks are taken by Create. Prepare grows the rest to what steps need; nothing gives it back.
// Numbers: those of kernels/cuda/attention/cuda_attention.h. Blocks have the wire type whatever attention workers
// store.
// Threads: reactor-owned, as CudaDense.
class CudaPromptAttention {
 public:
  // Whether prompts of such a model can be attended here: it has softmax layers, and heads of multiples of 8
  // dimensions.
  static bool Takes(const proto::AttentionTable& table);

  // For options.prompt_blocks > 0 blocks of a table that it takes. kResourceExhausted: the GPU has no room for them.
  // `device`, `table` and `rank_rows`, which may be null, outlive it.
  static absl::StatusOr<std::unique_ptr<CudaPromptAttention>> Create(kernels::cuda::CudaDevice& device,
                                                                     kernels::cuda::CudaStream& stream,
                                                                     const proto::AttentionTable& table,
                                                                     const ComputeWorkerOptions& options,
                                                                     CudaRankRows* rank_rows);

  // For the plan that `core` runs in this micro-batch: block tables, what is attended, what is joined. `batch.rows` are
  // known. kResourceExhausted: no memory.
  absl::Status Prepare(const ComputeWorkerCore& core, CudaBatch& batch);

  // Appends the op's gathered rows, which its answers have brought, those that other ranks sent, and k and v of
  // batch.key_value to the blocks, and attends batch.query over them.
  absl::Status Attend(const ComputeWorkerCore& core, int op, CudaBatch& batch);

  // In a ring, behind that of the op: over K and V of an earlier rank.
  absl::Status Attend(const ComputeWorkerCore& core, const AttendShard& shard, CudaBatch& batch);

  // In a head switch, in place of that: what CudaSwitchAttention does of these names. kInternal: no rank gives this
  // one anything.
  absl::StatusOr<transport::LentBytes> GiveHeads(const ComputeWorkerCore& core, int op, const proto::HeadRange& heads,
                                                 kernels::cuda::CudaStream& copies, CudaBatch& batch);
  absl::Status Attend(const ComputeWorkerCore& core, const AttendHeads& attend, kernels::cuda::CudaStream& copies,
                      CudaBatch& batch);
  absl::StatusOr<transport::LentBytes> TakeOutputs(const CudaBatch& batch);
  absl::Status Place(const ComputeWorkerCore& core, const PlaceRankOutputs& place, CudaBatch& batch);

  // K and V of a later rank into `part` (KeepRankRows), in the stream of all prompts.
  absl::Status Keep(const ComputeWorkerCore& core, const KeepRankRows& keep, const PromptScratch::Part& part,
                    kernels::cuda::CudaStream& stream);
  // A piece of earlier tokens' K and V, on the device, into the blocks of its prompt (KeepEarlierRows). Likewise.
  absl::Status Keep(const ComputeWorkerCore& core, const KeepEarlierRows& keep, kernels::cuda::CudaStream& stream);

  // Nothing of the micro-batch's step runs any more.
  void Ended(MicroBatchId id) { steps_[id.value()].runs_in = nullptr; }

  // Joins the rows of prompts that began elsewhere with what attention workers have answered.
  absl::Status Join(const std::vector<WorkerPart>& parts, int op, CudaBatch& batch);

  // o of the op at hand, [rows, query_heads * value_dim] in the wire type; rows of other entries are the caller's to
  // fill. Valid until the micro-batch's next Prepare.
  std::byte* attended(const CudaBatch& batch) const { return steps_[batch.id.value()].attended->data(); }

 private:
  using BufferPtr = std::unique_ptr<kernels::Buffer>;

  // Rows to append that lie one after the other, of as many KV heads each.
  struct AppendRun {
    int64_t rows = 0;
    int64_t first_row = 0;  // of the step
    int64_t table_row = 0;  // of the uploaded positions
  };
  // K and V of some KV heads that others sent, on the device: keys of all tokens, then values.
  struct SentRows {
    const PromptScratch::Part& part;
    int op = 0;
    proto::HeadRange heads;
    proto::TokenRange tokens;
    std::span<const std::byte> bytes;
  };
  // Rows of earlier tokens that come with an answer.
  struct GatherRun {
    int part = 0, item = 0;  // of its layout
    int64_t rows = 0;
    int64_t table_row = 0;
    int64_t at = 0;  // bytes into the staging memory: keys, then values
  };
  // Rows that a rank before this one sends.
  struct RankRun {
    int rank = 0;
    proto::TokenRange tokens;
    int64_t table_row = 0;
  };
  // One layer group of a micro-batch's step.
  struct GroupStep {
    std::unique_ptr<kernels::cuda::CudaAttention> attention;
    std::unique_ptr<kernels::cuda::StagedUpload> tables;  // items, positions, their items, block pointers
    std::vector<StepWire::LocalPartial> locals;
    std::vector<AppendRun> appends;
    std::vector<GatherRun> gathers;
    std::vector<RankRun> from_ranks;
    std::unique_ptr<CudaPartialJoin> join;
    // The blocks of every op lie equally far from those of the group's first; else tables and plan are made anew for
    // each op. Sinks are of one op.
    bool regular = false;
    int base_op = -1;                // whose blocks the tables hold
    std::vector<int64_t> op_offset;  // bytes, by index of the op in the group, if regular
    RowTables into;                  // items: prompts, then gathered
  };
  struct Step {
    std::vector<GroupStep> groups;
    std::vector<int64_t> row_begin;  // by entry of the plan
    BufferPtr attended, gathered, partials;
    StepId number;
    kernels::cuda::CudaStream* runs_in = nullptr;  // null: it has ended
  };

  CudaPromptAttention(kernels::cuda::CudaDevice& device, const proto::AttentionTable& table, int micro_batches,
                      CudaRankRows* rank_rows);
  kernels::cuda::CudaAttentionShape ShapeOf(LayerGroup group) const;
  absl::Status AwaitFailed(const ComputeWorkerCore& core, const CudaBatch& batch);
  std::vector<int> OpsOf(LayerGroup group) const;
  std::byte* BlockAt(uint32_t block) const;
  void FindOffsets(const ComputeWorkerCore& core, MicroBatchId id, LayerGroup group, GroupStep& step) const;
  int64_t FindGathers(const ComputeWorkerCore& core, MicroBatchId id, LayerGroup group, GroupStep& step) const;
  void FindRankRows(const ComputeWorkerCore& core, MicroBatchId id, LayerGroup group, GroupStep& step) const;
  absl::Status PlanPrompts(const ComputeWorkerCore& core, CudaBatch& batch, LayerGroup group);
  CudaSwitchAttention::Step SwitchOf(LayerGroup group, int op, const CudaBatch& batch) const;
  absl::Status PlanGroup(const ComputeWorkerCore& core, CudaBatch& batch, LayerGroup group, int op);
  void FillRows(const ComputeWorkerCore& core, MicroBatchId id, LayerGroup group, GroupStep& step, int32_t* positions,
                int32_t* row_items) const;
  std::vector<kernels::cuda::CudaAttentionItem> ItemsOf(const ComputeWorkerCore& core, MicroBatchId id,
                                                        LayerGroup group, int op,
                                                        const std::vector<const std::byte* const*>& blocks) const;
  absl::Status AppendGathered(const ComputeWorkerCore& core, int op, int64_t kv_offset, CudaBatch& batch);
  absl::Status AppendFromRanks(const ComputeWorkerCore& core, int op, int64_t kv_offset, CudaBatch& batch);
  absl::Status Append(LayerGroup group, int64_t kv_offset, CudaBatch& batch);
  static kernels::cuda::CudaAttentionRun RunOf(const Step& step, const GroupStep& own, const CudaBatch& batch);
  absl::Status Put(const ComputeWorkerCore& core, const SentRows& rows, kernels::cuda::CudaStream& stream);

  kernels::cuda::CudaDevice& device_;
  const proto::AttentionTable& table_;
  const size_t block_bytes_;
  CudaRankRows* const rank_rows_;
  std::unique_ptr<CudaRingAttention> ring_;      // null: no rank gives this one rows
  std::unique_ptr<CudaSwitchAttention> switch_;  // likewise
  int64_t most_rows_ = 0;
  BufferPtr arena_;                          // CudaKvLayout::kArenaLead bytes, then the blocks
  std::vector<BufferPtr> sinks_;             // by op, where it has any
  std::vector<Step> steps_;                  // by micro-batch
  kernels::cuda::StagedUpload kept_tables_;  // of SentRows: an item, positions, their items, block pointers
  kernels::cuda::CudaEvent kept_;            // behind the last Keep; none: there was none
};

}  // namespace dovetail::compute
