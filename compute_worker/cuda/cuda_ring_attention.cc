#include "compute_worker/cuda/cuda_ring_attention.h"
#include "compute_worker/cuda/step_memory.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace dovetail::compute {

using kernels::cuda::CudaAttention;
using kernels::cuda::CudaAttentionItem;
using kernels::cuda::CudaAttentionRun;
using kernels::cuda::CudaAttentionShape;
using kernels::cuda::CudaKvLayout;
using kernels::cuda::DeviceAttentionItem;

namespace {

int64_t SegmentsOf(const proto::TokenRange& tokens) {
  return (tokens.end - tokens.begin + kSegmentTokens - 1) / kSegmentTokens;
}

int FirstOpOf(const proto::AttentionTable& table, LayerGroup group) {
  return static_cast<int>(std::find(table.op_group.begin(), table.op_group.end(), group) - table.op_group.begin());
}

}  // namespace

CudaRingAttention::CudaRingAttention(kernels::cuda::CudaDevice& device, const proto::AttentionTable& table,
                                     size_t block_bytes, int micro_batches, CudaRankRows& rank_rows)
    : device_(device), table_(table), block_bytes_(block_bytes), rank_rows_(rank_rows), steps_(micro_batches) {
  for (Step& step : steps_) {
    step.groups.resize(table.group_count());
    for (GroupStep& group : step.groups) group.tables = std::make_unique<kernels::cuda::StagedUpload>(device);
  }
}

// Rows of tables that they take.
int64_t CudaRingAttention::FindShards(const ComputeWorkerCore& core, MicroBatchId id, LayerGroup group,
                                      GroupStep& step) const {
  const int op = FirstOpOf(table_, group);
  int64_t table_row = 0;
  step.shards.clear();
  for (int rank = 0; rank < core.PlanOf(id).part.rank; ++rank) {
    const proto::TokenRange comes = core.RowsFrom(id, op, rank);
    if (comes.begin >= comes.end) continue;
    step.shards.push_back({rank, core.ShardOf(id, rank), comes, table_row});
    table_row += comes.end - comes.begin;
  }
  return table_row;
}

void CudaRingAttention::FindGathers(const ComputeWorkerCore& core, MicroBatchId id, LayerGroup group, int64_t table_row,
                                    GroupStep& step) const {
  const proto::SoftmaxSpec& spec = table_.softmax(group);
  const std::vector<WorkerPart>& parts = core.PartsOf(id);
  int64_t bytes = 0;
  step.gathers.clear();
  if (step.shards.empty() || step.shards[0].rank != 0) return;  // no row sees that segment
  for (size_t p = 0; p < parts.size(); ++p) {
    const auto& items = parts[p].layouts[group.value()].items;
    for (size_t i = 0; i < items.size(); ++i) {
      const int64_t rows = items[i].gather_count;
      if (rows == 0) continue;
      step.gathers.push_back({static_cast<int>(p), static_cast<int>(i), rows, table_row, bytes});
      table_row += rows;
      bytes += KeyBytes(spec, rows, items[i].kv_heads.size()) + ValueBytes(spec, rows, items[i].kv_heads.size());
    }
  }
}

absl::Status CudaRingAttention::Prepare(const ComputeWorkerCore& core, CudaBatch& batch) {
  Step& step = steps_[batch.id.value()];
  size_t blocks = 0, gathered = 0;
  for (int g = 0; g < table_.group_count(); ++g) {
    const LayerGroup group(static_cast<uint16_t>(g));
    const proto::SoftmaxSpec& spec = table_.softmax(group);
    if (spec.linear()) continue;
    GroupStep& own = step.groups[g];
    FindGathers(core, batch.id, group, FindShards(core, batch.id, group, own), own);
    for (const Shard& shard : own.shards)
      blocks = std::max(blocks, static_cast<size_t>(SegmentsOf(shard.blocks) * spec.kv_heads));
    size_t bytes = 0;
    for (const GatherRun& run : own.gathers) {
      const int heads = core.PartsOf(batch.id)[run.part].layouts[g].items[run.item].kv_heads.size();
      bytes += KeyBytes(spec, run.rows, heads) + ValueBytes(spec, run.rows, heads);
    }
    gathered = std::max(gathered, bytes);
  }
  if (blocks == 0) return absl::OkStatus();  // windows that see no other rank's tokens
  DT_RETURN_IF_ERROR(
      GrowZeroed(device_, batch.stream(), CudaKvLayout::kArenaLead + blocks * block_bytes_, step.blocks));
  return GrowZeroed(device_, batch.stream(), gathered, step.gathered);
}

