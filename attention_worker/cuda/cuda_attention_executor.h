#pragma once
#include <array>
#include <memory>
#include <vector>

#include "attention_worker/attention_backend.h"
#include "attention_worker/cuda/cuda_state_executor.h"
#include "attention_worker/cuda/incoming_rows.h"
#include "attention_worker/cuda/outgoing_rows.h"
#include "exchange/cuda/gpu_exchange.h"
#include "exchange/cuda/shared_gpu.h"
#include "kernels/cuda/attention/cuda_attention.h"
#include "kernels/cuda/runtime/staged_upload.h"
#include "kernels/cuda/runtime/step_work.h"
#include "proto/gather_frames.h"

namespace dovetail::attention {

// Attention on a GPU, over one arena of KV blocks there (kernels/cuda/attention/kv_layout.h). A step's lengths are
// planned and its block table is uploaded once; each op then is an append and one pass. Where q, k and v come from,
// where o goes, and when launches run is decided by the step's Crossing (cuda_attention_crossings.h).
// Threads: reactor-owned, as AttentionBackend.
class CudaAttentionExecutor final : public AttentionBackend {
 public:
  // kUnimplemented for other types than bf16 and f16; kResourceExhausted when the device has no
  // room for kv_blocks blocks. `device`, `core` and `shared_gpu`, which may be null, outlive it.
  static absl::StatusOr<std::unique_ptr<AttentionBackend>> Create(
      kernels::cuda::CudaDevice& device, AttentionWorkerCore& core, uint32_t kv_blocks, int micro_batches,
      exchange::SharedGpu* shared_gpu = nullptr, KvStorage storage = KvStorage::kAsSent, bool deterministic = false);

  static size_t BlockBytes(const proto::AttentionTable& table, KvStorage storage);

  ~CudaAttentionExecutor() override;

  absl::Status Launch(MicroBatchId micro_batch) override;
  absl::Status Copy(std::span<const BlockCopy> copies) override;
  absl::StatusOr<uint64_t> DigestOf(std::span<const KvBlockId> blocks) override;
  absl::Status Poison(std::span<const KvBlockId> blocks) override;
  absl::Status PrepareStep(MicroBatchId micro_batch, const exchange::Seam& seam) override;
  absl::StatusOr<transport::LentBytes> GiveStates(MicroBatchId micro_batch, int op) override;
  absl::Status TakeQuery(MicroBatchId micro_batch, int op, std::span<const std::byte> query) override;
  absl::StatusOr<transport::LentBytes> AppendAndFinish(MicroBatchId micro_batch, int op,
                                                       std::span<const std::byte> key_value) override;
  absl::StatusOr<bool> TakeAppended(MicroBatchId id) override;
  absl::StatusOr<transport::LentBytes> GiveRows(MicroBatchId micro_batch, int op, int piece) override;
  absl::StatusOr<transport::LentBytes> Gather(int slot, int op) override;
  absl::StatusOr<bool> TakeGathered(int slot) override;

 private:
  using BufferPtr = std::shared_ptr<kernels::Buffer>;  // with frames that are being sent
  static constexpr size_t kLead = kernels::cuda::CudaKvLayout::kArenaLead;

  class Crossing;
  class HostCrossing;
  class OneGpuCrossing;
  class PeerCrossing;

  // Tokens to append that lie one after the other, of as many KV heads each.
  struct AppendRun {
    int rows = 0, kv_heads = 0;
    int first_row = 0;                         // of the uploaded positions
    int64_t key_offset = 0, value_offset = 0;  // bytes into the payload
  };
  // Results that go to the host as f32 subtrees.
  struct PartialCopy {
    int64_t from_o = 0, from_ml = 0;  // floats into the scratch
    int64_t to = 0;                   // bytes into the payload
    int64_t o_floats = 0, ml_floats = 0;
  };
  // One layer group of a micro-batch's step.
  struct GroupStep {
    std::unique_ptr<kernels::cuda::CudaAttention> attention;
    std::unique_ptr<kernels::cuda::StagedUpload> tables;  // block pointers, append items, their positions
    std::vector<AppendRun> appends;
    std::vector<PartialCopy> partials;
    int64_t ml_at = 0;  // floats from the first o of the partials to their first m and l
    // Of a step between GPUs with token shards (exchange/divided_payloads.h): bytes into the answer to the first o of
    // the partials, and to their first m and l.
    int64_t partials_there = 0, ml_there = 0;
    bool attends = false;   // some rows have queries
    bool finishes = false;  // some answers are o itself
    // The blocks of op i lie op_step bytes times i from those of the group's first op, for all items alike; else tables
    // and plan are made anew for each op.
    bool regular = false;
    int64_t op_step = 0;
    int planned_op = -1;                                        // whose blocks the tables hold, unless regular
    const kernels::cuda::DeviceAttentionItem* items = nullptr;  // of the layout, on the device
    const int32_t* positions = nullptr;
    const int32_t* row_items = nullptr;
  };
  struct MicroBatch {
    std::vector<GroupStep> groups;
    BufferPtr query, key_value;                               // payloads from the host
    std::unique_ptr<IncomingRows> incoming;                   // those that are only appended
    BufferPtr partial, partial_host;                          // what answers; pinned
    std::array<BufferPtr, proto::kGatherPiecesAhead> pieces;  // pinned
    BufferPtr partial_floats;                                 // subtrees of the op at hand: all o, then all m and l
    std::span<const std::byte> payload;                       // the query at hand
    bool prepared = false;
    // Of the step.
    Crossing* crossing = nullptr;
    kernels::cuda::CudaStream* stream = nullptr;
    kernels::cuda::StepWork* work = nullptr;  // null: launches are enqueued as they come
  };
  // Whether a set's blocks lie evenly spaced, and where.
  struct SetShape {
    uint32_t generation = 0;
    bool known = false, even = false;
    int64_t step = 0;  // blocks
  };

