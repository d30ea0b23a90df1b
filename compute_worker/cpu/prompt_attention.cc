#include "compute_worker/cpu/prompt_attention.h"

#include <algorithm>

#include "kernels/op_context.h"

namespace dovetail::compute {

size_t PromptAttention::BlockBytes(const proto::AttentionTable& table) {
  size_t bytes = 0;
  for (int g = 0; g < table.group_count(); ++g) {
    const proto::SoftmaxSpec& spec = table.softmax(LayerGroup(static_cast<uint16_t>(g)));
    if (spec.linear()) continue;
    const kernels::KvBlockLayout layout{spec.key_dim, spec.value_dim, spec.kv};
    bytes = std::max(bytes, (layout.bytes() + 63) / 64 * 64);
  }
  return bytes;
}

PromptAttention::PromptAttention(kernels::Device& device, const proto::AttentionTable& table, int micro_batches)
    : device_(device), table_(table), block_bytes_(BlockBytes(table)), micro_batches_(micro_batches) {}

kernels::AttentionShape PromptAttention::ShapeOf(LayerGroup group) const {
  const proto::SoftmaxSpec& spec = table_.softmax(group);
  return kernels::AttentionShape{spec.group_size(), spec.key_dim, spec.value_dim, spec.scale, spec.window, spec.kv};
}

absl::Status PromptAttention::Grow(std::unique_ptr<kernels::Buffer>& buffer, size_t bytes) {
  if (buffer != nullptr && buffer->size_bytes() >= bytes) return absl::OkStatus();
  buffer.reset();
  DT_ASSIGN_OR_RETURN(buffer, device_.Allocate(bytes + bytes / 4));
  return absl::OkStatus();
}

absl::Status PromptAttention::Prepare(const ComputeWorkerCore& core, MicroBatchId id, int threads, StepWire& wire) {
  const std::vector<PromptEntry>& prompts = core.PromptsOf(id);
  if (prompts.empty()) return absl::OkStatus();
  DT_RETURN_IF_ERROR(Grow(arena_, size_t{core.scratch().capacity()} * block_bytes_));
  MicroBatch& batch = micro_batches_[id.value()];
  size_t scratch = 0, partial = 0, items = 0, blocks = 0, gathered = 0;
  for (int g = 0; g < table_.group_count(); ++g) {
    const LayerGroup group(static_cast<uint16_t>(g));
    const proto::SoftmaxSpec& spec = table_.softmax(group);
    if (spec.linear()) continue;
    kernels::AttentionLimits limits;
    limits.threads = threads;
    size_t floats = 0;
    for (const StepWire::LocalPartial& local : wire.locals(group)) {
      const Position end = local.ctx_len + local.q_len;
      ++limits.items;
      limits.rows += local.q_len;
      limits.kv_heads = std::max(limits.kv_heads, local.kv_heads.size());
      limits.tokens = std::max<int64_t>(limits.tokens, end - local.begin);
      if (local.begin == 0) continue;
      const int64_t nodes = kernels::PartialNodes(local.ctx_len, local.q_len, spec.window, local.begin, end);
      floats += nodes * local.kv_heads.size() * spec.group_size() * (spec.value_dim + 2);
    }
    scratch = std::max(scratch, kernels::PagedAttentionScratchBytes(ShapeOf(group), limits));
    partial = std::max(partial, floats * sizeof(float));
    items = std::max(items, wire.locals(group).size());
    size_t shards = 0;
    for (const WorkerPart& part : core.PartsOf(id)) shards += part.layouts[g].items.size();
    gathered = std::max(gathered, shards);
    size_t group_blocks = 0;
    for (const PromptEntry& prompt : prompts) group_blocks += prompt.part->segments.size() * spec.kv_heads;
    blocks = std::max(blocks, group_blocks);
  }
  batch.blocks.reserve(blocks);
  batch.first.reserve(prompts.size());
  batch.appends.reserve(prompts.size() + gathered + proto::kMaxPrefillRanks);
  batch.items.reserve(items);
  DT_RETURN_IF_ERROR(Grow(batch.scratch, scratch));
  return Grow(batch.partial, partial);
}

void PromptAttention::FillBlocks(const ComputeWorkerCore& core, MicroBatchId id, int op) {
  MicroBatch& batch = micro_batches_[id.value()];
  const int heads = table_.softmax(table_.op_group[op]).kv_heads;
  batch.blocks.clear();
  batch.first.clear();
  for (const PromptEntry& prompt : core.PromptsOf(id)) {
    batch.first.push_back(batch.blocks.size());
    for (int head = 0; head < heads; ++head)
      for (const PromptScratch::Segment& segment : prompt.part->segments)
        batch.blocks.push_back(arena_->data() + size_t{core.scratch().BlockOf(segment, op, head)} * block_bytes_);
  }
}

kernels::KvBlockTable PromptAttention::TableOf(const ComputeWorkerCore& core, MicroBatchId id, size_t prompt,
                                               int first_head) const {
  const MicroBatch& batch = micro_batches_[id.value()];
  const PromptScratch::Part& part = *core.PromptsOf(id)[prompt].part;
  kernels::KvBlockTable table;
  table.head_step = static_cast<int64_t>(part.segments.size());
  table.blocks = batch.blocks.data() + batch.first[prompt] + first_head * table.head_step;
  table.first_segment = static_cast<int32_t>(part.begin / kSegmentTokens);
  table.segments = static_cast<int32_t>(part.segments.size());
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
    append.blocks = TableOf(core, id, p, 0);
    batch.appends.push_back(append);
  }
}

