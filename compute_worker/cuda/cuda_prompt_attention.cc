#include "compute_worker/cuda/cuda_prompt_attention.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "compute_worker/cpu/prompt_attention.h"
#include "compute_worker/cuda/step_memory.h"

namespace dovetail::compute {

using kernels::cuda::CudaAttentionItem;
using kernels::cuda::CudaAttentionShape;
using kernels::cuda::CudaKvLayout;
using kernels::cuda::CudaStream;
using kernels::cuda::DeviceAttentionItem;

namespace {

constexpr int64_t kRowsBeyond = 8;  // that what reads o may take
constexpr int kMostHeadDim = 256;

}  // namespace

bool CudaPromptAttention::Takes(const proto::AttentionTable& table) {
  bool softmax = false;
  for (const proto::SoftmaxSpec& spec : table.views) {
    if (spec.linear()) continue;
    softmax = true;
    for (const int dim : {spec.key_dim, spec.value_dim})
      if (dim % 8 != 0 || dim > kMostHeadDim) return false;
  }
  return softmax;
}

CudaPromptAttention::CudaPromptAttention(kernels::cuda::CudaDevice& device, const proto::AttentionTable& table,
                                         int micro_batches, CudaRankRows* rank_rows)
    : device_(device),
      table_(table),
      block_bytes_(PromptAttention::BlockBytes(table)),
      rank_rows_(rank_rows),
      steps_(micro_batches),
      kept_tables_(device) {
  for (Step& step : steps_) {
    step.groups.resize(table.group_count());
    for (GroupStep& group : step.groups) {
      group.attention = std::make_unique<kernels::cuda::CudaAttention>(device);
      group.tables = std::make_unique<kernels::cuda::StagedUpload>(device);
      group.join = std::make_unique<CudaPartialJoin>(device);
    }
  }
}

absl::StatusOr<std::unique_ptr<CudaPromptAttention>> CudaPromptAttention::Create(kernels::cuda::CudaDevice& device,
                                                                                 CudaStream& stream,
                                                                                 const proto::AttentionTable& table,
                                                                                 const ComputeWorkerOptions& options,
                                                                                 CudaRankRows* rank_rows) {
  std::unique_ptr<CudaPromptAttention> made(new CudaPromptAttention(device, table, options.micro_batches, rank_rows));
  made->most_rows_ = options.max_step_tokens;
  if (rank_rows != nullptr) {
    made->ring_ =
        std::make_unique<CudaRingAttention>(device, table, made->block_bytes_, options.micro_batches, *rank_rows);
    made->switch_ =
        std::make_unique<CudaSwitchAttention>(device, table, made->block_bytes_, options.micro_batches, *rank_rows);
  }
  const size_t bytes = CudaKvLayout::kArenaLead + size_t{options.prompt_blocks} * made->block_bytes_;
  auto arena = device.Allocate(bytes);
  if (!arena.ok())
    return Annotate(arena.status(), absl::StrCat("a prompt scratch of ", bytes >> 20, " MiB (--prompt-scratch)"));
  made->arena_ = *std::move(arena);
  // Rows of a block that hold no token may be read. They have no weight, but they must be numbers.
  DT_RETURN_IF_ERROR(stream.Fill(made->arena_->data(), 0, bytes));
  made->sinks_.resize(table.op_count());
  for (int op = 0; op < table.op_count(); ++op) {
    if (table.sinks(op) == nullptr) continue;
    const size_t sink_bytes = table.constants[op].sinks.size() * sizeof(float);
    DT_ASSIGN_OR_RETURN(made->sinks_[op], device.Allocate(sink_bytes));
    DT_RETURN_IF_ERROR(stream.Copy(made->sinks_[op]->data(), table.sinks(op), sink_bytes));
  }
  DT_RETURN_IF_ERROR(stream.SynchronizeStatus());
  return made;
}

CudaAttentionShape CudaPromptAttention::ShapeOf(LayerGroup group) const {
  const proto::SoftmaxSpec& spec = table_.softmax(group);
  CudaAttentionShape shape;
  shape.group = spec.group_size();
  shape.window = spec.window;
  shape.layout = BlockLayoutOf(spec);
  shape.q_type = shape.o_type = RowTypeOf(spec);
  shape.scale = spec.scale;
  shape.arena = arena_->data();
  shape.arena_bytes = arena_->size_bytes();
  return shape;
}

std::vector<int> CudaPromptAttention::OpsOf(LayerGroup group) const {
  std::vector<int> ops;
  for (int op = 0; op < table_.op_count(); ++op)
    if (table_.op_group[op] == group) ops.push_back(op);
  return ops;
}

std::byte* CudaPromptAttention::BlockAt(uint32_t block) const {
  return arena_->data() + CudaKvLayout::kArenaLead + size_t{block} * block_bytes_;
}

void CudaPromptAttention::FindOffsets(const ComputeWorkerCore& core, MicroBatchId id, LayerGroup group,
                                      GroupStep& step) const {
  const std::vector<int> ops = OpsOf(group);
  const PromptScratch& scratch = core.scratch();
  const int heads = table_.softmax(group).kv_heads;
  step.base_op = ops.front();
  step.op_offset.assign(ops.size(), 0);
  step.regular = std::none_of(ops.begin(), ops.end(), [&](int op) { return sinks_[op] != nullptr; });
  bool first = true;
  for (const PromptEntry& prompt : core.PromptsOf(id))
    for (const PromptScratch::Segment& segment : prompt.part->segments)
      for (int head = 0; step.regular && head < heads; ++head) {
        const int64_t base = scratch.BlockOf(segment, step.base_op, head);
        for (size_t i = 0; i < ops.size(); ++i) {
          const int64_t offset =
              (int64_t{scratch.BlockOf(segment, ops[i], head)} - base) * static_cast<int64_t>(block_bytes_);
          if (first) step.op_offset[i] = offset;
          if (step.op_offset[i] != offset) step.regular = false;
        }
        first = false;
      }
  if (!step.regular) return;
  // Offsets are counted from the lowest of them.
  const auto lowest = std::min_element(step.op_offset.begin(), step.op_offset.end());
  step.base_op = ops[lowest - step.op_offset.begin()];
  const int64_t least = *lowest;
  for (int64_t& offset : step.op_offset) offset -= least;
}

// Bytes of staging memory.
int64_t CudaPromptAttention::FindGathers(const ComputeWorkerCore& core, MicroBatchId id, LayerGroup group,
                                         GroupStep& step) const {
  const proto::SoftmaxSpec& spec = table_.softmax(group);
  const std::vector<WorkerPart>& parts = core.PartsOf(id);
  int64_t bytes = 0, table_row = 0;
  for (const PromptEntry& prompt : core.PromptsOf(id))
    table_row += static_cast<int64_t>(core.PlanOf(id).entries[prompt.entry].tokens.size());
  step.gathers.clear();
  if (core.PromptsOf(id)[0].ring) return 0;  // CudaRingAttention's
  for (size_t p = 0; p < parts.size(); ++p) {
    const auto& items = parts[p].layouts[group.value()].items;
    for (size_t i = 0; i < items.size(); ++i) {
      if (items[i].gather_count == 0 || parts[p].layouts[group.value()].pieces > 0) continue;
      const int64_t rows = items[i].gather_count;
      step.gathers.push_back({static_cast<int>(p), static_cast<int>(i), rows, table_row, bytes});
      table_row += rows;
      bytes += KeyBytes(spec, rows, items[i].kv_heads.size()) + ValueBytes(spec, rows, items[i].kv_heads.size());
    }
  }
  return bytes;
}

// Behind the prompts' and the gathered rows. A rank's step has one prompt.
void CudaPromptAttention::FindRankRows(const ComputeWorkerCore& core, MicroBatchId id, LayerGroup group,
                                       GroupStep& step) const {
  step.from_ranks.clear();
  if (!core.PromptsOf(id)[0].from_ranks || core.PromptsOf(id)[0].ring) return;
  int64_t table_row = static_cast<int64_t>(core.PlanOf(id).entries[0].tokens.size());
  for (const GatherRun& run : step.gathers) table_row += run.rows;
  for (int rank = 0; rank < core.PlanOf(id).part.rank; ++rank) {
    const proto::TokenRange tokens = core.RowsFrom(id, OpsOf(group).front(), rank);
    if (tokens.begin >= tokens.end) continue;
    step.from_ranks.push_back({rank, tokens, table_row});
    table_row += tokens.end - tokens.begin;
  }
}

absl::Status CudaPromptAttention::AwaitFailed(const ComputeWorkerCore& core, const CudaBatch& batch) {
  for (size_t i = 0; i < steps_.size(); ++i) {
    Step& step = steps_[i];
    const MicroBatchId id(static_cast<uint16_t>(i));
    const bool runs = id != batch.id && core.running(id) && core.PlanOf(id).step == step.number;
    if (step.runs_in == nullptr || runs) continue;
    if (step.runs_in != &batch.stream()) DT_RETURN_IF_ERROR(step.runs_in->SynchronizeStatus());
    step.runs_in = nullptr;
  }
  return absl::OkStatus();
}

absl::Status CudaPromptAttention::Prepare(const ComputeWorkerCore& core, CudaBatch& batch) {
  const UploadsInOrder in_order(batch.stream());
  Step& step = steps_[batch.id.value()];
  DT_RETURN_IF_ERROR(AwaitFailed(core, batch));
  if (kept_.handle() != nullptr) DT_RETURN_IF_ERROR(batch.stream().Wait(kept_));
  step.number = core.PlanOf(batch.id).step;
  step.runs_in = &batch.stream();
  step.row_begin.clear();
  int64_t rows = 0, width = 0;
  size_t partials = 0;
  for (const proto::StepEntry& entry : core.PlanOf(batch.id).entries) {
    step.row_begin.push_back(rows);
    rows += static_cast<int64_t>(entry.tokens.size());
  }
  const PromptEntry& first = core.PromptsOf(batch.id)[0];
  if (first.ring) DT_RETURN_IF_ERROR(ring_->Prepare(core, batch));
  if (first.switches && switch_ == nullptr) return Internal("a head switch, on a GPU that gets nothing of other ranks");
  if (first.switches) DT_RETURN_IF_ERROR(switch_->Prepare(core, batch));
  for (int g = 0; g < table_.group_count(); ++g) {
    const LayerGroup group(static_cast<uint16_t>(g));
    const proto::SoftmaxSpec& spec = table_.softmax(group);
    if (spec.linear()) continue;
    GroupStep& own = step.groups[g];
    StepWire::FindLocals(core, batch.id, group, own.locals);
    DT_RETURN_IF_ERROR(own.join->Plan(core, batch.id, group, own.locals, step.row_begin, batch.stream()));
    if (!first.switches) DT_RETURN_IF_ERROR(PlanPrompts(core, batch, group));
    if (first.ring) DT_RETURN_IF_ERROR(ring_->Plan(core, group, ShapeOf(group), own.locals, *own.join, batch));
    if (!own.join->empty()) partials = std::max(partials, own.join->bytes());
    width = std::max(width, int64_t{spec.query_heads} * spec.value_dim);
  }
  DT_RETURN_IF_ERROR(
      GrowMemory(device_, batch.stream(), (most_rows_ + kRowsBeyond) * width * kRowElement, step.attended));
  DT_RETURN_IF_ERROR(GrowMemory(device_, batch.stream(), partials, step.partials));
  for (int op = 0; op < table_.op_count() && first.switches; ++op) {
    const LayerGroup group = table_.op_group[op];
    if (table_.op_index_in_group[op] > 0 || table_.linear(group) != nullptr) continue;
    DT_RETURN_IF_ERROR(switch_->Plan(core, group, SwitchOf(group, op, batch), batch));
  }
  return absl::OkStatus();
}

// Of prompts whose blocks are those of the scratch.
absl::Status CudaPromptAttention::PlanPrompts(const ComputeWorkerCore& core, CudaBatch& batch, LayerGroup group) {
  Step& step = steps_[batch.id.value()];
  GroupStep& own = step.groups[group.value()];
  FindOffsets(core, batch.id, group, own);
  DT_RETURN_IF_ERROR(GrowMemory(device_, batch.stream(), FindGathers(core, batch.id, group, own), step.gathered));
  FindRankRows(core, batch.id, group, own);
  return PlanGroup(core, batch, group, own.base_op);
}

// Rows of prompts that follow each other in the step go in one launch.
void CudaPromptAttention::FillRows(const ComputeWorkerCore& core, MicroBatchId id, LayerGroup group, GroupStep& step,
                                   int32_t* positions, int32_t* row_items) const {
  const std::vector<PromptEntry>& prompts = core.PromptsOf(id);
  step.appends.clear();
  int64_t at = 0;
  for (size_t p = 0; p < prompts.size(); ++p) {
    const proto::StepEntry& entry = core.PlanOf(id).entries[prompts[p].entry];
    const int64_t row = steps_[id.value()].row_begin[prompts[p].entry];
    if (step.appends.empty() || step.appends.back().first_row + step.appends.back().rows != row)
      step.appends.push_back({0, row, at});
    for (size_t i = 0; i < entry.tokens.size(); ++i, ++at) {
      positions[at] = static_cast<int32_t>(entry.ctx_len + static_cast<Position>(i));
      row_items[at] = static_cast<int32_t>(p);
    }
    step.appends.back().rows += static_cast<int64_t>(entry.tokens.size());
  }
  for (size_t i = 0; i < step.gathers.size(); ++i) {
    const GatherRun& run = step.gathers[i];
    const proto::ShardStep& item = core.PartsOf(id)[run.part].layouts[group.value()].items[run.item];
    for (int64_t r = 0; r < run.rows; ++r, ++at) {
      positions[at] = static_cast<int32_t>(item.gather_first + r);
      row_items[at] = static_cast<int32_t>(prompts.size() + i);
    }
  }
  for (const RankRun& run : step.from_ranks)
    for (Position position = run.tokens.begin; position < run.tokens.end; ++position, ++at) {
      positions[at] = static_cast<int32_t>(position);
      row_items[at] = 0;
    }
}

std::vector<CudaAttentionItem> CudaPromptAttention::ItemsOf(const ComputeWorkerCore& core, MicroBatchId id,
                                                            LayerGroup group, int op,
                                                            const std::vector<const std::byte* const*>& blocks) const {
  const proto::SoftmaxSpec& spec = table_.softmax(group);
  const Step& step = steps_[id.value()];
  const GroupStep& own = step.groups[group.value()];
  const std::vector<PromptEntry>& prompts = core.PromptsOf(id);
  std::vector<CudaAttentionItem> items;
  size_t p = 0;  // both lists are by entry
  for (size_t l = 0; l < own.locals.size(); ++l) {
    const StepWire::LocalPartial& local = own.locals[l];
    if (local.rank != StepWire::LocalPartial::kOwn) continue;  // CudaRingAttention's
    while (prompts[p].entry != local.entry) ++p;
    const int64_t row = step.row_begin[local.entry], head = int64_t{local.kv_heads.begin} * spec.group_size();
    CudaAttentionItem& item = items.emplace_back();
    item.q_rows = local.q_len;
    item.kv_heads = local.kv_heads.size();
    item.first_position = local.ctx_len;
    item.token_begin = local.begin;
    item.token_end = local.ctx_len + local.q_len;
    item.q_row_step = int64_t{spec.query_heads} * spec.key_dim;
    item.q_offset = row * item.q_row_step + head * spec.key_dim;
    item.head_step = static_cast<int64_t>(prompts[p].part->segments.size());
    item.blocks = blocks[p] + local.kv_heads.begin * item.head_step;
    item.first_segment = static_cast<int32_t>(local.begin / kSegmentTokens);
    if (local.whole()) {
      item.o_row_step = int64_t{spec.query_heads} * spec.value_dim;
      item.o_offset = row * item.o_row_step + head * spec.value_dim;
      if (sinks_[op] != nullptr) item.sinks = reinterpret_cast<const float*>(sinks_[op]->data()) + head;
      continue;
    }
    item.partial = item.node_a_row = true;
    item.first_node = static_cast<int32_t>(own.join->first_node(l));
  }
  return items;
}

absl::Status CudaPromptAttention::PlanGroup(const ComputeWorkerCore& core, CudaBatch& batch, LayerGroup group, int op) {
  GroupStep& step = steps_[batch.id.value()].groups[group.value()];
  const std::vector<PromptEntry>& prompts = core.PromptsOf(batch.id);
  const int heads = table_.softmax(group).kv_heads;
  size_t pointers = 0, rows = 0;
  for (const PromptEntry& prompt : prompts) {
    pointers += prompt.part->segments.size() * heads;
    rows += core.PlanOf(batch.id).entries[prompt.entry].tokens.size();
  }
  for (const GatherRun& run : step.gathers) rows += run.rows;
  for (const RankRun& run : step.from_ranks) rows += run.tokens.end - run.tokens.begin;
  kernels::cuda::UploadLayout at;
  const size_t items_at = at.Add<DeviceAttentionItem>(prompts.size() + step.gathers.size());
  const size_t positions_at = at.Add<int32_t>(rows), row_items_at = at.Add<int32_t>(rows);
  const size_t pointers_at = at.Add<const std::byte*>(pointers);
  DT_ASSIGN_OR_RETURN(std::byte* const host, step.tables->Begin(batch.stream(), at.bytes()));
  std::byte* const there = step.tables->device();
  auto* pointer = reinterpret_cast<const std::byte**>(host + pointers_at);
  auto* pointer_there = reinterpret_cast<const std::byte* const*>(there + pointers_at);
  auto* items = reinterpret_cast<DeviceAttentionItem*>(host + items_at);
  std::vector<const std::byte* const*> blocks;
  for (size_t p = 0; p < prompts.size(); ++p) {
    const PromptScratch::Part& part = *prompts[p].part;
    for (int head = 0; head < heads; ++head)
      for (const PromptScratch::Segment& segment : part.segments)
        *pointer++ = BlockAt(core.scratch().BlockOf(segment, op, head));
    items[p] = DeviceAttentionItem{};
    items[p].blocks = pointer_there;
    items[p].head_step = static_cast<int64_t>(part.segments.size());
    items[p].first_segment = static_cast<int32_t>(part.begin / kSegmentTokens);
    items[p].kv_heads = heads;
    blocks.push_back(pointer_there);
    pointer_there += part.segments.size() * heads;
  }
  for (size_t i = 0; i < step.gathers.size(); ++i) {
    const GatherRun& run = step.gathers[i];
    const proto::ShardStep& item = core.PartsOf(batch.id)[run.part].layouts[group.value()].items[run.item];
    const auto of = std::find_if(prompts.begin(), prompts.end(),
                                 [&](const PromptEntry& prompt) { return prompt.entry == item.entry; });
    DeviceAttentionItem& to = items[prompts.size() + i];
    to = items[of - prompts.begin()];
    to.blocks += item.kv_heads.begin * to.head_step;
    to.kv_heads = item.kv_heads.size();
  }
  FillRows(core, batch.id, group, step, reinterpret_cast<int32_t*>(host + positions_at),
           reinterpret_cast<int32_t*>(host + row_items_at));
  step.into.items = reinterpret_cast<const DeviceAttentionItem*>(there + items_at);
  step.into.positions = reinterpret_cast<const int32_t*>(there + positions_at);
  step.into.row_items = reinterpret_cast<const int32_t*>(there + row_items_at);
  step.base_op = op;
  DT_RETURN_IF_ERROR(step.tables->Send(batch.stream()));
  return step.attention->Plan(batch.stream(), ShapeOf(group), ItemsOf(core, batch.id, group, op, blocks));
}

absl::Status CudaPromptAttention::AppendGathered(const ComputeWorkerCore& core, int op, int64_t kv_offset,
                                                 CudaBatch& batch) {
  const LayerGroup group = table_.op_group[op];
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
    DT_RETURN_IF_ERROR(
        AppendRows(spec, own.into, k, k + keys, heads, run.rows, run.table_row, kv_offset, batch.stream()));
  }
  return absl::OkStatus();
}

