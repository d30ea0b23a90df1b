#pragma once
#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "attention_worker/attention_backend.h"
#include "attention_worker/core/attention_worker_core.h"
#include "attention_worker/cpu/linear_executor.h"
#include "base/status.h"
#include "kernels/device.h"
#include "kernels/kv_append.h"
#include "kernels/paged_attention.h"
#include "kernels/pages_ahead.h"
#include "proto/gather_frames.h"

namespace dovetail::attention {

// Runs the kernels that an AttentionWorkerCore asks for on the CPU.
// Threads: reactor-owned, as AttentionBackend; kernels use the threads of the device's pool as well.
class AttentionExecutor final : public AttentionBackend {
 public:
  // Bytes of one KvBlock of this model: the largest over its layer groups, since all share the arena.
  static size_t BlockBytes(const proto::AttentionTable& table, KvStorage storage = KvStorage::kAsSent);

  // kResourceExhausted when the device has no room for kv_blocks blocks. kUnimplemented for 8 bits and linear states,
  // kInvalidArgument for 8 bits and another wire type than bfloat16.
  static absl::StatusOr<std::unique_ptr<AttentionExecutor>> Create(kernels::Device& device, AttentionWorkerCore& core,
                                                                   uint32_t kv_blocks, int micro_batches,
                                                                   KvStorage storage = KvStorage::kAsSent);

  absl::Status Copy(std::span<const BlockCopy> copies) override;
  absl::StatusOr<uint64_t> DigestOf(std::span<const KvBlockId> blocks) override;
  absl::Status Poison(std::span<const KvBlockId> blocks) override;
  absl::Status PrepareStep(MicroBatchId micro_batch, const exchange::Seam& seam) override;
  absl::StatusOr<transport::LentBytes> GiveStates(MicroBatchId micro_batch, int op) override;
  absl::Status TakeQuery(MicroBatchId micro_batch, int op, std::span<const std::byte> query) override;
  void AttendEarlier(MicroBatchId micro_batch, int op) override;
  absl::StatusOr<transport::LentBytes> AppendAndFinish(MicroBatchId micro_batch, int op,
                                                       std::span<const std::byte> key_value) override;
  absl::StatusOr<transport::LentBytes> GiveRows(MicroBatchId micro_batch, int op, int piece) override;
  absl::StatusOr<transport::LentBytes> Gather(int slot, int op) override;

 private:
  using SharedBuffer = std::shared_ptr<kernels::Buffer>;  // with frames that are being sent

  struct MicroBatch {
    std::vector<std::byte*> block_pointers;        // of all items of the op at hand
    std::vector<kernels::AttentionItem> items;     // by item of the layout
    std::vector<kernels::AttentionItem> attended;  // those with queries
    std::vector<kernels::KvAppendItem> appends;
    SharedBuffer scratch;
    SharedBuffer partial;
    std::array<SharedBuffer, proto::kGatherPiecesAhead> pieces;
    bool prepared = false;                             // the buffers are large enough for the step
    std::optional<kernels::PagedAttention> attention;  // between q and k, v
    int attended_op = 0;                               // its op
    std::span<const std::byte> linear_query;           // likewise, of a linear state
  };

  AttentionExecutor(kernels::Device& device, AttentionWorkerCore& core, int micro_batches, KvStorage storage);
  kernels::AttentionShape ShapeOf(LayerGroup group) const;
  absl::Status Grow(SharedBuffer& buffer, size_t bytes);
  absl::StatusOr<transport::LentBytes> AppendToStates(MicroBatch& batch, MicroBatchId id, int op,
                                                      std::span<const std::byte> key_value);
  void FillTables(MicroBatch& batch, MicroBatchId id, int op);
  // K and V of these tokens of a shard, wire dtype: [tokens, heads, key_dim], [tokens, heads, value_dim]. kInternal:
  // some are not held.
  absl::Status GatherRows(int op, int heads, const ShardState& shard, const proto::TokenRange& tokens, std::byte* k,
                          std::byte* v);
  std::byte* BlockAt(KvBlockId block) const { return arena_->data() + size_t{block} * block_bytes_; }

  kernels::Device& device_;
  AttentionWorkerCore& core_;  // read only
  const KvStorage storage_;
  const size_t block_bytes_;
  std::unique_ptr<kernels::Stream> stream_;
  std::unique_ptr<kernels::Buffer> arena_;
  std::optional<kernels::PagesAhead> pages_;  // of the arena, unless it is small
  std::unique_ptr<LinearExecutor> linear_;    // if the model has linear states
  std::vector<MicroBatch> micro_batches_;     // and a slot for each move that comes in
  struct Gathered {                           // what Gather gave last, of a slot
    std::array<SharedBuffer, proto::kMoveOpsAhead> rows;
    size_t next = 0;
  };
  std::array<Gathered, proto::kMoveSlots> gathered_;
};

}  // namespace dovetail::attention
