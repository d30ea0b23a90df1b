#include "model/config_json_hybrid.h"

#include <algorithm>
#include <cmath>

#include "model/file_errors.h"

namespace dovetail::model {
namespace {

using Json = nlohmann::json;
using Family = StateConfig::Family;

void SetDefault(Json& config, const char* field, Json value) {
  if (!config.contains(field) || config[field].is_null()) config[field] = std::move(value);
}

void Rename(Json& config, const char* from, const char* to) {
  if (config.contains(from) && !config[from].is_null()) SetDefault(config, to, config[from]);
}

absl::StatusOr<int64_t> Size(const JsonFields& fields, const char* field, std::optional<int64_t> missing = {}) {
  DT_ASSIGN_OR_RETURN(const auto value, fields.Int(field));
  if (!value && !missing) return fields.Error(field, "is missing");
  const int64_t size = value.value_or(missing.value_or(0));
  if (size < 1 || size > (int64_t{1} << 24))
    return fields.Error(field, absl::StrCat("is ", size, "; it must be positive"));
  return size;
}

absl::StatusOr<float> Scale(const JsonFields& fields, const char* field, double missing) {
  DT_ASSIGN_OR_RETURN(const auto value, fields.Float(field));
  return static_cast<float>(value.value_or(missing));
}

absl::StatusOr<bool> Flag(const JsonFields& fields, const char* field, bool missing) {
  DT_ASSIGN_OR_RETURN(const auto value, fields.Bool(field));
  return value.value_or(missing);
}

// A list of one string a layer from a rule.
template <typename Rule>
Json Types(const Json& config, Rule&& is_full) {
  Json types = Json::array();
  if (!config.contains("num_hidden_layers") || !config["num_hidden_layers"].is_number_integer()) return types;
  const int64_t layers = std::clamp<int64_t>(config["num_hidden_layers"].get<int64_t>(), 0, 1024);
  for (int64_t i = 0; i < layers; ++i) types.push_back(is_full(i) ? "full_attention" : "linear_attention");
  return types;
}

bool Contains(const Json& list, int64_t value) {
  return list.is_array() && std::find(list.begin(), list.end(), Json(value)) != list.end();
}

void SpellMiniMax(Json& c) {
  for (const char* kind : {"full", "linear"})
    for (const char* factor : {"alpha", "beta"}) {
      const std::string to = absl::StrCat(kind, "_attn_", factor, "_factor");
      const std::string from = absl::StrCat("layernorm_", kind, "_attention_", factor);
      Rename(c, from.c_str(), to.c_str());
    }
  Rename(c, "layernorm_mlp_alpha", "mlp_alpha_factor");
  Rename(c, "layernorm_mlp_beta", "mlp_beta_factor");
  if (!c.contains("layer_types") && c.contains("attn_type_list") && c["attn_type_list"].is_array()) {
    Json types = Json::array();
    for (const Json& type : c["attn_type_list"]) types.push_back(type == 1 ? "full_attention" : "linear_attention");
    c["layer_types"] = types;
  }
}

void SpellQwen(Json& c) {
  SetDefault(c, "full_attention_interval", 4);
  const int64_t every = c["full_attention_interval"].is_number_integer()
                            ? std::max<int64_t>(1, c["full_attention_interval"].get<int64_t>()) : 4;
  if (!c.contains("layer_types") || c["layer_types"].is_null())
    c["layer_types"] = Types(c, [&](int64_t i) { return (i + 1) % every == 0; });
}

void SpellKimi(Json& c) {
  Rename(c, "model_max_length", "max_position_embeddings");
  Rename(c, "num_experts_per_token", "num_experts_per_tok");
  if (c.contains("linear_attn_config") && c["linear_attn_config"].is_object()) {  // layers are counted from 1 there
    const Json linear = c["linear_attn_config"];
    const Json full = linear.value("full_attn_layers", Json::array());
    if (!c.contains("layer_types")) c["layer_types"] = Types(c, [&](int64_t i) { return Contains(full, i + 1); });
    if (linear.contains("head_dim")) SetDefault(c, "linear_head_dim", linear["head_dim"]);
    if (linear.contains("num_heads")) SetDefault(c, "linear_num_heads", linear["num_heads"]);
    if (linear.contains("short_conv_kernel_size"))
      SetDefault(c, "linear_conv_kernel_dim", linear["short_conv_kernel_size"]);
  }
}

void SpellMamba2(Json& c) {
  c["layer_types"] = Types(c, [](int64_t) { return false; });
  Rename(c, "layer_norm_epsilon", "rms_norm_eps");
  Rename(c, "num_heads", "mamba_n_heads");
  Rename(c, "head_dim", "mamba_d_head");
  Rename(c, "n_groups", "mamba_n_groups");
  Rename(c, "state_size", "mamba_d_state");
  Rename(c, "conv_kernel", "mamba_d_conv");
  Rename(c, "use_conv_bias", "mamba_conv_bias");
  // There is no attention; what describes it is never used.
  c["num_attention_heads"] = c["num_key_value_heads"] = 1;
  c["head_dim"] = 2;
  SetDefault(c, "intermediate_size", 1);
  SetDefault(c, "max_position_embeddings", 1 << 20);
}

// layers_block_type, or layer_types that say "mamba" and "attention".
void SpellMambaHybrid(Json& c) {
  Rename(c, "layers_block_type", "layer_types");
  if (!c.contains("layer_types") || c["layer_types"].is_null()) {
    const Json full = c.value("attn_layer_indices", Json::array());
    c["layer_types"] = Types(c, [&](int64_t i) { return Contains(full, i); });
  }
  if (c["layer_types"].is_array())
    for (Json& type : c["layer_types"])
      if (type == "attention") type = "full_attention";
  if (c.contains("mamba_d_head") && c["mamba_d_head"] == "auto") c.erase("mamba_d_head");
  Rename(c, "shared_intermediate_size", "intermediate_size");
}

absl::Status ReadExperts(const JsonFields& fields, ExpertConfig& experts, const char* count, const char* intermediate) {
  DT_ASSIGN_OR_RETURN(experts.experts, Size(fields, count));
  DT_ASSIGN_OR_RETURN(experts.chosen, Size(fields, "num_experts_per_tok"));
  DT_ASSIGN_OR_RETURN(experts.intermediate, Size(fields, intermediate));
  return absl::OkStatus();
}

// decoder_sparse_step and mlp_only_layers say which layers are dense.
absl::Status ReadSparseLayers(const JsonFields& fields, ModelConfig& config) {
  DT_ASSIGN_OR_RETURN(const auto dense, fields.Ints("mlp_only_layers"));
  DT_ASSIGN_OR_RETURN(const int64_t every, Size(fields, "decoder_sparse_step", 1));
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const bool listed = dense && std::find(dense->begin(), dense->end(), static_cast<int64_t>(i)) != dense->end();
    if (!listed && (static_cast<int64_t>(i) + 1) % every == 0) config.layers[i].mlp = MlpKind::kExperts;
  }
  return absl::OkStatus();
}

absl::Status ReadQwenExperts(const JsonFields& fields, ModelConfig& config) {
  ExpertConfig experts;
  const char* count = fields.Has("num_experts") ? "num_experts" : "num_local_experts";
  DT_RETURN_IF_ERROR(ReadExperts(fields, experts, count, "moe_intermediate_size"));
  const bool next = config.architecture == Architecture::kQwen3Next;
  DT_ASSIGN_OR_RETURN(experts.renormalise, Flag(fields, "norm_topk_prob", next));
  if (next) {
    DT_ASSIGN_OR_RETURN(experts.shared_intermediate, Size(fields, "shared_expert_intermediate_size", 512));
    experts.shared_gate = true;
  }
  config.experts = experts;
  return ReadSparseLayers(fields, config);
}

void AllSparse(ModelConfig& config) {
  for (LayerConfig& layer : config.layers) layer.mlp = MlpKind::kExperts;
}

absl::Status ReadMiniMax(const JsonFields& fields, ModelConfig& config) {
  ExpertConfig experts;
  DT_RETURN_IF_ERROR(ReadExperts(fields, experts, "num_local_experts", "intermediate_size"));
  config.experts = experts;
  AllSparse(config);
  StateConfig state;
  state.heads = state.key_heads = config.heads;
  state.key_dim = state.value_dim = config.key_dim;
  state.out_norm_eps = 1e-6;
  config.state = state;
  ResidualConfig& r = config.residual;
  r.from_norm = true;
  DT_ASSIGN_OR_RETURN(r.full_alpha, Scale(fields, "full_attn_alpha_factor", 1));
  DT_ASSIGN_OR_RETURN(r.full_beta, Scale(fields, "full_attn_beta_factor", 1));
  DT_ASSIGN_OR_RETURN(r.linear_alpha, Scale(fields, "linear_attn_alpha_factor", 1));
  DT_ASSIGN_OR_RETURN(r.linear_beta, Scale(fields, "linear_attn_beta_factor", 1));
  DT_ASSIGN_OR_RETURN(r.mlp_alpha, Scale(fields, "mlp_alpha_factor", 1));
  DT_ASSIGN_OR_RETURN(r.mlp_beta, Scale(fields, "mlp_beta_factor", 1));
  return absl::OkStatus();
}

absl::Status ReadGatedDelta(const JsonFields& fields, ModelConfig& config) {
  StateConfig state;
  state.family = Family::kGatedDelta;
  DT_ASSIGN_OR_RETURN(state.heads, Size(fields, "linear_num_value_heads"));
  DT_ASSIGN_OR_RETURN(state.key_heads, Size(fields, "linear_num_key_heads"));
  DT_ASSIGN_OR_RETURN(state.key_dim, Size(fields, "linear_key_head_dim"));
  DT_ASSIGN_OR_RETURN(state.value_dim, Size(fields, "linear_value_head_dim"));
  DT_ASSIGN_OR_RETURN(state.conv_width, Size(fields, "linear_conv_kernel_dim", 4));
  state.out_norm_eps = config.norm_eps;
  config.qk_norm = config.gated_attention = config.norms_stored_minus_one = true;
  config.state = state;
  return config.architecture == Architecture::kQwen3Next ? ReadQwenExperts(fields, config) : absl::OkStatus();
}

absl::Status ReadMambaState(const JsonFields& fields, ModelConfig& config) {
  StateConfig state;
  state.family = Family::kMamba2;
  DT_ASSIGN_OR_RETURN(state.heads, Size(fields, "mamba_n_heads", 128));
  DT_ASSIGN_OR_RETURN(const int64_t expand, Size(fields, "mamba_expand", 2));
  DT_ASSIGN_OR_RETURN(state.value_dim, Size(fields, "mamba_d_head", config.hidden_size * expand / state.heads));
  DT_ASSIGN_OR_RETURN(state.key_heads, Size(fields, "mamba_n_groups", 1));
  DT_ASSIGN_OR_RETURN(state.key_dim, Size(fields, "mamba_d_state", 256));
  DT_ASSIGN_OR_RETURN(state.conv_width, Size(fields, "mamba_d_conv", 4));
  DT_ASSIGN_OR_RETURN(state.conv_bias, Flag(fields, "mamba_conv_bias", true));
  DT_ASSIGN_OR_RETURN(const bool bias, Flag(fields, "mamba_proj_bias", false));
  DT_ASSIGN_OR_RETURN(const bool use_bias, Flag(fields, "use_bias", false));
  if (bias || use_bias) return Unimplemented(fields.file(), ": biases of Mamba's projections are not served");
  const Json* limit = fields.Get("time_step_limit");
  if (limit != nullptr && limit->is_array() && limit->size() == 2) {
    const auto number = [](const Json& value, float missing) {  // transformers 5 writes {"__float__": "Infinity"}
      return value.is_number() ? static_cast<float>(std::min(value.get<double>(), 3e38)) : missing;
    };
    state.step_low = number((*limit)[0], 0);
    state.step_high = number((*limit)[1], 3e38f);
  }
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

absl::Status ReadKimiAttention(const JsonFields& fields, ModelConfig& config) {
  DT_ASSIGN_OR_RETURN(const bool nope, Flag(fields, "mla_use_nope", false));
  if (!nope) return Unimplemented(fields.file(), ": latent attention with rope (mla_use_nope false) is not served");
  if (fields.Has("q_lora_rank")) return Unimplemented(fields.file(), ": q_lora_rank is set, which is not served");
  LatentConfig latent;
  DT_ASSIGN_OR_RETURN(latent.rank, Size(fields, "kv_lora_rank"));
  DT_ASSIGN_OR_RETURN(latent.own_key_dim, Size(fields, "qk_nope_head_dim"));
  DT_ASSIGN_OR_RETURN(latent.shared_key_dim, Size(fields, "qk_rope_head_dim"));
  DT_ASSIGN_OR_RETURN(config.value_dim, Size(fields, "v_head_dim"));
  config.key_dim = latent.own_key_dim + latent.shared_key_dim;
  config.kv_heads = config.heads;
  config.attention_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(config.key_dim)));
  config.latent = latent;
  for (LayerConfig& layer : config.layers) layer.rope = -1;
  config.ropes.clear();
  return absl::OkStatus();
}