absl::Status CudaPromptAttention::AppendFromRanks(const ComputeWorkerCore& core, int op, int64_t kv_offset,
                                                  CudaBatch& batch) {
  const LayerGroup group = table_.op_group[op];
  const proto::SoftmaxSpec& spec = table_.softmax(group);
  const GroupStep& own = steps_[batch.id.value()].groups[group.value()];
  for (const RankRun& run : own.from_ranks) {
    const std::span<const std::byte> sent = core.RankRows(batch.id, op, run.rank);
    const int64_t rows = run.tokens.end - run.tokens.begin, keys = KeyBytes(spec, rows, spec.kv_heads);
    if (static_cast<int64_t>(sent.size()) != keys + ValueBytes(spec, rows, spec.kv_heads))
      return Internal("attention op ", op, ": rank ", run.rank, " sent ", sent.size(), " bytes of ", rows, " tokens");
    DT_RETURN_IF_ERROR(AppendRows(spec, own.into, sent.data(), sent.data() + keys, spec.kv_heads, rows, run.table_row,
                                  kv_offset, batch.stream()));
    DT_RETURN_IF_ERROR(rank_rows_->Reads(sent, batch.stream()));
  }
  return absl::OkStatus();
}

absl::Status CudaPromptAttention::Keep(const ComputeWorkerCore& core, const KeepRankRows& keep,
                                       const PromptScratch::Part& part, CudaStream& stream) {
  const proto::HeadRange heads{0, table_.softmax(table_.op_group[keep.op]).kv_heads};
  const proto::TokenRange tokens = core.RowsFrom(keep.micro_batch, keep.op, keep.rank);
  return Put(core, {part, keep.op, heads, tokens, keep.rows.bytes}, stream);
}

