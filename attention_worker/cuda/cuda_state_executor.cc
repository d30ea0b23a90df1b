#include "attention_worker/cuda/cuda_state_executor.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "exchange/divided_payloads.h"
#include "linear_attention/packed_state.h"

namespace dovetail::attention {

using kernels::cuda::CudaStream;
using kernels::cuda::StateItem;
using kernels::cuda::StateLaunch;
using kernels::cuda::StateUnit;
using kernels::cuda::WireType;

namespace {

constexpr int kMostSingleTokens = exchange::kMostStateTokens;  // of an item that goes token by token
constexpr size_t kMostWorkspaceBytes = size_t{128} << 20;      // for chunks, unless one of each head needs more

int64_t BlockOf(Position position) { return position / kSegmentTokens; }

bool HoldsBlock(const ShardState& shard, int64_t block) {
  const int64_t at = block - shard.first_block();
  return at >= 0 && at < static_cast<int64_t>(shard.sets.size()) && shard.sets[at] != kNoBlockSet;
}

const float* Floats(const std::unique_ptr<kernels::Buffer>& buffer) {
  return buffer != nullptr ? reinterpret_cast<const float*>(buffer->data()) : nullptr;
}

// A block of one head in host memory.
class HostBlock {
 public:
  HostBlock(int pieces, size_t piece_bytes) : bytes_(pieces * piece_bytes), pieces_(pieces) {
    for (int p = 0; p < pieces; ++p) pieces_[p] = bytes_.data() + p * piece_bytes;
  }
  std::byte* const* pieces() const { return pieces_.data(); }

