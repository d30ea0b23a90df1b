#pragma once
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "attention_worker/core/attention_worker_core.h"
#include "base/status.h"
#include "kernels/cuda/runtime/staged_upload.h"
#include "kernels/cuda/state/cuda_state.h"

namespace dovetail::attention {

// The linear states of a worker on a GPU, in KvBlocks of the same arena as K and V (kernels/cuda/state/state_layout.h).
// A step's items and blocks are uploaded once for all ops of a layer group where their blocks lie evenly, else for each
// op.
// Threads: reactor-owned. Steps run in streams that they are prepared with, states that cross in the one it was made
// with.
class CudaStateExecutor {
 public:
  // Whether the blocks of a set lie evenly spaced, and how many blocks apart.
  struct Spacing {
    bool even = false;
    int64_t step = 0;
  };
  struct Arena {
    size_t block_bytes = 0;
    std::function<std::byte*(KvBlockId)> block_at;  // on the device
    std::function<Spacing(BlockSetId)> spacing;
  };

  // Uploads what is fixed for an op. kUnimplemented: f32 on the wire; kInvalidArgument when a state needs more blocks
  // than the table says; kResourceExhausted. All outlive it.
  static absl::StatusOr<std::unique_ptr<CudaStateExecutor>> Create(kernels::cuda::CudaDevice& device,
                                                                   kernels::cuda::CudaStream& stream,
                                                                   const AttentionWorkerCore& core, Arena arena,
                                                                   int micro_batches);

  // For core.LayoutOf(id, group), a linear group, whose ops run in `stream`, which outlives the step.
  // kResourceExhausted.
  absl::Status Prepare(MicroBatchId id, LayerGroup group, kernels::cuda::CudaStream& stream);
  // Nothing is uploaded between the ops of the step, and none goes in chunks: its launches can be recorded.
  bool IsRegular(MicroBatchId id, LayerGroup group) const;

  // On the device, as proto::StepLayout says.
  struct Payloads {
    const std::byte *query = nullptr, *key_value = nullptr;
    std::byte* out = nullptr;          // that of kPartial
    const uint64_t* failed = nullptr;  // StateLaunch::failed
  };
  absl::Status Run(MicroBatchId id, int op, const Payloads& payloads);
  // What Run enqueues of a step that does not go in chunks (kernels::cuda::AppendStates).
  absl::StatusOr<kernels::cuda::StateLaunch> LaunchOf(MicroBatchId id, int op, const Payloads& payloads);
  // All that tells such a launch from others of its op.
  static std::vector<uint64_t> WordsOf(const kernels::cuda::StateLaunch& launch);

  // As LinearExecutor's: states that cross in place of tokens, in host memory and in the form of the CPU.
  absl::Status GiveStates(MicroBatchId id, int op, std::byte* out);
  absl::Status TakeStates(MicroBatchId id, int op, std::span<const std::byte> key_value);

  // As LinearExecutor's: an item of a move out of this worker, and the items of one into it, in host memory. States
  // travel in the form of the CPU, so that workers of both kinds exchange them.
  absl::Status Gather(const proto::ShardStep& item, const ShardState& shard, int op, std::span<std::byte> out);
  absl::Status Restore(MicroBatchId id, int op, std::span<const std::byte> key_value);

 private:
  using BufferPtr = std::unique_ptr<kernels::Buffer>;
  struct OpConstants {
    BufferPtr log_decay, conv, conv_bias, skip;
  };
  struct GroupStep {
    std::unique_ptr<kernels::cuda::StagedUpload> tables;
    // Of all but what an op brings: items of few tokens, and those that go in chunks.
    kernels::cuda::StateLaunch launch, chunks;
    kernels::cuda::CudaStream* stream = nullptr;  // of the step
    int planned_op = -1;                          // whose blocks the tables hold; any, if they lie evenly
    bool incomplete = false;  // the tables lack a block that a rank before this one in a prefill group makes room for
  };

  CudaStateExecutor(kernels::cuda::CudaDevice& device, kernels::cuda::CudaStream& stream,
                    const AttentionWorkerCore& core, Arena arena)
      : device_(device), stream_(stream), core_(core), arena_(std::move(arena)) {}
  absl::Status UploadConstants();
  absl::Status Upload(const std::vector<float>& values, BufferPtr& out);
  bool IsEven(MicroBatchId id, LayerGroup group, int64_t& step) const;
  absl::Status Plan(MicroBatchId id, LayerGroup group, int op_index);
  // The group's tables name the op's blocks.
  absl::StatusOr<GroupStep*> PlannedFor(MicroBatchId id, int op);
  kernels::cuda::StateLaunch Complete(kernels::cuda::StateLaunch launch, int op, const Payloads& payloads) const;
  absl::Status GrowWorkspace(const GroupStep& step);
  void FillBlocks(const proto::ShardStep& item, const ShardState& shard, const GroupStep& step, int op_index,
                  std::vector<const std::byte*>& out) const;
  // The KvBlocks of an op in one set of its shard, or null: it is not held.
  const KvBlockId* BlocksOfOp(const ShardState& shard, int64_t block, int op) const;
  absl::Status GrowStaging(size_t bytes);
  // One head's block, between the device (`there`) and a CPU's form in host memory (`here`), by the staging memory.
  absl::Status BlockToCpu(LayerGroup group, int tokens, const KvBlockId* there, std::byte* const* here);
  absl::Status BlockFromCpu(LayerGroup group, int tokens, std::byte* const* here, const KvBlockId* there);
  // The KvBlocks of one head; kInternal: they are not held.
  absl::StatusOr<const KvBlockId*> BlocksOfHead(const proto::ShardStep& item, MicroBatchId id, int op, int64_t block,
                                                int head) const;
  void Describe(const proto::ShardStep& from, kernels::cuda::StateItem& item) const;

  kernels::cuda::CudaDevice& device_;
  kernels::cuda::CudaStream& stream_;
  const AttentionWorkerCore& core_;
  const Arena arena_;
  std::vector<kernels::LinearStateShape> shapes_;      // by group
  std::vector<OpConstants> constants_;                 // by op
  std::vector<std::vector<GroupStep>> micro_batches_;  // [micro-batch][group]
  BufferPtr staging_;                                  // pinned: one head's block on its way
  BufferPtr workspace_;                                // of chunks
};

}  // namespace dovetail::attention
