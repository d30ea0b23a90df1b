#include "compute_worker/attention_specs.h"

#include <limits>
#include <vector>

namespace dovetail::compute {

absl::StatusOr<proto::AttentionTable> AttentionTableOf(const model::ModelConfig& config, DType kv) {
  std::vector<proto::AttentionSpec> ops;
  for (const model::LayerConfig& layer : config.layers) {
    proto::SoftmaxSpec spec;
    spec.query_heads = static_cast<int>(config.heads);
    spec.kv_heads = static_cast<int>(config.kv_heads);
    spec.key_dim = static_cast<int>(config.key_dim);
    spec.value_dim = static_cast<int>(config.value_dim);
    spec.scale = config.attention_scale;
    // A window that no sequence can outgrow is full attention.
    spec.window = layer.window < config.max_positions ? static_cast<int>(layer.window) : 0;
    spec.kv = kv;
    ops.push_back(spec);
  }
  return proto::AttentionTable::Build(ops);
}

}  // namespace dovetail::compute
