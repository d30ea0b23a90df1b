#include <algorithm>
#include <limits>

#include "model/families/config_json_fields.h"
#include "model/families/config_json_hybrid.h"
#include "model/formats/file_errors.h"

// Mamba-2 and the hybrids around it.

namespace dovetail::model {
namespace {

using Json = nlohmann::json;

// A number, or the infinities as transformers 5 writes them: {"__float__": "Infinity"}.
absl::StatusOr<double> LimitOf(const JsonFields& fields, const char* field, const Json& value) {
  if (value.is_number()) return value.get<double>();
  if (value.is_object() && value.contains("__float__") && value["__float__"].is_string()) {
    const std::string text = value["__float__"].get<std::string>();
    if (text == "Infinity") return std::numeric_limits<double>::max();
    if (text == "-Infinity") return -std::numeric_limits<double>::max();
  }
  const std::string shown =
      value.is_string() ? absl::StrCat("'", Printable(value.get<std::string>()), "'") : Printable(value.dump());
  return fields.Error(field, absl::StrCat("holds ", shown, ", which is neither a number nor an infinity"));
}

absl::Status ReadStepLimits(const JsonFields& fields, StateConfig& state) {
  const char* field = "time_step_limit";
  const Json* limit = fields.Get(field);
  if (limit == nullptr) return absl::OkStatus();
  if (!limit->is_array() || limit->size() != 2) return fields.Error(field, "must be a list of two numbers");
  DT_ASSIGN_OR_RETURN(const double low, LimitOf(fields, field, (*limit)[0]));
  DT_ASSIGN_OR_RETURN(const double high, LimitOf(fields, field, (*limit)[1]));
  if (!(low >= 0 && low <= high))
    return fields.Error(field, absl::StrCat("is from ", low, " to ", high, "; it must ascend from 0 or more"));
  state.step_low = static_cast<float>(std::min(low, 3e38));
  state.step_high = static_cast<float>(std::min(high, 3e38));
  return absl::OkStatus();
}

// `inner`: what the config says the heads make together, and by which fields.
absl::Status CheckInner(const JsonFields& fields, const StateConfig& state, int64_t inner, const std::string& by) {
  if (state.value_width() == inner) return absl::OkStatus();
  return InvalidArgument(fields.file(), ": ", state.heads, " Mamba heads of ", state.value_dim, " make ",
                         state.value_width(), ", but ", by, " say ", inner);
}

absl::Status ReadMambaState(const JsonFields& fields, ModelConfig& config) {
  StateConfig state;
  state.family = StateConfig::Family::kMamba2;
  DT_ASSIGN_OR_RETURN(state.heads, Size(fields, "mamba_n_heads", 128));
  DT_ASSIGN_OR_RETURN(const int64_t expand, Size(fields, "mamba_expand", 2));
  const bool falcon = config.architecture == Architecture::kFalconH1;
  DT_ASSIGN_OR_RETURN(const int64_t falcon_inner, Size(fields, "mamba_d_ssm", config.hidden_size * expand));
  const int64_t inner = falcon ? falcon_inner : config.hidden_size * expand;
  DT_ASSIGN_OR_RETURN(state.value_dim, Size(fields, "mamba_d_head", std::max<int64_t>(1, inner / state.heads)));
  if (config.architecture != Architecture::kNemotronH)
    DT_RETURN_IF_ERROR(
        CheckInner(fields, state, inner,
                   falcon ? "mamba_d_ssm, or mamba_expand and hidden_size," : "mamba_expand and hidden_size"));
  DT_ASSIGN_OR_RETURN(state.key_heads, Size(fields, "mamba_n_groups", 1));
  DT_ASSIGN_OR_RETURN(state.key_dim, Size(fields, "mamba_d_state", 256));
  DT_ASSIGN_OR_RETURN(state.conv_width, Size(fields, "mamba_d_conv", 4));
  DT_ASSIGN_OR_RETURN(state.conv_bias, Flag(fields, "mamba_conv_bias", true));
  const bool use_bias = config.architecture == Architecture::kMamba2 || config.architecture == Architecture::kNemotronH;
  DT_ASSIGN_OR_RETURN(state.proj_bias, Flag(fields, use_bias ? "use_bias" : "mamba_proj_bias", false));
  DT_RETURN_IF_ERROR(ReadStepLimits(fields, state));
  state.out_norm_eps = config.norm_eps;
  config.state = state;
  return absl::OkStatus();
}

absl::Status ReadGranite(const JsonFields& fields, ModelConfig& config) {
  DT_ASSIGN_OR_RETURN(config.embedding_scale, Scale(fields, "embedding_multiplier", 1));
  DT_ASSIGN_OR_RETURN(config.attention_scale, Scale(fields, "attention_multiplier", 1));
  DT_ASSIGN_OR_RETURN(const float residual, Scale(fields, "residual_multiplier", 1));
  ResidualConfig& r = config.residual;
  r.full_beta = r.linear_beta = r.mlp_beta = residual;
  DT_ASSIGN_OR_RETURN(const float logits, Scale(fields, "logits_scaling", 1));
  if (!(logits > 0)) return fields.Error("logits_scaling", "must be positive");
  config.logits_scale = 1 / logits;
  DT_ASSIGN_OR_RETURN(const auto position, fields.String("position_embedding_type"));
  if (position.value_or("") != "rope")
    for (LayerConfig& layer : config.layers) layer.rope = -1;
  DT_ASSIGN_OR_RETURN(const auto count, fields.Int("num_local_experts"));
  if (count.value_or(0) == 0) return absl::OkStatus();
  // The dense MLP of these layers is an expert that every token goes to.
  ExpertConfig experts;
  DT_RETURN_IF_ERROR(ReadExperts(fields, experts, "num_local_experts", "expert_intermediate_size"));
  experts.shared_intermediate = config.intermediate_size;
  experts.score = ExpertConfig::Score::kSoftmaxOfChosen;
  config.experts = experts;
  AllSparse(config);
  return absl::OkStatus();
}

absl::Status ReadNemotronExperts(const JsonFields& fields, ModelConfig& config) {
  ExpertConfig experts;
  DT_RETURN_IF_ERROR(ReadSigmoidExperts(fields, experts, {"n_routed_experts", "n_group", "norm_topk_prob"}));
  DT_ASSIGN_OR_RETURN(experts.shared_intermediate, Size(fields, "moe_shared_expert_intermediate_size", 7688));
  if (fields.Has("moe_latent_size")) {
    DT_ASSIGN_OR_RETURN(experts.latent, Size(fields, "moe_latent_size"));
  }
  if (config.mlp_bias) return Unimplemented(fields.file(), ": mlp_bias with experts is not served");
  config.experts = experts;
  return absl::OkStatus();
}

// A layer is a state, softmax attention, an MLP or experts.
absl::Status ReadNemotron(const JsonFields& fields, ModelConfig& config) {
  config.tensor_prefix = "backbone.";
  config.state->out_norm_groups = config.state->key_heads;
  bool experts = false;
  for (LayerConfig& layer : config.layers) {
    if (layer.kind != LayerKind::kMlpOnly) layer.mlp = MlpKind::kNone;
    experts |= layer.mlp == MlpKind::kExperts;
  }
  return experts ? ReadNemotronExperts(fields, config) : absl::OkStatus();
}

absl::StatusOr<std::vector<float>> Multipliers(const JsonFields& fields, const char* field, size_t count) {
  DT_ASSIGN_OR_RETURN(const auto values, fields.Floats(field));
  if (!values) return std::vector<float>(count, 1.0f);
  if (values->size() != count)
    return fields.Error(field, absl::StrCat("has ", values->size(), " numbers; there must be ", count));
  return std::vector<float>(values->begin(), values->end());
}

// Attention and state of the same normed x, side by side. The many multipliers become factors of what is there anyway:
// of scores, taps, norms and residual sums.
absl::Status ReadFalcon(const JsonFields& fields, ModelConfig& config) {
  StateConfig& state = *config.state;
  for (LayerConfig& layer : config.layers) layer.kind = LayerKind::kAttentionAndState;
  DT_ASSIGN_OR_RETURN(state.out_norm, Flag(fields, "mamba_rms_norm", false));
  DT_ASSIGN_OR_RETURN(state.norm_first, Flag(fields, "mamba_norm_before_gate", true));
  if (state.out_norm) state.out_norm_groups = state.key_heads;
  DT_ASSIGN_OR_RETURN(const bool out_bias, Flag(fields, "projectors_bias", false));
  if (out_bias != state.proj_bias)
    return Unimplemented(fields.file(), ": projectors_bias without mamba_proj_bias, or the other way, is not served");

  DT_ASSIGN_OR_RETURN(config.embedding_scale, Scale(fields, "embedding_multiplier", 1));
  DT_ASSIGN_OR_RETURN(config.logits_scale, Scale(fields, "lm_head_multiplier", 1));
  DT_ASSIGN_OR_RETURN(const float attention_in, Scale(fields, "attention_in_multiplier", 1));
  DT_ASSIGN_OR_RETURN(const float attention_out, Scale(fields, "attention_out_multiplier", 1));
  DT_ASSIGN_OR_RETURN(const float key, Scale(fields, "key_multiplier", 1));
  DT_ASSIGN_OR_RETURN(const float state_in, Scale(fields, "ssm_in_multiplier", 1));
  DT_ASSIGN_OR_RETURN(const std::vector<float> inputs, Multipliers(fields, "ssm_multipliers", 5));  // of z, x, B, C, dt
  DT_ASSIGN_OR_RETURN(const std::vector<float> mlp, Multipliers(fields, "mlp_multipliers", 2));     // of gate and down
  if ((config.q_bias && (attention_in != 1 || key != 1)) || (state.proj_bias && state_in != 1) ||
      (config.mlp_bias && mlp[0] != 1))
    return Unimplemented(fields.file(), ": biases of projections that have multipliers are not served");
  if (mlp[0] == 0) return fields.Error("mlp_multipliers", "holds 0");
  config.attention_scale *= attention_in * attention_in * key;
  config.residual.full_beta = attention_in * attention_out;
  DT_ASSIGN_OR_RETURN(config.residual.linear_beta, Scale(fields, "ssm_out_multiplier", 1));
  config.residual.mlp_input = mlp[0];  // of the gate, and so of what it gates
  config.residual.mlp_beta = mlp[1] / mlp[0];
  state.multipliers = {.gate = state_in * inputs[0],
                       .q = state_in * inputs[3],
                       .k = state_in * inputs[2],
                       .v = state_in * inputs[1],
                       .step = state_in * inputs[4]};
  return absl::OkStatus();
}

}  // namespace

absl::Status ReadMambaHybrid(const JsonFields& fields, ModelConfig& config) {
  DT_RETURN_IF_ERROR(ReadMambaState(fields, config));
  switch (config.architecture) {
    case Architecture::kMamba2:
      config.tensor_prefix = "backbone.";
      for (LayerConfig& layer : config.layers) layer.mlp = MlpKind::kNone;
      return absl::OkStatus();
    case Architecture::kGraniteHybrid: return ReadGranite(fields, config);
    case Architecture::kNemotronH: return ReadNemotron(fields, config);
    case Architecture::kFalconH1: return ReadFalcon(fields, config);
    default: return absl::OkStatus();
  }
}

}  // namespace dovetail::model
