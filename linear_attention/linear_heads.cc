#include "linear_attention/linear_heads.h"

#include <algorithm>

#include "kernels/convert.h"
#include "kernels/short_convolution.h"
#include "kernels/thread_pool.h"

namespace dovetail::linear_attention {

using kernels::LinearStateItem;
using kernels::LinearStateLayout;

namespace {

int64_t BlockOf(Position position) { return position / kSegmentTokens; }

int64_t FloatsOf(const proto::LinearSpec& spec) { return 2 * spec.channels() + spec.value_dim; }  // a token

}  // namespace

int64_t FirstBlock(Position position) { return std::max<int64_t>(0, BlockOf(position) - 1); }

int64_t BlocksTo(Position position, Position end) { return BlockOf(end - 1) + 1 - FirstBlock(position); }

struct LinearHeads::View {
  const kernels::OpContext& context;
  const proto::LinearSpec& spec;
  const proto::LinearConstants& constants;
  const LinearStateLayout state;
  const std::span<const LinearHead> heads;
  const size_t piece_bytes;

  bool rated() const { return spec.token_rate && !spec.delta; }
  bool skips() const { return !constants.skip.empty(); }
};

absl::Status LinearHeads::Grow(std::unique_ptr<kernels::Buffer>& buffer, size_t bytes) {
  if (buffer != nullptr && buffer->size_bytes() >= bytes) return absl::OkStatus();
  buffer.reset();
  DT_ASSIGN_OR_RETURN(buffer, device_.Allocate(bytes + bytes / 4));
  return absl::OkStatus();
}

absl::Status LinearHeads::Prepare(const proto::LinearSpec& spec, const Limits& limits) {
  of_heads_.reserve(limits.heads);
  items_.reserve(limits.heads);
  DT_RETURN_IF_ERROR(Grow(floats_, limits.rows * FloatsOf(spec) * sizeof(float)));
  return Grow(scratch_, limits.unkept * 2 * LinearStateLayout(ShapeOf(spec)).bytes());
}

absl::Status LinearHeads::LayOut(const View& view) {
  of_heads_.clear();
  int64_t rows = 0;
  for (const LinearHead& head : view.heads) rows += head.rows;
  if (view.heads.size() > of_heads_.capacity() || floats_ == nullptr ||
      rows * FloatsOf(view.spec) * sizeof(float) > floats_->size_bytes())
    return Internal("linear attention: ", view.heads.size(), " heads and ", rows, " rows were not prepared for");
  auto* floats = reinterpret_cast<float*>(floats_->data());
  for (const LinearHead& head : view.heads) {
    Floats of;
    of.inputs = floats;
    of.prepared = view.spec.conv_width > 0 ? of.inputs + int64_t{head.rows} * view.spec.channels() : of.inputs;
    of.o = of.prepared + int64_t{head.rows} * view.spec.channels();
    floats = of.o + int64_t{head.rows} * view.spec.value_dim;
    of_heads_.push_back(of);
  }
  return absl::OkStatus();
}

// Null where the block is not kept.
std::byte* LinearHeads::HistoryRow(const View& view, const LinearHead& head, Position position) {
  std::byte* const* pieces = head.pieces + (BlockOf(position) - head.first_block) * view.spec.blocks_per_head;
  if (pieces[0] == nullptr) return nullptr;
  std::byte* rows[LinearStateLayout::kMaxRows];
  view.state.Rows(LinearStateLayout::kHistory, pieces, view.piece_bytes, rows);
  return rows[position % kSegmentTokens];
}

// From the wire, through the convolution and the norms.
void LinearHeads::PrepareHead(const View& view, const LinearHead& head, const Floats& floats) {
  const proto::LinearSpec& spec = view.spec;
  const int64_t channels = spec.channels();
  const auto take = [&](const std::byte* from, int64_t step, int dim, float* to) {
    for (int row = 0; row < head.rows; ++row)
      view.context.table->to_float[static_cast<int>(spec.wire)](from + row * step, to + row * channels, dim);
  };
  take(head.q, head.q_step, spec.key_dim, floats.inputs);
  take(head.k, head.k_step, spec.key_dim, floats.inputs + spec.key_dim);
  take(head.v, head.v_step, spec.value_dim, floats.inputs + 2 * spec.key_dim);
  if (spec.conv_width > 0) Convolve(view, head, floats);
  if (!spec.normalise && spec.query_scale == 1) return;
  for (int row = 0; row < head.rows; ++row) {
    float* q = floats.prepared + row * channels;
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

void LinearHeads::Convolve(const View& view, const LinearHead& head, const Floats& floats) {
  const proto::LinearSpec& spec = view.spec;
  const int channels = spec.channels(), before = spec.conv_history();
  float history[(proto::LinearSpec::kMaxConvWidth - 1) * 3 * proto::kMaxHeadDim];
  for (int h = 0; h < before; ++h) {
    const Position position = head.first_position - before + h;
    const std::byte* row = position >= 0 ? HistoryRow(view, head, position) : nullptr;
    if (row != nullptr) {
      view.context.table->to_float[static_cast<int>(spec.wire)](row, history + h * channels, channels);
    } else {
      std::fill_n(history + h * channels, channels, 0.0f);
    }
  }
  // What is kept is exact: the inputs came in this type.
  for (int row = 0; row < head.rows; ++row)
    if (std::byte* to = HistoryRow(view, head, head.first_position + row))
      view.context.table->from_float[static_cast<int>(spec.wire)](floats.inputs + int64_t{row} * channels, to,
                                                                  channels);
  kernels::ShortConvolutionArgs args;
  args.x = floats.inputs;
  args.history = history;
  args.weights = view.constants.conv.data() + int64_t{head.head} * channels;
  args.weight_step = int64_t{spec.heads} * channels;
  const std::vector<float>& bias = view.constants.conv_bias;
  args.bias = bias.empty() ? nullptr : bias.data() + int64_t{head.head} * channels;
  args.silu = !spec.conv_linear;
  args.width = spec.conv_width;
  args.rows = head.rows;
  args.channels = channels;
  args.out = floats.prepared;
  (void)kernels::ShortConvolution(view.context, args);
}

// v is worth its token's rate times what it was. What skips the state waits where the inputs of the convolution were.
void LinearHeads::ApplyGates(const View& view, const LinearHead& head, const Floats& floats) {
  const proto::LinearSpec& spec = view.spec;
  for (int row = 0; row < head.rows; ++row) {
    const float rate = view.rated() ? head.gates[row * head.gate_step + spec.decays()] : 1.0f;
    float* const v = floats.prepared + int64_t{row} * spec.channels() + 2 * spec.key_dim;
    float* const kept = view.skips() ? floats.inputs + int64_t{row} * spec.value_dim : nullptr;
    for (int i = 0; i < spec.value_dim; ++i) {
      if (kept != nullptr) kept[i] = view.constants.skip[head.head] * v[i];
      v[i] *= rate;
    }
  }
}

LinearStateItem LinearHeads::ItemOf(const View& view, const LinearHead& head, const Floats& floats) {
  const proto::LinearSpec& spec = view.spec;
  LinearStateItem item;
  item.q = floats.prepared;
  item.k = floats.prepared + spec.key_dim;
  item.v = floats.prepared + 2 * spec.key_dim;
  item.q_step = item.k_step = item.v_step = spec.channels();
  item.o = floats.o;
  item.o_step = spec.value_dim;
  if (spec.token_decay) {
    item.log_decay = head.gates;
    item.decay_step = head.gate_step;
  } else {
    item.constant_log_decay = view.constants.log_decay[head.head];
  }
  if (spec.delta) {
    item.beta = head.gates + spec.decays();
    item.beta_step = head.gate_step;
  }
  item.rows = head.rows;
  item.first_position = head.first_position;
  item.pieces = head.pieces;
  item.pieces_per_block = spec.blocks_per_head;
  item.piece_bytes = view.piece_bytes;
  item.first_block = head.first_block;
  item.blocks = head.blocks;
  return item;
}

// To the wire; before that what o takes straight from v.
void LinearHeads::FinishHead(const View& view, const LinearHead& head, const Floats& floats) const {
  const proto::LinearSpec& spec = view.spec;
  if (view.skips()) view.context.table->add(floats.o, floats.inputs, floats.o, int64_t{head.rows} * spec.value_dim);
  for (int row = 0; row < head.rows; ++row)
    view.context.table->from_float[static_cast<int>(spec.wire)](floats.o + int64_t{row} * spec.value_dim,
                                                                head.o + row * head.o_step, spec.value_dim);
}

absl::Status LinearHeads::Run(const kernels::OpContext& context, const proto::LinearSpec& spec,
                              const proto::LinearConstants& constants, std::span<const LinearHead> heads,
                              size_t piece_bytes) {
  const View view{context, spec, constants, LinearStateLayout(ShapeOf(spec)), heads, piece_bytes};
  DT_RETURN_IF_ERROR(LayOut(view));
  const int tasks = static_cast<int>(heads.size());
  items_.clear();
  for (int i = 0; i < tasks; ++i) items_.push_back(ItemOf(view, heads[i], of_heads_[i]));
  context.pool->Run(tasks, [&](int i) {
    PrepareHead(view, heads[i], of_heads_[i]);
    if (view.rated() || view.skips()) ApplyGates(view, heads[i], of_heads_[i]);
  });
  std::span<std::byte> scratch;
  if (scratch_ != nullptr) scratch = {scratch_->data(), scratch_->size_bytes()};
  DT_RETURN_IF_ERROR(kernels::LinearState(context, ShapeOf(spec), items_, scratch));
  context.pool->Run(tasks, [&](int i) { FinishHead(view, heads[i], of_heads_[i]); });
  return absl::OkStatus();
}

}  // namespace dovetail::linear_attention
