#pragma once
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "attention_worker/core/attention_worker_core.h"
#include "base/status.h"
#include "kernels/device.h"
#include "kernels/linear_state.h"
#include "kernels/op_context.h"
#include "proto/attention_spec.h"
#include "proto/step_layout.h"

namespace dovetail::attention {

kernels::LinearStateShape StateShapeOf(const proto::LinearSpec& spec);

// Runs the linear states of a worker: a head's state lies in KvBlocks of the same arena as K and V, blocks_per_head of
// them for 64 tokens. Owned by the node's event loop. Run allocates nothing that Prepare has not grown.
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

  // Payloads as proto::StepLayout says; `out` is that of kPartial. Errors: those of kernels::LinearState.
  absl::Status Run(const kernels::OpContext& context, MicroBatchId id, int op, std::span<const std::byte> query,
                   std::span<const std::byte> key_value, std::byte* out);

  // An item of a move out of this worker, as state_snapshot.h says. kInternal: a block of it is not held.
  absl::Status Gather(const proto::ShardStep& item, const ShardState& shard, int op, std::span<std::byte> out) const;
  // The items of a move into this worker. kInvalidArgument, naming what differs, for states of another model, op, place
  // or layout; then nothing of the item is written.
  absl::Status Restore(MicroBatchId id, int op, std::span<const std::byte> key_value) const;

 private:
  // The new tokens of one head of one item, as floats: q, k and v side by side a token.
  struct Head {
    const proto::ShardStep* step = nullptr;
    int head = 0;               // of the model
    int local = 0;              // of the shard
    size_t table = 0;           // its first entry in pieces_
    float* inputs = nullptr;    // [rows][channels]
    float* prepared = nullptr;  // [rows][channels], after the convolution
    float* o = nullptr;         // [rows][value_dim]
  };
  struct OpView;  // what Run hands to its parts

  LinearExecutor(kernels::Device& device, const AttentionWorkerCore& core, size_t block_bytes, BlockAt block_at);
  absl::Status Grow(std::unique_ptr<kernels::Buffer>& buffer, size_t bytes);
  void LayOut(const OpView& view);
  void PrepareHead(const OpView& view, const Head& head);
  void Convolve(const OpView& view, const Head& head);
  void FinishHead(const OpView& view, const Head& head) const;
  kernels::LinearStateItem ItemOf(const OpView& view, const Head& head) const;
  std::byte* HistoryRow(const OpView& view, const Head& head, Position position) const;
  std::byte* const* PiecesOf(const OpView& view, const Head& head, int64_t block) const;
  // The KvBlocks of an op in one set of its shard, or null: it is not held.
  const KvBlockId* BlocksOfOp(const ShardState& shard, int64_t block, int op) const;

  kernels::Device& device_;
  const AttentionWorkerCore& core_;
  const size_t block_bytes_;
  const BlockAt block_at_;
  std::vector<Head> heads_;
  std::vector<kernels::LinearStateItem> items_;
  std::vector<std::byte*> pieces_;  // [head][block][piece]
  std::unique_ptr<kernels::Buffer> floats_, scratch_;
};

}  // namespace dovetail::attention
