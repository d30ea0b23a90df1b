#include "compute_worker/cuda/cuda_switch_attention.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "compute_worker/cuda/step_memory.h"
#include "proto/head_switch.h"

namespace dovetail::compute {

using kernels::cuda::CudaAttention;
using kernels::cuda::CudaAttentionItem;
using kernels::cuda::CudaAttentionRun;
using kernels::cuda::CudaAttentionShape;
using kernels::cuda::CudaKvLayout;
using kernels::cuda::CudaStream;
using kernels::cuda::DeviceAttentionItem;
using proto::HeadRange;
using proto::SoftmaxSpec;
using proto::StepPlan;

namespace {

Position BeginOf(const StepPlan& plan) { return proto::SwitchBegin(plan.part.base); }

int64_t SegmentsOf(const StepPlan& plan) {
  return (plan.part.end - BeginOf(plan) + kSegmentTokens - 1) / kSegmentTokens;
}

HeadRange OwnHeads(const StepPlan& plan, const SoftmaxSpec& spec) {
  return proto::HeadsOfRank(spec.kv_heads, plan.part.rank, plan.part.ranks);
}

// Earlier tokens of the segment in which the group begins, which rank 0 gathers.
int64_t EarlierOf(const StepPlan& plan) { return plan.part.rank == 0 ? plan.part.base - BeginOf(plan) : 0; }

// Of K and V that a rank sends.
Position FirstOf(const StepPlan& plan, int rank) {
  return rank == 0 ? BeginOf(plan) : proto::TokensOfRank(plan, rank).begin;
}

int64_t OutputBytes(const StepPlan& plan, const SoftmaxSpec& spec, int rank) {
  return proto::HeadOutputBytes(spec, proto::TokensOfRank(plan, rank), BeginOf(plan), OwnHeads(plan, spec).size(),
                                proto::HeadPartials::kOfTokens);
}

// From one rank to another.
int64_t HeadsBytes(const StepPlan& plan, const SoftmaxSpec& spec, int from, int to) {
  return proto::HeadRowsBytes(spec, proto::TokensOfRank(plan, from), FirstOf(plan, from),
                              proto::HeadsOfRank(spec.kv_heads, to, plan.part.ranks).size());
}

// Elements of a token and KV head.
int64_t QueryOf(const SoftmaxSpec& spec) { return int64_t{spec.group_size()} * spec.key_dim; }
int64_t OutputOf(const SoftmaxSpec& spec) { return int64_t{spec.group_size()} * spec.value_dim; }

// Rows of all of a step's heads, or of those that a rank has or gives, of so many bytes a head.
CudaStream::ConstRows RowsFrom(const std::byte* rows, int64_t all_heads, int64_t first_head, int64_t head_bytes) {
  return {rows + first_head * head_bytes, static_cast<size_t>(all_heads * head_bytes)};
}
CudaStream::Rows RowsTo(std::byte* rows, int64_t all_heads, int64_t first_head, int64_t head_bytes) {
  return {rows + first_head * head_bytes, static_cast<size_t>(all_heads * head_bytes)};
}

}  // namespace

CudaSwitchAttention::CudaSwitchAttention(kernels::cuda::CudaDevice& device, const proto::AttentionTable& table,
                                         size_t block_bytes, int micro_batches, CudaRankRows& rank_rows)
    : device_(device), table_(table), block_bytes_(block_bytes), rank_rows_(rank_rows), batches_(micro_batches) {
  for (Batch& batch : batches_) {
    batch.groups.resize(table.group_count());
    for (Group& group : batch.groups) group.tables = std::make_unique<kernels::cuda::StagedUpload>(device);
  }
}

absl::Status CudaSwitchAttention::Prepare(const ComputeWorkerCore& core, CudaBatch& batch) {
  Batch& own = batches_[batch.id.value()];
  const StepPlan& plan = core.PlanOf(batch.id);
  int64_t blocks = 0, gathered = 0, made = 0, crosses = 0;
  for (int g = 0; g < table_.group_count(); ++g) {
    const SoftmaxSpec& spec = table_.views[g];
    if (spec.linear()) continue;
    blocks = std::max(blocks, SegmentsOf(plan) * OwnHeads(plan, spec).size());
    gathered = std::max(
        gathered, KeyBytes(spec, EarlierOf(plan), spec.kv_heads) + ValueBytes(spec, EarlierOf(plan), spec.kv_heads));
    for (int rank = 0; rank < plan.part.ranks; ++rank) {
      if (rank == plan.part.rank ? BeginOf(plan) > 0 : !batch.ranks_reach)
        made = std::max(made, OutputBytes(plan, spec, rank));
      crosses = std::max({crosses, HeadsBytes(plan, spec, plan.part.rank, rank), OutputBytes(plan, spec, rank),
                          HeadsBytes(plan, spec, rank, plan.part.rank)});
    }
  }
  for (kernels::cuda::CudaEvent* const event : {&own.ready, &own.made_copied})
    if (event->handle() == nullptr) {
      DT_ASSIGN_OR_RETURN(*event, device_.CreateEvent());
    }
  own.gathered_op = -1;
  own.outputs = {};
  // What it gives of one op, and heads of the next; what the others give, heads of an op to come among it.
  const auto others = static_cast<size_t>(plan.part.ranks - 1);
  DT_RETURN_IF_ERROR(
      rank_rows_.Reserve(static_cast<size_t>(crosses), 2 * others, 2 * others, batch.ranks_reach, batch.stream()));
  DT_RETURN_IF_ERROR(GrowZeroed(device_, batch.stream(),
                                CudaKvLayout::kArenaLead + static_cast<size_t>(blocks) * block_bytes_, own.blocks));
  DT_RETURN_IF_ERROR(GrowZeroed(device_, batch.stream(), static_cast<size_t>(gathered), own.gathered));
  return GrowZeroed(device_, batch.stream(), static_cast<size_t>(made), own.made);
}

// Tokens from SwitchBegin to the group's end, and the blocks: by KV head, then by segment.
absl::Status CudaSwitchAttention::UploadTables(const ComputeWorkerCore& core, LayerGroup group, CudaBatch& batch) {
  Batch& step = batches_[batch.id.value()];
  Group& own = step.groups[group.value()];
  const StepPlan& plan = core.PlanOf(batch.id);
  const int64_t heads = OwnHeads(plan, table_.softmax(group)).size();
  const int64_t rows = plan.part.end - BeginOf(plan), pointers = SegmentsOf(plan) * heads;
  kernels::cuda::UploadLayout at;
  const size_t item_at = at.Add<DeviceAttentionItem>(1);
  const size_t positions_at = at.Add<int32_t>(rows), row_items_at = at.Add<int32_t>(rows);
  const size_t pointers_at = at.Add<const std::byte*>(pointers);
  DT_ASSIGN_OR_RETURN(std::byte* const host, own.tables->Begin(batch.stream(), at.bytes()));
  std::byte* const there = own.tables->device();
  auto* const pointer = reinterpret_cast<const std::byte**>(host + pointers_at);
  for (int64_t block = 0; block < pointers; ++block)
    pointer[block] = step.blocks->data() + CudaKvLayout::kArenaLead + static_cast<size_t>(block) * block_bytes_;
  own.block_pointers = reinterpret_cast<const std::byte* const*>(there + pointers_at);
  auto& item = *reinterpret_cast<DeviceAttentionItem*>(host + item_at);
  item = DeviceAttentionItem{};
  item.blocks = own.block_pointers;
  item.head_step = SegmentsOf(plan);
  item.first_segment = static_cast<int32_t>(BeginOf(plan) / kSegmentTokens);
  item.kv_heads = static_cast<int32_t>(heads);
  auto* const position = reinterpret_cast<int32_t*>(host + positions_at);
  std::iota(position, position + rows, static_cast<int32_t>(BeginOf(plan)));
  std::fill_n(reinterpret_cast<int32_t*>(host + row_items_at), rows, 0);
  own.into.items = reinterpret_cast<const DeviceAttentionItem*>(there + item_at);
  own.into.positions = reinterpret_cast<const int32_t*>(there + positions_at);
  own.into.row_items = reinterpret_cast<const int32_t*>(there + row_items_at);
  return own.tables->Send(batch.stream());
}

// A plan for each rank's tokens. Those of other ranks have q and o with the heads of this one, our own with all.
absl::Status CudaSwitchAttention::PlanRanks(const ComputeWorkerCore& core, LayerGroup group, const Step& step,
                                            CudaBatch& batch) {
  Batch& of = batches_[batch.id.value()];
  Group& own = of.groups[group.value()];
  const StepPlan& plan = core.PlanOf(batch.id);
  const SoftmaxSpec& spec = table_.softmax(group);
  const HeadRange heads = OwnHeads(plan, spec);
  CudaAttentionShape shape = step.shape;
  shape.arena = of.blocks->data();
  shape.arena_bytes = of.blocks->size_bytes();
  for (int rank = 0; rank < plan.part.ranks; ++rank) {
    const proto::TokenRange tokens = proto::TokensOfRank(plan, rank);
    const bool mine = rank == plan.part.rank;
    CudaAttentionItem item;
    item.q_rows = static_cast<int32_t>(tokens.end - tokens.begin);
    item.kv_heads = heads.size();
    item.first_position = tokens.begin;
    item.token_begin = BeginOf(plan);
    item.token_end = tokens.end;
    item.q_row_step = (mine ? spec.kv_heads : heads.size()) * QueryOf(spec);
    item.q_offset = mine ? heads.begin * QueryOf(spec) : 0;
    item.blocks = own.block_pointers;
    item.head_step = SegmentsOf(plan);
    item.first_segment = static_cast<int32_t>(BeginOf(plan) / kSegmentTokens);
    if (BeginOf(plan) > 0) {
      item.partial = item.node_a_row = true;
    } else {
      item.o_row_step = (mine ? spec.kv_heads : heads.size()) * OutputOf(spec);
      item.o_offset = mine ? heads.begin * OutputOf(spec) : 0;
      if (step.sinks != nullptr) item.sinks = step.sinks + heads.begin * spec.group_size();
    }
    const auto r = static_cast<size_t>(rank);
    if (own.attention.size() <= r) own.attention.resize(r + 1);
    if (own.attention[r] == nullptr) own.attention[r] = std::make_unique<CudaAttention>(device_);
    DT_RETURN_IF_ERROR(own.attention[r]->Plan(batch.stream(), shape, {&item, 1}));
  }
  return absl::OkStatus();
}

absl::Status CudaSwitchAttention::Plan(const ComputeWorkerCore& core, LayerGroup group, const Step& step,
                                       CudaBatch& batch) {
  batches_[batch.id.value()].groups[group.value()].sinks_of = -1;
  DT_RETURN_IF_ERROR(UploadTables(core, group, batch));
  return PlanRanks(core, group, step, batch);
}

// Once an op, when its answers are there. Tokens that no row sees are not gathered: their rows stay as they are.
absl::Status CudaSwitchAttention::Gather(const ComputeWorkerCore& core, int op, CudaBatch& batch) {
  Batch& own = batches_[batch.id.value()];
  const StepPlan& plan = core.PlanOf(batch.id);
  const LayerGroup group = table_.op_group[op];
  const SoftmaxSpec& spec = table_.softmax(group);
  const int64_t earlier = EarlierOf(plan);
  if (earlier == 0 || std::exchange(own.gathered_op, op) == op) return absl::OkStatus();
  const int64_t key = spec.key_dim * kRowElement, value = spec.value_dim * kRowElement;
  std::byte* const keys = own.gathered->data();
  std::byte* const values = keys + KeyBytes(spec, earlier, spec.kv_heads);
  for (const WorkerPart& part : core.PartsOf(batch.id))
    for (const proto::ShardStep& item : part.layouts[group.value()].items) {
      if (item.gather_count == 0) continue;
      const int64_t row = item.gather_first - BeginOf(plan), heads = item.kv_heads.size();
      const auto copy = [&](std::byte* to, int64_t offset, int64_t head_bytes) {
        return batch.stream().CopyRows(
            RowsTo(to + row * spec.kv_heads * head_bytes, spec.kv_heads, item.kv_heads.begin, head_bytes),
            RowsFrom(part.partial.data() + offset, heads, 0, head_bytes), static_cast<size_t>(heads * head_bytes),
            static_cast<size_t>(item.gather_count));
      };
      DT_RETURN_IF_ERROR(copy(keys, item.gather_key_offset, key));
      DT_RETURN_IF_ERROR(copy(values, item.gather_value_offset, value));
    }
  return absl::OkStatus();
}

absl::StatusOr<transport::LentBytes> CudaSwitchAttention::GiveHeads(const ComputeWorkerCore& core, int op,
                                                                    const HeadRange& heads, CudaStream& copies,
                                                                    CudaBatch& batch) {
  Batch& own = batches_[batch.id.value()];
  const StepPlan& plan = core.PlanOf(batch.id);
  const SoftmaxSpec& spec = table_.softmax(table_.op_group[op]);
  const int64_t earlier = EarlierOf(plan), all = spec.kv_heads, count = heads.size();
  DT_RETURN_IF_ERROR(Gather(core, op, batch));
  CudaStream& stream = batch.ranks_reach ? batch.stream() : copies;
  if (&stream == &copies) {
    DT_RETURN_IF_ERROR(batch.stream().Record(own.ready));
    DT_RETURN_IF_ERROR(copies.Wait(own.ready));
  }
  const int64_t bytes = proto::HeadRowsBytes(spec, proto::TokensOfRank(plan, plan.part.rank),
                                             FirstOf(plan, plan.part.rank), heads.size());
  DT_ASSIGN_OR_RETURN(CudaRankRows::Given given,
                      rank_rows_.Give(static_cast<size_t>(bytes), batch.ranks_reach, stream));
  std::byte* to = given.memory;
  const auto copy = [&](const std::byte* from, int64_t head_elements, int64_t rows) {
    const int64_t head_bytes = head_elements * kRowElement;
    std::byte* const here = std::exchange(to, to + rows * count * head_bytes);
    if (rows == 0) return absl::OkStatus();
    return stream.CopyRows(RowsTo(here, count, 0, head_bytes), RowsFrom(from, all, heads.begin, head_bytes),
                           static_cast<size_t>(count * head_bytes), static_cast<size_t>(rows));
  };
  const std::byte* const gathered = own.gathered == nullptr ? nullptr : own.gathered->data();
  const std::byte* const keys = batch.key_value->data();
  DT_RETURN_IF_ERROR(copy(batch.query->data(), QueryOf(spec), batch.rows));
  DT_RETURN_IF_ERROR(copy(gathered, spec.key_dim, earlier));
  DT_RETURN_IF_ERROR(copy(keys, spec.key_dim, batch.rows));
  DT_RETURN_IF_ERROR(copy(gathered + KeyBytes(spec, earlier, spec.kv_heads), spec.value_dim, earlier));
  DT_RETURN_IF_ERROR(copy(keys + KeyBytes(spec, batch.rows, spec.kv_heads), spec.value_dim, batch.rows));
  DT_RETURN_IF_ERROR(rank_rows_.Fills(given.rows, stream));
  return std::move(given.rows);
}

absl::Status CudaSwitchAttention::Append(const ComputeWorkerCore& core, const AttendHeads& attend, CudaBatch& batch) {
  const Batch& step = batches_[batch.id.value()];
  const StepPlan& plan = core.PlanOf(batch.id);
  const LayerGroup group = table_.op_group[attend.op];
  const SoftmaxSpec& spec = table_.softmax(group);
  const RowTables& into = step.groups[group.value()].into;
  const HeadRange heads = OwnHeads(plan, spec);
  const proto::TokenRange tokens = proto::TokensOfRank(plan, attend.rank);
  const int64_t key = int64_t{heads.size()} * spec.key_dim, value = int64_t{heads.size()} * spec.value_dim;
  if (attend.rank != plan.part.rank) {
    const Position first = FirstOf(plan, attend.rank);
    const std::byte* const k = core.RankHeads(batch.id, attend.op, attend.rank).data() +
                               (tokens.end - tokens.begin) * heads.size() * QueryOf(spec) * kRowElement;
    const int64_t rows = tokens.end - first;
    return AppendRows(spec, into, {k, k + rows * key * kRowElement, key, value, rows}, heads.size(),
                      first - BeginOf(plan), batch.stream());
  }
  const auto append = [&](const std::byte* k, int64_t rows, int64_t table_row) {
    const std::byte* const v = k + KeyBytes(spec, rows, spec.kv_heads);
    return AppendRows(spec, into,
                      {k + heads.begin * spec.key_dim * kRowElement, v + heads.begin * spec.value_dim * kRowElement,
                       int64_t{spec.kv_heads} * spec.key_dim, int64_t{spec.kv_heads} * spec.value_dim, rows},
                      heads.size(), table_row, batch.stream());
  };
  if (EarlierOf(plan) > 0) {
    DT_RETURN_IF_ERROR(Gather(core, attend.op, batch));
    DT_RETURN_IF_ERROR(append(step.gathered->data(), EarlierOf(plan), /*table_row=*/0));
  }
  return append(batch.key_value->data(), batch.rows, tokens.begin - BeginOf(plan));
}

// Where attention writes what another rank is to get.
absl::StatusOr<std::byte*> CudaSwitchAttention::OutputsOf(size_t bytes, CudaStream& copies, CudaBatch& batch) {
  Batch& own = batches_[batch.id.value()];
  CudaStream& stream = batch.ranks_reach ? batch.stream() : copies;
  DT_ASSIGN_OR_RETURN(CudaRankRows::Given given, rank_rows_.Give(bytes, batch.ranks_reach, stream));
  own.outputs = std::move(given.rows);
  if (batch.ranks_reach) return given.memory;
  DT_RETURN_IF_ERROR(batch.stream().Wait(own.made_copied));
  return own.made->data();
}

// Behind it.
absl::Status CudaSwitchAttention::GiveOutputs(size_t bytes, CudaStream& copies, CudaBatch& batch) {
  Batch& own = batches_[batch.id.value()];
  if (batch.ranks_reach) return rank_rows_.Fills(own.outputs, batch.stream());
  DT_RETURN_IF_ERROR(batch.stream().Record(own.ready));
  DT_RETURN_IF_ERROR(copies.Wait(own.ready));
  DT_RETURN_IF_ERROR(copies.Copy(const_cast<std::byte*>(own.outputs.data()), own.made->data(), bytes));
  DT_RETURN_IF_ERROR(copies.Record(own.made_copied));
  return rank_rows_.Fills(own.outputs, copies);
}

absl::Status CudaSwitchAttention::Attend(const ComputeWorkerCore& core, const AttendHeads& attend, const Step& step,
                                         CudaStream& copies, CudaBatch& batch) {
  Batch& of = batches_[batch.id.value()];
  const StepPlan& plan = core.PlanOf(batch.id);
  const LayerGroup group = table_.op_group[attend.op];
  const SoftmaxSpec& spec = table_.softmax(group);
  Group& own = of.groups[group.value()];
  const bool mine = attend.rank == plan.part.rank, whole = BeginOf(plan) == 0;
  if (whole && step.sinks != nullptr && std::exchange(own.sinks_of, attend.op) != attend.op) {
    const UploadsInOrder in_order(batch.stream());
    DT_RETURN_IF_ERROR(PlanRanks(core, group, step, batch));
  }
  DT_RETURN_IF_ERROR(Append(core, attend, batch));
  const auto bytes = static_cast<size_t>(OutputBytes(plan, spec, attend.rank));
  std::byte* out = step.o;
  if (!mine) {
    DT_ASSIGN_OR_RETURN(out, OutputsOf(bytes, copies, batch));
  } else if (!whole) {
    DT_RETURN_IF_ERROR(batch.stream().Wait(of.made_copied));
    out = of.made->data();
  }
  const std::span<const std::byte> sent =
      mine ? std::span<const std::byte>() : core.RankHeads(batch.id, attend.op, attend.rank);
  CudaAttentionRun run;
  run.q = mine ? batch.query->data() : sent.data();
  if (whole) {
    run.o = out;
  } else {
    const proto::TokenRange tokens = proto::TokensOfRank(plan, attend.rank);
    run.partial_o = reinterpret_cast<float*>(out);
    run.partial_ml = run.partial_o + (tokens.end - tokens.begin) * OwnHeads(plan, spec).size() * OutputOf(spec);
  }
  CudaAttentionShape shape = step.shape;
  shape.arena = of.blocks->data();
  shape.arena_bytes = of.blocks->size_bytes();
  DT_RETURN_IF_ERROR(own.attention[static_cast<size_t>(attend.rank)]->Run(batch.stream(), shape, run));
  if (mine)
    return whole ? absl::OkStatus() : PlaceRows(core, group, attend.rank, {of.made->data(), bytes}, step, batch);
  DT_RETURN_IF_ERROR(rank_rows_.Reads(sent, batch.stream()));
  return GiveOutputs(bytes, copies, batch);
}

absl::Status CudaSwitchAttention::Place(const ComputeWorkerCore& core, const PlaceRankOutputs& place, const Step& step,
                                        CudaBatch& batch) {
  DT_RETURN_IF_ERROR(PlaceRows(core, table_.op_group[place.op], place.rank, place.outputs.bytes, step, batch));
  return rank_rows_.Reads(place.outputs.bytes, batch.stream());
}

// The step's tokens have partial results for each head range of their placement, which may be cut otherwise.
absl::Status CudaSwitchAttention::PlaceRows(const ComputeWorkerCore& core, LayerGroup group, int rank,
                                            std::span<const std::byte> outputs, const Step& step,
                                            CudaBatch& batch) const {
  const StepPlan& plan = core.PlanOf(batch.id);
  const SoftmaxSpec& spec = table_.softmax(group);
  const HeadRange heads = proto::HeadsOfRank(spec.kv_heads, rank, plan.part.ranks);
  const auto copy = [&](std::byte* to, const HeadRange& of, const std::byte* from, int64_t head_bytes) {
    const HeadRange both{std::max(heads.begin, of.begin), std::min(heads.end, of.end)};
    if (both.begin >= both.end) return absl::OkStatus();
    return batch.stream().CopyRows(RowsTo(to, of.size(), both.begin - of.begin, head_bytes),
                                   RowsFrom(from, heads.size(), both.begin - heads.begin, head_bytes),
                                   static_cast<size_t>(both.size() * head_bytes), static_cast<size_t>(batch.rows));
  };
  if (BeginOf(plan) == 0) return copy(step.o, {0, spec.kv_heads}, outputs.data(), OutputOf(spec) * kRowElement);
  constexpr int64_t kFloat = sizeof(float);
  const int64_t o_bytes = OutputOf(spec) * kFloat, ml_bytes = 2 * spec.group_size() * kFloat;
  const std::byte* const ml = outputs.data() + batch.rows * heads.size() * o_bytes;
  auto* const partials = reinterpret_cast<std::byte*>(step.partials);
  for (size_t l = 0; l < step.locals.size(); ++l) {
    const HeadRange& of = step.locals[l].kv_heads;
    const int64_t node = step.join->first_node(l) * of.size();
    DT_RETURN_IF_ERROR(copy(partials + node * o_bytes, of, outputs.data(), o_bytes));
    DT_RETURN_IF_ERROR(copy(partials + step.join->ml_at() * kFloat + node * ml_bytes, of, ml, ml_bytes));
  }
  return absl::OkStatus();
}

}  // namespace dovetail::compute
