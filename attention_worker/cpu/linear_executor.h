#pragma once
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "attention_worker/core/attention_worker_core.h"
#include "base/status.h"
#include "kernels/device.h"
#include "kernels/op_context.h"
#include "linear_attention/linear_heads.h"
#include "linear_attention/packed_state.h"
#include "proto/attention_spec.h"
#include "proto/state_blocks.h"
#include "proto/step_layout.h"

namespace dovetail::attention {

// Runs the linear states of a worker: a head's state lies in KvBlocks of the same arena as K and V, blocks_per_head of
// them for 64 tokens. Run allocates nothing that Prepare has not grown.
// Threads: reactor-owned.
class LinearExecutor {
 public:
  // Where a KvBlock lies.
  using BlockAt = std::function<std::byte*(KvBlockId)>;

  // `block_bytes` of a KvBlock. kInvalidArgument when a state needs more blocks than the table says.
  static absl::StatusOr<std::unique_ptr<LinearExecutor>> Create(kernels::Device& device,
                                                                const AttentionWorkerCore& core, size_t block_bytes,
                                                                BlockAt block_at);

  // Grows buffers to what these items need. kResourceExhausted: no memory.
  absl::Status Prepare(MicroBatchId id, LayerGroup group);

  // The items whose tokens cross. Payloads as proto::StepLayout says; `out` is that of kPartial. Errors: those of
  // kernels::LinearState.
  absl::Status Run(const kernels::OpContext& context, MicroBatchId id, int op, std::span<const std::byte> query,
                   std::span<const std::byte> key_value, std::byte* out);

  // The items whose states cross (proto/state_blocks.h): writes the states before the step that were asked for to the
  // answer `out`; takes those that it leaves. kInternal: a block is not held.
  absl::Status GiveStates(const kernels::OpContext& context, MicroBatchId id, int op, std::byte* out);
  absl::Status TakeStates(const kernels::OpContext& context, MicroBatchId id, int op,
                          std::span<const std::byte> key_value);

  // An item of a move out of this worker, as state_snapshot.h says. kInternal: a block of it is not held.
  absl::Status Gather(const proto::ShardStep& item, const ShardState& shard, int op, std::span<std::byte> out) const;
  // The items of a move into this worker. kInvalidArgument, naming what differs, for states of another model, op, place
  // or layout; then nothing of the item is written.
  absl::Status Restore(MicroBatchId id, int op, std::span<const std::byte> key_value) const;

 private:
  LinearExecutor(kernels::Device& device, const AttentionWorkerCore& core, size_t block_bytes, BlockAt block_at);
  void AddHeads(const proto::ShardStep& step, MicroBatchId id, int op, std::span<const std::byte> query,
                std::span<const std::byte> key_value, std::byte* out);
  // The KvBlocks of an op in one set of its shard, or null: it is not held.
  const KvBlockId* BlocksOfOp(const ShardState& shard, int64_t block, int op) const;
  // A state that crosses packed: of one head and block.
  struct PackedBlock {
    int tokens = 0;
    size_t first_piece = 0;  // in pieces_
    size_t at = 0;           // bytes into the payload
  };
  // Adds those of an item, whose first one is at `at`, to packed_. kInternal: a block is not held.
  absl::Status FindPacked(const proto::ShardStep& item, MicroBatchId id, int op, const proto::StateBlocks& blocks,
                          const linear_attention::PackedState& packed, size_t at);
  void ClearPacked();

  const AttentionWorkerCore& core_;
  const size_t block_bytes_;
  const BlockAt block_at_;
  linear_attention::LinearHeads heads_of_op_;
  std::vector<linear_attention::LinearHead> heads_;
  std::vector<PackedBlock> packed_;
  std::vector<std::byte*> pieces_;  // [head][block][piece]; of packed_, [block][piece]
};

}  // namespace dovetail::attention
