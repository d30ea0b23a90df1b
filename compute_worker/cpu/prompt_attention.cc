#include "compute_worker/cpu/prompt_attention.h"

#include <algorithm>

#include "compute_worker/cpu/local_partials.h"
#include "kernels/op_context.h"

namespace dovetail::compute {

size_t PromptAttention::BlockBytes(const proto::AttentionTable& table, KvStorage storage) {
  size_t bytes = 0;
  for (int g = 0; g < table.group_count(); ++g) {
    const proto::SoftmaxSpec& spec = table.softmax(LayerGroup(static_cast<uint16_t>(g)));
    if (spec.linear()) continue;
    const kernels::KvBlockLayout layout{spec.key_dim, spec.value_dim, spec.kv, storage};
    bytes = std::max(bytes, (layout.bytes() + 63) / 64 * 64);
  }
  return bytes;
}

PromptAttention::PromptAttention(kernels::Device& device, const proto::AttentionTable& table, int micro_batches,
                                 KvStorage storage)
    : device_(device),
      table_(table),
      storage_(storage),
      block_bytes_(BlockBytes(table, storage)),
      micro_batches_(micro_batches) {}

kernels::AttentionShape PromptAttention::ShapeOf(LayerGroup group) const {
  const proto::SoftmaxSpec& spec = table_.softmax(group);
  return kernels::AttentionShape{spec.group_size(), spec.key_dim, spec.value_dim, spec.scale,
                                 spec.window,       spec.kv,      storage_};
}

absl::Status PromptAttention::Grow(std::unique_ptr<kernels::Buffer>& buffer, size_t bytes) {
  if (buffer != nullptr && buffer->size_bytes() >= bytes) return absl::OkStatus();
  buffer.reset();
  DT_ASSIGN_OR_RETURN(buffer, device_.Allocate(bytes + bytes / 4));
  return absl::OkStatus();
}

// Of one call, over the step's own tokens or those of an earlier rank.
size_t PromptAttention::ScratchOf(LayerGroup group, int rank, int threads, StepWire& wire) const {
  kernels::AttentionLimits limits;
  limits.threads = threads;
  for (const StepWire::LocalPartial& local : wire.locals(group)) {
    if (local.rank != rank) continue;
    ++limits.items;
    limits.rows += local.q_len;
    limits.kv_heads = std::max(limits.kv_heads, local.kv_heads.size());
    limits.tokens = std::max<int64_t>(limits.tokens, local.end - local.begin);
  }
  return limits.items == 0 ? 0 : kernels::PagedAttentionScratchBytes(ShapeOf(group), limits);
}

absl::Status PromptAttention::Prepare(const ComputeWorkerCore& core, MicroBatchId id, int threads, StepWire& wire) {
  const std::vector<PromptEntry>& prompts = core.PromptsOf(id);
  // SwitchAttention and PassQAttention have some.
  if (prompts.empty() || prompts[0].switches || prompts[0].asks_ranks) return absl::OkStatus();
  DT_RETURN_IF_ERROR(Grow(arena_, size_t{core.scratch().capacity()} * block_bytes_));
  MicroBatch& batch = micro_batches_[id.value()];
  size_t scratch = 0, partial = 0, items = 0, blocks = 0, gathered = 0, shard = 0;
  const int shards = prompts[0].ring ? core.PlanOf(id).part.rank : 0;
  for (int g = 0; g < table_.group_count(); ++g) {
    const LayerGroup group(static_cast<uint16_t>(g));
    const proto::SoftmaxSpec& spec = table_.softmax(group);
    if (spec.linear()) continue;
    for (int rank = StepWire::LocalPartial::kOwn; rank < shards; ++rank)
      scratch = std::max(scratch, ScratchOf(group, rank, threads, wire));
    const auto floats = static_cast<size_t>(PartialFloats(wire.locals(group), spec));
    partial = std::max(partial, floats * sizeof(float));
    items = std::max(items, wire.locals(group).size());
    size_t answers = 0;
    for (const WorkerPart& part : core.PartsOf(id)) answers += part.layouts[g].items.size();
    gathered = std::max(gathered, answers);
    size_t group_blocks = 0;
    for (const PromptEntry& prompt : prompts) group_blocks += prompt.part->segments.size() * spec.kv_heads;
    blocks = std::max(blocks, group_blocks);
    const bool keeps =
        core.PlanOf(id).gives_back || std::any_of(core.PartsOf(id).begin(), core.PartsOf(id).end(),
                                                  [&](const WorkerPart& part) { return part.layouts[g].pieces > 0; });
    if (keeps) keep_blocks_.reserve(std::max(keep_blocks_.capacity(), group_blocks));
    for (int rank = 0; rank < shards; ++rank) {
      const proto::TokenRange tokens = core.ShardOf(id, rank);
      shard = std::max<size_t>(shard, (tokens.end - tokens.begin) / kSegmentTokens * spec.kv_heads);
    }
  }
  batch.blocks.reserve(std::max(blocks, shard));
  batch.extents.reserve(prompts.size());
  batch.appends.reserve(prompts.size() + gathered + proto::kMaxPrefillRanks);
  batch.items.reserve(items);
  DT_RETURN_IF_ERROR(Grow(batch.shard, shard * block_bytes_));
  DT_RETURN_IF_ERROR(Grow(batch.scratch, scratch));
  return Grow(batch.partial, partial);
}

void PromptAttention::FillBlocks(const ComputeWorkerCore& core, MicroBatchId id, int op) {
  MicroBatch& batch = micro_batches_[id.value()];
  const int heads = table_.softmax(table_.op_group[op]).kv_heads;
  batch.blocks.clear();
  batch.extents.clear();
  for (const PromptEntry& prompt : core.PromptsOf(id)) {
    batch.extents.push_back({batch.blocks.size(), prompt.part->begin, prompt.part->segments.size()});
    for (int head = 0; head < heads; ++head)
      for (const PromptScratch::Segment& segment : prompt.part->segments)
        batch.blocks.push_back(arena_->data() + size_t{core.scratch().BlockOf(segment, op, head)} * block_bytes_);
  }
}

void PromptAttention::FillShardBlocks(MicroBatch& batch, int kv_heads, const proto::TokenRange& tokens) const {
  const auto segments = static_cast<size_t>((tokens.end - tokens.begin) / kSegmentTokens);
  batch.blocks.clear();
  batch.extents.assign(1, {0, tokens.begin, segments});
  for (size_t block = 0; block < segments * static_cast<size_t>(kv_heads); ++block)
    batch.blocks.push_back(batch.shard->data() + block * block_bytes_);
}

kernels::KvBlockTable PromptAttention::TableOf(const MicroBatch& batch, size_t prompt, int first_head) {
  const Extent& extent = batch.extents[prompt];
  kernels::KvBlockTable table;
  table.head_step = static_cast<int64_t>(extent.segments);
  table.blocks = batch.blocks.data() + extent.first + first_head * table.head_step;
  table.first_segment = static_cast<int32_t>(extent.begin / kSegmentTokens);
  table.segments = static_cast<int32_t>(extent.segments);
  return table;
}

void PromptAttention::FillAppends(const ComputeWorkerCore& core, MicroBatchId id, int op, StepWire& wire) {
  MicroBatch& batch = micro_batches_[id.value()];
  const proto::SoftmaxSpec& spec = table_.softmax(table_.op_group[op]);
  const std::vector<PromptEntry>& prompts = core.PromptsOf(id);
  const int64_t element = static_cast<int64_t>(SizeOf(spec.kv));
  batch.appends.clear();
  for (size_t p = 0; p < prompts.size(); ++p) {
    const proto::StepEntry& entry = core.PlanOf(id).entries[prompts[p].entry];
    const int64_t row = wire.row_begin(prompts[p].entry);
    kernels::KvAppendItem append;
    append.k = wire.key(op) + row * spec.kv_heads * spec.key_dim * element;
    append.v = wire.value(op) + row * spec.kv_heads * spec.value_dim * element;
    append.rows = static_cast<int>(entry.tokens.size());
    append.kv_heads = spec.kv_heads;
    append.first_position = entry.ctx_len;
    append.blocks = TableOf(batch, p, 0);
    batch.appends.push_back(append);
  }
}

// Earlier tokens, as they came with the op's answers.
void PromptAttention::FillGathered(const ComputeWorkerCore& core, MicroBatchId id, int op) {
  const LayerGroup group = table_.op_group[op];
  MicroBatch& batch = micro_batches_[id.value()];
  const std::vector<PromptEntry>& prompts = core.PromptsOf(id);
  for (const WorkerPart& part : core.PartsOf(id)) {
    size_t p = 0;  // both lists are by entry
    for (const proto::ShardStep& item : part.layouts[group.value()].items) {
      if (item.gather_count == 0 || part.layouts[group.value()].pieces > 0) continue;
      while (prompts[p].entry != item.entry) ++p;
      kernels::KvAppendItem append;
      append.k = part.partial.data() + item.gather_key_offset;
      append.v = part.partial.data() + item.gather_value_offset;
      append.rows = static_cast<int>(item.gather_count);
      append.kv_heads = item.kv_heads.size();
      append.first_position = item.gather_first;
      append.blocks = TableOf(batch, p, item.kv_heads.begin);
      batch.appends.push_back(append);
    }
  }
}

// Of K and V as another rank sent them. The blocks are the caller's to fill in.
kernels::KvAppendItem PromptAttention::AppendOf(const std::byte* rows, int op, const proto::TokenRange& tokens) const {
  return AppendOf(rows, op, tokens, table_.softmax(table_.op_group[op]).kv_heads);
}

kernels::KvAppendItem PromptAttention::AppendOf(const std::byte* rows, int op, const proto::TokenRange& tokens,
                                                int kv_heads) const {
  const proto::SoftmaxSpec& spec = table_.softmax(table_.op_group[op]);
  const int64_t key_bytes = int64_t{kv_heads} * spec.key_dim * static_cast<int64_t>(SizeOf(spec.kv));
  kernels::KvAppendItem append;
  append.k = rows;
  append.v = rows + (tokens.end - tokens.begin) * key_bytes;
  append.rows = static_cast<int>(tokens.end - tokens.begin);
  append.kv_heads = kv_heads;
  append.first_position = tokens.begin;
  return append;
}

absl::Status PromptAttention::Keep(const ComputeWorkerCore& core, const KeepRankRows& keep,
                                   const PromptScratch::Part& part, kernels::Stream& stream) {
  const proto::HeadRange heads{0, table_.softmax(table_.op_group[keep.op]).kv_heads};
  const proto::TokenRange tokens = core.RowsFrom(keep.micro_batch, keep.op, keep.rank);
  return Put(core, {part, keep.op, heads, tokens, keep.rows.bytes.data()}, stream);
}

absl::Status PromptAttention::Keep(const ComputeWorkerCore& core, const KeepEarlierRows& keep,
                                   kernels::Stream& stream) {
  const LayerGroup group = table_.op_group[keep.op];
  const WorkerPart& from = core.PartsOf(keep.micro_batch)[keep.part];
  const proto::StepLayout::Piece piece = from.layouts[group.value()].PieceAt(keep.piece, table_.softmax(group));
  for (const PromptEntry& prompt : core.PromptsOf(keep.micro_batch)) {
    if (prompt.entry != piece.item->entry) continue;
    return Put(core, {*prompt.part, keep.op, piece.item->kv_heads, piece.tokens, keep.rows.bytes.data()}, stream);
  }
  return Internal("attention op ", keep.op, ": rows came for entry ", piece.item->entry, ", which is no prompt");
}

absl::Status PromptAttention::Put(const ComputeWorkerCore& core, const Rows& rows, kernels::Stream& stream) {
  const auto first = static_cast<size_t>((rows.tokens.begin - rows.part.begin) / kSegmentTokens);
  const auto end = static_cast<size_t>((rows.tokens.end - rows.part.begin + kSegmentTokens - 1) / kSegmentTokens);
  keep_blocks_.clear();
  for (int head = rows.heads.begin; head < rows.heads.end; ++head)
    for (size_t s = first; s < end; ++s)
      keep_blocks_.push_back(arena_->data() +
                             size_t{core.scratch().BlockOf(rows.part.segments[s], rows.op, head)} * block_bytes_);
  kernels::KvAppendItem append = AppendOf(rows.bytes, rows.op, rows.tokens, rows.heads.size());
  append.blocks.blocks = keep_blocks_.data();
  append.blocks.head_step = static_cast<int64_t>(end - first);
  append.blocks.first_segment = static_cast<int32_t>(rows.tokens.begin / kSegmentTokens);
  append.blocks.segments = static_cast<int32_t>(end - first);
  return kernels::KvAppend(kernels::ContextOf(stream), ShapeOf(table_.op_group[rows.op]).layout(), {&append, 1});
}

// Tokens of a rank before this one, as it sent them. A rank's step has one prompt.
void PromptAttention::FillRows(const ComputeWorkerCore& core, MicroBatchId id, int op, int rank) {
  MicroBatch& batch = micro_batches_[id.value()];
  const proto::TokenRange tokens = core.RowsFrom(id, op, rank);
  if (tokens.begin >= tokens.end) return;
  kernels::KvAppendItem append = AppendOf(core.RankRows(id, op, rank).data(), op, tokens);
  append.blocks = TableOf(batch, 0, 0);
  batch.appends.push_back(append);
}

// Of all ranks before this one.
void PromptAttention::FillFromRanks(const ComputeWorkerCore& core, MicroBatchId id, int op) {
  if (!core.PromptsOf(id)[0].from_ranks) return;
  for (int rank = 0; rank < core.PlanOf(id).part.rank; ++rank) FillRows(core, id, op, rank);
}

// Those of the step's own tokens, or of an earlier rank's. What is a token shard has the same place in `partial` in
// every call.
void PromptAttention::FillItems(const ComputeWorkerCore& core, MicroBatchId id, int op, int rank, StepWire& wire) {
  MicroBatch& batch = micro_batches_[id.value()];
  const LayerGroup group = table_.op_group[op];
  const proto::SoftmaxSpec& spec = table_.softmax(group);
  const std::vector<PromptEntry>& prompts = core.PromptsOf(id);
  const int64_t element = static_cast<int64_t>(SizeOf(spec.kv));
  float* partial = batch.partial == nullptr ? nullptr : reinterpret_cast<float*>(batch.partial->data());
  batch.items.clear();
  size_t p = 0;  // both lists are by entry
  for (StepWire::LocalPartial& local : wire.locals(group)) {
    while (prompts[p].entry != local.entry) ++p;
    const int query_heads = local.kv_heads.size() * spec.group_size();
    kernels::AttentionItem item;
    item.q_row_step = int64_t{spec.query_heads} * spec.key_dim;
    item.q = wire.query() + (wire.row_begin(local.entry) * item.q_row_step +
                             int64_t{local.kv_heads.begin} * spec.group_size() * spec.key_dim) *
                                element;
    item.q_rows = local.q_len;
    item.kv_heads = local.kv_heads.size();
    item.first_position = local.ctx_len;
    item.token_begin = local.begin;
    item.token_end = local.end;
    item.blocks = TableOf(batch, p, local.kv_heads.begin);
    if (local.whole()) {
      item.o = wire.joined(local.entry, group);
      if (const float* sinks = table_.sinks(op)) item.sinks = sinks + local.kv_heads.begin * spec.group_size();
    } else {
      const int64_t nodes = kernels::PartialNodes(local.ctx_len, local.q_len, spec.window, local.begin, item.token_end);
      local.o = item.partial_o = partial;
      local.ml = item.partial_ml = partial + nodes * query_heads * spec.value_dim;
      partial += nodes * query_heads * (spec.value_dim + 2);
    }
    if (local.rank == rank) batch.items.push_back(item);
  }
}

absl::Status PromptAttention::Attend(MicroBatch& batch, LayerGroup group, kernels::Stream& stream) {
  const kernels::OpContext context = kernels::ContextOf(stream);
  const kernels::AttentionShape shape = ShapeOf(group);
  DT_RETURN_IF_ERROR(kernels::KvAppend(context, shape.layout(), batch.appends));
  DT_ASSIGN_OR_RETURN(kernels::PagedAttention attention,
                      kernels::PagedAttention::Begin(context, shape, batch.items,
                                                     {batch.scratch->data(), batch.scratch->size_bytes()}));
  attention.AttendRest();
  attention.Finish();
  stream.Synchronize();
  return absl::OkStatus();
}

absl::Status PromptAttention::Run(const ComputeWorkerCore& core, MicroBatchId id, int op, StepWire& wire,
                                  kernels::Stream& stream) {
  const bool ring = core.PromptsOf(id)[0].ring;
  FillBlocks(core, id, op);
  FillAppends(core, id, op, wire);
  if (!ring) FillGathered(core, id, op);
  if (!ring) FillFromRanks(core, id, op);
  FillItems(core, id, op, StepWire::LocalPartial::kOwn, wire);
  return Attend(micro_batches_[id.value()], table_.op_group[op], stream);
}

absl::Status PromptAttention::RunShard(const ComputeWorkerCore& core, const AttendShard& shard, StepWire& wire,
                                       kernels::Stream& stream) {
  const MicroBatchId id = shard.micro_batch;
  const LayerGroup group = table_.op_group[shard.op];
  MicroBatch& batch = micro_batches_[id.value()];
  FillShardBlocks(batch, table_.softmax(group).kv_heads, core.ShardOf(id, shard.rank));
  batch.appends.clear();
  FillRows(core, id, shard.op, shard.rank);
  if (shard.rank == 0) FillGathered(core, id, shard.op);
  FillItems(core, id, shard.op, shard.rank, wire);
  return Attend(batch, group, stream);
}

}  // namespace dovetail::compute