// The blocks of every shard lie one after the other from the first one on: by KV head, then by segment.
absl::Status CudaRingAttention::UploadTables(const ComputeWorkerCore& core, LayerGroup group, CudaBatch& batch) {
  Step& step = steps_[batch.id.value()];
  GroupStep& own = step.groups[group.value()];
  const int heads = table_.softmax(group).kv_heads;
  int64_t rows = 0, pointers = 0;
  for (const Shard& shard : own.shards) {
    rows += shard.comes.end - shard.comes.begin;
    pointers = std::max(pointers, SegmentsOf(shard.blocks) * heads);
  }
  for (const GatherRun& run : own.gathers) rows += run.rows;
  kernels::cuda::UploadLayout at;
  const size_t items_at = at.Add<DeviceAttentionItem>(own.shards.size() + own.gathers.size());
  const size_t positions_at = at.Add<int32_t>(rows), row_items_at = at.Add<int32_t>(rows);
  const size_t pointers_at = at.Add<const std::byte*>(pointers);
  DT_ASSIGN_OR_RETURN(std::byte* const host, own.tables->Begin(batch.stream(), at.bytes()));
  std::byte* const there = own.tables->device();
  auto* const pointer = reinterpret_cast<const std::byte**>(host + pointers_at);
  for (int64_t block = 0; block < pointers; ++block)
    pointer[block] = step.blocks->data() + CudaKvLayout::kArenaLead + static_cast<size_t>(block) * block_bytes_;
  own.block_pointers = reinterpret_cast<const std::byte* const*>(there + pointers_at);
  auto* item = reinterpret_cast<DeviceAttentionItem*>(host + items_at);
  auto* position = reinterpret_cast<int32_t*>(host + positions_at);
  auto* row_item = reinterpret_cast<int32_t*>(host + row_items_at);
  int32_t number = 0;
  const auto add_rows = [&](Position first, int64_t count) {
    std::iota(position, position + count, static_cast<int32_t>(first));
    position += count;
    row_item = std::fill_n(row_item, count, number++);
  };
  const auto add_item = [&](const Shard& shard, const proto::HeadRange& kv_heads) {
    *item = DeviceAttentionItem{};
    item->head_step = SegmentsOf(shard.blocks);
    item->blocks = own.block_pointers + kv_heads.begin * item->head_step;
    item->first_segment = static_cast<int32_t>(shard.blocks.begin / kSegmentTokens);
    item->kv_heads = kv_heads.size();
    ++item;
  };
  for (const Shard& shard : own.shards) {
    add_item(shard, {0, heads});
    add_rows(shard.comes.begin, shard.comes.end - shard.comes.begin);
  }
  for (const GatherRun& run : own.gathers) {
    const proto::ShardStep& from = core.PartsOf(batch.id)[run.part].layouts[group.value()].items[run.item];
    add_item(own.shards[0], from.kv_heads);
    add_rows(from.gather_first, run.rows);
  }
  own.into.items = reinterpret_cast<const DeviceAttentionItem*>(there + items_at);
  own.into.positions = reinterpret_cast<const int32_t*>(there + positions_at);
  own.into.row_items = reinterpret_cast<const int32_t*>(there + row_items_at);
  return own.tables->Send(batch.stream());
}

std::vector<CudaAttentionItem> CudaRingAttention::ItemsOf(const Shard& shard, const proto::SoftmaxSpec& spec,
                                                          std::span<const StepWire::LocalPartial> locals,
                                                          const CudaPartialJoin& join,
                                                          const std::byte* const* blocks) const {
  std::vector<CudaAttentionItem> items;
  for (size_t l = 0; l < locals.size(); ++l) {
    const StepWire::LocalPartial& local = locals[l];
    if (local.rank != shard.rank) continue;
    CudaAttentionItem& item = items.emplace_back();
    item.q_rows = local.q_len;
    item.kv_heads = local.kv_heads.size();
    item.first_position = local.ctx_len;
    item.token_begin = shard.blocks.begin;
    item.token_end = shard.blocks.end;
    item.q_row_step = int64_t{spec.query_heads} * spec.key_dim;
    item.q_offset = int64_t{local.kv_heads.begin} * spec.group_size() * spec.key_dim;  // the step has one prompt
    item.head_step = SegmentsOf(shard.blocks);
    item.blocks = blocks + local.kv_heads.begin * item.head_step;
    item.first_segment = static_cast<int32_t>(shard.blocks.begin / kSegmentTokens);
    item.partial = item.node_a_row = true;
    item.first_node = static_cast<int32_t>(join.first_node(l));
  }
  return items;
}

