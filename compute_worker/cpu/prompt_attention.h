#pragma once
#include <cstddef>
#include <memory>
#include <vector>

#include "base/kv_storage.h"
#include "base/status.h"
#include "compute_worker/core/compute_worker_core.h"
#include "compute_worker/step_wire.h"
#include "kernels/device.h"
#include "kernels/kv_append.h"
#include "kernels/paged_attention.h"

namespace dovetail::compute {

// Attends prompts on the compute worker, over blocks that PromptScratch numbers: the same kernels, the same storage and
// the same order of sums as on attention workers, so the same bits.
// Threads: reactor-owned; Run neither allocates nor locks.
class PromptAttention {
 public:
  // Bytes of one block of the scratch; 0: no layer of the model keeps K and V. `storage`: as attention workers store.
  static size_t BlockBytes(const proto::AttentionTable& table, KvStorage storage = KvStorage::kAsSent);

  PromptAttention(kernels::Device& device, const proto::AttentionTable& table, int micro_batches,
                  KvStorage storage = KvStorage::kAsSent);

  // For the plan that `core` runs in this micro-batch, after wire.Prepare; Run will use `threads`. The memory of the
  // scratch is taken with the first prompt. kResourceExhausted: no memory.
  absl::Status Prepare(const ComputeWorkerCore& core, MicroBatchId id, int threads, StepWire& wire);

  // Appends the op's k and v to the blocks, attends, and leaves the results in the wire.
  absl::Status Run(const ComputeWorkerCore& core, MicroBatchId id, int op, StepWire& wire, kernels::Stream& stream);

  // Likewise over K and V that came round from an earlier rank (AttendShard): one more token shard in the wire.
  absl::Status RunShard(const ComputeWorkerCore& core, const AttendShard& shard, StepWire& wire,
                        kernels::Stream& stream);

  // K and V of a later rank into `part` (KeepRankRows). Allocates nothing.
  absl::Status Keep(const ComputeWorkerCore& core, const KeepRankRows& keep, const PromptScratch::Part& part,
                    kernels::Stream& stream);
  // A piece of earlier tokens' K and V into the blocks of its prompt (KeepEarlierRows). Likewise.
  absl::Status Keep(const ComputeWorkerCore& core, const KeepEarlierRows& keep, kernels::Stream& stream);

 private:
  // K and V of some KV heads: [tokens, heads, key_dim], then [tokens, heads, value_dim].
  struct Rows {
    const PromptScratch::Part& part;
    int op = 0;
    proto::HeadRange heads;
    proto::TokenRange tokens;
    const std::byte* bytes = nullptr;
  };
  struct Extent {  // blocks of one prompt
    size_t first = 0;
    Position begin = 0;
    size_t segments = 0;
  };
  struct MicroBatch {
    std::vector<std::byte*> blocks;  // of all prompts of the op at hand: [prompt][KV head][segment]
    std::vector<Extent> extents;     // by index in PromptsOf
    std::vector<kernels::KvAppendItem> appends;
    std::vector<kernels::AttentionItem> items;
    std::unique_ptr<kernels::Buffer> scratch, partial;
    std::unique_ptr<kernels::Buffer> shard;  // blocks of an earlier rank's tokens
  };

  kernels::AttentionShape ShapeOf(LayerGroup group) const;
  absl::Status Grow(std::unique_ptr<kernels::Buffer>& buffer, size_t bytes);
  size_t ScratchOf(LayerGroup group, int rank, int threads, StepWire& wire) const;
  void FillBlocks(const ComputeWorkerCore& core, MicroBatchId id, int op);
  void FillShardBlocks(MicroBatch& batch, int kv_heads, const proto::TokenRange& tokens) const;
  static kernels::KvBlockTable TableOf(const MicroBatch& batch, size_t prompt, int first_head);
  void FillFromRanks(const ComputeWorkerCore& core, MicroBatchId id, int op);
  void FillGathered(const ComputeWorkerCore& core, MicroBatchId id, int op);
  void FillAppends(const ComputeWorkerCore& core, MicroBatchId id, int op, StepWire& wire);
  kernels::KvAppendItem AppendOf(const std::byte* rows, int op, const proto::TokenRange& tokens) const;
  kernels::KvAppendItem AppendOf(const std::byte* rows, int op, const proto::TokenRange& tokens, int kv_heads) const;
  absl::Status Put(const ComputeWorkerCore& core, const Rows& rows, kernels::Stream& stream);
  void FillRows(const ComputeWorkerCore& core, MicroBatchId id, int op, int rank);
  void FillItems(const ComputeWorkerCore& core, MicroBatchId id, int op, int rank, StepWire& wire);
  absl::Status Attend(MicroBatch& batch, LayerGroup group, kernels::Stream& stream);

  kernels::Device& device_;
  const proto::AttentionTable& table_;
  const KvStorage storage_;
  const size_t block_bytes_;
  std::unique_ptr<kernels::Buffer> arena_;
  std::vector<MicroBatch> micro_batches_;
  std::vector<std::byte*> keep_blocks_;  // [KV head][segment] of tokens that others sent
};

}  // namespace dovetail::compute