  CudaAttentionExecutor(kernels::cuda::CudaDevice& device, AttentionWorkerCore& core, kernels::cuda::CudaStream& stream,
                        int micro_batches, exchange::SharedGpu* shared_gpu, KvStorage storage);
  kernels::cuda::CudaKvLayout LayoutOf(const proto::SoftmaxSpec& spec) const;
  kernels::cuda::CudaAttentionShape ShapeOf(LayerGroup group) const;
  absl::Status Synchronize();  // until all that was launched is done
  absl::Status Grow(BufferPtr& buffer, size_t bytes, bool pinned = false);
  absl::Status GrowBuffers(MicroBatch& batch, MicroBatchId id);
  const SetShape& ShapeOfSet(BlockSetId set);
  bool IsRegular(MicroBatchId id, LayerGroup group, int64_t& op_step);
  absl::Status Plan(MicroBatch& batch, MicroBatchId id, LayerGroup group, int op_index);
  void PlanAppends(const proto::StepLayout& layout, GroupStep& step, int32_t* positions, int32_t* row_items);
  // Of the layout's items those with queries; `blocks` are tables on the device, by item.
  std::vector<kernels::cuda::CudaAttentionItem> ItemsOf(MicroBatchId id, LayerGroup group, const float* sinks,
                                                        const std::vector<const std::byte* const*>& blocks);
  Crossing& CrossingOf(const exchange::Seam& seam) const;
  absl::Status CheckDeterministic() const;
  static bool OnDevice(const MicroBatch& batch);  // payloads are device memory
  // Of a step between GPUs with token shards: queries and answers of `items` lie elsewhere, one partial result a row.
  static void PlaceBetweenGpus(const proto::StepLayout& layout, const proto::SoftmaxSpec& spec, GroupStep& step,
                               std::vector<kernels::cuda::CudaAttentionItem>& items);
  absl::Status UploadSinks();
  const float* SinksOf(LayerGroup group, int op_index) const;  // on the device, or null
  absl::Status Append(MicroBatch& batch, LayerGroup group, int op_index, const std::byte* key_value,
                      const kernels::cuda::ExchangeEnd* await = nullptr, int op = -1);
  absl::Status Attend(MicroBatch& batch, LayerGroup group, int op_index, const std::byte* query,
                      std::byte* elsewhere = nullptr);
  absl::Status GatherEarlier(MicroBatch& batch, MicroBatchId id, int op);
  // K and V of these tokens of a shard, wire dtype, host memory: [tokens, heads, key_dim], [tokens, heads, value_dim].
  absl::StatusOr<OutgoingPart> PartOf(int op, int heads, const ShardState& shard, const proto::TokenRange& tokens,
                                      std::byte* k, std::byte* v) const;
  absl::Status GatherRows(int op, int heads, const ShardState& shard, const proto::TokenRange& tokens, std::byte* k,
                          std::byte* v);
  std::byte* BlockAt(KvBlockId block) const { return arena_->data() + kLead + size_t{block} * block_bytes_; }

  kernels::cuda::CudaDevice& device_;
  AttentionWorkerCore& core_;  // read only
  // Where steps cross through the hosts and K and V leave.
  kernels::cuda::CudaStream& HostsStream() const { return hosts_stream_ != nullptr ? *hosts_stream_ : stream_; }

  kernels::cuda::CudaStream& stream_;
  // With a shared GPU, so that these do not wait for whole steps in the other; null: they have that one.
  std::unique_ptr<kernels::cuda::CudaStream> hosts_stream_;
  kernels::cuda::CudaEvent before_hosts_;
  const size_t block_bytes_;
  const KvStorage storage_;
  BufferPtr arena_;                                             // kLead bytes, then the blocks
  std::vector<BufferPtr> sinks_;                                // by op, where it has any
  std::unique_ptr<CudaStateExecutor> states_;                   // if the model has linear states
  std::vector<MicroBatch> micro_batches_;                       // and a slot for each move that comes in
  std::vector<std::unique_ptr<Crossing>> crossings_;            // by alternative of exchange::Seam; null: not here
  std::vector<SetShape> sets_;                                  // by BlockSetId
  struct Gathered {                                             // what Gather gave last, of a slot
    std::array<BufferPtr, proto::kMoveOpsAhead> rows, staging;  // pinned
    size_t next = 0;
  };
  std::array<Gathered, proto::kMoveSlots> gathered_;
  std::unique_ptr<OutgoingRows> outgoing_;  // from the first move on; its thread reads the arena
  BufferPtr given_blocks_;                  // pinned: whole blocks on their way to a host's rows, of GatherRows
  BufferPtr digested_;                      // pinned: a block set, for its digest
};

}  // namespace dovetail::attention
