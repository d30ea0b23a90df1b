#include "attention_worker/cpu/attention_executor.h"

#include <algorithm>
#include <cstring>

#include "attention_worker/block_digest.h"
#include "base/check.h"
#include "kernels/op_context.h"
#include "kernels/thread_pool.h"

namespace dovetail::attention {

namespace {

constexpr size_t kShareAhead = 8;                 // of the arena, that is taken before it is used
constexpr size_t kLeastAhead = size_t{16} << 20;  // smaller ones are soon there

}  // namespace

size_t AttentionExecutor::BlockBytes(const proto::AttentionTable& table, KvStorage storage) {
  size_t bytes = 0, state_bytes = 0;
  for (const proto::AttentionSpec& spec : table.groups) {
    if (const auto* linear = std::get_if<proto::LinearSpec>(&spec)) {
      state_bytes = std::max(state_bytes, kernels::LinearStateLayout(linear_attention::ShapeOf(*linear)).bytes());
      continue;
    }
    const auto& softmax = std::get<proto::SoftmaxSpec>(spec);
    const kernels::KvBlockLayout layout{softmax.key_dim, softmax.value_dim, softmax.kv, storage};
    bytes = std::max(bytes, (layout.bytes() + 63) / 64 * 64);
  }
  return bytes > 0 ? bytes : state_bytes;
}

AttentionExecutor::AttentionExecutor(kernels::Device& device, AttentionWorkerCore& core, int micro_batches,
                                     KvStorage storage)
    : device_(device),
      core_(core),
      storage_(storage),
      block_bytes_(BlockBytes(core.table(), storage)),
      stream_(device.CreateStream()),
      micro_batches_(micro_batches + proto::kMoveSlots) {}

absl::StatusOr<std::unique_ptr<AttentionExecutor>> AttentionExecutor::Create(kernels::Device& device,
                                                                             AttentionWorkerCore& core,
                                                                             uint32_t kv_blocks, int micro_batches,
                                                                             KvStorage storage) {
  DT_RETURN_IF_ERROR(CheckKvStorage(core.table(), storage, /*gpu=*/""));
  std::unique_ptr<AttentionExecutor> executor(new AttentionExecutor(device, core, micro_batches, storage));
  DT_ASSIGN_OR_RETURN(executor->arena_, device.Allocate(size_t{kv_blocks} * executor->block_bytes_));
  const size_t ahead = std::min(executor->arena_->size_bytes() / kShareAhead, kernels::PagesAhead::kMostAhead);
  if (ahead >= kLeastAhead)
    executor->pages_.emplace(std::span(executor->arena_->data(), executor->arena_->size_bytes()), ahead);
  if (core.table().has_linear()) {
    DT_ASSIGN_OR_RETURN(executor->linear_, LinearExecutor::Create(device, core, executor->block_bytes_,
                                                                  [raw = executor.get()](KvBlockId block) {
                                                                    return raw->BlockAt(block);
                                                                  }));
  }
  return executor;
}

kernels::AttentionShape AttentionExecutor::ShapeOf(LayerGroup group) const {
  const proto::SoftmaxSpec& spec = core_.table().softmax(group);
  return kernels::AttentionShape{spec.group_size(), spec.key_dim, spec.value_dim, spec.scale,
                                 spec.window,       spec.kv,      storage_};
}

absl::Status AttentionExecutor::Grow(SharedBuffer& buffer, size_t bytes) {
  if (buffer != nullptr && buffer->size_bytes() >= bytes) return absl::OkStatus();
  buffer.reset();
  DT_ASSIGN_OR_RETURN(buffer, device_.Allocate(bytes + bytes / 4));
  return absl::OkStatus();
}

absl::Status AttentionExecutor::Copy(std::span<const BlockCopy> copies) {
  for (const BlockCopy& copy : copies) std::memcpy(BlockAt(copy.to), BlockAt(copy.from), block_bytes_);
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> AttentionExecutor::DigestOf(std::span<const KvBlockId> blocks) {
  std::vector<uint64_t> digests(blocks.size());
  stream_->pool().Run(static_cast<int>(blocks.size()), [&](int i) {
    digests[i] = Digest({BlockAt(blocks[i]), block_bytes_});
  });
  return Digest(std::as_bytes(std::span(digests)));
}

absl::Status AttentionExecutor::Poison(std::span<const KvBlockId> blocks) {
  for (const KvBlockId block : blocks) std::memset(BlockAt(block), kPoison, block_bytes_);
  return absl::OkStatus();
}

absl::Status AttentionExecutor::PrepareStep(MicroBatchId id, const exchange::Seam& seam) {
  DT_CHECK(std::holds_alternative<exchange::ThroughHosts>(seam), "a CPU's payloads cross through the hosts");
  MicroBatch& batch = micro_batches_[id.value()];
  batch.attention.reset();
  batch.prepared = false;
  if (pages_) pages_->WillUse(size_t{core_.begun_blocks()} * block_bytes_);
  size_t scratch = 0, partial = 0, pointers = 0, items = 0, piece = 0;
  for (int g = 0; g < core_.table().group_count(); ++g) {
    const LayerGroup group(static_cast<uint16_t>(g));
    const proto::StepLayout& layout = core_.LayoutOf(id, group);
    if (core_.table().linear(group) != nullptr) {
      DT_RETURN_IF_ERROR(linear_->Prepare(id, group));
      partial = std::max<size_t>(partial, std::max(layout.partial_bytes, layout.before_bytes));
      continue;
    }
    kernels::AttentionLimits limits;
    size_t group_pointers = 0;
    for (const proto::ShardStep& item : layout.items) {
      if (item.rows.q_count > 0) {
        ++limits.items;
        limits.rows += item.rows.q_count;
        limits.kv_heads = std::max(limits.kv_heads, item.kv_heads.size());
        limits.tokens = std::max<int64_t>(limits.tokens, item.attended_end() - item.tokens.begin);
      }
      group_pointers += core_.ShardOf(id, item).sets.size() * item.kv_heads.size();
    }
    limits.threads = stream_->pool().threads();
    if (limits.items > 0) scratch = std::max(scratch, kernels::PagedAttentionScratchBytes(ShapeOf(group), limits));
    partial = std::max<size_t>(partial, layout.partial_bytes);
    piece = std::max<size_t>(piece, layout.largest_piece);
    pointers = std::max(pointers, group_pointers);
    items = std::max(items, layout.items.size());
  }
  batch.block_pointers.reserve(pointers);
  batch.items.reserve(items);
  batch.attended.reserve(items);
  batch.appends.reserve(items);
  DT_RETURN_IF_ERROR(Grow(batch.scratch, scratch));
  DT_RETURN_IF_ERROR(Grow(batch.partial, partial));
  for (SharedBuffer& buffer : batch.pieces)
    if (piece > 0) DT_RETURN_IF_ERROR(Grow(buffer, piece));
  batch.prepared = true;
  return absl::OkStatus();
}

// Block pointers are laid out [item][KV head][block of the shard].
void AttentionExecutor::FillTables(MicroBatch& batch, MicroBatchId id, int op) {
  const LayerGroup group = core_.table().op_group[op];
  const int op_index = core_.table().op_index_in_group[op];
  batch.block_pointers.clear();
  batch.items.clear();
  for (const proto::ShardStep& step : core_.LayoutOf(id, group).items) {
    const ShardState& shard = core_.ShardOf(id, step);
    const size_t first = batch.block_pointers.size();
    const int heads = step.kv_heads.size();
    for (int head = 0; head < heads; ++head)
      for (const BlockSetId set : shard.sets)
        batch.block_pointers.push_back(set == kNoBlockSet ? nullptr
                                                          : BlockAt(core_.BlocksOf(set)[op_index * heads + head]));
    kernels::AttentionItem item;
    item.q_rows = step.rows.q_count;
    item.kv_heads = heads;
    item.first_position = step.ctx_len + step.rows.q_first;
    item.token_begin = step.tokens.begin;
    item.token_end = step.attended_end();
    item.blocks.blocks = batch.block_pointers.data() + first;
    item.blocks.head_step = static_cast<int64_t>(shard.sets.size());
    item.blocks.first_segment = static_cast<int32_t>(shard.first_block());
    item.blocks.segments = static_cast<int32_t>(shard.sets.size());
    batch.items.push_back(item);
  }
}

absl::Status AttentionExecutor::TakeQuery(MicroBatchId id, int op, std::span<const std::byte> query) {
  MicroBatch& batch = micro_batches_[id.value()];
  if (!batch.prepared) return Internal("attention op ", op, ": its step has no buffers");  // q of a step just refused
  const LayerGroup group = core_.table().op_group[op];
  batch.linear_query = query;
  if (core_.table().linear(group) != nullptr) return absl::OkStatus();  // its q needs the decays that come with k and v
  FillTables(batch, id, op);
  const proto::StepLayout& layout = core_.LayoutOf(id, group);
  const int value_dim = core_.table().softmax(group).value_dim;
  batch.attended.clear();
  for (size_t i = 0; i < layout.items.size(); ++i) {
    const proto::ShardStep& step = layout.items[i];
    if (step.rows.q_count == 0) continue;
    kernels::AttentionItem& item = batch.attended.emplace_back(batch.items[i]);
    std::byte* out = batch.partial->data() + step.partial_offset;
    item.q = query.data() + step.query_offset;
    if (step.finished()) {
      item.o = out;
      if (const float* sinks = core_.table().sinks(op))
        item.sinks = sinks + step.kv_heads.begin * core_.table().softmax(group).group_size();
    } else {
      item.partial_o = reinterpret_cast<float*>(out);
      item.partial_ml = item.partial_o + step.nodes * step.query_heads * value_dim;
    }
  }
  if (batch.attended.empty()) return absl::OkStatus();  // only rows are asked for
  auto attention = kernels::PagedAttention::Begin(kernels::ContextOf(*stream_), ShapeOf(group), batch.attended,
                                                  {batch.scratch->data(), batch.scratch->size_bytes()});
  DT_RETURN_IF_ERROR(attention.status());
  batch.attention.emplace(*std::move(attention));
  batch.attended_op = op;
  return absl::OkStatus();
}

void AttentionExecutor::AttendEarlier(MicroBatchId id, int op) {
  MicroBatch& batch = micro_batches_[id.value()];
  if (batch.attention.has_value() && batch.attended_op == op) batch.attention->AttendComplete();
}

absl::StatusOr<transport::LentBytes> AttentionExecutor::GiveStates(MicroBatchId id, int op) {
  MicroBatch& batch = micro_batches_[id.value()];
  if (!batch.prepared) return Internal("attention op ", op, ": its step has no buffers");
  DT_RETURN_IF_ERROR(linear_->GiveStates(kernels::ContextOf(*stream_), id, op, batch.partial->data()));
  return transport::Lend(batch.partial, core_.LayoutOf(id, core_.table().op_group[op]).before_bytes);
}

// Of a linear op. Without queries it is a part of a move.
absl::StatusOr<transport::LentBytes> AttentionExecutor::AppendToStates(MicroBatch& batch, MicroBatchId id, int op,
                                                                       std::span<const std::byte> key_value) {
  const proto::StepLayout& layout = core_.LayoutOf(id, core_.table().op_group[op]);
  if (!batch.prepared) return Internal("attention op ", op, ": its step has no buffers");
  std::span<const std::byte> query = std::exchange(batch.linear_query, {});
  if (layout.with_states) {
    DT_RETURN_IF_ERROR(linear_->TakeStates(kernels::ContextOf(*stream_), id, op, key_value));
    if (layout.partial_bytes == 0) return transport::LentBytes();
    query = key_value;  // its queries are there
  } else if (layout.query_bytes == 0) {
    DT_RETURN_IF_ERROR(linear_->Restore(id, op, key_value));
    return transport::LentBytes();
  } else if (query.size() != static_cast<size_t>(layout.query_bytes)) {
    return Internal("attention op ", op, ": k and v came without q");
  }
  DT_RETURN_IF_ERROR(linear_->Run(kernels::ContextOf(*stream_), id, op, query, key_value, batch.partial->data()));
  stream_->Synchronize();
  return transport::Lend(batch.partial, layout.partial_bytes);
}

absl::StatusOr<transport::LentBytes> AttentionExecutor::AppendAndFinish(MicroBatchId id, int op,
                                                                        std::span<const std::byte> key_value) {
  MicroBatch& batch = micro_batches_[id.value()];
  const LayerGroup group = core_.table().op_group[op];
  const proto::StepLayout& layout = core_.LayoutOf(id, group);
  if (core_.table().linear(group) != nullptr) return AppendToStates(batch, id, op, key_value);
  const bool asked = layout.query_bytes > 0;
  if (asked != batch.attention.has_value() || !batch.prepared)
    return Internal("attention op ", op, ": k and v came without q");
  if (!asked) FillTables(batch, id, op);
  batch.appends.clear();
  for (size_t i = 0; i < layout.items.size(); ++i) {
    const proto::ShardStep& step = layout.items[i];
    if (step.rows.kv_count == 0) continue;
    kernels::KvAppendItem append;
    append.k = key_value.data() + step.key_offset;
    append.v = key_value.data() + step.value_offset;
    append.rows = step.rows.kv_count;
    append.kv_heads = step.kv_heads.size();
    append.first_position = step.ctx_len + step.rows.kv_first;
    append.blocks = batch.items[i].blocks;
    batch.appends.push_back(append);
  }
  const kernels::AttentionShape shape = ShapeOf(group);
  DT_RETURN_IF_ERROR(kernels::KvAppend(kernels::ContextOf(*stream_), shape.layout(), batch.appends));
  if (asked) {
    batch.attention->AttendRest();
    batch.attention->Finish();
    batch.attention.reset();
  }
  stream_->Synchronize();
  for (const proto::ShardStep& item : layout.items) {
    if (item.gather_count == 0 || layout.pieces > 0) continue;
    std::byte* const out = batch.partial->data();
    DT_RETURN_IF_ERROR(GatherRows(op, item.kv_heads.size(), core_.ShardOf(id, item),
                                  {item.gather_first, item.gather_first + item.gather_count},
                                  out + item.gather_key_offset, out + item.gather_value_offset));
  }
  return transport::Lend(batch.partial, layout.partial_bytes);
}

absl::StatusOr<transport::LentBytes> AttentionExecutor::GiveRows(MicroBatchId id, int op, int piece) {
  MicroBatch& batch = micro_batches_[id.value()];
  if (!batch.prepared) return Internal("attention op ", op, ": its step has no buffers");
  const LayerGroup group = core_.table().op_group[op];
  const proto::StepLayout::Piece rows = core_.LayoutOf(id, group).PieceAt(piece, core_.table().softmax(group));
  const SharedBuffer& buffer = batch.pieces[piece % proto::kGatherPiecesAhead];
  DT_RETURN_IF_ERROR(GatherRows(op, rows.item->kv_heads.size(), core_.ShardOf(id, *rows.item), rows.tokens,
                                buffer->data(), buffer->data() + rows.value_offset));
  return transport::Lend(buffer, rows.bytes);
}

namespace {

// Copies `rows` tokens of one head, from `token` of the first block on, out of the layout of blocks.
struct HeadRows {
  kernels::KvBlockLayout layout;
  int token = 0;
  int rows = 0;
  std::byte* k = nullptr;  // of the first row
  std::byte* v = nullptr;
  size_t k_step = 0, v_step = 0;  // bytes from row to row
};

void GatherBlock(const std::byte* block, const HeadRows& out) {
  for (int row = 0; row < out.rows; ++row)
    out.layout.ReadRow(block, out.token + row, out.k + row * out.k_step, out.v + row * out.v_step);
}

}  // namespace

// A block of a head is a task.
absl::Status AttentionExecutor::GatherRows(int op, int heads, const ShardState& shard, const proto::TokenRange& tokens,
                                           std::byte* k, std::byte* v) {
  const kernels::KvBlockLayout layout = ShapeOf(core_.table().op_group[op]).layout();
  const int first_block = core_.table().op_index_in_group[op] * heads;
  const size_t k_step = heads * layout.key_dim * SizeOf(layout.dtype);
  const size_t v_step = heads * layout.value_dim * SizeOf(layout.dtype);
  const int64_t first = tokens.begin / kSegmentTokens, last = (tokens.end + kSegmentTokens - 1) / kSegmentTokens;
  for (int64_t block = first; block < last; ++block) {
    const int64_t index = block - shard.first_block();
    if (index < 0 || index >= static_cast<int64_t>(shard.sets.size()) || shard.sets[index] == kNoBlockSet)
      return Internal("tokens from ", block * kSegmentTokens, " are not held here");
  }
  stream_->pool().Run(static_cast<int>((last - first) * heads), [&](int task) {
    const int head = task % heads;
    const int64_t block = first + task / heads;
    const Position begin = std::max<Position>(tokens.begin, block * kSegmentTokens);
    HeadRows out{layout, static_cast<int>(begin % kSegmentTokens)};
    out.rows = static_cast<int>(std::min<Position>((block + 1) * kSegmentTokens, tokens.end) - begin);
    out.k_step = k_step;
    out.v_step = v_step;
    out.k = k + (begin - tokens.begin) * k_step + head * layout.key_dim * SizeOf(layout.dtype);
    out.v = v + (begin - tokens.begin) * v_step + head * layout.value_dim * SizeOf(layout.dtype);
    GatherBlock(BlockAt(core_.BlocksOf(shard.sets[block - shard.first_block()])[first_block + head]), out);
  });
  return absl::OkStatus();
}

absl::StatusOr<transport::LentBytes> AttentionExecutor::Gather(int slot, int op) {
  const OutgoingMove& move = core_.OutgoingMoveOf(slot);
  const LayerGroup group = core_.table().op_group[op];
  const proto::StepLayout& layout = move.layouts[group.value()];
  Gathered& gathered = gathered_[static_cast<size_t>(slot)];
  SharedBuffer& rows = gathered.rows[gathered.next];
  gathered.next = (gathered.next + 1) % gathered.rows.size();
  DT_RETURN_IF_ERROR(Grow(rows, layout.key_value_bytes));
  if (core_.table().linear(group) != nullptr) {
    const std::span<std::byte> all(rows->data(), layout.key_value_bytes);
    for (const proto::ShardStep& item : layout.items)
      DT_RETURN_IF_ERROR(linear_->Gather(item, core_.ShardOf(move, item), op, all.subspan(item.key_offset)));
    return transport::Lend(rows, all.size());
  }
  for (const proto::ShardStep& item : layout.items) {
    const Position begin = item.ctx_len + item.rows.kv_first;
    std::byte* const out = rows->data();
    DT_RETURN_IF_ERROR(GatherRows(op, item.kv_heads.size(), core_.ShardOf(move, item),
                                  {begin, begin + item.rows.kv_count}, out + item.key_offset, out + item.value_offset));
  }
  return transport::Lend(rows, layout.key_value_bytes);
}

}  // namespace dovetail::attention