absl::Status ReadKimiExperts(const JsonFields& fields, ModelConfig& config) {
  ExpertConfig experts;
  DT_RETURN_IF_ERROR(ReadExperts(fields, experts, "num_experts", "moe_intermediate_size"));
  DT_ASSIGN_OR_RETURN(const int64_t groups, Size(fields, "num_expert_group", 1));
  if (groups != 1) return Unimplemented(fields.file(), ": num_expert_group ", groups, " is not served");
  experts.score = ExpertConfig::Score::kSigmoid;
  experts.selection_bias = true;
  DT_ASSIGN_OR_RETURN(experts.renormalise, Flag(fields, "moe_renormalize", true));
  DT_ASSIGN_OR_RETURN(experts.scale, Scale(fields, "routed_scaling_factor", 1));
  DT_ASSIGN_OR_RETURN(const auto shared, fields.Int("num_shared_experts"));
  experts.shared_intermediate = std::clamp<int64_t>(shared.value_or(0), 0, 64) * experts.intermediate;
  config.experts = experts;
  DT_ASSIGN_OR_RETURN(const auto types, fields.Strings("mlp_layer_types"));
  DT_ASSIGN_OR_RETURN(const auto first, fields.Int("first_k_dense_replace"));
  if (types && types->size() != config.layers.size())
    return fields.Error("mlp_layer_types", absl::StrCat("has ", types->size(), " entries for ", config.layers.size(),
                                                        " layers"));
  for (size_t i = 0; i < config.layers.size(); ++i)
    if (types ? (*types)[i] == "sparse" : static_cast<int64_t>(i) >= first.value_or(0))
      config.layers[i].mlp = MlpKind::kExperts;
  return absl::OkStatus();
}