absl::Status CudaPromptAttention::Keep(const ComputeWorkerCore& core, const KeepEarlierRows& keep, CudaStream& stream) {
  const LayerGroup group = table_.op_group[keep.op];
  const WorkerPart& from = core.PartsOf(keep.micro_batch)[keep.part];
  const proto::StepLayout::Piece piece = from.layouts[group.value()].PieceAt(keep.piece, table_.softmax(group));
  for (const PromptEntry& prompt : core.PromptsOf(keep.micro_batch)) {
    if (prompt.entry != piece.item->entry) continue;
    return Put(core, {*prompt.part, keep.op, piece.item->kv_heads, piece.tokens, keep.rows.bytes}, stream);
  }
  return Internal("attention op ", keep.op, ": rows came for entry ", piece.item->entry, ", which is no prompt");
}

// They have tables of their own: the step's may be of another op, and it may have ended.
absl::Status CudaPromptAttention::Put(const ComputeWorkerCore& core, const SentRows& sent, CudaStream& stream) {
  const UploadsInOrder in_order(stream);
  const proto::SoftmaxSpec& spec = table_.softmax(table_.op_group[sent.op]);
  const PromptScratch::Part& part = sent.part;
  const int64_t rows = sent.tokens.end - sent.tokens.begin;
  const auto first = static_cast<size_t>((sent.tokens.begin - part.begin) / kSegmentTokens);
  const auto end = static_cast<size_t>((sent.tokens.end - part.begin + kSegmentTokens - 1) / kSegmentTokens);
  kernels::cuda::UploadLayout at;
  const size_t item_at = at.Add<DeviceAttentionItem>(1), positions_at = at.Add<int32_t>(rows);
  const size_t row_items_at = at.Add<int32_t>(rows),
               pointers_at = at.Add<const std::byte*>((end - first) * sent.heads.size());
  DT_ASSIGN_OR_RETURN(std::byte* const host, kept_tables_.Begin(stream, at.bytes()));
  std::byte* const there = kept_tables_.device();
  auto* pointer = reinterpret_cast<const std::byte**>(host + pointers_at);
  for (int head = sent.heads.begin; head < sent.heads.end; ++head)
    for (size_t s = first; s < end; ++s) *pointer++ = BlockAt(core.scratch().BlockOf(part.segments[s], sent.op, head));
  auto& item = *reinterpret_cast<DeviceAttentionItem*>(host + item_at);
  item = DeviceAttentionItem{};
  item.blocks = reinterpret_cast<const std::byte* const*>(there + pointers_at);
  item.head_step = static_cast<int64_t>(end - first);
  item.first_segment = static_cast<int32_t>(sent.tokens.begin / kSegmentTokens);
  item.kv_heads = sent.heads.size();
  auto* const positions = reinterpret_cast<int32_t*>(host + positions_at);
  std::iota(positions, positions + rows, static_cast<int32_t>(sent.tokens.begin));
  std::fill_n(reinterpret_cast<int32_t*>(host + row_items_at), rows, 0);
  DT_RETURN_IF_ERROR(kept_tables_.Send(stream));
  RowTables to;
  to.items = reinterpret_cast<const DeviceAttentionItem*>(there + item_at);
  to.positions = reinterpret_cast<const int32_t*>(there + positions_at);
  to.row_items = reinterpret_cast<const int32_t*>(there + row_items_at);
  const std::byte* const k = sent.bytes.data();
  DT_RETURN_IF_ERROR(AppendRows(spec, to, k, k + KeyBytes(spec, rows, sent.heads.size()), sent.heads.size(), rows,
                                /*table_row=*/0, /*kv_offset=*/0, stream));
  if (kept_.handle() == nullptr) {
    DT_ASSIGN_OR_RETURN(kept_, device_.CreateEvent());
  }
  DT_RETURN_IF_ERROR(stream.Record(kept_));
  return rank_rows_->Reads(sent.bytes, stream);
}