// Earlier tokens, as they came with the op's answers.
void PromptAttention::FillGathered(const ComputeWorkerCore& core, MicroBatchId id, int op) {
  const LayerGroup group = table_.op_group[op];
  const std::vector<PromptEntry>& prompts = core.PromptsOf(id);
  for (const WorkerPart& part : core.PartsOf(id)) {
    size_t p = 0;  // both lists are by entry
    for (const proto::ShardStep& item : part.layouts[group.value()].items) {
      if (item.gather_count == 0) continue;
      while (prompts[p].entry != item.entry) ++p;
      kernels::KvAppendItem append;
      append.k = part.partial.data() + item.gather_key_offset;
      append.v = part.partial.data() + item.gather_value_offset;
      append.rows = static_cast<int>(item.gather_count);
      append.kv_heads = item.kv_heads.size();
      append.first_position = item.gather_first;
      append.blocks = TableOf(core, id, p, item.kv_heads.begin);
      micro_batches_[id.value()].appends.push_back(append);
    }
  }
}

// Tokens of the ranks before this one, as they sent them. A rank's step has one prompt.
void PromptAttention::FillFromRanks(const ComputeWorkerCore& core, MicroBatchId id, int op) {
  if (!core.PromptsOf(id)[0].from_ranks) return;
  const proto::SoftmaxSpec& spec = table_.softmax(table_.op_group[op]);
  const int64_t key_bytes = int64_t{spec.kv_heads} * spec.key_dim * static_cast<int64_t>(SizeOf(spec.kv));
  for (int rank = 0; rank < core.PlanOf(id).part.rank; ++rank) {
    const proto::TokenRange tokens = core.RowsFrom(id, op, rank);
    if (tokens.begin >= tokens.end) continue;
    kernels::KvAppendItem append;
    const std::byte* const rows = core.RankRows(id, op, rank).data();
    append.k = rows;
    append.v = rows + (tokens.end - tokens.begin) * key_bytes;
    append.rows = static_cast<int>(tokens.end - tokens.begin);
    append.kv_heads = spec.kv_heads;
    append.first_position = tokens.begin;
    append.blocks = TableOf(core, id, 0, 0);
    micro_batches_[id.value()].appends.push_back(append);
  }
}

void PromptAttention::FillItems(const ComputeWorkerCore& core, MicroBatchId id, int op, StepWire& wire) {
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
    item.token_end = local.ctx_len + local.q_len;
    item.blocks = TableOf(core, id, p, local.kv_heads.begin);
    if (local.begin == 0) {
      item.o = wire.joined(local.entry, group);
      if (const float* sinks = table_.sinks(op)) item.sinks = sinks + local.kv_heads.begin * spec.group_size();
    } else {
      const int64_t nodes = kernels::PartialNodes(local.ctx_len, local.q_len, spec.window, local.begin, item.token_end);
      local.o = item.partial_o = partial;
      local.ml = item.partial_ml = partial + nodes * query_heads * spec.value_dim;
      partial += nodes * query_heads * (spec.value_dim + 2);
    }
    batch.items.push_back(item);
  }
}

absl::Status PromptAttention::Run(const ComputeWorkerCore& core, MicroBatchId id, int op, StepWire& wire,
                                  kernels::Stream& stream) {
  MicroBatch& batch = micro_batches_[id.value()];
  FillBlocks(core, id, op);
  FillAppends(core, id, op, wire);
  FillGathered(core, id, op);
  FillFromRanks(core, id, op);
  FillItems(core, id, op, wire);
  const kernels::OpContext context = kernels::ContextOf(stream);
  const kernels::AttentionShape shape = ShapeOf(table_.op_group[op]);
  DT_RETURN_IF_ERROR(kernels::KvAppend(context, shape.layout(), batch.appends));
  DT_ASSIGN_OR_RETURN(kernels::PagedAttention attention,
                      kernels::PagedAttention::Begin(context, shape, batch.items,
                                                     {batch.scratch->data(), batch.scratch->size_bytes()}));
  attention.AttendRest();
  attention.Finish();
  stream.Synchronize();
  return absl::OkStatus();
}

}  // namespace dovetail::compute
