#pragma once
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "compute_worker/core/compute_worker_core.h"
#include "kernels/device.h"
#include "kernels/merge_partials.h"
#include "kernels/op_context.h"

namespace dovetail::compute {

// The tensors of one micro-batch at the seam: q, k and v on their way out, what attention gave on its way in. Rows are
// the step's new tokens, entry by entry, row-major over heads, in the wire type of the op's layer group. If one worker
// holds everything its payload is the tensor itself, else each worker's part is packed into a buffer of its own.
// Thread-compatible; nothing allocates between Prepare calls.
class StepWire {
 public:
  StepWire(kernels::Device& device, const proto::AttentionTable& table) : device_(device), table_(table) {}

  // For the plan that `core` runs in this micro-batch: computes row offsets, sizes buffers. kResourceExhausted: no
  // memory.
  absl::Status Prepare(const ComputeWorkerCore& core, MicroBatchId id);

  int64_t rows() const { return rows_; }
  int64_t row_begin(int entry) const { return row_begin_[entry]; }

  // Where the dense step writes, wire type: [rows, query_heads, key_dim], [rows, kv_heads, key_dim], [rows, kv_heads,
  // value_dim].
  std::byte* query() { return query_->data(); }
  std::byte* key() { return key_value_->data(); }
  std::byte* value(LayerGroup group) { return key_value_->data() + KeyBytes(group); }

  // The payloads for part `p` of the micro-batch; valid until the next op's.
  std::span<const std::byte> PackQuery(const std::vector<WorkerPart>& parts, int p, LayerGroup group);
  std::span<const std::byte> PackKeyValue(const std::vector<WorkerPart>& parts, int p, LayerGroup group);

  // All partials of an op as a [rows, query_heads * value_dim] tensor in the wire type: the one worker's payload
  // itself, or joined here.
  absl::StatusOr<const std::byte*> JoinPartials(const std::vector<WorkerPart>& parts, LayerGroup group,
                                                const kernels::OpContext& context);

 private:
  struct ItemRef {
    int part = 0;
    int item = 0;
  };
  // The token shards of one entry and head range, in token order.
  struct TokenSplit {
    int entry = 0;
    std::vector<ItemRef> shards;
    std::vector<kernels::ShardPartials> partials;
  };
  struct Group {
    bool whole = false;             // one worker's payloads are the tensors themselves
    std::vector<TokenSplit> splits;
    std::vector<kernels::MergeItem> merges;
  };

  int64_t KeyBytes(LayerGroup group) const;
  absl::Status Grow(std::unique_ptr<kernels::Buffer>& buffer, size_t bytes);
  bool IsWhole(const std::vector<WorkerPart>& parts, LayerGroup group) const;
  void PlanSplits(const std::vector<WorkerPart>& parts, LayerGroup group);
  void CopyWholeItems(const std::vector<WorkerPart>& parts, LayerGroup group);

  kernels::Device& device_;
  const proto::AttentionTable& table_;
  int64_t rows_ = 0;
  std::vector<int64_t> row_begin_;
  std::vector<Group> groups_;
  std::unique_ptr<kernels::Buffer> query_, key_value_, joined_;
  std::vector<std::unique_ptr<kernels::Buffer>> part_query_, part_key_value_;
};

}  // namespace dovetail::compute
