#include "attention_worker/cpu/linear_executor.h"

#include <algorithm>
#include <cstring>

namespace dovetail::attention {

using linear_attention::BlocksTo;
using linear_attention::FirstBlock;
using linear_attention::LinearHead;
using linear_attention::PackedState;
using proto::StateBlock;
using proto::StateExchange;

LinearExecutor::LinearExecutor(kernels::Device& device, const AttentionWorkerCore& core, size_t block_bytes,
                               BlockAt block_at)
    : core_(core), block_bytes_(block_bytes), block_at_(std::move(block_at)), heads_of_op_(device) {}

absl::StatusOr<std::unique_ptr<LinearExecutor>> LinearExecutor::Create(kernels::Device& device,
                                                                       const AttentionWorkerCore& core,
                                                                       size_t block_bytes, BlockAt block_at) {
  for (int g = 0; g < core.table().group_count(); ++g) {
    const proto::LinearSpec* spec = core.table().linear(LayerGroup(static_cast<uint16_t>(g)));
    if (spec == nullptr) continue;
    const int pieces = kernels::LinearStateLayout(linear_attention::ShapeOf(*spec)).pieces(block_bytes);
    if (pieces == 0 || pieces > spec->blocks_per_head)
      return InvalidArgument("layer group ", g, ": a state needs ", pieces, " KvBlocks of ", block_bytes,
                             " bytes; the model's table says ", spec->blocks_per_head);
  }
  return std::unique_ptr<LinearExecutor>(new LinearExecutor(device, core, block_bytes, std::move(block_at)));
}

absl::Status LinearExecutor::Prepare(MicroBatchId id, LayerGroup group) {
  const proto::LinearSpec& spec = *core_.table().linear(group);
  linear_attention::LinearHeads::Limits limits;
  size_t pieces = spec.blocks_per_head;
  for (const proto::ShardStep& step : core_.LayoutOf(id, group).items) {
    if (step.states != StateExchange::kTokens) continue;
    const size_t count = step.kv_heads.size();
    const int64_t blocks = BlocksTo(step.ctx_len, step.ctx_len + step.q_len);
    limits.heads += count;
    limits.rows += static_cast<int64_t>(count) * step.q_len;
    pieces += count * blocks * spec.blocks_per_head;
    if (blocks > 2) limits.unkept += count;
  }
  heads_.reserve(limits.heads);
  pieces_.reserve(pieces);
  return heads_of_op_.Prepare(spec, limits);
}

void LinearExecutor::AddHeads(const proto::ShardStep& step, MicroBatchId id, int op, std::span<const std::byte> query,
                              std::span<const std::byte> key_value, std::byte* out) {
  const proto::LinearSpec& spec = *core_.table().linear(core_.table().op_group[op]);
  const ShardState& shard = core_.ShardOf(id, step);
  const int64_t count = step.kv_heads.size(), element = static_cast<int64_t>(SizeOf(spec.wire));
  const int64_t key_bytes = spec.key_dim * element, value_bytes = spec.value_dim * element;
  for (int local = 0; local < count; ++local) {
    LinearHead head;
    head.head = step.kv_heads.begin + local;
    head.first_position = step.ctx_len;
    head.rows = step.q_len;
    head.q = query.data() + step.query_offset + local * key_bytes;
    head.k = key_value.data() + step.key_offset + local * key_bytes;
    head.v = key_value.data() + step.value_offset + local * value_bytes;
    head.o = out + step.partial_offset + local * value_bytes;
    head.q_step = head.k_step = count * key_bytes;
    head.v_step = head.o_step = count * value_bytes;
    head.gates = reinterpret_cast<const float*>(key_value.data() + step.gate_offset) + int64_t{local} * spec.gates();
    head.gate_step = count * spec.gates();
    head.pieces = pieces_.data() + pieces_.size();
    head.first_block = FirstBlock(step.ctx_len);
    head.blocks = BlocksTo(step.ctx_len, step.ctx_len + step.q_len);
    for (int64_t block = head.first_block; block < head.first_block + head.blocks; ++block) {
      const KvBlockId* const held = BlocksOfOp(shard, block, op);
      for (int p = 0; p < spec.blocks_per_head; ++p)
        pieces_.push_back(held != nullptr ? block_at_(held[local * spec.blocks_per_head + p]) : nullptr);
    }
    heads_.push_back(head);
  }
}

absl::Status LinearExecutor::Run(const kernels::OpContext& context, MicroBatchId id, int op,
                                 std::span<const std::byte> query, std::span<const std::byte> key_value,
                                 std::byte* out) {
  const proto::AttentionTable& table = core_.table();
  const LayerGroup group = table.op_group[op];
  heads_.clear();
  pieces_.clear();
  for (const proto::ShardStep& step : core_.LayoutOf(id, group).items)
    if (step.states == StateExchange::kTokens) AddHeads(step, id, op, query, key_value, out);
  return heads_of_op_.Run(context, *table.linear(group), table.constants[op], heads_, block_bytes_);
}

absl::Status LinearExecutor::FindPacked(const proto::ShardStep& item, MicroBatchId id, int op,
                                        const proto::StateBlocks& blocks, const PackedState& packed, size_t at) {
  const int pieces = core_.table().linear(core_.table().op_group[op])->blocks_per_head;
  for (int head = 0; head < item.kv_heads.size(); ++head)
    for (const StateBlock& block : blocks) {
      const KvBlockId* const held = BlocksOfOp(core_.ShardOf(id, item), block.block, op);
      if (held == nullptr) return Internal("linear attention: the state of block ", block.block, " is not held");
      packed_.push_back({block.tokens, pieces_.size(), at});
      for (int p = 0; p < pieces; ++p) pieces_.push_back(block_at_(held[head * pieces + p]));
      at += packed.bytes(block.tokens);
    }
  return absl::OkStatus();
}

// A state of a large model has tens of kilobytes a head, and a prompt leaves some of each: so each is a task.
absl::Status LinearExecutor::GiveStates(const kernels::OpContext& context, MicroBatchId id, int op, std::byte* out) {
  const LayerGroup group = core_.table().op_group[op];
  const PackedState packed(*core_.table().linear(group), block_bytes_);
  ClearPacked();
  for (const proto::ShardStep& item : core_.LayoutOf(id, group).items)
    if (item.states == StateExchange::kFetch)
      DT_RETURN_IF_ERROR(FindPacked(item, id, op, proto::StatesBefore(item.ctx_len), packed, item.before_offset));
  context.pool->Run(static_cast<int>(packed_.size()), [&](int i) {
    const PackedBlock& block = packed_[i];
    packed.Pack(block.tokens, pieces_.data() + block.first_piece, out + block.at);
  });
  return absl::OkStatus();
}

absl::Status LinearExecutor::TakeStates(const kernels::OpContext& context, MicroBatchId id, int op,
                                        std::span<const std::byte> key_value) {
  const LayerGroup group = core_.table().op_group[op];
  const PackedState packed(*core_.table().linear(group), block_bytes_);
  ClearPacked();
  for (const proto::ShardStep& item : core_.LayoutOf(id, group).items)
    if (item.states != StateExchange::kTokens)
      DT_RETURN_IF_ERROR(FindPacked(item, id, op, item.states_left(), packed, item.state_offset));
  context.pool->Run(static_cast<int>(packed_.size()), [&](int i) {
    const PackedBlock& block = packed_[i];
    packed.Unpack(block.tokens, key_value.data() + block.at, pieces_.data() + block.first_piece);
  });
  return absl::OkStatus();
}

void LinearExecutor::ClearPacked() {
  packed_.clear();
  pieces_.clear();
}

const KvBlockId* LinearExecutor::BlocksOfOp(const ShardState& shard, int64_t block, int op) const {
  const int64_t at = block - shard.first_block();
  if (at < 0 || at >= static_cast<int64_t>(shard.sets.size()) || shard.sets[at] == kNoBlockSet) return nullptr;
  const proto::LinearSpec& spec = *core_.table().linear(core_.table().op_group[op]);
  const int per_op = shard.shard.kv_heads.size() * spec.blocks_per_head;
  return core_.BlocksOf(shard.sets[at]).data() + core_.table().op_index_in_group[op] * per_op;
}

absl::Status LinearExecutor::Gather(const proto::ShardStep& item, const ShardState& shard, int op,
                                    std::span<std::byte> out) const {
  const StateSnapshot snapshot = core_.SnapshotOf(item, op);
  std::memcpy(out.data(), &snapshot, sizeof(snapshot));
  std::byte* at = out.data() + sizeof(snapshot);
  const int pieces = item.kv_heads.size() * static_cast<int>(snapshot.pieces);
  for (int64_t block = snapshot.first_block; block < snapshot.first_block + snapshot.blocks; ++block) {
    const KvBlockId* held = BlocksOfOp(shard, block, op);
    if (held == nullptr) return Internal("move: the state of block ", block, " is not held here");
    for (int piece = 0; piece < pieces; ++piece, at += block_bytes_)
      std::memcpy(at, block_at_(held[piece]), block_bytes_);
  }
  return absl::OkStatus();
}

absl::Status LinearExecutor::Restore(MicroBatchId id, int op, std::span<const std::byte> key_value) const {
  for (const proto::ShardStep& item : core_.LayoutOf(id, core_.table().op_group[op]).items) {
    const StateSnapshot expected = core_.SnapshotOf(item, op);
    const auto bytes = key_value.subspan(item.key_offset, expected.payload_bytes());
    DT_RETURN_IF_ERROR(CheckSnapshot(bytes, expected));
    const ShardState& shard = core_.ShardOf(id, item);
    const std::byte* at = bytes.data() + sizeof(expected);
    const int pieces = item.kv_heads.size() * static_cast<int>(expected.pieces);
    for (int64_t block = expected.first_block; block < expected.first_block + expected.blocks; ++block) {
      const KvBlockId* held = BlocksOfOp(shard, block, op);
      if (held == nullptr) return Internal("move: there is no room for the state of block ", block);
      for (int piece = 0; piece < pieces; ++piece, at += block_bytes_)
        std::memcpy(block_at_(held[piece]), at, block_bytes_);
    }
  }
  return absl::OkStatus();
}

}  // namespace dovetail::attention