absl::Status CudaPromptAttention::Append(LayerGroup group, int64_t kv_offset, CudaBatch& batch) {
  const proto::SoftmaxSpec& spec = table_.softmax(group);
  const GroupStep& own = steps_[batch.id.value()].groups[group.value()];
  const std::byte* const keys = batch.key_value->data();
  const std::byte* const values = keys + KeyBytes(spec, batch.rows, spec.kv_heads);
  for (const AppendRun& run : own.appends)
    DT_RETURN_IF_ERROR(AppendRows(spec, own.into, keys + KeyBytes(spec, run.first_row, spec.kv_heads),
                                  values + ValueBytes(spec, run.first_row, spec.kv_heads), spec.kv_heads, run.rows,
                                  run.table_row, kv_offset, batch.stream()));
  return absl::OkStatus();
}

absl::Status CudaPromptAttention::Attend(const ComputeWorkerCore& core, int op, CudaBatch& batch) {
  const LayerGroup group = table_.op_group[op];
  Step& step = steps_[batch.id.value()];
  GroupStep& own = step.groups[group.value()];
  if (!own.regular && own.base_op != op) {
    const UploadsInOrder in_order(batch.stream());
    DT_RETURN_IF_ERROR(PlanGroup(core, batch, group, op));
  }
  const int64_t kv_offset = own.regular ? own.op_offset[table_.op_index_in_group[op]] : 0;
  DT_RETURN_IF_ERROR(AppendGathered(core, op, kv_offset, batch));
  DT_RETURN_IF_ERROR(AppendFromRanks(core, op, kv_offset, batch));
  DT_RETURN_IF_ERROR(Append(group, kv_offset, batch));
  kernels::cuda::CudaAttentionRun run = RunOf(step, own, batch);
  run.kv_offset_bytes = static_cast<size_t>(kv_offset);
  return own.attention->Run(batch.stream(), ShapeOf(group), run);
}