absl::Status ReadKimi(const JsonFields& fields, ModelConfig& config) {
  StateConfig state;
  state.family = Family::kKda;
  DT_ASSIGN_OR_RETURN(state.heads, Size(fields, "linear_num_heads"));
  state.key_heads = state.heads;
  DT_ASSIGN_OR_RETURN(state.key_dim, Size(fields, "linear_head_dim"));
  state.value_dim = state.key_dim;
  DT_ASSIGN_OR_RETURN(state.conv_width, Size(fields, "linear_conv_kernel_dim", 4));
  state.out_norm_eps = config.norm_eps;
  config.state = state;
  DT_RETURN_IF_ERROR(ReadKimiAttention(fields, config));
  return ReadKimiExperts(fields, config);
}

}  // namespace

absl::StatusOr<Json> CommonSpelling(const std::string& file, const Json& given) {
  Json c = given;
  const auto type_of = [](const Json& json) {
    return json.contains("model_type") && json["model_type"].is_string() ? json["model_type"].get<std::string>() : "";
  };
  if (type_of(c) == "qwen3_5" && c.contains("text_config") && c["text_config"].is_object()) {
    c = given["text_config"];
    for (const char* field : {"tie_word_embeddings", "eos_token_id", "bos_token_id"})
      if (given.contains(field)) SetDefault(c, field, given[field]);
    c["model_type"] = "qwen3_5_text";
    c["dovetail_tensor_prefix"] = "model.language_model.";
  }
  const std::string type = type_of(c);
  if (type == "minimax") SpellMiniMax(c);
  if (type == "qwen3_next" || type == "qwen3_5_text") SpellQwen(c);
  if (type == "kimi_linear") SpellKimi(c);
  if (type == "mamba2") SpellMamba2(c);
  if (type == "bamba" || type == "granitemoehybrid") {
    if (type == "granitemoehybrid") {  // its intermediate_size is that of an expert
      Rename(c, "intermediate_size", "expert_intermediate_size");
      c.erase("intermediate_size");
    }
    SpellMambaHybrid(c);
  }
  return c;
}

