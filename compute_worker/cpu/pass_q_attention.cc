#include "compute_worker/cpu/pass_q_attention.h"

#include <algorithm>

#include "compute_worker/cpu/local_partials.h"
#include "compute_worker/cpu/prompt_attention.h"
#include "kernels/op_context.h"
#include "proto/pass_q.h"

namespace dovetail::compute {
namespace {

proto::TokenRange OwnShard(const ComputeWorkerCore& core, MicroBatchId id) {
  return core.ShardOf(id, core.PlanOf(id).part.rank);
}

int64_t SegmentsOf(const proto::TokenRange& shard) {
  return (shard.end - shard.begin + kSegmentTokens - 1) / kSegmentTokens;
}

}  // namespace

PassQAttention::PassQAttention(kernels::Device& device, const proto::AttentionTable& table, int micro_batches,
                               KvStorage storage)
    : device_(device),
      table_(table),
      storage_(storage),
      block_bytes_(PromptAttention::BlockBytes(table, storage)),
      micro_batches_(micro_batches) {}

kernels::AttentionShape PassQAttention::ShapeOf(LayerGroup group) const {
  const proto::SoftmaxSpec& spec = table_.softmax(group);
  return kernels::AttentionShape{spec.group_size(), spec.key_dim, spec.value_dim, spec.scale,
                                 spec.window,       spec.kv,      storage_};
}

absl::Status PassQAttention::Grow(std::unique_ptr<kernels::Buffer>& buffer, size_t bytes) {
  if (buffer != nullptr && buffer->size_bytes() >= bytes) return absl::OkStatus();
  buffer.reset();
  DT_ASSIGN_OR_RETURN(buffer, device_.Allocate(bytes + bytes / 4));
  return absl::OkStatus();
}

size_t PassQAttention::ScratchOf(LayerGroup group, int64_t rows, int items, const proto::TokenRange& shard,
                                 int threads) const {
  const kernels::AttentionLimits limits{.items = items,
                                        .rows = rows,
                                        .kv_heads = table_.softmax(group).kv_heads,
                                        .tokens = shard.end - shard.begin,
                                        .threads = threads};
  return kernels::PagedAttentionScratchBytes(ShapeOf(group), limits);
}

absl::Status PassQAttention::Prepare(const ComputeWorkerCore& core, MicroBatchId id, int threads, StepWire& wire) {
  const std::vector<PromptEntry>& prompts = core.PromptsOf(id);
  if (prompts.empty() || !prompts[0].asks_ranks) return absl::OkStatus();
  const proto::StepPlan& plan = core.PlanOf(id);
  const std::vector<Position> cuts = proto::PassQCuts(plan);
  const proto::TokenRange shard = OwnShard(core, id);
  MicroBatch& batch = micro_batches_[id.value()];
  size_t blocks = 0, scratch = 0, items = 0;
  int64_t floats = 0;
  for (int g = 0; g < table_.group_count(); ++g) {
    const LayerGroup group(static_cast<uint16_t>(g));
    const proto::SoftmaxSpec& spec = table_.softmax(group);
    if (spec.linear()) continue;
    const auto locals = wire.locals(group);
    blocks = std::max(blocks, static_cast<size_t>(SegmentsOf(shard) * spec.kv_heads));
    items = std::max(items, locals.size());
    const int own = static_cast<int>(locals.size());
    scratch = std::max(scratch, ScratchOf(group, wire.rows() * own, own, shard, threads));
    for (int rank = plan.part.rank + 1; rank < plan.part.ranks; ++rank) {
      const proto::TokenRange queries = proto::PassQQueries(spec, cuts, rank, plan.part.rank);
      scratch = std::max(scratch, ScratchOf(group, queries.end - queries.begin, 1, shard, threads));
    }
    floats = std::max(floats, PartialFloats(locals, spec));
  }
  batch.place_bytes = blocks * block_bytes_;
  batch.table.reserve(blocks);
  batch.items.reserve(std::max<size_t>(items, 1));
  batch.appends.reserve(1 + proto::kMaxShards);
  DT_RETURN_IF_ERROR(Grow(batch.blocks, batch.place_bytes * kRankOpsAhead));
  DT_RETURN_IF_ERROR(Grow(batch.scratch, scratch));
  return Grow(batch.partial, static_cast<size_t>(floats) * sizeof(float));
}

void PassQAttention::FillTable(const ComputeWorkerCore& core, MicroBatchId id, int op) {
  MicroBatch& batch = micro_batches_[id.value()];
  const int64_t blocks = SegmentsOf(OwnShard(core, id)) * table_.softmax(table_.op_group[op]).kv_heads;
  std::byte* const first = batch.blocks->data() + static_cast<size_t>(core.PlaceOfKeys(id, op)) * batch.place_bytes;
  batch.table.clear();
  for (int64_t block = 0; block < blocks; ++block)
    batch.table.push_back(first + static_cast<size_t>(block) * block_bytes_);
}

kernels::KvBlockTable PassQAttention::TableOf(const ComputeWorkerCore& core, MicroBatchId id, int first_head) const {
  const proto::TokenRange shard = OwnShard(core, id);
  kernels::KvBlockTable table;
  table.head_step = SegmentsOf(shard);
  table.blocks = micro_batches_[id.value()].table.data() + first_head * table.head_step;
  table.first_segment = static_cast<int32_t>(shard.begin / kSegmentTokens);
  table.segments = static_cast<int32_t>(SegmentsOf(shard));
  return table;
}

// With rank 0's own, earlier tokens of its segment, which came from the attention workers.
void PassQAttention::FillAppends(const ComputeWorkerCore& core, MicroBatchId id, int op, StepWire& wire) {
  const LayerGroup group = table_.op_group[op];
  const proto::SoftmaxSpec& spec = table_.softmax(group);
  std::vector<kernels::KvAppendItem>& appends = micro_batches_[id.value()].appends;
  appends.assign(1, {.k = wire.key(op),
                     .v = wire.value(op),
                     .rows = static_cast<int>(wire.rows()),
                     .kv_heads = spec.kv_heads,
                     .first_position = core.PlanOf(id).entries[0].ctx_len,
                     .blocks = TableOf(core, id, 0)});
  for (const WorkerPart& part : core.PartsOf(id))
    for (const proto::ShardStep& item : part.layouts[group.value()].items) {
      if (item.gather_count == 0) continue;
      appends.push_back({.k = part.partial.data() + item.gather_key_offset,
                         .v = part.partial.data() + item.gather_value_offset,
                         .rows = static_cast<int>(item.gather_count),
                         .kv_heads = item.kv_heads.size(),
                         .first_position = item.gather_first,
                         .blocks = TableOf(core, id, item.kv_heads.begin)});
    }
}

// Those of the step's own tokens.
void PassQAttention::FillItems(const ComputeWorkerCore& core, MicroBatchId id, int op, StepWire& wire) {
  MicroBatch& batch = micro_batches_[id.value()];
  const LayerGroup group = table_.op_group[op];
  const proto::SoftmaxSpec& spec = table_.softmax(group);
  const auto element = static_cast<int64_t>(SizeOf(spec.kv));
  float* const memory = batch.partial == nullptr ? nullptr : reinterpret_cast<float*>(batch.partial->data());
  batch.items.clear();
  PlaceLocals(wire.locals(group), spec, memory, [&](const StepWire::LocalPartial& local, float* o, float* ml) {
    if (local.rank != StepWire::LocalPartial::kOwn) return;
    const int64_t first_head = int64_t{local.kv_heads.begin} * spec.group_size();
    kernels::AttentionItem item;
    item.q_row_step = int64_t{spec.query_heads} * spec.key_dim;
    item.q = wire.query() + first_head * spec.key_dim * element;
    item.q_rows = local.q_len;
    item.kv_heads = local.kv_heads.size();
    item.first_position = local.ctx_len;
    item.token_begin = local.begin;
    item.token_end = local.end;
    item.blocks = TableOf(core, id, local.kv_heads.begin);
    item.partial_o = o;
    item.partial_ml = ml;
    if (local.whole()) {
      item.o = wire.joined(local.entry, group);
      if (const float* sinks = table_.sinks(op)) item.sinks = sinks + first_head;
    }
    batch.items.push_back(item);
  });
}

absl::Status PassQAttention::Attend(MicroBatch& batch, LayerGroup group, kernels::Stream& stream) const {
  DT_ASSIGN_OR_RETURN(kernels::PagedAttention attention,
                      kernels::PagedAttention::Begin(kernels::ContextOf(stream), ShapeOf(group), batch.items,
                                                     {batch.scratch->data(), batch.scratch->size_bytes()}));
  attention.AttendRest();
  attention.Finish();
  stream.Synchronize();
  return absl::OkStatus();
}

absl::Status PassQAttention::Run(const ComputeWorkerCore& core, MicroBatchId id, int op, StepWire& wire,
                                 kernels::Stream& stream) {
  MicroBatch& batch = micro_batches_[id.value()];
  const LayerGroup group = table_.op_group[op];
  FillTable(core, id, op);
  FillAppends(core, id, op, wire);
  FillItems(core, id, op, wire);
  DT_RETURN_IF_ERROR(kernels::KvAppend(kernels::ContextOf(stream), ShapeOf(group).layout(), batch.appends));
  return Attend(batch, group, stream);
}

std::vector<std::byte> PassQAttention::Pack(int op, int64_t rows, StepWire& wire) const {
  const proto::SoftmaxSpec& spec = table_.softmax(table_.op_group[op]);
  const int64_t bytes = rows * spec.query_heads * spec.key_dim * static_cast<int64_t>(SizeOf(spec.kv));
  return {wire.query(), wire.query() + bytes};
}

absl::Status PassQAttention::Answer(const ComputeWorkerCore& core, const AttendQueries& attend,
                                    kernels::Stream& stream) {
  const MicroBatchId id = attend.micro_batch;
  MicroBatch& batch = micro_batches_[id.value()];
  const proto::StepPlan& plan = core.PlanOf(id);
  const LayerGroup group = table_.op_group[attend.op];
  const proto::SoftmaxSpec& spec = table_.softmax(group);
  const std::vector<Position> cuts = proto::PassQCuts(plan);
  const proto::TokenRange queries = proto::PassQQueries(spec, cuts, attend.rank, plan.part.rank);
  const int64_t bytes = proto::PassQPartialBytes(spec, cuts, attend.rank, plan.part.rank);
  batch.outputs.resize(static_cast<size_t>(bytes));
  FillTable(core, id, attend.op);
  kernels::AttentionItem item;
  item.q = core.RankHeads(id, attend.op, attend.rank).data();
  item.q_rows = static_cast<int>(queries.end - queries.begin);
  item.kv_heads = spec.kv_heads;
  item.first_position = queries.begin;
  item.token_begin = OwnShard(core, id).begin;
  item.token_end = OwnShard(core, id).end;
  item.blocks = TableOf(core, id, 0);
  item.partial_o = reinterpret_cast<float*>(batch.outputs.data());
  const int64_t floats = bytes / static_cast<int64_t>(sizeof(float));
  item.partial_ml = item.partial_o + floats / (spec.value_dim + 2) * spec.value_dim;
  batch.items.assign(1, item);
  return Attend(batch, group, stream);
}

void PassQAttention::Place(const ComputeWorkerCore& core, const PlaceRankOutputs& place, StepWire& wire) {
  const LayerGroup group = table_.op_group[place.op];
  const proto::SoftmaxSpec& spec = core.table().softmax(group);
  auto* const memory = reinterpret_cast<float*>(micro_batches_[place.micro_batch.value()].partial->data());
  PlaceLocals(wire.locals(group), spec, memory, [&](const StepWire::LocalPartial& local, float* o, float* ml) {
    if (local.rank == place.rank) CopyPartials(local, spec, {0, spec.kv_heads}, place.outputs.bytes.data(), o, ml);
  });
}

}  // namespace dovetail::compute
