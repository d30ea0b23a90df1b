#include "compute_worker/attention_specs.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/kv_block.h"
#include "kernels/linear_state.h"

namespace dovetail::compute {
namespace {

using Family = model::StateConfig::Family;

proto::SoftmaxSpec SoftmaxSpecOf(const model::ModelConfig& config, const model::LayerConfig& layer, DType kv) {
  proto::SoftmaxSpec spec;
  spec.query_heads = static_cast<int>(config.heads);
  spec.kv_heads = static_cast<int>(config.kv_heads);
  spec.key_dim = static_cast<int>(config.key_dim);
  spec.value_dim = static_cast<int>(config.value_dim);
  spec.scale = config.attention_scale;
  // A window that no sequence can outgrow is full attention.
  spec.window = layer.window < config.max_positions ? static_cast<int>(layer.window) : 0;
  spec.kv = kv;
  return spec;
}

proto::LinearSpec LinearSpecOf(const model::StateConfig& state, DType wire, DType stored) {
  proto::LinearSpec spec;
  spec.heads = static_cast<int>(state.heads);
  spec.key_dim = static_cast<int>(state.key_dim);
  spec.value_dim = static_cast<int>(state.value_dim);
  spec.delta = state.family == Family::kGatedDelta || state.family == Family::kKda;
  spec.vector_decay = state.family == Family::kKda;
  spec.token_decay = spec.token_rate = state.family != Family::kLightning && state.family != Family::kConvolution;
  spec.normalise = spec.delta;
  if (spec.delta) spec.query_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(state.key_dim)));
  spec.conv_width = static_cast<int>(state.conv_width);
  spec.conv_linear = state.family == Family::kConvolution;
  spec.wire = wire;
  spec.state = stored;
  return spec;
}

// KvBlocks of one head's state, as an attention worker lays it out; 0: they are too small.
int BlocksPerHead(const proto::LinearSpec& spec, size_t block_bytes) {
  kernels::LinearStateShape shape;
  shape.key_dim = spec.key_dim;
  shape.value_dim = spec.value_dim;
  shape.decay = spec.vector_decay ? kernels::DecayForm::kVector : kernels::DecayForm::kScalar;
  shape.update = spec.delta ? kernels::StateUpdate::kDelta : kernels::StateUpdate::kAdd;
  shape.state = spec.state;
  shape.history_channels = spec.conv_width > 0 ? spec.channels() : 0;
  shape.history = spec.wire;
  const kernels::LinearStateLayout layout(shape);
  return layout.pieces(block_bytes > 0 ? block_bytes : layout.bytes());
}

// MiniMax's slopes: 2^(-8 (h + 1) / heads), less in later layers. The state of a mere convolution stays empty.
std::vector<float> LogDecays(const model::ModelConfig& config, size_t layer) {
  if (config.state->family == Family::kConvolution) return std::vector<float>(config.state->heads, 0.0f);
  const double heads = static_cast<double>(config.state->heads), layers = static_cast<double>(config.layers.size());
  const double factor = 1 - static_cast<double>(layer) / (layers - 1 + 1e-5) + 1e-5;
  std::vector<float> decays;
  for (int64_t head = 0; head < config.state->heads; ++head)
    decays.push_back(static_cast<float>(-std::exp2(-8.0 * static_cast<double>(head + 1) / heads) * factor));
  return decays;
}

}  // namespace

absl::StatusOr<proto::AttentionTable> AttentionTableOf(const model::ModelConfig& config, DType kv, DType state) {
  std::vector<proto::AttentionSpec> ops;
  std::vector<proto::LinearConstants> constants;
  // A KvBlock is as large as 64 tokens of a softmax head; states take several. Without softmax, a state is a block.
  size_t block_bytes = 0;
  const std::vector<model::AttentionOp> layer_ops = model::AttentionOpsOf(config);
  if (std::any_of(layer_ops.begin(), layer_ops.end(), [](const model::AttentionOp& op) { return !op.state; })) {
    const kernels::KvBlockLayout layout{static_cast<int>(config.key_dim), static_cast<int>(config.value_dim), kv};
    block_bytes = (layout.bytes() + 63) / 64 * 64;
  }
  for (const model::AttentionOp& op : layer_ops) {
    proto::LinearConstants& own = constants.emplace_back();
    const bool has_constants = op.layer < config.constants.size();
    if (!op.state) {
      ops.push_back(SoftmaxSpecOf(config, config.layers[op.layer], kv));
      if (has_constants) own.sinks = config.constants[op.layer].sinks;
      continue;
    }
    proto::LinearSpec spec = LinearSpecOf(*config.state, kv, state);
    spec.blocks_per_head = BlocksPerHead(spec, block_bytes);
    if (spec.blocks_per_head == 0)
      return Unimplemented("layer ", op.layer, ": a row of its linear state does not fit into a KvBlock of ",
                           block_bytes, " bytes");
    ops.push_back(spec);
    if (!spec.token_decay) own.log_decay = LogDecays(config, op.layer);
    if (has_constants) {
      own.conv = config.constants[op.layer].conv;
      own.conv_bias = config.constants[op.layer].conv_bias;
      own.skip = config.constants[op.layer].skip;
    }
  }
  return proto::AttentionTable::Build(ops, std::move(constants));
}

}  // namespace dovetail::compute
