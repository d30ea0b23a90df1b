#include "attention_worker/cuda/cuda_attention_executor.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "attention_worker/cpu/attention_executor.h"
#include "attention_worker/cuda/cuda_attention_crossings.h"
#include "attention_worker/cuda/gather_rows.h"
#include "base/check.h"
#include "exchange/divided_payloads.h"
#include "kernels/cuda/rows/row_ops.h"

namespace dovetail::attention {

using kernels::cuda::CudaAttentionItem;
using kernels::cuda::CudaAttentionShape;
using kernels::cuda::CudaDevice;
using kernels::cuda::CudaStream;
using kernels::cuda::DeviceAttentionItem;
using kernels::cuda::WireType;

namespace {

constexpr int64_t kRowsBeyond = 8;

absl::Status CheckTable(const proto::AttentionTable& table) {
  for (int g = 0; g < table.group_count(); ++g) {
    const LayerGroup group(static_cast<uint16_t>(g));
    const proto::SoftmaxSpec& spec = table.softmax(group);
    if (table.linear(group) != nullptr) continue;  // CudaStateExecutor says what it runs
    if (spec.kv == DType::kF32)
      return Unimplemented("K and V in float32: GPUs keep them in bfloat16 or float16 (--kv-cache-dtype)");
    for (const int dim : {spec.key_dim, spec.value_dim})
      if (dim % 8 != 0) return Unimplemented("heads of ", dim, " dimensions; multiples of 8 run on a GPU");
  }
  return absl::OkStatus();
}

}  // namespace

CudaAttentionExecutor::CudaAttentionExecutor(CudaDevice& device, AttentionWorkerCore& core,
                                             kernels::cuda::CudaStream& stream, int micro_batches,
                                             exchange::SharedGpu* shared_gpu, KvStorage storage)
    : device_(device),
      core_(core),
      stream_(stream),
      block_bytes_(BlockBytes(core.table(), storage)),
      storage_(storage),
      micro_batches_(micro_batches + proto::kMoveSlots) {
  crossings_.push_back(std::make_unique<HostCrossing>(*this));
  crossings_.push_back(shared_gpu != nullptr ? std::make_unique<OneGpuCrossing>(*this, *shared_gpu) : nullptr);
  crossings_.push_back(std::make_unique<PeerCrossing>(*this, micro_batches));
}

CudaAttentionExecutor::~CudaAttentionExecutor() = default;

CudaAttentionExecutor::Crossing& CudaAttentionExecutor::CrossingOf(const exchange::Seam& seam) const {
  Crossing* const crossing = crossings_[seam.index()].get();
  DT_CHECK(crossing != nullptr, "a step on one GPU, of a worker that shares none");
  return *crossing;
}

bool CudaAttentionExecutor::OnDevice(const MicroBatch& batch) { return batch.crossing->on_device(); }

absl::StatusOr<std::unique_ptr<AttentionBackend>> CudaAttentionExecutor::Create(CudaDevice& device,
                                                                                AttentionWorkerCore& core,
                                                                                uint32_t kv_blocks, int micro_batches,
                                                                                exchange::SharedGpu* shared_gpu,
                                                                                KvStorage storage, bool deterministic) {
  DT_RETURN_IF_ERROR(CheckTable(core.table()));
  DT_RETURN_IF_ERROR(CheckKvStorage(core.table(), storage, device.name()));
  DT_ASSIGN_OR_RETURN(kernels::cuda::CudaStream* const stream, device.WorkerStream());
  std::unique_ptr<CudaAttentionExecutor> executor(
      new CudaAttentionExecutor(device, core, *stream, micro_batches, shared_gpu, storage));
  DT_ASSIGN_OR_RETURN(executor->arena_, device.Allocate(kLead + size_t{kv_blocks} * executor->block_bytes_));
  DT_RETURN_IF_ERROR(stream->Fill(executor->arena_->data(), 0, executor->arena_->size_bytes()));
  DT_RETURN_IF_ERROR(executor->UploadSinks());
  if (shared_gpu != nullptr && !core.table().has_linear()) {
    DT_ASSIGN_OR_RETURN(executor->hosts_stream_, device.CreateCudaStream());
    DT_ASSIGN_OR_RETURN(executor->before_hosts_, device.CreateEvent());
  }
  if (core.table().has_linear()) {
    CudaAttentionExecutor* const raw = executor.get();
    CudaStateExecutor::Arena arena{raw->block_bytes_, [raw](KvBlockId block) { return raw->BlockAt(block); },
                                   [raw](BlockSetId set) {
                                     const SetShape& shape = raw->ShapeOfSet(set);
                                     return CudaStateExecutor::Spacing{shape.even, shape.step};
                                   }};
    DT_ASSIGN_OR_RETURN(executor->states_,
                        CudaStateExecutor::Create(device, *stream, core, std::move(arena),
                                                  static_cast<int>(executor->micro_batches_.size())));
  }
  using kernels::cuda::CudaAttention;
  const auto kernel = deterministic ? CudaAttention::Kernel::kBatchInvariant : CudaAttention::Kernel::kFaster;
  for (MicroBatch& batch : executor->micro_batches_) {
    batch.incoming = std::make_unique<IncomingRows>(device);
    batch.groups.resize(core.table().group_count());
    for (GroupStep& group : batch.groups) {
      group.attention = std::make_unique<CudaAttention>(device, kernel);
      group.tables = std::make_unique<kernels::cuda::StagedUpload>(device);
    }
  }
  if (deterministic) DT_RETURN_IF_ERROR(executor->CheckDeterministic());
  return std::unique_ptr<AttentionBackend>(std::move(executor));
}

absl::Status CudaAttentionExecutor::CheckDeterministic() const {
  if (core_.table().has_linear())
    return Unimplemented(
        "--deterministic: linear layers on a GPU add tokens to states one by one or many at a time, "
        "as they come; leave the flag out, or take CPUs");
  const kernels::cuda::CudaAttention attention(device_, kernels::cuda::CudaAttention::Kernel::kBatchInvariant);
  for (int g = 0; g < core_.table().group_count(); ++g) {
    const absl::Status takes = attention.CheckInvariant(ShapeOf(LayerGroup(static_cast<uint16_t>(g))));
    if (!takes.ok()) return Annotate(takes, "--deterministic");
  }
  return absl::OkStatus();
}

CudaAttentionShape CudaAttentionExecutor::ShapeOf(LayerGroup group) const {
  const proto::SoftmaxSpec& spec = core_.table().softmax(group);
  CudaAttentionShape shape;
  shape.group = spec.group_size();
  shape.window = spec.window;
  shape.layout = LayoutOf(spec);
  shape.q_type = shape.o_type = spec.kv == DType::kBF16 ? WireType::kBF16 : WireType::kF16;
  shape.scale = spec.scale;
  shape.arena = arena_->data();
  shape.arena_bytes = arena_->size_bytes();
  return shape;
}

absl::Status CudaAttentionExecutor::Synchronize() {
  DT_RETURN_IF_ERROR(stream_.SynchronizeStatus());
  if (hosts_stream_ != nullptr) DT_RETURN_IF_ERROR(hosts_stream_->SynchronizeStatus());
  for (const std::unique_ptr<Crossing>& crossing : crossings_)
    if (crossing != nullptr) DT_RETURN_IF_ERROR(crossing->Synchronize());
  return absl::OkStatus();
}

absl::Status CudaAttentionExecutor::Grow(BufferPtr& buffer, size_t bytes, bool pinned) {
  if (buffer != nullptr && buffer->size_bytes() >= bytes) return absl::OkStatus();
  DT_RETURN_IF_ERROR(Synchronize());  // what still runs uses the old memory
  buffer.reset();
  bytes += bytes / 4;
  DT_ASSIGN_OR_RETURN(buffer, pinned ? device_.AllocatePinned(bytes) : device_.Allocate(bytes));
  return absl::OkStatus();
}

const CudaAttentionExecutor::SetShape& CudaAttentionExecutor::ShapeOfSet(BlockSetId set) {
  if (PlaceOf(set) >= sets_.size()) sets_.resize(std::max<size_t>(2 * sets_.size(), PlaceOf(set) + 1));
  SetShape& shape = sets_[PlaceOf(set)];
  const uint32_t generation = GenerationOf(set);
  if (shape.known && shape.generation == generation) return shape;
  const std::vector<KvBlockId>& blocks = core_.BlocksOf(set);
  shape = {generation, true, true, blocks.size() > 1 ? int64_t{blocks[1]} - blocks[0] : 0};
  for (size_t i = 1; i < blocks.size(); ++i)
    shape.even = shape.even && int64_t{blocks[i]} - blocks[i - 1] == shape.step;
  return shape;
}

// Sets that were never split are: their blocks were handed out one after the other.
bool CudaAttentionExecutor::IsRegular(MicroBatchId id, LayerGroup group, int64_t& op_step) {
  int heads = -1;
  int64_t step = 0;
  for (const proto::ShardStep& item : core_.LayoutOf(id, group).items) {
    if (heads >= 0 && item.kv_heads.size() != heads) return false;
    heads = item.kv_heads.size();
    for (const BlockSetId set : core_.ShardOf(id, item).sets) {
      if (set == kNoBlockSet) continue;
      const SetShape& shape = ShapeOfSet(set);
      if (!shape.even || (step != 0 && shape.step != step)) return false;
      step = shape.step;
    }
  }
  op_step = step * heads * static_cast<int64_t>(block_bytes_);
  return true;
}

absl::Status CudaAttentionExecutor::GrowBuffers(MicroBatch& batch, MicroBatchId id) {
  size_t query = 0, key_value = 0, partial = 0, piece = 0;
  for (int g = 0; g < core_.table().group_count(); ++g) {
    const proto::StepLayout& layout = core_.LayoutOf(id, LayerGroup(static_cast<uint16_t>(g)));
    query = std::max<size_t>(query, layout.query_bytes);
    key_value = std::max<size_t>(key_value, layout.key_value_bytes);
    partial = std::max<size_t>(partial, std::max(layout.partial_bytes, layout.before_bytes));
    piece = std::max<size_t>(piece, layout.largest_piece);
  }
  // What reads the answers as rows of a matrix may take a few more of them.
  int64_t row = 0;
  for (const proto::SoftmaxSpec& spec : core_.table().views)
    row = std::max(row, int64_t{spec.query_heads} * spec.value_dim * kWireElement);
  DT_RETURN_IF_ERROR(Grow(batch.partial, partial + kRowsBeyond * row));
  if (OnDevice(batch)) return absl::OkStatus();
  DT_RETURN_IF_ERROR(Grow(batch.query, query));
  DT_RETURN_IF_ERROR(Grow(batch.key_value, key_value));
  for (BufferPtr& buffer : batch.pieces)
    if (piece > 0) DT_RETURN_IF_ERROR(Grow(buffer, piece, /*pinned=*/true));
  return Grow(batch.partial_host, partial, /*pinned=*/true);
}

absl::Status CudaAttentionExecutor::PrepareStep(MicroBatchId id, const exchange::Seam& seam) {
  MicroBatch& batch = micro_batches_[id.value()];
  batch.prepared = false;
  batch.payload = {};
  batch.crossing = &CrossingOf(seam);
  DT_RETURN_IF_ERROR(batch.crossing->Use(seam, id, batch));
  DT_RETURN_IF_ERROR(GrowBuffers(batch, id));
  DT_RETURN_IF_ERROR(batch.crossing->Begin(id, batch));
  for (int g = 0; g < core_.table().group_count(); ++g) {
    const LayerGroup group(static_cast<uint16_t>(g));
    if (core_.table().linear(group) != nullptr) {
      DT_RETURN_IF_ERROR(states_->Prepare(id, group, *batch.stream));
      if (batch.work != nullptr && !(batch.crossing->records_states() && states_->IsRegular(id, group)))
        DT_RETURN_IF_ERROR(batch.work->BeImmediate(*batch.stream));
      continue;
    }
    GroupStep& step = batch.groups[g];
    // Items name the sinks of one op.
    step.regular = IsRegular(id, group, step.op_step) && SinksOf(group, 0) == nullptr;
    DT_RETURN_IF_ERROR(Plan(batch, id, group, 0));
    // Tables that are made anew for each op are uploaded between its launches.
    if (batch.work != nullptr && !step.regular) DT_RETURN_IF_ERROR(batch.work->BeImmediate(*batch.stream));
  }
  batch.prepared = true;
  return absl::OkStatus();
}

const float* CudaAttentionExecutor::SinksOf(LayerGroup group, int op_index) const {
  for (size_t op = 0; op < sinks_.size(); ++op)
    if (core_.table().op_group[op] == group && core_.table().op_index_in_group[op] == op_index)
      return sinks_[op] != nullptr ? reinterpret_cast<const float*>(sinks_[op]->data()) : nullptr;
  return nullptr;
}

absl::Status CudaAttentionExecutor::UploadSinks() {
  const proto::AttentionTable& table = core_.table();
  sinks_.resize(table.op_count());
  for (int op = 0; op < table.op_count(); ++op) {
    if (table.sinks(op) == nullptr) continue;
    const size_t bytes = table.constants[op].sinks.size() * sizeof(float);
    DT_ASSIGN_OR_RETURN(sinks_[op], device_.Allocate(bytes));
    DT_RETURN_IF_ERROR(stream_.Copy(sinks_[op]->data(), table.sinks(op), bytes));
  }
  return stream_.SynchronizeStatus();
}

// Rows of items that follow each other in the payload and have as many heads go in one launch.
void CudaAttentionExecutor::PlanAppends(const proto::StepLayout& layout, GroupStep& step, int32_t* positions,
                                        int32_t* row_items) {
  step.appends.clear();
  int row = 0;
  for (size_t i = 0; i < layout.items.size(); ++i) {
    const proto::ShardStep& item = layout.items[i];
    if (item.rows.kv_count == 0) continue;
    const int heads = item.kv_heads.size();
    if (step.appends.empty() || step.appends.back().kv_heads != heads)
      step.appends.push_back({0, heads, row, item.key_offset, item.value_offset});
    step.appends.back().rows += item.rows.kv_count;
    for (int r = 0; r < item.rows.kv_count; ++r, ++row) {
      positions[row] = static_cast<int32_t>(item.ctx_len + item.rows.kv_first + r);
      row_items[row] = static_cast<int32_t>(i);
    }
  }
}

std::vector<CudaAttentionItem> CudaAttentionExecutor::ItemsOf(MicroBatchId id, LayerGroup group, const float* sinks,
                                                              const std::vector<const std::byte* const*>& blocks) {
  const proto::SoftmaxSpec& spec = core_.table().softmax(group);
  const proto::StepLayout& layout = core_.LayoutOf(id, group);
  GroupStep& step = micro_batches_[id.value()].groups[group.value()];
  std::vector<CudaAttentionItem> items;
  items.reserve(layout.items.size());
  step.partials.clear();
  step.finishes = false;
  int64_t floats = 0;  // of o, over all unfinished items so far
  for (size_t i = 0; i < layout.items.size(); ++i) {
    const proto::ShardStep& shard = layout.items[i];
    if (shard.rows.q_count == 0) continue;
    CudaAttentionItem& item = items.emplace_back();
    item.q_rows = shard.rows.q_count;
    item.kv_heads = shard.kv_heads.size();
    item.first_position = shard.ctx_len + shard.rows.q_first;
    item.token_begin = shard.tokens.begin;
    item.token_end = std::max<int64_t>(shard.attended_end(), shard.tokens.begin);
    item.q_offset = shard.query_offset / kWireElement;
    item.q_row_step = int64_t{shard.query_heads} * spec.key_dim;
    item.blocks = blocks[i];
    if (sinks != nullptr && shard.finished()) item.sinks = sinks + int64_t{shard.kv_heads.begin} * spec.group_size();
    item.head_step = static_cast<int64_t>(core_.ShardOf(id, shard).sets.size());
    item.first_segment = static_cast<int32_t>(shard.tokens.begin / kSegmentTokens);
    if (shard.finished()) {
      step.finishes = true;
      item.o_offset = shard.partial_offset / kWireElement;
      item.o_row_step = int64_t{shard.query_heads} * spec.value_dim;
      continue;
    }
    // The kernel numbers subtrees by the item's own heads, so each item begins on a multiple of its subtree.
    const int64_t node = int64_t{shard.query_heads} * spec.value_dim;
    floats = (floats + node - 1) / node * node;
    item.partial = true;
    item.first_node = static_cast<int32_t>(floats / node);
    step.partials.push_back({floats, floats / spec.value_dim * 2, shard.partial_offset, shard.nodes * node,
                             shard.nodes * shard.query_heads * 2});
    floats += shard.nodes * node;
  }
  if (!step.partials.empty() && !micro_batches_[id.value()].crossing->answers_are_here())
    PlaceBetweenGpus(layout, spec, step, items);
  return items;
}

void CudaAttentionExecutor::PlaceBetweenGpus(const proto::StepLayout& layout, const proto::SoftmaxSpec& spec,
                                             GroupStep& step, std::vector<CudaAttentionItem>& items) {
  const exchange::DividedPayloads payloads = exchange::DividedPayloadsOf(layout, spec);
  step.partials_there = payloads.partials_at;
  step.ml_there = payloads.ml_at;
  auto item = items.begin();
  for (size_t i = 0; i < layout.items.size(); ++i) {
    if (layout.items[i].rows.q_count == 0) continue;
    const exchange::DividedPayloads::Item& at = payloads.items[i];
    item->q_offset = at.query_at / kWireElement;
    item->o_offset = at.o_at / kWireElement;
    if (item->partial) {
      const int64_t row_bytes = int64_t{layout.items[i].query_heads} * spec.value_dim * int64_t{sizeof(float)};
      item->node_a_row = true;
      item->first_node = static_cast<int32_t>((at.o_at - payloads.partials_at) / row_bytes);
    }
    ++item;
  }
}

absl::Status CudaAttentionExecutor::Plan(MicroBatch& batch, MicroBatchId id, LayerGroup group, int op_index) {
  GroupStep& step = batch.groups[group.value()];
  const proto::StepLayout& layout = core_.LayoutOf(id, group);
  size_t pointers = 0, rows = 0;
  for (const proto::ShardStep& item : layout.items) {
    pointers += core_.ShardOf(id, item).sets.size() * item.kv_heads.size();
    rows += item.rows.kv_count;
  }
  kernels::cuda::UploadLayout at;
  // What grows with the sequences comes last: the others' addresses stay from step to step.
  const size_t items_at = at.Add<DeviceAttentionItem>(layout.items.size());
  const size_t positions_at = at.Add<int32_t>(rows), row_items_at = at.Add<int32_t>(rows);
  const size_t pointers_at = at.Add<const std::byte*>(pointers);
  step.planned_op = op_index;
  step.attends = step.finishes = false;
  if (layout.items.empty()) return absl::OkStatus();
  DT_ASSIGN_OR_RETURN(std::byte* const host, step.tables->Begin(*batch.stream, at.bytes()));
  std::byte* const there = step.tables->device();
  auto* pointer = reinterpret_cast<const std::byte**>(host + pointers_at);
  auto* pointer_there = reinterpret_cast<const std::byte* const*>(there + pointers_at);
  auto* items = reinterpret_cast<DeviceAttentionItem*>(host + items_at);
  std::vector<const std::byte* const*> blocks;
  blocks.reserve(layout.items.size());
  for (size_t i = 0; i < layout.items.size(); ++i) {
    const proto::ShardStep& item = layout.items[i];
    const std::vector<BlockSetId>& sets = core_.ShardOf(id, item).sets;
    const int heads = item.kv_heads.size();
    for (int head = 0; head < heads; ++head)
      for (const BlockSetId set : sets)
        *pointer++ = set == kNoBlockSet ? nullptr : BlockAt(core_.BlocksOf(set)[op_index * heads + head]);
    blocks.push_back(pointer_there);
    items[i] = DeviceAttentionItem{};
    items[i].blocks = pointer_there;
    items[i].head_step = static_cast<int64_t>(sets.size());
    items[i].first_segment = static_cast<int32_t>(core_.ShardOf(id, item).first_block());
    items[i].kv_heads = heads;
    pointer_there += sets.size() * heads;
  }
  PlanAppends(layout, step, reinterpret_cast<int32_t*>(host + positions_at),
              reinterpret_cast<int32_t*>(host + row_items_at));
  step.items = reinterpret_cast<const DeviceAttentionItem*>(there + items_at);
  step.positions = reinterpret_cast<const int32_t*>(there + positions_at);
  step.row_items = reinterpret_cast<const int32_t*>(there + row_items_at);
  DT_RETURN_IF_ERROR(step.tables->Send(*batch.stream));
  const std::vector<CudaAttentionItem> attended = ItemsOf(id, group, SinksOf(group, op_index), blocks);
  if (attended.empty()) return absl::OkStatus();
  step.attends = true;
  if (!step.partials.empty() && batch.crossing->answers_are_here()) {
    const PartialCopy& last = step.partials.back();
    const int64_t o_floats = last.from_o + last.o_floats;
    DT_RETURN_IF_ERROR(Grow(batch.partial_floats, (o_floats + last.from_ml + last.ml_floats + 4) * sizeof(float)));
    step.ml_at = o_floats + (o_floats & 1);
  }
  return step.attention->Plan(*batch.stream, ShapeOf(group), attended);
}

absl::Status CudaAttentionExecutor::TakeQuery(MicroBatchId id, int op, std::span<const std::byte> query) {
  MicroBatch& batch = micro_batches_[id.value()];
  if (!batch.prepared) return Internal("attention op ", op, ": its step has no buffers");  // q of a step just refused
  batch.payload = query;
  return batch.crossing->TakeQuery(batch);
}

absl::Status CudaAttentionExecutor::Launch(MicroBatchId id) {
  MicroBatch& batch = micro_batches_[id.value()];
  return batch.crossing->Launch(batch);
}

absl::Status CudaAttentionExecutor::Append(MicroBatch& batch, LayerGroup group, int op_index,
                                           const std::byte* key_value, const kernels::cuda::ExchangeEnd* await,
                                           int op) {
  const proto::SoftmaxSpec& spec = core_.table().softmax(group);
  const GroupStep& step = batch.groups[group.value()];
  for (const AppendRun& run : step.appends) {
    kernels::cuda::KvAppendLaunch append;
    append.qkv = key_value + run.key_offset;
    append.qkv_step = int64_t{run.kv_heads} * spec.key_dim;
    append.v = key_value + run.value_offset;
    append.v_step = int64_t{run.kv_heads} * spec.value_dim;
    append.type = spec.kv == DType::kBF16 ? WireType::kBF16 : WireType::kF16;
    append.rows = run.rows;
    append.kv_heads = run.kv_heads;
    append.positions = step.positions + run.first_row;
    append.row_items = step.row_items + run.first_row;
    append.items = step.items;
    append.kv_offset = step.regular ? op_index * step.op_step : 0;
    append.layout = LayoutOf(spec);
    if (await != nullptr) {
      append.exchange = *await;
      append.await_op = op;
    }
    DT_RETURN_IF_ERROR(kernels::cuda::KvAppend(*batch.stream, append));
  }
  return absl::OkStatus();
}

absl::Status CudaAttentionExecutor::Attend(MicroBatch& batch, LayerGroup group, int op_index, const std::byte* query,
                                           std::byte* elsewhere) {
  const GroupStep& step = batch.groups[group.value()];
  if (!step.attends) return absl::OkStatus();
  kernels::cuda::CudaAttentionRun run;
  run.q = query;
  run.o = elsewhere != nullptr ? elsewhere : batch.partial->data();
  if (!step.partials.empty() && elsewhere != nullptr) {
    run.partial_o = reinterpret_cast<float*>(elsewhere + step.partials_there);
    run.partial_ml = reinterpret_cast<float*>(elsewhere + step.ml_there);
  } else if (!step.partials.empty()) {
    run.partial_o = reinterpret_cast<float*>(batch.partial_floats->data());
    run.partial_ml = run.partial_o + step.ml_at;
  }
  run.kv_offset_bytes = static_cast<size_t>(step.regular ? op_index * step.op_step : 0);
  return step.attention->Run(*batch.stream, ShapeOf(group), run);
}

absl::StatusOr<transport::LentBytes> CudaAttentionExecutor::GiveStates(MicroBatchId id, int op) {
  MicroBatch& batch = micro_batches_[id.value()];
  if (!batch.prepared) return Internal("attention op ", op, ": its step has no buffers");
  if (OnDevice(batch)) return Internal("states cross through the hosts");
  DT_RETURN_IF_ERROR(states_->GiveStates(id, op, batch.partial_host->data()));
  return transport::Lend(batch.partial_host, core_.LayoutOf(id, core_.table().op_group[op]).before_bytes);
}

absl::StatusOr<transport::LentBytes> CudaAttentionExecutor::AppendAndFinish(MicroBatchId id, int op,
                                                                            std::span<const std::byte> key_value) {
  MicroBatch& batch = micro_batches_[id.value()];
  const LayerGroup group = core_.table().op_group[op];
  const int op_index = core_.table().op_index_in_group[op];
  const proto::StepLayout& layout = core_.LayoutOf(id, group);
  const GroupStep& step = batch.groups[group.value()];
  if (!batch.prepared || batch.payload.size() != static_cast<size_t>(layout.query_bytes))
    return Internal("attention op ", op, ": k and v came without q");
  if (core_.table().linear(group) != nullptr) {
    DT_ASSIGN_OR_RETURN(transport::LentBytes answer, batch.crossing->RunState(id, op, key_value, batch));
    batch.payload = {};
    return answer;
  }
  if (!step.regular && step.planned_op != op_index) DT_RETURN_IF_ERROR(Plan(batch, id, group, op_index));
  DT_ASSIGN_OR_RETURN(transport::LentBytes answer, batch.crossing->Run(id, op, key_value, batch));
  batch.payload = {};
  if (layout.gather_bytes > 0 && layout.pieces == 0) DT_RETURN_IF_ERROR(GatherEarlier(batch, id, op));
  return answer;
}

// The rows of earlier tokens that the answer brings, behind what attention gave.
absl::Status CudaAttentionExecutor::GatherEarlier(MicroBatch& batch, MicroBatchId id, int op) {
  if (OnDevice(batch)) return Internal("attention op ", op, ": rows are not asked for on one GPU");
  std::byte* const out = batch.partial_host->data();
  for (const proto::ShardStep& item : core_.LayoutOf(id, core_.table().op_group[op]).items) {
    if (item.gather_count == 0) continue;
    DT_RETURN_IF_ERROR(GatherRows(op, item.kv_heads.size(), core_.ShardOf(id, item),
                                  {item.gather_first, item.gather_first + item.gather_count},
                                  out + item.gather_key_offset, out + item.gather_value_offset));
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> CudaAttentionExecutor::TakeAppended(MicroBatchId id) {
  return micro_batches_[id.value()].incoming->TakeOldest();
}

absl::StatusOr<transport::LentBytes> CudaAttentionExecutor::GiveRows(MicroBatchId id, int op, int piece) {
  MicroBatch& batch = micro_batches_[id.value()];
  if (!batch.prepared || OnDevice(batch)) return Internal("attention op ", op, ": its step gives no rows");
  const LayerGroup group = core_.table().op_group[op];
  const proto::StepLayout::Piece rows = core_.LayoutOf(id, group).PieceAt(piece, core_.table().softmax(group));
  const BufferPtr& buffer = batch.pieces[piece % proto::kGatherPiecesAhead];
  DT_RETURN_IF_ERROR(GatherRows(op, rows.item->kv_heads.size(), core_.ShardOf(id, *rows.item), rows.tokens,
                                buffer->data(), buffer->data() + rows.value_offset));
  return transport::Lend(buffer, rows.bytes);
}

absl::StatusOr<OutgoingPart> CudaAttentionExecutor::PartOf(int op, int heads, const ShardState& shard,
                                                           const proto::TokenRange& tokens, std::byte* k,
                                                           std::byte* v) const {
  const proto::SoftmaxSpec& spec = core_.table().softmax(core_.table().op_group[op]);
  const int first_block = core_.table().op_index_in_group[op] * heads;
  OutgoingPart part{.blocks = {}, .block_bytes = block_bytes_, .heads = heads, .tokens = tokens, .rows = {}};
  part.rows.layout = LayoutOf(spec);
  part.rows.bf16 = spec.kv == DType::kBF16;
  part.rows.k = k;
  part.rows.v = v;
  part.rows.k_step = static_cast<size_t>(heads) * spec.key_dim * kWireElement;
  part.rows.v_step = static_cast<size_t>(heads) * spec.value_dim * kWireElement;
  const Position end_segment = (tokens.end + kSegmentTokens - 1) / kSegmentTokens;
  for (Position segment = tokens.begin / kSegmentTokens; segment < end_segment; ++segment) {
    const int64_t index = segment - shard.first_block();
    const BlockSetId set =
        index >= 0 && index < static_cast<int64_t>(shard.sets.size()) ? shard.sets[index] : kNoBlockSet;
    if (set == kNoBlockSet) return Internal("tokens from ", segment * kSegmentTokens, " are not held here");
    for (int head = 0; head < heads; ++head) part.blocks.push_back(BlockAt(core_.BlocksOf(set)[first_block + head]));
  }
  return part;
}

absl::Status CudaAttentionExecutor::GatherRows(int op, int heads, const ShardState& shard,
                                               const proto::TokenRange& tokens, std::byte* k, std::byte* v) {
  DT_ASSIGN_OR_RETURN(const OutgoingPart part, PartOf(op, heads, shard, tokens, k, v));
  DT_RETURN_IF_ERROR(Grow(given_blocks_, part.staging_bytes(), /*pinned=*/true));
  return CopyOut(part, HostsStream(), given_blocks_->data());
}

absl::StatusOr<transport::LentBytes> CudaAttentionExecutor::Gather(int slot, int op) {
  const OutgoingMove& move = core_.OutgoingMoveOf(slot);
  const LayerGroup group = core_.table().op_group[op];
  const proto::StepLayout& layout = move.layouts[group.value()];
  Gathered& gathered = gathered_[static_cast<size_t>(slot)];
  BufferPtr& rows = gathered.rows[gathered.next];
  BufferPtr& staging = gathered.staging[gathered.next];
  gathered.next = (gathered.next + 1) % gathered.rows.size();
  DT_RETURN_IF_ERROR(Grow(rows, layout.key_value_bytes, /*pinned=*/true));
  if (core_.table().linear(group) != nullptr) {
    const std::span<std::byte> all(rows->data(), layout.key_value_bytes);
    for (const proto::ShardStep& item : layout.items)
      DT_RETURN_IF_ERROR(states_->Gather(item, core_.ShardOf(move, item), op, all.subspan(item.key_offset)));
    return transport::Lend(rows, all.size());
  }
  std::vector<OutgoingPart> parts;
  size_t staging_bytes = 0;
  for (const proto::ShardStep& item : layout.items) {
    const Position begin = item.ctx_len + item.rows.kv_first;
    std::byte* const out = rows->data();
    DT_ASSIGN_OR_RETURN(parts.emplace_back(),
                        PartOf(op, item.kv_heads.size(), core_.ShardOf(move, item), {begin, begin + item.rows.kv_count},
                               out + item.key_offset, out + item.value_offset));
    staging_bytes += parts.back().staging_bytes();
  }
  DT_RETURN_IF_ERROR(Grow(staging, staging_bytes, /*pinned=*/true));
  if (outgoing_ == nullptr) {
    DT_ASSIGN_OR_RETURN(outgoing_, OutgoingRows::Create(device_));
  }
  outgoing_->Begin(slot, std::move(parts), rows, staging);
  return transport::Lend(rows, layout.key_value_bytes);
}

absl::StatusOr<bool> CudaAttentionExecutor::TakeGathered(int slot) {
  return outgoing_ == nullptr ? absl::StatusOr<bool>(true) : outgoing_->TakeOldest(slot);
}

}  // namespace dovetail::attention
