#include "attention_worker/cpu/linear_executor.h"

#include <algorithm>
#include <cstring>

#include "kernels/convert.h"
#include "kernels/short_convolution.h"
#include "kernels/thread_pool.h"

namespace dovetail::attention {

using kernels::LinearStateItem;
using kernels::LinearStateLayout;

kernels::LinearStateShape StateShapeOf(const proto::LinearSpec& spec) {
  kernels::LinearStateShape shape;
  shape.key_dim = spec.key_dim;
  shape.value_dim = spec.value_dim;
  shape.decay = spec.vector_decay ? kernels::DecayForm::kVector : kernels::DecayForm::kScalar;
  shape.update = spec.delta ? kernels::StateUpdate::kDelta : kernels::StateUpdate::kAdd;
  shape.state = spec.state;
  shape.history_channels = spec.conv_width > 0 ? spec.channels() : 0;
  shape.history = spec.wire;
  return shape;
}

struct LinearExecutor::OpView {
  const kernels::OpContext& context;
  const proto::LinearSpec& spec;
  const proto::LinearConstants& constants;
  MicroBatchId id;
  int op_index = 0;  // in its group
  const proto::StepLayout& layout;
  LinearStateLayout state;
  std::span<const std::byte> query, key_value;
  std::byte* out = nullptr;
};

namespace {

int64_t BlockOf(Position position) { return position / kSegmentTokens; }
int64_t FirstBlock(const proto::ShardStep& step) { return std::max<int64_t>(0, BlockOf(step.ctx_len) - 1); }
int64_t BlocksIn(const proto::ShardStep& step) { return BlockOf(step.ctx_len + step.q_len - 1) + 1 - FirstBlock(step); }

}  // namespace

LinearExecutor::LinearExecutor(kernels::Device& device, const AttentionWorkerCore& core, size_t block_bytes,
                               BlockAt block_at)
    : device_(device), core_(core), block_bytes_(block_bytes), block_at_(std::move(block_at)) {}

absl::StatusOr<std::unique_ptr<LinearExecutor>> LinearExecutor::Create(kernels::Device& device,
                                                                       const AttentionWorkerCore& core,
                                                                       size_t block_bytes, BlockAt block_at) {
  for (int g = 0; g < core.table().group_count(); ++g) {
    const proto::LinearSpec* spec = core.table().linear(LayerGroup(static_cast<uint16_t>(g)));
    if (spec == nullptr) continue;
    const int pieces = LinearStateLayout(StateShapeOf(*spec)).pieces(block_bytes);
    if (pieces == 0 || pieces > spec->blocks_per_head)
      return InvalidArgument("layer group ", g, ": a state needs ", pieces, " KvBlocks of ", block_bytes,
                             " bytes; the model's table says ", spec->blocks_per_head);
  }
  return std::unique_ptr<LinearExecutor>(new LinearExecutor(device, core, block_bytes, std::move(block_at)));
}

absl::Status LinearExecutor::Grow(std::unique_ptr<kernels::Buffer>& buffer, size_t bytes) {
  if (buffer != nullptr && buffer->size_bytes() >= bytes) return absl::OkStatus();
  buffer.reset();
  DT_ASSIGN_OR_RETURN(buffer, device_.Allocate(bytes + bytes / 4));
  return absl::OkStatus();
}

absl::Status LinearExecutor::Prepare(MicroBatchId id, LayerGroup group) {
  const proto::LinearSpec& spec = *core_.table().linear(group);
  const size_t state_bytes = LinearStateLayout(StateShapeOf(spec)).bytes();
  size_t floats = 0, pieces = 0, heads = 0, scratch = 0;
  for (const proto::ShardStep& step : core_.LayoutOf(id, group).items) {
    const size_t count = step.kv_heads.size();
    heads += count;
    floats += count * step.q_len * (2 * spec.channels() + spec.value_dim);
    pieces += count * BlocksIn(step) * spec.blocks_per_head;
    if (BlocksIn(step) > 2) scratch += count * 2 * state_bytes;
  }
  heads_.reserve(heads);
  items_.reserve(heads);
  pieces_.reserve(pieces);
  DT_RETURN_IF_ERROR(Grow(floats_, floats * sizeof(float)));
  return Grow(scratch_, scratch);
}

std::byte* const* LinearExecutor::PiecesOf(const OpView& view, const Head& head, int64_t block) const {
  return pieces_.data() + head.table + (block - FirstBlock(*head.step)) * view.spec.blocks_per_head;
}

// Null where the block is not kept.
std::byte* LinearExecutor::HistoryRow(const OpView& view, const Head& head, Position position) const {
  std::byte* const* pieces = PiecesOf(view, head, BlockOf(position));
  if (pieces[0] == nullptr) return nullptr;
  std::byte* rows[LinearStateLayout::kMaxRows];
  view.state.Rows(LinearStateLayout::kHistory, pieces, block_bytes_, rows);
  return rows[position % kSegmentTokens];
}

void LinearExecutor::LayOut(const OpView& view) {
  heads_.clear();
  pieces_.clear();
  auto* floats = reinterpret_cast<float*>(floats_->data());
  for (const proto::ShardStep& step : view.layout.items) {
    const ShardState& shard = core_.ShardOf(view.id, step);
    const int count = step.kv_heads.size();
    for (int local = 0; local < count; ++local) {
      Head head{&step, step.kv_heads.begin + local, local, pieces_.size()};
      head.inputs = floats;
      head.prepared = view.spec.conv_width > 0 ? head.inputs + step.q_len * view.spec.channels() : head.inputs;
      head.o = head.prepared + step.q_len * view.spec.channels();
      floats = head.o + step.q_len * view.spec.value_dim;
      for (int64_t block = FirstBlock(step); block < FirstBlock(step) + BlocksIn(step); ++block) {
        const bool held = block < static_cast<int64_t>(shard.sets.size()) && shard.sets[block] != kNoBlockSet;
        for (int p = 0; p < view.spec.blocks_per_head; ++p) {
          const int at = (view.op_index * count + local) * view.spec.blocks_per_head + p;
          pieces_.push_back(held ? block_at_(core_.BlocksOf(shard.sets[block])[at]) : nullptr);
        }
      }
      heads_.push_back(head);
    }
  }
}

// From the wire, through the convolution and the norms.
void LinearExecutor::PrepareHead(const OpView& view, const Head& head) {
  const proto::LinearSpec& spec = view.spec;
  const proto::ShardStep& step = *head.step;
  const int heads = step.kv_heads.size(), channels = spec.channels();
  const size_t element = SizeOf(spec.wire);
  const auto take = [&](const std::byte* from, int dim, float* to) {  // [rows][heads][dim]
    for (int row = 0; row < step.q_len; ++row)
      view.context.table->to_float[static_cast<int>(spec.wire)](
          from + (int64_t{row} * heads + head.local) * dim * element, to + int64_t{row} * channels, dim);
  };
  take(view.query.data() + step.query_offset, spec.key_dim, head.inputs);
  take(view.key_value.data() + step.key_offset, spec.key_dim, head.inputs + spec.key_dim);
  take(view.key_value.data() + step.value_offset, spec.value_dim, head.inputs + 2 * spec.key_dim);
  if (spec.conv_width > 0) Convolve(view, head);
  if (!spec.normalise && spec.query_scale == 1) return;
  for (int row = 0; row < step.q_len; ++row) {
    float* q = head.prepared + int64_t{row} * channels;
    if (spec.normalise) {
      (void)kernels::L2Norm(view.context,
                            {.x = q, .out = q, .rows = 1, .size = spec.key_dim, .factor = spec.query_scale});
      float* k = q + spec.key_dim;
      (void)kernels::L2Norm(view.context, {.x = k, .out = k, .rows = 1, .size = spec.key_dim});
    } else {
      view.context.table->scale(q, spec.query_scale, q, spec.key_dim);
    }
  }
}

void LinearExecutor::Convolve(const OpView& view, const Head& head) {
  const proto::LinearSpec& spec = view.spec;
  const proto::ShardStep& step = *head.step;
  const int channels = spec.channels(), before = spec.conv_width - 1;
  float history[(proto::LinearSpec::kMaxConvWidth - 1) * 3 * proto::kMaxHeadDim];
  for (int h = 0; h < before; ++h) {
    const Position position = step.ctx_len - before + h;
    const std::byte* row = position >= 0 ? HistoryRow(view, head, position) : nullptr;
    if (row != nullptr) {
      view.context.table->to_float[static_cast<int>(spec.wire)](row, history + h * channels, channels);
    } else {
      std::fill_n(history + h * channels, channels, 0.0f);
    }
  }
  // What is kept is exact: the inputs came in this type.
  for (int row = 0; row < step.q_len; ++row)
    if (std::byte* to = HistoryRow(view, head, step.ctx_len + row))
      view.context.table->from_float[static_cast<int>(spec.wire)](head.inputs + int64_t{row} * channels, to, channels);
  kernels::ShortConvolutionArgs args;
  args.x = head.inputs;
  args.history = history;
  args.weights = view.constants.conv.data() + int64_t{head.head} * channels;
  args.weight_step = int64_t{spec.heads} * channels;
  const std::vector<float>& bias = view.constants.conv_bias;
  args.bias = bias.empty() ? nullptr : bias.data() + int64_t{head.head} * channels;
  args.silu = !spec.conv_linear;
  args.width = spec.conv_width;
  args.rows = step.q_len;
  args.channels = channels;
  args.out = head.prepared;
  (void)kernels::ShortConvolution(view.context, args);
}

LinearStateItem LinearExecutor::ItemOf(const OpView& view, const Head& head) const {
  const proto::LinearSpec& spec = view.spec;
  const proto::ShardStep& step = *head.step;
  LinearStateItem item;
  item.q = head.prepared;
  item.k = head.prepared + spec.key_dim;
  item.v = head.prepared + 2 * spec.key_dim;
  item.q_step = item.k_step = item.v_step = spec.channels();
  item.o = head.o;
  item.o_step = spec.value_dim;
  const auto* gates =
      reinterpret_cast<const float*>(view.key_value.data() + step.gate_offset) + int64_t{head.local} * spec.gates();
  const int64_t gate_step = int64_t{step.kv_heads.size()} * spec.gates();
  if (spec.token_decay) {
    item.log_decay = gates;
    item.decay_step = gate_step;
  } else {
    item.constant_log_decay = view.constants.log_decay[head.head];
  }
  if (spec.delta) {
    item.beta = gates + spec.decays();
    item.beta_step = gate_step;
  }
  item.rows = step.q_len;
  item.first_position = step.ctx_len;
  item.pieces = pieces_.data() + head.table;
  item.pieces_per_block = spec.blocks_per_head;
  item.piece_bytes = block_bytes_;
  item.first_block = FirstBlock(step);
  item.blocks = BlocksIn(step);
  return item;
}

// To the wire; before that what o takes straight from v.
void LinearExecutor::FinishHead(const OpView& view, const Head& head) const {
  const proto::LinearSpec& spec = view.spec;
  const proto::ShardStep& step = *head.step;
  const int heads = step.kv_heads.size();
  const size_t element = SizeOf(spec.wire);
  for (int row = 0; row < step.q_len; ++row) {
    const int64_t at = (int64_t{row} * heads + head.local) * spec.value_dim;
    view.context.table->from_float[static_cast<int>(spec.wire)](
        head.o + int64_t{row} * spec.value_dim, view.out + step.partial_offset + at * element, spec.value_dim);
  }
}

namespace {

// v is worth `rate` times what it was; `kept`, where there is one, gets what skips the state.
void ApplyRate(const proto::LinearSpec& spec, float rate, float skip, float* v, float* kept) {
  for (int i = 0; i < spec.value_dim; ++i) {
    if (kept != nullptr) kept[i] = skip * v[i];
    v[i] *= rate;
  }
}

}  // namespace

absl::Status LinearExecutor::Run(const kernels::OpContext& context, MicroBatchId id, int op,
                                 std::span<const std::byte> query, std::span<const std::byte> key_value,
                                 std::byte* out) {
  const proto::AttentionTable& table = core_.table();
  const LayerGroup group = table.op_group[op];
  const proto::LinearSpec& spec = *table.linear(group);
  const OpView view{context,
                    spec,
                    table.constants[op],
                    id,
                    table.op_index_in_group[op],
                    core_.LayoutOf(id, group),
                    LinearStateLayout(StateShapeOf(spec)),
                    query,
                    key_value,
                    out};
  LayOut(view);
  const bool rated = spec.token_rate && !spec.delta, skips = !view.constants.skip.empty();
  const int tasks = static_cast<int>(heads_.size());
  items_.clear();
  for (const Head& head : heads_) items_.push_back(ItemOf(view, head));
  // What skips the state waits where the inputs of the convolution were.
  context.pool->Run(tasks, [&](int i) {
    const Head& head = heads_[i];
    PrepareHead(view, head);
    if (!rated && !skips) return;
    const int64_t gate_step = int64_t{head.step->kv_heads.size()} * spec.gates();
    const auto* rates = reinterpret_cast<const float*>(key_value.data() + head.step->gate_offset) +
                        int64_t{head.local} * spec.gates() + spec.decays();
    for (int row = 0; row < head.step->q_len; ++row)
      ApplyRate(spec, rated ? rates[row * gate_step] : 1.0f, skips ? view.constants.skip[head.head] : 0.0f,
                head.prepared + int64_t{row} * spec.channels() + 2 * spec.key_dim,
                skips ? head.inputs + int64_t{row} * spec.value_dim : nullptr);
  });
  DT_RETURN_IF_ERROR(
      kernels::LinearState(context, StateShapeOf(spec), items_, {scratch_->data(), scratch_->size_bytes()}));
  context.pool->Run(tasks, [&](int i) {
    const Head& head = heads_[i];
    if (skips) {
      const int64_t n = int64_t{head.step->q_len} * spec.value_dim;
      context.table->add(head.o, head.inputs, head.o, n);
    }
    FinishHead(view, head);
  });
  return absl::OkStatus();
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