kernels::cuda::CudaAttentionRun CudaPromptAttention::RunOf(const Step& step, const GroupStep& own,
                                                           const CudaBatch& batch) {
  kernels::cuda::CudaAttentionRun run;
  run.q = batch.query->data();
  run.o = step.attended->data();
  if (!own.join->empty()) {
    run.partial_o = reinterpret_cast<float*>(step.partials->data());
    run.partial_ml = run.partial_o + own.join->ml_at();
  }
  return run;
}

absl::Status CudaPromptAttention::Attend(const ComputeWorkerCore& core, const AttendShard& shard, CudaBatch& batch) {
  const LayerGroup group = table_.op_group[shard.op];
  const Step& step = steps_[batch.id.value()];
  if (ring_ == nullptr) return Internal("attention op ", shard.op, ": this GPU has no rows of other ranks");
  return ring_->Attend(core, shard, ShapeOf(group), RunOf(step, step.groups[group.value()], batch), batch);
}

CudaSwitchAttention::Step CudaPromptAttention::SwitchOf(LayerGroup group, int op, const CudaBatch& batch) const {
  const Step& step = steps_[batch.id.value()];
  const GroupStep& own = step.groups[group.value()];
  CudaSwitchAttention::Step where;
  where.shape = ShapeOf(group);
  if (sinks_[op] != nullptr) where.sinks = reinterpret_cast<const float*>(sinks_[op]->data());
  where.o = step.attended->data();
  where.locals = own.locals;
  where.join = own.join.get();
  if (!own.join->empty()) where.partials = reinterpret_cast<float*>(step.partials->data());
  return where;
}

