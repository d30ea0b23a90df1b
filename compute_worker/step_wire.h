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
#include "transport/lent_bytes.h"

namespace dovetail::compute {

// The tensors of one micro-batch at the seam: q, k and v on their way out, what attention gave on its way in. Rows are
// the step's new tokens, entry by entry, row-major over heads, in the wire type of the op's layer group. If one worker
// holds everything its payload is the tensor itself, else each worker's part is packed into a buffer of its own.
// Threads: thread-compatible; nothing allocates between Prepare calls.
class StepWire {
 public:
  // Where what the compute worker attends itself is joined with what comes back.
  enum class Join { kHere, kElsewhere };

  StepWire(kernels::Device& device, const proto::AttentionTable& table, Join join = Join::kHere)
      : device_(device), table_(table), join_(join) {}

  // For the plan that `core` runs in this micro-batch: computes row offsets, sizes buffers. kResourceExhausted: no
  // memory.
  absl::Status Prepare(const ComputeWorkerCore& core, MicroBatchId id);

  int64_t rows() const { return rows_; }
  int64_t row_begin(int entry) const { return row_begin_[entry]; }

  // Where the dense step writes, wire type: [rows, query_heads, key_dim], [rows, kv_heads, key_dim], [rows, kv_heads,
  // value_dim].
  // With prompts in the step k and v of several ops are on their way at a time, each in memory of its own.
  std::byte* query() { return query_->data(); }
  std::byte* key(int op) { return key_value_[SlotOf(op)]->data(); }
  std::byte* value(int op) { return key(op) + KeyBytes(table_.op_group[op]); }
  // [rows, kv_heads, gates] f32, of a linear state.
  float* gates(int op) { return reinterpret_cast<float*>(key(op) + GatesAt(table_.op_group[op])); }

  // The payload of k and v of part `p`, where states cross: they are written there before PackKeyValue.
  std::byte* part_key_value(int p, int op) { return part_key_value_[p][SlotOf(op)]->data(); }

  // The payloads for part `p` of the micro-batch, with their owner; unchanged until the next op's, k and v until they
  // were answered.
  transport::LentBytes PackQuery(const std::vector<WorkerPart>& parts, int p, LayerGroup group);
  transport::LentBytes PackKeyValue(const std::vector<WorkerPart>& parts, int p, int op);

  // k and v of the rows from first_row on, for a later rank of a prefill group (kRankRows in proto/rank_frames.h). Of
  // an op of softmax attention.
  std::vector<std::byte> RankRows(int op, int64_t first_row);

  // Attention over an entry's tokens in [begin, end), made here. Of all that its rows see it is written to the entry's
  // rows of joined(); else it is one more token shard for these heads, to be set before JoinPartials.
  struct LocalPartial {
    static constexpr int kOwn = -1;

    int entry = 0;
    proto::HeadRange kv_heads;
    Position ctx_len = 0;
    int q_len = 0;
    Position begin = 0, end = 0;
    // In a ring and with pass-q: the earlier rank whose tokens they are (AttendShard, PlaceRankOutputs); else from
    // `begin` to the step's last one.
    int rank = kOwn;
    const float* o = nullptr;
    const float* ml = nullptr;
    bool whole() const { return begin == 0 && rank == kOwn; }
  };
  std::span<LocalPartial> locals(LayerGroup group) { return groups_[group.value()].locals; }
  // What the plan that `core` runs in this micro-batch attends itself of a group, in the order of entries: one for each
  // head range of an entry that has its earlier tokens elsewhere, in a ring and with pass-q one more for each rank
  // before, in order.
  static void FindLocals(const ComputeWorkerCore& core, MicroBatchId id, LayerGroup group,
                         std::vector<LocalPartial>& locals);
  std::byte* joined(int entry, LayerGroup group);

  // Rows of entries whose linear layers run here (StateEntry) are written to joined() as well, before JoinPartials.
  // All partials of an op as a [rows, query_heads * value_dim] tensor in the wire type: the one worker's payload
  // itself, or joined here. With Join::kElsewhere the rows of locals() mean nothing.
  absl::StatusOr<const std::byte*> JoinPartials(const std::vector<WorkerPart>& parts, int op,
                                                const kernels::OpContext& context);

 private:
  using SharedBuffer = std::shared_ptr<kernels::Buffer>;  // with frames that are being sent

  struct ItemRef {
    int part = 0;
    int item = 0;
  };
  // The token shards of one entry and head range, in token order.
  struct TokenSplit {
    int entry = 0;
    proto::HeadRange kv_heads;
    Position ctx_len = 0;
    int q_len = 0;
    int query_heads = 0;
    std::vector<ItemRef> shards;
    std::vector<int> locals;  // indices among the group's, after all shards
    std::vector<kernels::ShardPartials> partials;
  };
  struct Group {
    bool whole = false;            // one worker's payloads are the tensors themselves
    bool whole_key_value = false;  // its k and v are
    std::vector<LocalPartial> locals;
    std::vector<TokenSplit> splits;
    std::vector<kernels::MergeItem> merges;
  };

  int64_t KeyBytes(LayerGroup group) const;
  int64_t GatesAt(LayerGroup group) const;  // bytes from the first key
  absl::Status Grow(SharedBuffer& buffer, size_t bytes);
  int SlotOf(int op) const { return op % slots_; }
  void CopyQuery(const proto::StepLayout& layout, LayerGroup group, std::byte* out) const;
  bool IsWhole(const std::vector<WorkerPart>& parts, LayerGroup group) const;
  TokenSplit& SplitOf(Group& plan, int entry, const proto::HeadRange& heads, LayerGroup group);
  static bool IsLocal(const Group& plan, int entry);
  void PlanSplits(const std::vector<WorkerPart>& parts, LayerGroup group);
  absl::Status GrowSlots(std::vector<SharedBuffer>& buffers, size_t bytes);
  void CopyWholeItems(const std::vector<WorkerPart>& parts, LayerGroup group);

  kernels::Device& device_;
  const proto::AttentionTable& table_;
  const Join join_;
  int64_t rows_ = 0;
  std::vector<int64_t> row_begin_;
  std::vector<Group> groups_;
  int slots_ = 1;
  SharedBuffer query_, joined_;
  std::vector<SharedBuffer> key_value_;  // by slot
  std::vector<SharedBuffer> part_query_;
  std::vector<std::vector<SharedBuffer>> part_key_value_;  // by part and slot
};

}  // namespace dovetail::compute
