#include <algorithm>
#include <cmath>

#include "model/config.h"
#include "model/families/config_json_hybrid.h"
#include "model/families/config_json_rope.h"
#include "model/formats/file_errors.h"
#include "model/formats/json_file.h"

// config.json as transformers 4 and 5 write it. Defaults are those of transformers' configuration classes: a field that
// a class knows may be missing from an older file.

namespace dovetail::model {
namespace {

struct Family {
  const char* model_type;
  Architecture architecture;
  bool tie_default;
  double theta_default;
  double eps_default;
  std::optional<int64_t> head_dim_default;  // else hidden / heads
};

constexpr Family kFamilies[] = {
    {"llama", Architecture::kLlama, false, 1e4, 1e-6, std::nullopt},
    {"mistral", Architecture::kMistral, false, 1e4, 1e-6, std::nullopt},
    {"smollm3", Architecture::kSmolLm3, true, 2e6, 1e-6, std::nullopt},
    {"qwen2", Architecture::kQwen2, false, 1e4, 1e-6, std::nullopt},
    {"qwen3", Architecture::kQwen3, false, 1e4, 1e-6, 128},
    {"phi3", Architecture::kPhi3, false, 1e4, 1e-5, std::nullopt},
    {"gemma3_text", Architecture::kGemma3, true, 1e6, 1e-6, 256},
    {"mixtral", Architecture::kMixtral, false, 1e6, 1e-5, std::nullopt},
    {"qwen3_moe", Architecture::kQwen3Moe, false, 1e4, 1e-6, 128},
    {"minimax_m2", Architecture::kMiniMaxM2, false, 5e6, 1e-6, 128},
    {"minimax", Architecture::kMiniMax, false, 1e6, 1e-5, std::nullopt},
    {"qwen3_next", Architecture::kQwen3Next, false, 1e4, 1e-6, 256},
    {"qwen3_5_text", Architecture::kQwen35, false, 1e4, 1e-6, 256},
    {"qwen3_5_moe_text", Architecture::kQwen35Moe, false, 1e4, 1e-6, 256},
    {"kimi_linear", Architecture::kKimiLinear, false, 1e4, 1e-6, std::nullopt},
    {"mamba2", Architecture::kMamba2, false, 1e4, 1e-5, std::nullopt},
    {"bamba", Architecture::kBamba, false, 1e4, 1e-5, std::nullopt},
    {"granitemoehybrid", Architecture::kGraniteHybrid, true, 1e4, 1e-6, std::nullopt},
    {"nemotron_h", Architecture::kNemotronH, false, 1e4, 1e-5, 128},
    {"falcon_h1", Architecture::kFalconH1, false, 1e4, 1e-5, std::nullopt},
    {"olmo_hybrid", Architecture::kOlmoHybrid, false, 1e4, 1e-6, std::nullopt},
    {"lfm2", Architecture::kLfm2, true, 1e6, 1e-5, std::nullopt},
    {"gpt_oss", Architecture::kGptOss, false, 1.5e5, 1e-5, 64},
};

absl::StatusOr<const Family*> FindFamily(const JsonFields& fields) {
  DT_ASSIGN_OR_RETURN(const auto type, fields.String("model_type"));
  if (!type) return fields.Error("model_type", "is missing; this is no model's config.json");
  std::string known;
  for (const Family& family : kFamilies) {
    if (*type == family.model_type) return &family;
    known += absl::StrCat(known.empty() ? "" : ", ", family.model_type);
  }
  return Unimplemented(fields.file(), ": model_type '", Printable(*type), "' is not served; served are ", known);
}

absl::StatusOr<int64_t> Required(const JsonFields& fields, const char* field) {
  DT_ASSIGN_OR_RETURN(const auto value, fields.Int(field));
  if (!value) return fields.Error(field, "is missing");
  if (*value < 1) return fields.Error(field, absl::StrCat("is ", *value, "; it must be at least 1"));
  if (*value > (int64_t{1} << 32)) return fields.Error(field, absl::StrCat("is ", *value, "; it must be below 2^32"));
  return *value;
}

// Whether weights are stored in a way that the checkpoint's reader knows: gpt-oss's MXFP4, and E4M3 with a scale for
// each row or tensor. Which, and whether scales are there, the tensors say.
absl::StatusOr<bool> IsServedQuantization(const JsonFields& fields, const ModelConfig& config) {
  DT_ASSIGN_OR_RETURN(const auto quantization, fields.Object("quantization_config"));
  if (!quantization) return false;
  DT_ASSIGN_OR_RETURN(const auto method, quantization->String("quant_method"));
  if (method == "mxfp4") return config.architecture == Architecture::kGptOss;
  if (method == "fbgemm_fp8") return true;
  if (method == "fp8") return !quantization->Has("weight_block_size");
  if (method != "compressed-tensors") return false;
  DT_ASSIGN_OR_RETURN(const auto format, quantization->String("format"));
  return format == "float-quantized" || format == "naive-quantized";
}

// Features of these families that would change the numbers and are not built.
absl::Status RefuseUnserved(const JsonFields& fields, const ModelConfig& config) {
  DT_ASSIGN_OR_RETURN(const bool served, IsServedQuantization(fields, config));
  for (const char* field : {"attn_logit_softcapping", "final_logit_softcapping", "quantization_config"}) {
    if (served && std::string_view(field) == "quantization_config") continue;
    if (fields.Has(field)) return Unimplemented(fields.file(), ": ", field, " is set, which is not served");
  }
  DT_ASSIGN_OR_RETURN(const auto bidirectional, fields.Bool("use_bidirectional_attention"));
  if (bidirectional.value_or(false)) return Unimplemented(fields.file(), ": use_bidirectional_attention is not served");
  return absl::OkStatus();
}

absl::Status ReadSizes(const JsonFields& fields, const Family& family, ModelConfig& config) {
  DT_ASSIGN_OR_RETURN(config.hidden_size, Required(fields, "hidden_size"));
  DT_ASSIGN_OR_RETURN(const int64_t layers, Required(fields, "num_hidden_layers"));
  if (layers > 1024) return fields.Error("num_hidden_layers", absl::StrCat("is ", layers, "; at most 1024 are served"));
  config.layers.resize(static_cast<size_t>(layers));
  DT_ASSIGN_OR_RETURN(config.heads, Required(fields, "num_attention_heads"));
  DT_ASSIGN_OR_RETURN(const auto kv_heads, fields.Int("num_key_value_heads"));
  config.kv_heads = kv_heads.value_or(config.heads);
  DT_ASSIGN_OR_RETURN(config.intermediate_size, Required(fields, "intermediate_size"));
  DT_ASSIGN_OR_RETURN(config.vocab_size, Required(fields, "vocab_size"));
  DT_ASSIGN_OR_RETURN(config.max_positions, Required(fields, "max_position_embeddings"));
  DT_ASSIGN_OR_RETURN(auto head_dim, fields.Int("head_dim"));
  if (!head_dim) head_dim = family.head_dim_default;
  if (!head_dim) {
    if (config.hidden_size % config.heads != 0) {
      return fields.Error("head_dim", absl::StrCat("is missing, and hidden_size ", config.hidden_size,
                                                   " is not a multiple of num_attention_heads ", config.heads));
    }
    head_dim = config.hidden_size / config.heads;
  }
  if (*head_dim < 2 || *head_dim > 1024)
    return fields.Error("head_dim", absl::StrCat("is ", *head_dim, "; it must be in [2, 1024]"));
  config.key_dim = config.value_dim = *head_dim;
  DT_ASSIGN_OR_RETURN(const auto eps, fields.Float("rms_norm_eps"));
  config.norm_eps = eps.value_or(family.eps_default);
  DT_ASSIGN_OR_RETURN(const auto tie, fields.Bool("tie_word_embeddings"));
  config.tie_embeddings = tie.value_or(family.tie_default);
  return absl::OkStatus();
}

absl::Status ReadDtype(const JsonFields& fields, ModelConfig& config) {
  DT_ASSIGN_OR_RETURN(auto dtype, fields.String("dtype"));
  if (!dtype) {
    DT_ASSIGN_OR_RETURN(dtype, fields.String("torch_dtype"));
  }
  if (!dtype) return absl::OkStatus();
  if (*dtype == "bfloat16") config.weights_dtype = DType::kBF16;
  if (*dtype == "float16") config.weights_dtype = DType::kF16;
  return absl::OkStatus();
}

absl::Status ReadActivation(const JsonFields& fields, ModelConfig& config) {
  const bool gemma = config.architecture == Architecture::kGemma3;
  const char* field = gemma ? "hidden_activation" : "hidden_act";
  DT_ASSIGN_OR_RETURN(const auto name, fields.String(field));
  const std::string activation = name.value_or(gemma ? "gelu_pytorch_tanh" : "silu");
  if (activation == "silu" || activation == "swish") {
    config.activation = Activation::kSilu;
  } else if (activation == "gelu_pytorch_tanh") {
    config.activation = Activation::kGeluTanh;
  } else if (activation == "relu2" && config.architecture == Architecture::kNemotronH) {
    config.activation = Activation::kRelu2;
  } else {
    return Unimplemented(fields.file(), ": ", field, " '", Printable(activation),
                         "' is not served; served are silu and gelu_pytorch_tanh");
  }
  if (config.architecture == Architecture::kNemotronH && config.activation != Activation::kRelu2)
    return Unimplemented(fields.file(), ": mlp_hidden_act '", Printable(activation), "' is not served; relu2 is");
  return absl::OkStatus();
}

absl::Status ReadBiases(const JsonFields& fields, ModelConfig& config) {
  DT_ASSIGN_OR_RETURN(const auto attention, fields.Bool("attention_bias"));
  DT_ASSIGN_OR_RETURN(const auto mlp, fields.Bool("mlp_bias"));
  switch (config.architecture) {
    case Architecture::kLlama:
    case Architecture::kSmolLm3:
    case Architecture::kNemotronH:
    case Architecture::kFalconH1: config.mlp_bias = mlp.value_or(false); [[fallthrough]];
    case Architecture::kQwen3:
    case Architecture::kGemma3:
    case Architecture::kQwen3Moe:
    case Architecture::kQwen3Next:
    case Architecture::kQwen35:
    case Architecture::kQwen35Moe:
    case Architecture::kBamba:
    case Architecture::kGraniteHybrid:
    case Architecture::kOlmoHybrid:
    case Architecture::kGptOss:
      config.q_bias = config.k_bias = config.v_bias = config.o_bias = attention.value_or(false);
      break;
    case Architecture::kQwen2: config.q_bias = config.k_bias = config.v_bias = true; break;
    case Architecture::kMistral:
    case Architecture::kPhi3:
    case Architecture::kMixtral:
    case Architecture::kMiniMaxM2:
    case Architecture::kMiniMax:
    case Architecture::kKimiLinear:
    case Architecture::kMamba2:
    case Architecture::kLfm2: break;
  }
  return absl::OkStatus();
}

absl::Status ReadScales(const JsonFields& fields, ModelConfig& config) {
  double query_dim = static_cast<double>(config.key_dim);
  if (config.architecture == Architecture::kGemma3) {
    DT_ASSIGN_OR_RETURN(const auto scalar, fields.Float("query_pre_attn_scalar"));
    query_dim = scalar.value_or(256.0);
    if (!(query_dim > 0))
      return fields.Error("query_pre_attn_scalar", absl::StrCat("is ", query_dim, "; it must be positive"));
    config.qk_norm = config.post_norms = config.norms_stored_minus_one = true;
    // The reference keeps the factor in the model's dtype.
    const auto scale = static_cast<float>(std::sqrt(static_cast<double>(config.hidden_size)));
    config.embedding_scale = config.weights_dtype == DType::kBF16  ? ToFloat(ToBF16(scale))
                             : config.weights_dtype == DType::kF16 ? ToFloat(ToF16(scale))
                                                                   : scale;
  }
  if (config.architecture == Architecture::kQwen3 || config.architecture == Architecture::kQwen3Moe)
    config.qk_norm = true;
  config.attention_scale = static_cast<float>(1.0 / std::sqrt(query_dim));
  return absl::OkStatus();
}

// --- Layers ---

// The window that sliding layers have, or nullopt when the model has none.
absl::StatusOr<std::optional<int64_t>> ReadWindow(const JsonFields& fields, const ModelConfig& config) {
  DT_ASSIGN_OR_RETURN(std::optional<int64_t> window, fields.Int("sliding_window"));
  switch (config.architecture) {
    case Architecture::kLlama:
    case Architecture::kMiniMaxM2:
    case Architecture::kMiniMax:
    case Architecture::kQwen3Next:
    case Architecture::kQwen35:
    case Architecture::kQwen35Moe:
    case Architecture::kKimiLinear:
    case Architecture::kMamba2:
    case Architecture::kBamba:
    case Architecture::kGraniteHybrid:
    case Architecture::kNemotronH:
    case Architecture::kFalconH1:
    case Architecture::kOlmoHybrid:
    case Architecture::kLfm2: return std::nullopt;
    case Architecture::kQwen2:
    case Architecture::kQwen3:
    case Architecture::kQwen3Moe:
    case Architecture::kSmolLm3: {
      DT_ASSIGN_OR_RETURN(const auto used, fields.Bool("use_sliding_window"));
      if (!used.value_or(false)) return std::nullopt;
      break;
    }
    case Architecture::kMistral:
    case Architecture::kMixtral:
    case Architecture::kGemma3:
    case Architecture::kPhi3:
    case Architecture::kGptOss: break;
  }
  return window;
}

// Which layers slide where the config has no layer_types: each family's own rule.
absl::StatusOr<std::vector<bool>> DefaultSliding(const JsonFields& fields, const ModelConfig& config, bool has_window,
                                                 const std::vector<bool>& has_rope) {
  const size_t layers = config.layers.size();
  std::vector<bool> sliding(layers, false);
  if (!has_window) return sliding;
  switch (config.architecture) {
    case Architecture::kMistral:
    case Architecture::kMixtral:
    case Architecture::kPhi3: sliding.assign(layers, true); break;
    case Architecture::kSmolLm3:
      for (size_t i = 0; i < layers; ++i) sliding[i] = !has_rope[i];
      break;
    case Architecture::kQwen2:
    case Architecture::kQwen3Moe:
    case Architecture::kQwen3: {
      DT_ASSIGN_OR_RETURN(const auto first, fields.Int("max_window_layers"));
      for (size_t i = 0; i < layers; ++i) sliding[i] = static_cast<int64_t>(i) >= first.value_or(28);
      break;
    }
    case Architecture::kGemma3: {
      DT_ASSIGN_OR_RETURN(auto pattern, fields.Int("sliding_window_pattern"));
      if (!pattern) {
        DT_ASSIGN_OR_RETURN(pattern, fields.Int("_sliding_window_pattern"));
      }
      const int64_t every = pattern.value_or(6);
      if (every < 1)
        return fields.Error("sliding_window_pattern", absl::StrCat("is ", every, "; it must be at least 1"));
      for (size_t i = 0; i < layers; ++i) sliding[i] = static_cast<int64_t>(i + 1) % every != 0;
      break;
    }
    default:  // no window
      break;
  }
  return sliding;
}

absl::StatusOr<std::vector<bool>> ReadHasRope(const JsonFields& fields, const ModelConfig& config) {
  std::vector<bool> has_rope(config.layers.size(), true);
  DT_ASSIGN_OR_RETURN(const auto none, fields.Bool("dovetail_no_rope"));
  if (none.value_or(false) || config.architecture == Architecture::kNemotronH)
    has_rope.assign(config.layers.size(), false);
  if (config.architecture != Architecture::kSmolLm3) return has_rope;
  DT_ASSIGN_OR_RETURN(const auto flags, fields.Ints("no_rope_layers"));
  DT_ASSIGN_OR_RETURN(const auto interval, fields.Int("no_rope_layer_interval"));
  const int64_t every = interval.value_or(4);
  if (every < 1) return fields.Error("no_rope_layer_interval", absl::StrCat("is ", every, "; it must be at least 1"));
  if (flags && flags->size() != has_rope.size()) {
    return fields.Error("no_rope_layers",
                        absl::StrCat("has ", flags->size(), " entries, but num_hidden_layers is ", has_rope.size()));
  }
  for (size_t i = 0; i < has_rope.size(); ++i) {
    has_rope[i] = flags ? (*flags)[i] != 0 : static_cast<int64_t>(i + 1) % every != 0;
  }
  return has_rope;
}

// max_position_embeddings is what the model was trained at. Dynamic NTK grows the base beyond it, and `factor` says how
// far it is meant to go (vLLM serves max_position_embeddings * factor too); the other kinds' max_position_embeddings
// already is the stretched length.
void StretchPositions(ModelConfig& config) {
  const int64_t trained = config.max_positions;
  for (const RopeSpec& rope : config.ropes)
    if (rope.kind == RopeKind::kDynamic)
      config.max_positions = std::max(config.max_positions, RopeLength(rope, RopeLengthRule::kModelMaximum, trained));
}

absl::Status ReadLayers(const JsonFields& fields, const Family& family, ModelConfig& config) {
  DT_ASSIGN_OR_RETURN(const JsonRopes ropes, ReadRopes(fields, family.theta_default, config));
  DT_ASSIGN_OR_RETURN(const std::vector<bool> has_rope, ReadHasRope(fields, config));
  DT_ASSIGN_OR_RETURN(const auto window, ReadWindow(fields, config));
  DT_ASSIGN_OR_RETURN(std::vector<bool> sliding, DefaultSliding(fields, config, window.has_value(), has_rope));
  DT_ASSIGN_OR_RETURN(const auto types, fields.Strings("layer_types"));
  if (types && types->size() != config.layers.size()) {
    return fields.Error("layer_types", absl::StrCat("has ", types->size(), " entries, but num_hidden_layers is ",
                                                    config.layers.size()));
  }
  for (size_t i = 0; i < config.layers.size(); ++i) {
    if (types) {
      const std::string& type = (*types)[i];
      if (IsLinearLayer(config.architecture, type)) {
        config.layers[i].kind = LayerKind::kLinearState;
        continue;
      }
      if (const auto mlp = MlpOfLayer(config.architecture, type)) {
        config.layers[i].kind = LayerKind::kMlpOnly;
        config.layers[i].mlp = *mlp;
        continue;
      }
      if (type != "full_attention" && type != "sliding_attention") {
        return Unimplemented(fields.file(), ": layer_types[", i, "] is '", Printable(type),
                             "', which is not served in ", family.model_type);
      }
      sliding[i] = type == "sliding_attention";
    }
    if (sliding[i] && !window)
      return fields.Error("sliding_window", absl::StrCat("is missing, but layer ", i, " is sliding_attention"));
    LayerConfig& layer = config.layers[i];
    layer.kind = sliding[i] ? LayerKind::kSlidingAttention : LayerKind::kFullAttention;
    layer.window = sliding[i] ? *window : 0;
    layer.rope = has_rope[i] ? AddRope(config, sliding[i] ? ropes.sliding : ropes.full) : -1;
  }
  StretchPositions(config);
  return absl::OkStatus();
}

// --- Tokens and sampling ---

absl::Status AddStopIds(const JsonFields& fields, ModelConfig& config) {
  DT_ASSIGN_OR_RETURN(const auto ids, fields.Ints("eos_token_id"));
  for (const int64_t id : ids.value_or(std::vector<int64_t>{})) {
    if (id < 0 || id >= config.vocab_size) {
      return fields.Error("eos_token_id", absl::StrCat("is ", id, ", but vocab_size is ", config.vocab_size));
    }
    config.stop_ids.push_back(static_cast<TokenId>(id));
  }
  return absl::OkStatus();
}

absl::Status ReadTokens(const JsonFields& fields, const nlohmann::json& generation_config, ModelConfig& config) {
  DT_ASSIGN_OR_RETURN(const auto bos, fields.Int("bos_token_id"));
  if (bos && (*bos < 0 || *bos >= config.vocab_size)) {
    return fields.Error("bos_token_id", absl::StrCat("is ", *bos, ", but vocab_size is ", config.vocab_size));
  }
  if (bos) config.bos = static_cast<TokenId>(*bos);
  DT_RETURN_IF_ERROR(AddStopIds(fields, config));
  if (generation_config.is_null()) return absl::OkStatus();

  const JsonFields generation("generation_config.json", generation_config);
  DT_RETURN_IF_ERROR(AddStopIds(generation, config));
  SamplingDefaults& sampling = config.sampling;
  DT_ASSIGN_OR_RETURN(sampling.temperature, generation.Float("temperature"));
  DT_ASSIGN_OR_RETURN(sampling.top_p, generation.Float("top_p"));
  DT_ASSIGN_OR_RETURN(sampling.min_p, generation.Float("min_p"));
  DT_ASSIGN_OR_RETURN(sampling.repetition_penalty, generation.Float("repetition_penalty"));
  DT_ASSIGN_OR_RETURN(sampling.top_k, generation.Int("top_k"));
  DT_ASSIGN_OR_RETURN(sampling.do_sample, generation.Bool("do_sample"));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelConfig> ConfigFromJson(const std::string& file, const nlohmann::json& given,
                                           const nlohmann::json& generation_config) {
  if (!given.is_object()) return InvalidArgument(file, ": is not a JSON object");
  DT_ASSIGN_OR_RETURN(const nlohmann::json json, CommonSpelling(file, given));
  if (!generation_config.is_null() && !generation_config.is_object())
    return InvalidArgument("generation_config.json: is not a JSON object");
  const JsonFields fields(file, json);
  DT_ASSIGN_OR_RETURN(const Family* family, FindFamily(fields));
  ModelConfig config;
  config.architecture = family->architecture;
  DT_RETURN_IF_ERROR(RefuseUnserved(fields, config));
  DT_RETURN_IF_ERROR(ReadSizes(fields, *family, config));
  DT_RETURN_IF_ERROR(ReadDtype(fields, config));
  DT_RETURN_IF_ERROR(ReadActivation(fields, config));
  DT_RETURN_IF_ERROR(ReadBiases(fields, config));
  DT_RETURN_IF_ERROR(ReadScales(fields, config));
  DT_RETURN_IF_ERROR(ReadLayers(fields, *family, config));
  DT_RETURN_IF_ERROR(ReadHybrid(fields, config));
  DT_RETURN_IF_ERROR(ReadTokens(fields, generation_config, config));
  std::sort(config.stop_ids.begin(), config.stop_ids.end());
  config.stop_ids.erase(std::unique(config.stop_ids.begin(), config.stop_ids.end()), config.stop_ids.end());
  DT_RETURN_IF_ERROR(ValidateConfig(file, config));
  return config;
}

}  // namespace dovetail::model