namespace {

absl::Status NoSwitch(int op) {
  return Internal("attention op ", op, ": a head switch, on a GPU that gets nothing of other ranks");
}

}  // namespace

absl::StatusOr<transport::LentBytes> CudaPromptAttention::GiveHeads(const ComputeWorkerCore& core, int op,
                                                                    const proto::HeadRange& heads, CudaStream& copies,
                                                                    CudaBatch& batch) {
  if (switch_ == nullptr) return NoSwitch(op);
  return switch_->GiveHeads(core, op, heads, copies, batch);
}

absl::Status CudaPromptAttention::Attend(const ComputeWorkerCore& core, const AttendHeads& attend, CudaStream& copies,
                                         CudaBatch& batch) {
  if (switch_ == nullptr) return NoSwitch(attend.op);
  return switch_->Attend(core, attend, SwitchOf(table_.op_group[attend.op], attend.op, batch), copies, batch);
}

absl::StatusOr<transport::LentBytes> CudaPromptAttention::TakeOutputs(const CudaBatch& batch) {
  if (switch_ == nullptr) return NoSwitch(-1);
  return switch_->TakeOutputs(batch.id);
}

absl::Status CudaPromptAttention::Place(const ComputeWorkerCore& core, const PlaceRankOutputs& place,
                                        CudaBatch& batch) {
  if (switch_ == nullptr) return NoSwitch(place.op);
  return switch_->Place(core, place, SwitchOf(table_.op_group[place.op], place.op, batch), batch);
}

absl::Status CudaPromptAttention::Join(const std::vector<WorkerPart>& parts, int op, CudaBatch& batch) {
  const LayerGroup group = table_.op_group[op];
  const Step& step = steps_[batch.id.value()];
  const GroupStep& own = step.groups[group.value()];
  if (own.join->empty()) return absl::OkStatus();
  const float* const sinks = sinks_[op] != nullptr ? reinterpret_cast<const float*>(sinks_[op]->data()) : nullptr;
  return own.join->Run(parts, table_.softmax(group), group, reinterpret_cast<float*>(step.partials->data()),
                       step.attended->data(), sinks, batch.stream());
}

}  // namespace dovetail::compute
