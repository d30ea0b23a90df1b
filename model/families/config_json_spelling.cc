#include <algorithm>

#include "model/families/config_json_hybrid.h"
#include "model/formats/file_errors.h"

namespace dovetail::model {
namespace {

using Json = nlohmann::json;

void SetDefault(Json& config, const char* field, Json value) {
  if (!config.contains(field) || config[field].is_null()) config[field] = std::move(value);
}

void Rename(Json& config, const char* from, const char* to) {
  if (config.contains(from) && !config[from].is_null()) SetDefault(config, to, config[from]);
}

// As many as are looked at here; the field itself is checked later.
int64_t LayersOf(const Json& c) {
  if (!c.contains("num_hidden_layers") || !c["num_hidden_layers"].is_number_integer()) return 0;
  return std::clamp<int64_t>(c["num_hidden_layers"].get<int64_t>(), 0, 1024);
}

// A list of one string a layer from a rule.
template <typename Rule>
Json Types(const Json& config, Rule&& is_full) {
  Json types = Json::array();
  for (int64_t i = 0; i < LayersOf(config); ++i) types.push_back(is_full(i) ? "full_attention" : "linear_attention");
  return types;
}

bool Contains(const Json& list, const Json& value) {
  return list.is_array() && std::find(list.begin(), list.end(), value) != list.end();
}

// Layers counted from `first`, as a list in some field.
absl::Status CheckIndices(const std::string& file, const std::string& field, const Json& list, int64_t first,
                          const Json& c) {
  if (!list.is_array()) return InvalidArgument(file, ": ", field, " must be a list of layers");
  const int64_t layers = LayersOf(c);
  for (const Json& index : list)
    if (!index.is_number_integer() || index.get<int64_t>() < first || index.get<int64_t>() >= first + layers)
      return InvalidArgument(file, ": ", field, " names layer ", Printable(index.dump()), ", but layers are ", first,
                             " to ", first + layers - 1);
  return absl::OkStatus();
}

absl::Status SpellMiniMax(const std::string& file, Json& c) {
  for (const char* kind : {"full", "linear"})
    for (const char* factor : {"alpha", "beta"}) {
      const std::string to = absl::StrCat(kind, "_attn_", factor, "_factor");
      const std::string from = absl::StrCat("layernorm_", kind, "_attention_", factor);
      Rename(c, from.c_str(), to.c_str());
    }
  Rename(c, "layernorm_mlp_alpha", "mlp_alpha_factor");
  Rename(c, "layernorm_mlp_beta", "mlp_beta_factor");
  if (!c.contains("attn_type_list") || !c["attn_type_list"].is_array()) return absl::OkStatus();
  Json types = Json::array();
  for (const Json& type : c["attn_type_list"]) {
    if (type != 0 && type != 1)
      return InvalidArgument(file, ": attn_type_list[", types.size(), "] is ", Printable(type.dump()),
                             "; layers are 0 (linear) or 1 (softmax)");
    types.push_back(type == 1 ? "full_attention" : "linear_attention");
  }
  if (c.contains("layer_types") && !c["layer_types"].is_null() && c["layer_types"] != types)
    return InvalidArgument(file, ": layer_types and attn_type_list contradict each other");
  c["layer_types"] = types;
  return absl::OkStatus();
}

absl::Status SpellQwen(const std::string& file, Json& c) {
  SetDefault(c, "full_attention_interval", 4);
  if (!c["full_attention_interval"].is_number_integer() || c["full_attention_interval"].get<int64_t>() < 1)
    return InvalidArgument(file, ": full_attention_interval is ", Printable(c["full_attention_interval"].dump()),
                           "; it must be at least 1");
  const int64_t every = c["full_attention_interval"].get<int64_t>();
  if (!c.contains("layer_types") || c["layer_types"].is_null())
    c["layer_types"] = Types(c, [&](int64_t i) { return (i + 1) % every == 0; });
  return absl::OkStatus();
}

absl::Status SpellKimi(const std::string& file, Json& c) {
  Rename(c, "model_max_length", "max_position_embeddings");
  Rename(c, "num_experts_per_token", "num_experts_per_tok");
  if (!c.contains("linear_attn_config") || !c["linear_attn_config"].is_object()) return absl::OkStatus();
  const Json linear = c["linear_attn_config"];  // layers are counted from 1 there
  const Json full = linear.value("full_attn_layers", Json::array());
  DT_RETURN_IF_ERROR(CheckIndices(file, "linear_attn_config.full_attn_layers", full, 1, c));
  if (linear.contains("kda_layers") && !linear["kda_layers"].is_null()) {
    const Json& kda = linear["kda_layers"];
    DT_RETURN_IF_ERROR(CheckIndices(file, "linear_attn_config.kda_layers", kda, 1, c));
    for (int64_t i = 1; i <= LayersOf(c); ++i)
      if (Contains(full, i) == Contains(kda, i))
        return InvalidArgument(file, ": layer ", i, " must be in one of linear_attn_config.kda_layers and ",
                               "linear_attn_config.full_attn_layers");
  }
  if (!c.contains("layer_types")) c["layer_types"] = Types(c, [&](int64_t i) { return Contains(full, i + 1); });
  if (linear.contains("head_dim")) SetDefault(c, "linear_head_dim", linear["head_dim"]);
  if (linear.contains("num_heads")) SetDefault(c, "linear_num_heads", linear["num_heads"]);
  if (linear.contains("short_conv_kernel_size"))
    SetDefault(c, "linear_conv_kernel_dim", linear["short_conv_kernel_size"]);
  return absl::OkStatus();
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

void SpellOlmo(const Json& given, Json& c) {
  if (!c.contains("layer_types") || c["layer_types"].is_null()) {
    c["layer_types"] = Types(c, [](int64_t i) { return i % 4 == 3; });
    if (!c["layer_types"].empty() && !Contains(c["layer_types"], "full_attention"))
      c["layer_types"].back() = "full_attention";
  }
  // A base that is there and null: no position embedding at all.
  const auto null_theta = [](const Json& json) { return json.contains("rope_theta") && json["rope_theta"].is_null(); };
  const bool parameters = given.contains("rope_parameters") && given["rope_parameters"].is_object();
  c["dovetail_no_rope"] = null_theta(parameters ? given["rope_parameters"] : given);
}

absl::Status SpellLfm2(const std::string& file, Json& c) {
  Rename(c, "norm_eps", "rms_norm_eps");
  if (c.contains("block_ff_dim") && !c["block_ff_dim"].is_null()) c["intermediate_size"] = c["block_ff_dim"];
  if (c.contains("tie_embedding") && !c["tie_embedding"].is_null()) c["tie_word_embeddings"] = c["tie_embedding"];
  if (!c.contains("layer_types") || c["layer_types"].is_null()) {
    const bool listed = c.contains("full_attn_idxs") && !c["full_attn_idxs"].is_null();
    const Json full = listed ? c["full_attn_idxs"] : Json::array();
    DT_RETURN_IF_ERROR(CheckIndices(file, "full_attn_idxs", full, 0, c));
    c["layer_types"] = Types(c, [&](int64_t i) { return !listed || Contains(full, i); });
  }
  return absl::OkStatus();
}

void SpellGptOss(Json& c) {
  Rename(c, "num_experts", "num_local_experts");
  Rename(c, "experts_per_token", "num_experts_per_tok");
  SetDefault(c, "sliding_window", 128);
  SetDefault(c, "attention_bias", true);
  if (!c.contains("layer_types") || c["layer_types"].is_null()) {
    c["layer_types"] = Types(c, [](int64_t i) { return i % 2 == 1; });
    for (Json& type : c["layer_types"])
      if (type == "linear_attention") type = "sliding_attention";
  }
  if (!c.contains("rope_parameters") && !c.contains("rope_scaling"))
    c["rope_parameters"] = {{"rope_type", "yarn"}, {"factor", 32.0},    {"beta_fast", 32.0},
                            {"beta_slow", 1.0},    {"truncate", false}, {"original_max_position_embeddings", 4096}};
}

// One mixer a layer: hybrid_override_pattern says which by a letter, layers_block_type by a word.
absl::Status SpellNemotron(const std::string& file, Json& c) {
  Rename(c, "layers_block_type", "layer_types");
  if ((!c.contains("layer_types") || c["layer_types"].is_null()) && c.contains("hybrid_override_pattern") &&
      c["hybrid_override_pattern"].is_string()) {
    const std::string pattern = c["hybrid_override_pattern"].get<std::string>();
    Json types = Json::array();
    for (size_t i = 0; i < pattern.size() && i < 1024; ++i) {
      switch (pattern[i]) {
        case 'M': types.push_back("mamba"); break;
        case '*': types.push_back("full_attention"); break;
        case '-': types.push_back("mlp"); break;
        case 'E': types.push_back("moe"); break;
        default:
          return InvalidArgument(file, ": hybrid_override_pattern has '", Printable(pattern.substr(i, 1)),
                                 "' for layer ", i, "; layers are M, *, - or E");
      }
    }
    c["layer_types"] = types;
  }
  if (!c.contains("layer_types") || !c["layer_types"].is_array())
    return InvalidArgument(file, ": layers_block_type is missing, and so is hybrid_override_pattern");
  for (Json& type : c["layer_types"])
    if (type == "attention") type = "full_attention";
  SetDefault(c, "num_hidden_layers", c["layer_types"].size());
  Rename(c, "layer_norm_epsilon", "rms_norm_eps");
  Rename(c, "mlp_hidden_act", "hidden_act");
  SetDefault(c, "hidden_act", "relu2");
  const std::pair<const char*, const char*> names[] = {{"mamba_num_heads", "mamba_n_heads"},
                                                       {"mamba_head_dim", "mamba_d_head"},
                                                       {"n_groups", "mamba_n_groups"},
                                                       {"ssm_state_size", "mamba_d_state"},
                                                       {"conv_kernel", "mamba_d_conv"},
                                                       {"use_conv_bias", "mamba_conv_bias"},
                                                       {"expand", "mamba_expand"}};
  for (const auto& [from, to] : names) Rename(c, from, to);
  SetDefault(c, "mamba_n_groups", 8);
  SetDefault(c, "mamba_d_head", 64);
  SetDefault(c, "mamba_d_state", 128);
  return absl::OkStatus();
}

void SpellFalcon(Json& c) {
  c.erase("layer_types");  // "hybrid", all of them
  if (c.contains("mamba_d_head") && c["mamba_d_head"] == "auto") c.erase("mamba_d_head");
}

// layers_block_type, or layer_types that say "mamba" and "attention".
absl::Status SpellMambaHybrid(const std::string& file, Json& c) {
  Rename(c, "layers_block_type", "layer_types");
  if (!c.contains("layer_types") || c["layer_types"].is_null()) {
    const bool listed = c.contains("attn_layer_indices") && !c["attn_layer_indices"].is_null();
    const Json full = listed ? c["attn_layer_indices"] : Json::array();
    DT_RETURN_IF_ERROR(CheckIndices(file, "attn_layer_indices", full, 0, c));
    c["layer_types"] = Types(c, [&](int64_t i) { return Contains(full, i); });
  }
  if (c["layer_types"].is_array())
    for (Json& type : c["layer_types"])
      if (type == "attention") type = "full_attention";
  if (c.contains("mamba_d_head") && c["mamba_d_head"] == "auto") c.erase("mamba_d_head");
  Rename(c, "shared_intermediate_size", "intermediate_size");
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Json> CommonSpelling(const std::string& file, const Json& given) {
  Json c = given;
  const auto type_of = [](const Json& json) {
    return json.contains("model_type") && json["model_type"].is_string() ? json["model_type"].get<std::string>() : "";
  };
  const std::string outer = type_of(c);
  if ((outer == "qwen3_5" || outer == "qwen3_5_moe") && c.contains("text_config") && c["text_config"].is_object()) {
    c = given["text_config"];
    for (const char* field : {"tie_word_embeddings", "eos_token_id", "bos_token_id"})
      if (given.contains(field)) SetDefault(c, field, given[field]);
    c["model_type"] = outer + "_text";
    c["dovetail_tensor_prefix"] = "model.language_model.";
  }
  const std::string type = type_of(c);
  if (type == "minimax") DT_RETURN_IF_ERROR(SpellMiniMax(file, c));
  // Every layer has experts, and no other MLP has a size.
  if (type == "qwen3_5_moe_text") c["intermediate_size"] = 1;
  if (type == "qwen3_next" || type.starts_with("qwen3_5_")) DT_RETURN_IF_ERROR(SpellQwen(file, c));
  if (type == "kimi_linear") DT_RETURN_IF_ERROR(SpellKimi(file, c));
  if (type == "mamba2") SpellMamba2(c);
  if (type == "olmo_hybrid") SpellOlmo(given, c);
  if (type == "lfm2") DT_RETURN_IF_ERROR(SpellLfm2(file, c));
  if (type == "gpt_oss") SpellGptOss(c);
  if (type == "falcon_h1") SpellFalcon(c);
  if (type == "nemotron_h") DT_RETURN_IF_ERROR(SpellNemotron(file, c));
  if (type == "bamba" || type == "granitemoehybrid") {
    if (type == "granitemoehybrid") {  // its intermediate_size is that of an expert
      Rename(c, "intermediate_size", "expert_intermediate_size");
      c.erase("intermediate_size");
    }
    DT_RETURN_IF_ERROR(SpellMambaHybrid(file, c));
  }
  return c;
}

bool IsLinearLayer(Architecture architecture, std::string_view type) {
  switch (architecture) {
    case Architecture::kMiniMax:
    case Architecture::kQwen3Next:
    case Architecture::kQwen35:
    case Architecture::kQwen35Moe:
    case Architecture::kOlmoHybrid:
    case Architecture::kKimiLinear: return type == "linear_attention";
    case Architecture::kMamba2:
    case Architecture::kBamba:
    case Architecture::kGraniteHybrid:
    case Architecture::kNemotronH: return type == "mamba" || type == "linear_attention";
    case Architecture::kLfm2: return type == "conv" || type == "linear_attention";
    default: return false;
  }
}

std::optional<MlpKind> MlpOfLayer(Architecture architecture, std::string_view type) {
  if (architecture != Architecture::kNemotronH) return std::nullopt;
  if (type == "mlp") return MlpKind::kDense;
  if (type == "moe") return MlpKind::kExperts;
  return std::nullopt;
}

}  // namespace dovetail::model