 private:
  std::vector<std::byte> bytes_;
  std::vector<std::byte*> pieces_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<CudaStateExecutor>> CudaStateExecutor::Create(kernels::cuda::CudaDevice& device,
                                                                             kernels::cuda::CudaStream& stream,
                                                                             const AttentionWorkerCore& core,
                                                                             Arena arena, int micro_batches) {
  std::unique_ptr<CudaStateExecutor> executor(new CudaStateExecutor(device, stream, core, std::move(arena)));
  const proto::AttentionTable& table = core.table();
  executor->micro_batches_.resize(micro_batches);
  for (auto& groups : executor->micro_batches_) groups.resize(table.group_count());
  for (int g = 0; g < table.group_count(); ++g) {
    kernels::LinearStateShape& shape = executor->shapes_.emplace_back();
    const proto::LinearSpec* spec = table.linear(LayerGroup(static_cast<uint16_t>(g)));
    if (spec == nullptr) continue;
    if (spec->wire == DType::kF32)
      return Unimplemented("linear-attention states with float32 on the wire: GPUs take bfloat16 or float16");
    shape = linear_attention::ShapeOf(*spec);
    const size_t block_bytes = executor->arena_.block_bytes;
    const WireType wire = static_cast<WireType>(spec->wire);
    DT_ASSIGN_OR_RETURN(StateLaunch launch, kernels::cuda::StateLaunchFor(shape, block_bytes, wire));
    if (launch.layout.pieces > spec->blocks_per_head)
      return InvalidArgument("layer group ", g, ": a state needs ", launch.layout.pieces, " KvBlocks of ", block_bytes,
                             " bytes; the model's table says ", spec->blocks_per_head);
    launch.pieces = spec->blocks_per_head;
    launch.token_decay = spec->token_decay;
    launch.token_rate = spec->token_rate;
    launch.gates = spec->gates();
    launch.normalise = spec->normalise;
    launch.query_scale = spec->query_scale;
    launch.conv_width = spec->conv_width;
    launch.conv_linear = spec->conv_linear;
    launch.model_heads = spec->heads;
    for (auto& groups : executor->micro_batches_) {
      groups[g].launch = launch;
      groups[g].tables = std::make_unique<kernels::cuda::StagedUpload>(device);
    }
  }
  DT_RETURN_IF_ERROR(executor->UploadConstants());
  return executor;
}

absl::Status CudaStateExecutor::Upload(const std::vector<float>& values, BufferPtr& out) {
  if (values.empty()) return absl::OkStatus();
  DT_ASSIGN_OR_RETURN(out, device_.Allocate(values.size() * sizeof(float)));
  DT_RETURN_IF_ERROR(stream_.Copy(out->data(), values.data(), out->size_bytes()));
  return stream_.SynchronizeStatus();  // the caller keeps the values
}

absl::Status CudaStateExecutor::UploadConstants() {
  const proto::AttentionTable& table = core_.table();
  constants_.resize(table.op_count());
  for (int op = 0; op < static_cast<int>(table.constants.size()); ++op) {
    if (table.linear(table.op_group[op]) == nullptr) continue;
    DT_RETURN_IF_ERROR(Upload(table.constants[op].log_decay, constants_[op].log_decay));
    DT_RETURN_IF_ERROR(Upload(table.constants[op].conv, constants_[op].conv));
    DT_RETURN_IF_ERROR(Upload(table.constants[op].conv_bias, constants_[op].conv_bias));
    DT_RETURN_IF_ERROR(Upload(table.constants[op].skip, constants_[op].skip));
  }
  return absl::OkStatus();
}

// Whether one distance holds for all blocks of the step.
bool CudaStateExecutor::IsEven(MicroBatchId id, LayerGroup group, int64_t& step) const {
  bool known = false;
  step = 1;
  for (const proto::ShardStep& item : core_.LayoutOf(id, group).items) {
    const ShardState& shard = core_.ShardOf(id, item);
    const int64_t first = std::max<int64_t>(0, BlockOf(item.ctx_len) - 1) - shard.first_block();
    for (int64_t i = std::max<int64_t>(0, first); i < static_cast<int64_t>(shard.sets.size()); ++i) {
      if (shard.sets[i] == kNoBlockSet) continue;
      const Spacing spacing = arena_.spacing(shard.sets[i]);
      if (!spacing.even || (known && spacing.step != step)) return false;
      step = spacing.step;
      known = true;
    }
  }
  return true;
}

absl::Status CudaStateExecutor::Prepare(MicroBatchId id, LayerGroup group, CudaStream& stream) {
  GroupStep& step = micro_batches_[id.value()][group.value()];
  step.stream = &stream;
  int64_t blocks_apart = 0;
  step.launch.even = IsEven(id, group, blocks_apart);
  step.launch.step = blocks_apart * static_cast<int64_t>(arena_.block_bytes);
  return Plan(id, group, 0);
}

const KvBlockId* CudaStateExecutor::BlocksOfOp(const ShardState& shard, int64_t block, int op) const {
  const int64_t at = block - shard.first_block();
  if (at < 0 || at >= static_cast<int64_t>(shard.sets.size()) || shard.sets[at] == kNoBlockSet) return nullptr;
  const proto::LinearSpec& spec = *core_.table().linear(core_.table().op_group[op]);
  const int per_op = shard.shard.kv_heads.size() * spec.blocks_per_head;
  return core_.BlocksOf(shard.sets[at]).data() + core_.table().op_index_in_group[op] * per_op;
}

void CudaStateExecutor::FillBlocks(const proto::ShardStep& item, const ShardState& shard, const GroupStep& step,
                                   int op_index, std::vector<const std::byte*>& out) const {
  const int per_op = item.kv_heads.size() * step.launch.pieces;
  const int64_t last = BlockOf(item.ctx_len + item.q_len - 1);
  for (int64_t block = std::max<int64_t>(0, BlockOf(item.ctx_len) - 1); block <= last; ++block) {
    const int64_t at = block - shard.first_block();
    const bool held = HoldsBlock(shard, block);
    const KvBlockId* blocks = held ? core_.BlocksOf(shard.sets[at]).data() : nullptr;
    for (int i = 0; i < (step.launch.even ? 1 : per_op); ++i)
      out.push_back(!held              ? nullptr
                    : step.launch.even ? arena_.block_at(blocks[0])
                                       : arena_.block_at(blocks[op_index * per_op + i]));
  }
}

void CudaStateExecutor::Describe(const proto::ShardStep& from, StateItem& item) const {
  item.query_offset = from.query_offset;
  item.key_offset = from.key_offset;
  item.value_offset = from.value_offset;
  item.gate_offset = from.gate_offset;
  item.out_offset = from.partial_offset;
  item.first_position = from.ctx_len;
  item.rows = from.q_len;
  item.heads = from.kv_heads.size();
  item.first_head = from.kv_heads.begin;
  item.first_block = std::max<int64_t>(0, BlockOf(from.ctx_len) - 1);
}

absl::Status CudaStateExecutor::Plan(MicroBatchId id, LayerGroup group, int op_index) {
  GroupStep& step = micro_batches_[id.value()][group.value()];
  const proto::StepLayout& layout = core_.LayoutOf(id, group);
  const bool in_chunks = kernels::cuda::StatesRunInChunks(device_, step.launch);
  std::vector<StateItem> items[2];  // of few tokens; in chunks
  std::vector<StateUnit> units[2];
  std::vector<const std::byte*> blocks;
  int64_t most_chunks = 0;
  for (const proto::ShardStep& shard_step : layout.items) {
    if (shard_step.rows.q_count == 0) continue;
    const int kind = in_chunks && shard_step.q_len > kMostSingleTokens ? 1 : 0;
    StateItem& item = items[kind].emplace_back();
    Describe(shard_step, item);
    item.table = static_cast<int64_t>(blocks.size());
    FillBlocks(shard_step, core_.ShardOf(id, shard_step), step, op_index, blocks);
    for (int head = 0; head < item.heads; ++head)
      units[kind].push_back({static_cast<int32_t>(items[kind].size()) - 1, head});
    if (kind == 1)
      most_chunks =
          std::max(most_chunks, BlockOf(item.first_position + item.rows - 1) - BlockOf(item.first_position) + 1);
  }
  step.planned_op = op_index;
  step.incomplete = std::any_of(layout.items.begin(), layout.items.end(), [&](const proto::ShardStep& item) {
    return item.rows.q_count > 0 && item.ctx_len > 0 && !HoldsBlock(core_.ShardOf(id, item), BlockOf(item.ctx_len - 1));
  });
  step.chunks = step.launch;
  step.chunks.chunk_end = static_cast<int32_t>(most_chunks);
  step.launch.unit_count = step.chunks.unit_count = 0;
  if (blocks.empty()) return absl::OkStatus();
  kernels::cuda::UploadLayout at;
  // What grows with the sequences comes last: the others' addresses stay from step to step.
  size_t items_at[2], units_at[2];
  for (const int kind : {0, 1}) {
    items_at[kind] = at.Add<StateItem>(items[kind].size());
    units_at[kind] = at.Add<StateUnit>(units[kind].size());
  }
  const size_t blocks_at = at.Add<const std::byte*>(blocks.size());
  DT_ASSIGN_OR_RETURN(std::byte* const host, step.tables->Begin(*step.stream, at.bytes()));
  std::memcpy(host + blocks_at, blocks.data(), blocks.size() * sizeof(const std::byte*));
  for (const int kind : {0, 1}) {
    if (items[kind].empty()) continue;
    std::memcpy(host + items_at[kind], items[kind].data(), items[kind].size() * sizeof(StateItem));
    std::memcpy(host + units_at[kind], units[kind].data(), units[kind].size() * sizeof(StateUnit));
  }
  DT_RETURN_IF_ERROR(step.tables->Send(*step.stream));
  std::byte* const there = step.tables->device();
  for (const int kind : {0, 1}) {
    StateLaunch& launch = kind == 0 ? step.launch : step.chunks;
    launch.blocks = reinterpret_cast<const std::byte* const*>(there + blocks_at);
    launch.items = reinterpret_cast<const StateItem*>(there + items_at[kind]);
    launch.units = reinterpret_cast<const StateUnit*>(there + units_at[kind]);
    launch.unit_count = static_cast<int32_t>(units[kind].size());
  }
  return GrowWorkspace(step);
}

// One for all micro-batches: steps that go in chunks share a stream.
absl::Status CudaStateExecutor::GrowWorkspace(const GroupStep& step) {
  if (step.chunks.unit_count == 0) return absl::OkStatus();
  if (step.stream != &stream_) return Internal("linear states of many tokens go in the worker's own stream");
  const size_t bytes = kernels::cuda::StateWorkspaceBytes(step.chunks, kMostWorkspaceBytes);
  if (workspace_ != nullptr && workspace_->size_bytes() >= bytes) return absl::OkStatus();
  DT_RETURN_IF_ERROR(stream_.SynchronizeStatus());  // what still runs uses the old memory
  workspace_.reset();
  DT_ASSIGN_OR_RETURN(workspace_, device_.Allocate(bytes));
  return absl::OkStatus();
}

bool CudaStateExecutor::IsRegular(MicroBatchId id, LayerGroup group) const {
  const GroupStep& step = micro_batches_[id.value()][group.value()];
  return step.launch.even && !step.incomplete && step.chunks.unit_count == 0;
}

absl::StatusOr<CudaStateExecutor::GroupStep*> CudaStateExecutor::PlannedFor(MicroBatchId id, int op) {
  const LayerGroup group = core_.table().op_group[op];
  const int op_index = core_.table().op_index_in_group[op];
  GroupStep& step = micro_batches_[id.value()][group.value()];
  if (step.incomplete) DT_RETURN_IF_ERROR(Prepare(id, group, *step.stream));  // by now the block is there
  if (!step.launch.even && step.planned_op != op_index) DT_RETURN_IF_ERROR(Plan(id, group, op_index));
  return &step;
}

StateLaunch CudaStateExecutor::Complete(StateLaunch launch, int op, const Payloads& payloads) const {
  launch.op = core_.table().op_index_in_group[op];
  launch.query = payloads.query;
  launch.key_value = payloads.key_value;
  launch.out = payloads.out;
  launch.failed = payloads.failed;
  launch.log_decay = Floats(constants_[op].log_decay);
  launch.conv = Floats(constants_[op].conv);
  launch.conv_bias = Floats(constants_[op].conv_bias);
  launch.skip = Floats(constants_[op].skip);
  return launch;
}

absl::Status CudaStateExecutor::Run(MicroBatchId id, int op, const Payloads& payloads) {
  DT_ASSIGN_OR_RETURN(GroupStep* const step, PlannedFor(id, op));
  if (step->launch.unit_count > 0)
    DT_RETURN_IF_ERROR(kernels::cuda::AppendStates(*step->stream, Complete(step->launch, op, payloads)));
  if (step->chunks.unit_count == 0) return absl::OkStatus();
  return kernels::cuda::AppendStatesInChunks(*step->stream, Complete(step->chunks, op, payloads),
                                             {workspace_->data(), workspace_->size_bytes()});
}

absl::StatusOr<StateLaunch> CudaStateExecutor::LaunchOf(MicroBatchId id, int op, const Payloads& payloads) {
  DT_ASSIGN_OR_RETURN(GroupStep* const step, PlannedFor(id, op));
  if (step->chunks.unit_count > 0) return Internal("attention op ", op, ": its states go in chunks");
  return Complete(step->launch, op, payloads);
}

std::vector<uint64_t> CudaStateExecutor::WordsOf(const StateLaunch& launch) {
  const auto word = [](const void* pointer) { return reinterpret_cast<uint64_t>(pointer); };
  return {word(launch.items),
          word(launch.units),
          word(launch.blocks),
          static_cast<uint64_t>(launch.unit_count),
          static_cast<uint64_t>(launch.step),
          static_cast<uint64_t>(launch.even),
          word(launch.query),
          word(launch.key_value),
          word(launch.out),
          word(launch.failed)};
}

absl::Status CudaStateExecutor::GrowStaging(size_t bytes) {
  if (staging_ != nullptr && staging_->size_bytes() >= bytes) return absl::OkStatus();
  staging_.reset();
  DT_ASSIGN_OR_RETURN(staging_, device_.AllocatePinned(bytes));
  return absl::OkStatus();
}

absl::Status CudaStateExecutor::BlockToCpu(LayerGroup group, int tokens, const KvBlockId* there,
                                           std::byte* const* here) {
  const int pieces = core_.table().linear(group)->blocks_per_head;
  DT_RETURN_IF_ERROR(GrowStaging(pieces * arena_.block_bytes));
  std::vector<std::byte*> from(pieces);
  for (int p = 0; p < pieces; ++p) {
    from[p] = staging_->data() + p * arena_.block_bytes;
    DT_RETURN_IF_ERROR(stream_.Copy(from[p], arena_.block_at(there[p]), arena_.block_bytes));
  }
  DT_RETURN_IF_ERROR(stream_.SynchronizeStatus());
  for (int p = 0; p < pieces; ++p) std::memset(here[p], 0, arena_.block_bytes);
  kernels::cuda::StateToCpu(shapes_[group.value()], tokens, from.data(), here, arena_.block_bytes);
  return absl::OkStatus();
}

absl::Status CudaStateExecutor::BlockFromCpu(LayerGroup group, int tokens, std::byte* const* here,
                                             const KvBlockId* there) {
  const int pieces = core_.table().linear(group)->blocks_per_head;
  DT_RETURN_IF_ERROR(GrowStaging(pieces * arena_.block_bytes));
  std::vector<std::byte*> to(pieces);
  for (int p = 0; p < pieces; ++p) to[p] = staging_->data() + p * arena_.block_bytes;
  kernels::cuda::StateFromCpu(shapes_[group.value()], tokens, here, to.data(), arena_.block_bytes);
  for (int p = 0; p < pieces; ++p)
    DT_RETURN_IF_ERROR(stream_.Copy(arena_.block_at(there[p]), to[p], arena_.block_bytes));
  return stream_.SynchronizeStatus();
}

absl::StatusOr<const KvBlockId*> CudaStateExecutor::BlocksOfHead(const proto::ShardStep& item, MicroBatchId id, int op,
                                                                 int64_t block, int head) const {
  const KvBlockId* const held = BlocksOfOp(core_.ShardOf(id, item), block, op);
  if (held == nullptr) return Internal("linear attention: the state of block ", block, " is not held");
  return held + head * core_.table().linear(core_.table().op_group[op])->blocks_per_head;
}

absl::Status CudaStateExecutor::GiveStates(MicroBatchId id, int op, std::byte* out) {
  const LayerGroup group = core_.table().op_group[op];
  const proto::LinearSpec& spec = *core_.table().linear(group);
  const linear_attention::PackedState packed(spec, arena_.block_bytes);
  HostBlock block_here(spec.blocks_per_head, arena_.block_bytes);
  for (const proto::ShardStep& item : core_.LayoutOf(id, group).items) {
    if (item.states != proto::StateExchange::kFetch) continue;
    std::byte* at = out + item.before_offset;
    for (int head = 0; head < item.kv_heads.size(); ++head)
      for (const proto::StateBlock& block : proto::StatesBefore(item.ctx_len)) {
        DT_ASSIGN_OR_RETURN(const KvBlockId* const there, BlocksOfHead(item, id, op, block.block, head));
        DT_RETURN_IF_ERROR(BlockToCpu(group, block.tokens, there, block_here.pieces()));
        at = packed.Pack(block.tokens, block_here.pieces(), at);
      }
  }
  return absl::OkStatus();
}

absl::Status CudaStateExecutor::TakeStates(MicroBatchId id, int op, std::span<const std::byte> key_value) {
  const LayerGroup group = core_.table().op_group[op];
  const proto::LinearSpec& spec = *core_.table().linear(group);
  const linear_attention::PackedState packed(spec, arena_.block_bytes);
  HostBlock block_here(spec.blocks_per_head, arena_.block_bytes);
  for (const proto::ShardStep& item : core_.LayoutOf(id, group).items) {
    if (item.states == proto::StateExchange::kTokens) continue;
    const std::byte* at = key_value.data() + item.state_offset;
    for (int head = 0; head < item.kv_heads.size(); ++head)
      for (const proto::StateBlock& block : item.states_left()) {
        DT_ASSIGN_OR_RETURN(const KvBlockId* const there, BlocksOfHead(item, id, op, block.block, head));
        at = packed.Unpack(block.tokens, at, block_here.pieces());
        DT_RETURN_IF_ERROR(BlockFromCpu(group, block.tokens, block_here.pieces(), there));
      }
  }
  return absl::OkStatus();
}

absl::Status CudaStateExecutor::Gather(const proto::ShardStep& item, const ShardState& shard, int op,
                                       std::span<std::byte> out) {
  const StateSnapshot snapshot = core_.SnapshotOf(item, op);
  const int pieces = static_cast<int>(snapshot.pieces);
  std::memcpy(out.data(), &snapshot, sizeof(snapshot));
  std::byte* at = out.data() + sizeof(snapshot);
  std::vector<std::byte*> here(pieces);
  for (int64_t block = snapshot.first_block; block < snapshot.first_block + snapshot.blocks; ++block) {
    const KvBlockId* held = BlocksOfOp(shard, block, op);
    if (held == nullptr) return Internal("move: the state of block ", block, " is not held here");
    const Position end = item.ctx_len + item.q_len - block * kSegmentTokens;
    const int tokens = static_cast<int>(std::min<Position>(kSegmentTokens, end));
    for (int head = 0; head < item.kv_heads.size(); ++head) {
      for (std::byte*& piece : here) piece = std::exchange(at, at + arena_.block_bytes);
      DT_RETURN_IF_ERROR(BlockToCpu(core_.table().op_group[op], tokens, held + head * pieces, here.data()));
    }
  }
  return absl::OkStatus();
}

absl::Status CudaStateExecutor::Restore(MicroBatchId id, int op, std::span<const std::byte> key_value) {
  const LayerGroup group = core_.table().op_group[op];
  for (const proto::ShardStep& item : core_.LayoutOf(id, group).items) {
    const StateSnapshot expected = core_.SnapshotOf(item, op);
    const auto bytes = key_value.subspan(item.key_offset, expected.payload_bytes());
    DT_RETURN_IF_ERROR(CheckSnapshot(bytes, expected));
    const ShardState& shard = core_.ShardOf(id, item);
    const int pieces = static_cast<int>(expected.pieces);
    auto* at = const_cast<std::byte*>(bytes.data()) + sizeof(expected);
    std::vector<std::byte*> here(pieces);
    for (int64_t block = expected.first_block; block < expected.first_block + expected.blocks; ++block) {
      const KvBlockId* held = BlocksOfOp(shard, block, op);
      if (held == nullptr) return Internal("move: there is no room for the state of block ", block);
      const Position end = item.ctx_len + item.q_len - block * kSegmentTokens;
      const int tokens = static_cast<int>(std::min<Position>(kSegmentTokens, end));
      for (int head = 0; head < item.kv_heads.size(); ++head) {
        for (std::byte*& piece : here) piece = std::exchange(at, at + arena_.block_bytes);
        DT_RETURN_IF_ERROR(BlockFromCpu(group, tokens, here.data(), held + head * pieces));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace dovetail::attention