bool IsLinearLayer(Architecture architecture, std::string_view type) {
  switch (architecture) {
    case Architecture::kMiniMax:
    case Architecture::kQwen3Next:
    case Architecture::kQwen35:
    case Architecture::kKimiLinear:
      return type == "linear_attention";
    case Architecture::kMamba2:
    case Architecture::kBamba:
    case Architecture::kGraniteHybrid:
      return type == "mamba" || type == "linear_attention";
    default:
      return false;
  }
}

absl::Status ReadHybrid(const JsonFields& fields, ModelConfig& config) {
  DT_ASSIGN_OR_RETURN(const auto prefix, fields.String("dovetail_tensor_prefix"));
  config.tensor_prefix = prefix.value_or("model.");
  switch (config.architecture) {
    case Architecture::kMixtral: {
      ExpertConfig experts;
      DT_RETURN_IF_ERROR(ReadExperts(fields, experts, "num_local_experts", "intermediate_size"));
      config.experts = experts;
      AllSparse(config);
      return absl::OkStatus();
    }
    case Architecture::kMiniMaxM2: {
      ExpertConfig experts;
      DT_RETURN_IF_ERROR(ReadExperts(fields, experts, "num_local_experts", "intermediate_size"));
      experts.score = ExpertConfig::Score::kSigmoid;
      experts.selection_bias = true;
      config.experts = experts;
      config.qk_norm = config.whole_qk_norm = true;
      AllSparse(config);
      return absl::OkStatus();
    }
    case Architecture::kQwen3Moe:
      return ReadQwenExperts(fields, config);
    case Architecture::kMiniMax:
      return ReadMiniMax(fields, config);
    case Architecture::kQwen3Next:
    case Architecture::kQwen35:
      return ReadGatedDelta(fields, config);
    case Architecture::kKimiLinear:
      return ReadKimi(fields, config);
    case Architecture::kMamba2:
      config.tensor_prefix = "backbone.";
      for (LayerConfig& layer : config.layers) layer.mlp = MlpKind::kNone;
      return ReadMambaState(fields, config);
    case Architecture::kBamba:
      return ReadMambaState(fields, config);
    case Architecture::kGraniteHybrid:
      DT_RETURN_IF_ERROR(ReadMambaState(fields, config));
      return ReadGranite(fields, config);
    default:
      return absl::OkStatus();
  }
}

}  // namespace dovetail::model