CudaAttentionShape CudaRingAttention::WithBlocks(CudaAttentionShape shape, const Step& step) const {
  shape.arena = step.blocks->data();
  shape.arena_bytes = step.blocks->size_bytes();
  return shape;
}

absl::Status CudaRingAttention::Plan(const ComputeWorkerCore& core, LayerGroup group, const CudaAttentionShape& shape,
                                     std::span<const StepWire::LocalPartial> locals, const CudaPartialJoin& join,
                                     CudaBatch& batch) {
  Step& step = steps_[batch.id.value()];
  GroupStep& own = step.groups[group.value()];
  if (own.shards.empty()) return absl::OkStatus();
  DT_RETURN_IF_ERROR(UploadTables(core, group, batch));
  for (const Shard& shard : own.shards) {
    const auto rank = static_cast<size_t>(shard.rank);
    if (own.attention.size() <= rank) own.attention.resize(rank + 1);
    if (own.attention[rank] == nullptr) own.attention[rank] = std::make_unique<CudaAttention>(device_);
    DT_RETURN_IF_ERROR(
        own.attention[rank]->Plan(batch.stream(), WithBlocks(shape, step),
                                  ItemsOf(shard, table_.softmax(group), locals, join, own.block_pointers)));
  }
  return absl::OkStatus();
}

absl::Status CudaRingAttention::AppendGathered(const ComputeWorkerCore& core, LayerGroup group, CudaBatch& batch) {
  const proto::SoftmaxSpec& spec = table_.softmax(group);
  const Step& step = steps_[batch.id.value()];
  const GroupStep& own = step.groups[group.value()];
  for (const GatherRun& run : own.gathers) {
    const WorkerPart& part = core.PartsOf(batch.id)[run.part];
    const proto::ShardStep& item = part.layouts[group.value()].items[run.item];
    const int heads = item.kv_heads.size();
    const int64_t keys = KeyBytes(spec, run.rows, heads), values = ValueBytes(spec, run.rows, heads);
    std::byte* const k = step.gathered->data() + run.at;
    DT_RETURN_IF_ERROR(batch.stream().Copy(k, part.partial.data() + item.gather_key_offset, keys));
    DT_RETURN_IF_ERROR(batch.stream().Copy(k + keys, part.partial.data() + item.gather_value_offset, values));
    DT_RETURN_IF_ERROR(AppendRows(spec, own.into, k, k + keys, heads, run.rows, run.table_row, 0, batch.stream()));
  }
  return absl::OkStatus();
}

absl::Status CudaRingAttention::Attend(const ComputeWorkerCore& core, const AttendShard& shard,
                                       const CudaAttentionShape& shape, const CudaAttentionRun& run, CudaBatch& batch) {
  const LayerGroup group = table_.op_group[shard.op];
  const proto::SoftmaxSpec& spec = table_.softmax(group);
  const Step& step = steps_[batch.id.value()];
  const GroupStep& own = step.groups[group.value()];
  const auto of =
      std::find_if(own.shards.begin(), own.shards.end(), [&](const Shard& known) { return known.rank == shard.rank; });
  if (of == own.shards.end())
    return Internal("attention op ", shard.op, ": no row of this step sees tokens of rank ", shard.rank);
  const std::span<const std::byte> sent = core.RankRows(batch.id, shard.op, shard.rank);
  const int64_t rows = of->comes.end - of->comes.begin, keys = KeyBytes(spec, rows, spec.kv_heads);
  if (static_cast<int64_t>(sent.size()) != keys + ValueBytes(spec, rows, spec.kv_heads))
    return Internal("attention op ", shard.op, ": of rank ", shard.rank, " came ", sent.size(), " bytes of ", rows,
                    " tokens");
  DT_RETURN_IF_ERROR(AppendRows(spec, own.into, sent.data(), sent.data() + keys, spec.kv_heads, rows, of->table_row, 0,
                                batch.stream()));
  DT_RETURN_IF_ERROR(rank_rows_.Reads(sent, batch.stream()));
  if (shard.rank == 0) DT_RETURN_IF_ERROR(AppendGathered(core, group, batch));
  return own.attention[static_cast<size_t>(shard.rank)]->Run(batch.stream(), WithBlocks(shape, step), run);
}

}  // namespace dovetail::compute
