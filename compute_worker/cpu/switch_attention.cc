#include "compute_worker/cpu/switch_attention.h"

#include <algorithm>
#include <cstring>

#include "compute_worker/cpu/local_partials.h"
#include "compute_worker/cpu/prompt_attention.h"
#include "kernels/op_context.h"
#include "proto/head_switch.h"

namespace dovetail::compute {
namespace {

int64_t WireBytes(const proto::SoftmaxSpec& spec) { return static_cast<int64_t>(SizeOf(spec.kv)); }

proto::HeadRange OwnHeads(const proto::StepPlan& plan, const proto::SoftmaxSpec& spec) {
  return proto::HeadsOfRank(spec.kv_heads, plan.part.rank, plan.part.ranks);
}

int64_t SegmentsOf(const proto::StepPlan& plan) {
  const Position begin = proto::SwitchBegin(plan.part.base);
  return (plan.part.end - begin + kSegmentTokens - 1) / kSegmentTokens;
}

// Rows of some heads of a tensor [rows, all heads, size].
struct Rows {
  const std::byte* data = nullptr;
  int64_t step = 0;  // elements from row to row
};

Rows RowsAt(const std::byte* tensor, int64_t all_heads, int64_t first_head, int64_t size, int64_t element) {
  return {tensor + first_head * size * element, all_heads * size};
}

// q of one rank's tokens, and K and V of those from `first` on, for some heads.
struct Tensors {
  Rows q, k, v;
  Position first = 0;
};

Tensors OwnTensors(const proto::StepPlan& plan, const proto::SoftmaxSpec& spec, int op, const proto::HeadRange& heads,
                   StepWire& wire) {
  const int64_t element = WireBytes(spec);
  return {.q = RowsAt(wire.query(), spec.query_heads, heads.begin * spec.group_size(), spec.key_dim, element),
          .k = RowsAt(wire.key(op), spec.kv_heads, heads.begin, spec.key_dim, element),
          .v = RowsAt(wire.value(op), spec.kv_heads, heads.begin, spec.value_dim, element),
          .first = proto::TokensOfRank(plan, plan.part.rank).begin};
}

Tensors TensorsOf(const ComputeWorkerCore& core, const AttendHeads& attend, const proto::HeadRange& heads,
                  StepWire& wire) {
  const proto::StepPlan& plan = core.PlanOf(attend.micro_batch);
  const proto::SoftmaxSpec& spec = core.table().softmax(core.table().op_group[attend.op]);
  if (attend.rank == plan.part.rank) return OwnTensors(plan, spec, attend.op, heads, wire);
  const proto::TokenRange tokens = proto::TokensOfRank(plan, attend.rank);
  const int64_t element = WireBytes(spec), count = heads.size();
  Tensors tensors;
  tensors.first = attend.rank == 0 ? proto::SwitchBegin(plan.part.base) : tokens.begin;
  const std::byte* const q = core.RankHeads(attend.micro_batch, attend.op, attend.rank).data();
  const std::byte* const k = q + (tokens.end - tokens.begin) * count * spec.group_size() * spec.key_dim * element;
  const std::byte* const v = k + (tokens.end - tensors.first) * count * spec.key_dim * element;
  tensors.q = RowsAt(q, count * spec.group_size(), 0, spec.key_dim, element);
  tensors.k = RowsAt(k, count, 0, spec.key_dim, element);
  tensors.v = RowsAt(v, count, 0, spec.value_dim, element);
  return tensors;
}

// Calls visit(heads, K, V, item) for what was gathered of some of these heads.
template <typename Visit>
void ForEachGathered(const ComputeWorkerCore& core, MicroBatchId id, int op, const proto::HeadRange& heads,
                     Visit&& visit) {
  const LayerGroup group = core.table().op_group[op];
  const proto::SoftmaxSpec& spec = core.table().softmax(group);
  for (const WorkerPart& part : core.PartsOf(id))
    for (const proto::ShardStep& item : part.layouts[group.value()].items) {
      const proto::HeadRange both{std::max(heads.begin, item.kv_heads.begin), std::min(heads.end, item.kv_heads.end)};
      if (item.gather_count == 0 || both.begin >= both.end) continue;
      const int64_t first = both.begin - item.kv_heads.begin, all = item.kv_heads.size();
      const std::byte* const answer = part.partial.data();
      visit(both, RowsAt(answer + item.gather_key_offset, all, first, spec.key_dim, WireBytes(spec)),
            RowsAt(answer + item.gather_value_offset, all, first, spec.value_dim, WireBytes(spec)), item);
    }
}

// `rows` rows of `bytes` bytes to memory where one begins every `step` bytes.
void CopyRows(const Rows& from, int64_t element, int64_t rows, int64_t bytes, std::byte* to, int64_t step) {
  for (int64_t row = 0; row < rows; ++row)
    std::memcpy(to + row * step, from.data + row * from.step * element, static_cast<size_t>(bytes));
}

}  // namespace

SwitchAttention::SwitchAttention(kernels::Device& device, const proto::AttentionTable& table, int micro_batches,
                                 KvStorage storage)
    : device_(device),
      table_(table),
      storage_(storage),
      block_bytes_(PromptAttention::BlockBytes(table, storage)),
      micro_batches_(micro_batches) {}

kernels::AttentionShape SwitchAttention::ShapeOf(LayerGroup group) const {
  const proto::SoftmaxSpec& spec = table_.softmax(group);
  return kernels::AttentionShape{spec.group_size(), spec.key_dim, spec.value_dim, spec.scale,
                                 spec.window,       spec.kv,      storage_};
}

absl::Status SwitchAttention::Grow(std::unique_ptr<kernels::Buffer>& buffer, size_t bytes) {
  if (buffer != nullptr && buffer->size_bytes() >= bytes) return absl::OkStatus();
  buffer.reset();
  DT_ASSIGN_OR_RETURN(buffer, device_.Allocate(bytes + bytes / 4));
  return absl::OkStatus();
}

absl::Status SwitchAttention::Prepare(const ComputeWorkerCore& core, MicroBatchId id, int threads, StepWire& wire) {
  const std::vector<PromptEntry>& prompts = core.PromptsOf(id);
  if (prompts.empty() || !prompts[0].switches) return absl::OkStatus();
  const proto::StepPlan& plan = core.PlanOf(id);
  MicroBatch& batch = micro_batches_[id.value()];
  size_t blocks = 0, scratch = 0, partial = 0;
  for (int g = 0; g < table_.group_count(); ++g) {
    const LayerGroup group(static_cast<uint16_t>(g));
    const proto::SoftmaxSpec& spec = table_.softmax(group);
    if (spec.linear()) continue;
    const int heads = OwnHeads(plan, spec).size();
    blocks = std::max(blocks, static_cast<size_t>(SegmentsOf(plan) * heads));
    for (int rank = 0; rank < plan.part.ranks; ++rank) {
      const proto::TokenRange tokens = proto::TokensOfRank(plan, rank);
      const kernels::AttentionLimits limits{.items = 1,
                                            .rows = tokens.end - tokens.begin,
                                            .kv_heads = heads,
                                            .tokens = tokens.end - proto::SwitchBegin(plan.part.base),
                                            .threads = threads};
      scratch = std::max(scratch, kernels::PagedAttentionScratchBytes(ShapeOf(group), limits));
    }
    const auto floats = static_cast<size_t>(PartialFloats(wire.locals(group), spec));
    partial = std::max(partial, floats * sizeof(float));
  }
  batch.table.reserve(blocks);
  batch.appends.reserve(1 + proto::kMaxShards);
  DT_RETURN_IF_ERROR(Grow(batch.blocks, blocks * block_bytes_));
  DT_RETURN_IF_ERROR(Grow(batch.scratch, scratch));
  return Grow(batch.partial, partial);
}

kernels::KvBlockTable SwitchAttention::FillTable(const ComputeWorkerCore& core, MicroBatchId id,
                                                 const proto::HeadRange& heads) {
  MicroBatch& batch = micro_batches_[id.value()];
  const proto::StepPlan& plan = core.PlanOf(id);
  const int64_t segments = SegmentsOf(plan);
  batch.table.clear();
  for (int64_t block = 0; block < segments * heads.size(); ++block)
    batch.table.push_back(batch.blocks->data() + static_cast<size_t>(block) * block_bytes_);
  kernels::KvBlockTable table;
  table.head_step = segments;
  table.blocks = batch.table.data();
  table.first_segment = static_cast<int32_t>(proto::SwitchBegin(plan.part.base) / kSegmentTokens);
  table.segments = static_cast<int32_t>(segments);
  return table;
}

std::vector<std::byte> SwitchAttention::Pack(const ComputeWorkerCore& core, MicroBatchId id, int op,
                                             const proto::HeadRange& heads, StepWire& wire) const {
  const proto::StepPlan& plan = core.PlanOf(id);
  const proto::SoftmaxSpec& spec = table_.softmax(table_.op_group[op]);
  const proto::TokenRange tokens = proto::TokensOfRank(plan, plan.part.rank);
  const Position first = plan.part.rank == 0 ? proto::SwitchBegin(plan.part.base) : tokens.begin;
  const Tensors own = OwnTensors(plan, spec, op, heads, wire);
  const int64_t element = WireBytes(spec), rows = tokens.end - tokens.begin, earlier = tokens.begin - first;
  const int64_t key = heads.size() * spec.key_dim * element, value = heads.size() * spec.value_dim * element;
  std::vector<std::byte> packed(static_cast<size_t>(proto::HeadRowsBytes(spec, tokens, first, heads.size())));
  std::byte* const q = packed.data();
  std::byte* const k = q + rows * key * spec.group_size();
  std::byte* const v = k + (rows + earlier) * key;
  CopyRows(own.q, element, rows, key * spec.group_size(), q, key * spec.group_size());
  CopyRows(own.k, element, rows, key, k + earlier * key, key);
  CopyRows(own.v, element, rows, value, v + earlier * value, value);
  ForEachGathered(
      core, id, op, heads,
      [&](const proto::HeadRange& some, const Rows& keys, const Rows& values, const proto::ShardStep& item) {
        const int64_t row = item.gather_first - first, head = some.begin - heads.begin;
        const int64_t key_head = spec.key_dim * element, value_head = spec.value_dim * element;
        CopyRows(keys, element, item.gather_count, some.size() * key_head, k + row * key + head * key_head, key);
        CopyRows(values, element, item.gather_count, some.size() * value_head, v + row * value + head * value_head,
                 value);
      });
  return packed;
}

// With rank 0's own, earlier tokens of its segment, which came from the attention workers.
void SwitchAttention::FillAppends(const ComputeWorkerCore& core, const AttendHeads& attend,
                                  const proto::HeadRange& heads, const kernels::KvBlockTable& table, StepWire& wire) {
  const proto::StepPlan& plan = core.PlanOf(attend.micro_batch);
  const Tensors tensors = TensorsOf(core, attend, heads, wire);
  std::vector<kernels::KvAppendItem>& appends = micro_batches_[attend.micro_batch.value()].appends;
  appends.assign(1, {.k = tensors.k.data,
                     .v = tensors.v.data,
                     .k_row_step = tensors.k.step,
                     .v_row_step = tensors.v.step,
                     .rows = static_cast<int>(proto::TokensOfRank(plan, attend.rank).end - tensors.first),
                     .kv_heads = heads.size(),
                     .first_position = tensors.first,
                     .blocks = table});
  if (attend.rank > 0 || plan.part.rank > 0) return;
  ForEachGathered(
      core, attend.micro_batch, attend.op, heads,
      [&](const proto::HeadRange& some, const Rows& keys, const Rows& values, const proto::ShardStep& item) {
        kernels::KvAppendItem append{.k = keys.data,
                                     .v = values.data,
                                     .k_row_step = keys.step,
                                     .v_row_step = values.step,
                                     .rows = static_cast<int>(item.gather_count),
                                     .kv_heads = some.size(),
                                     .first_position = item.gather_first,
                                     .blocks = table};
        append.blocks.blocks += (some.begin - heads.begin) * table.head_step;
        appends.push_back(append);
      });
}

// Its outputs lie in `outputs`, which have room.
kernels::AttentionItem SwitchAttention::ItemOf(const ComputeWorkerCore& core, const AttendHeads& attend,
                                               const proto::HeadRange& heads, StepWire& wire) const {
  const proto::StepPlan& plan = core.PlanOf(attend.micro_batch);
  const proto::TokenRange tokens = proto::TokensOfRank(plan, attend.rank);
  const Tensors tensors = TensorsOf(core, attend, heads, wire);
  kernels::AttentionItem item;
  item.q = tensors.q.data;
  item.q_row_step = tensors.q.step;
  item.q_rows = static_cast<int>(tokens.end - tokens.begin);
  item.kv_heads = heads.size();
  item.first_position = tokens.begin;
  item.token_begin = proto::SwitchBegin(plan.part.base);
  item.token_end = tokens.end;
  return item;
}

absl::Status SwitchAttention::Attend(const ComputeWorkerCore& core, const AttendHeads& attend, StepWire& wire,
                                     kernels::Stream& stream) {
  const MicroBatchId id = attend.micro_batch;
  MicroBatch& batch = micro_batches_[id.value()];
  const LayerGroup group = table_.op_group[attend.op];
  const proto::SoftmaxSpec& spec = table_.softmax(group);
  const proto::StepPlan& plan = core.PlanOf(id);
  const proto::HeadRange heads = OwnHeads(plan, spec);
  const kernels::KvBlockTable table = FillTable(core, id, heads);
  FillAppends(core, attend, heads, table, wire);
  kernels::AttentionItem item = ItemOf(core, attend, heads, wire);
  item.blocks = table;
  batch.outputs.resize(static_cast<size_t>(proto::HeadOutputBytes(
      spec, proto::TokensOfRank(plan, attend.rank), static_cast<Position>(item.token_begin), heads.size())));
  if (item.token_begin == 0) {
    item.o = batch.outputs.data();
    if (const float* sinks = table_.sinks(attend.op)) item.sinks = sinks + heads.begin * spec.group_size();
  } else {
    const int64_t nodes =
        kernels::PartialNodes(item.first_position, item.q_rows, spec.window, item.token_begin, item.token_end);
    item.partial_o = reinterpret_cast<float*>(batch.outputs.data());
    item.partial_ml = item.partial_o + nodes * heads.size() * spec.group_size() * spec.value_dim;
  }
  const kernels::OpContext context = kernels::ContextOf(stream);
  const kernels::AttentionShape shape = ShapeOf(group);
  DT_RETURN_IF_ERROR(kernels::KvAppend(context, shape.layout(), batch.appends));
  DT_ASSIGN_OR_RETURN(
      kernels::PagedAttention attention,
      kernels::PagedAttention::Begin(context, shape, {&item, 1}, {batch.scratch->data(), batch.scratch->size_bytes()}));
  attention.AttendRest();
  attention.Finish();
  stream.Synchronize();
  if (attend.rank == plan.part.rank) Place(core, {id, attend.op, attend.rank, TakeOutputs(id)}, wire);
  return absl::OkStatus();
}

void SwitchAttention::Place(const ComputeWorkerCore& core, const PlaceRankOutputs& place, StepWire& wire) {
  const LayerGroup group = table_.op_group[place.op];
  const proto::StepPlan& plan = core.PlanOf(place.micro_batch);
  const proto::HeadRange heads = proto::HeadsOfRank(table_.softmax(group).kv_heads, place.rank, plan.part.ranks);
  if (proto::SwitchBegin(plan.part.base) == 0)
    PlaceWhole(group, heads, place.outputs.bytes, wire);
  else
    PlacePartials(micro_batches_[place.micro_batch.value()], group, heads, place.outputs.bytes, wire);
}

void SwitchAttention::PlaceWhole(LayerGroup group, const proto::HeadRange& heads, std::span<const std::byte> outputs,
                                 StepWire& wire) const {
  const proto::SoftmaxSpec& spec = table_.softmax(group);
  const int64_t head = int64_t{spec.group_size()} * spec.value_dim;  // elements, of one KV head
  const int64_t element = WireBytes(spec), bytes = heads.size() * head * element;
  CopyRows({outputs.data(), heads.size() * head}, element, wire.rows(), bytes,
           wire.joined(0, group) + heads.begin * head * element, spec.kv_heads * head * element);
}

// The step's tokens have a local partial for each head range of their placement, which may be cut otherwise.
void SwitchAttention::PlacePartials(MicroBatch& batch, LayerGroup group, const proto::HeadRange& heads,
                                    std::span<const std::byte> outputs, StepWire& wire) const {
  const proto::SoftmaxSpec& spec = table_.softmax(group);
  auto* const memory = reinterpret_cast<float*>(batch.partial->data());
  PlaceLocals(wire.locals(group), spec, memory, [&](const StepWire::LocalPartial& local, float* o, float* ml) {
    CopyPartials(local, spec, heads, outputs.data(), o, ml);
  });
}

}  // namespace dovetail::compute
