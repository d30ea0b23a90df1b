#pragma once
#include "model/config.h"
#include "model/formats/json_file.h"

namespace dovetail::model {

// The rope of full-attention and of sliding layers. Only Gemma 3 has two different ones.
struct JsonRopes {
  RopeSpec full, sliding;
};

// From config.json, spelled as in transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters, perhaps one per kind
// of layer). `config` has its architecture, key_dim and max_positions already; `theta_default` is the family's base.
// Errors as ConfigFromJson's.
// Threads: pure.
absl::StatusOr<JsonRopes> ReadRopes(const JsonFields& top, double theta_default, const ModelConfig& config);

}  // namespace dovetail::model
