#include "model/families/config_json_hybrid.h"

#include <algorithm>
#include <cmath>

#include "model/families/config_json_fields.h"
#include "model/formats/file_errors.h"

namespace dovetail::model {

absl::Status ReadExperts(const JsonFields& fields, ExpertConfig& experts, const char* count, const char* intermediate) {
  DT_ASSIGN_OR_RETURN(experts.experts, Size(fields, count));
  DT_ASSIGN_OR_RETURN(experts.chosen, Size(fields, "num_experts_per_tok"));
  DT_ASSIGN_OR_RETURN(experts.intermediate, Size(fields, intermediate));
  return absl::OkStatus();
}

absl::Status ReadSigmoidExperts(const JsonFields& fields, ExpertConfig& experts, const SigmoidExpertNames& names) {
  DT_RETURN_IF_ERROR(ReadExperts(fields, experts, names.count, "moe_intermediate_size"));
  DT_ASSIGN_OR_RETURN(experts.groups, Size(fields, names.groups, 1));
  DT_ASSIGN_OR_RETURN(experts.chosen_groups, Size(fields, "topk_group", 1));
  DT_RETURN_IF_ERROR(ValidateExpertGroups(fields.file(), experts, names.groups, "topk_group"));
  experts.score = ExpertConfig::Score::kSigmoid;
  experts.selection_bias = true;
  DT_ASSIGN_OR_RETURN(experts.renormalise, Flag(fields, names.renormalise, true));
  DT_ASSIGN_OR_RETURN(experts.scale, Scale(fields, "routed_scaling_factor", 1));
  return absl::OkStatus();
}

void AllSparse(ModelConfig& config) {
  for (LayerConfig& layer : config.layers) layer.mlp = MlpKind::kExperts;
}

namespace {

using Family = StateConfig::Family;

// decoder_sparse_step and mlp_only_layers say which layers are dense.
absl::Status ReadSparseLayers(const JsonFields& fields, ModelConfig& config) {
  DT_ASSIGN_OR_RETURN(const auto dense, fields.Ints("mlp_only_layers"));
  for (const int64_t layer : dense.value_or(std::vector<int64_t>()))
    if (layer < 0 || layer >= static_cast<int64_t>(config.layers.size()))
      return fields.Error("mlp_only_layers", absl::StrCat("names layer ", layer, " of ", config.layers.size()));
  DT_ASSIGN_OR_RETURN(const int64_t every, Size(fields, "decoder_sparse_step", 1));
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const bool listed = dense && std::find(dense->begin(), dense->end(), static_cast<int64_t>(i)) != dense->end();
    if (!listed && (static_cast<int64_t>(i) + 1) % every == 0) config.layers[i].mlp = MlpKind::kExperts;
  }
  return absl::OkStatus();
}

absl::Status ReadQwenExperts(const JsonFields& fields, ModelConfig& config) {
  ExpertConfig experts;
  const bool older = config.architecture == Architecture::kQwen3Moe && !fields.Has("num_experts");
  const char* count = older ? "num_local_experts" : "num_experts";
  DT_RETURN_IF_ERROR(ReadExperts(fields, experts, count, "moe_intermediate_size"));
  const bool hybrid = config.architecture != Architecture::kQwen3Moe;
  DT_ASSIGN_OR_RETURN(experts.renormalise, Flag(fields, "norm_topk_prob", hybrid));
  if (hybrid) {
    DT_ASSIGN_OR_RETURN(experts.shared_intermediate, Size(fields, "shared_expert_intermediate_size", 512));
    experts.shared_gate = true;
  }
  config.experts = experts;
  return ReadSparseLayers(fields, config);
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
  return config.architecture == Architecture::kQwen35 ? absl::OkStatus() : ReadQwenExperts(fields, config);
}

absl::Status ReadOlmo(const JsonFields& fields, ModelConfig& config) {
  StateConfig state;
  state.family = Family::kGatedDelta;
  DT_ASSIGN_OR_RETURN(state.heads, Size(fields, "linear_num_value_heads", config.heads));
  DT_ASSIGN_OR_RETURN(state.key_heads, Size(fields, "linear_num_key_heads", config.heads));
  const int64_t dim = std::max<int64_t>(1, 3 * config.hidden_size / (4 * state.key_heads));
  DT_ASSIGN_OR_RETURN(state.key_dim, Size(fields, "linear_key_head_dim", dim));
  DT_ASSIGN_OR_RETURN(state.value_dim, Size(fields, "linear_value_head_dim", 2 * state.key_dim));
  DT_ASSIGN_OR_RETURN(state.conv_width, Size(fields, "linear_conv_kernel_dim", 4));
  DT_ASSIGN_OR_RETURN(const bool negative, Flag(fields, "linear_allow_neg_eigval", true));
  state.rate_scale = negative ? 2 : 1;
  state.out_norm_eps = 1e-5;  // whatever the others have
  config.qk_norm = config.whole_qk_norm = true;
  config.state = state;
  return absl::OkStatus();
}

// LFM2's MLPs are narrower than the config says, unless that says otherwise.
absl::Status ReadLfm2Mlp(const JsonFields& fields, ModelConfig& config) {
  DT_ASSIGN_OR_RETURN(const bool adjust, Flag(fields, "block_auto_adjust_ff_dim", true));
  if (!adjust) return absl::OkStatus();
  DT_ASSIGN_OR_RETURN(const int64_t multiple, Size(fields, "block_multiple_of", 256));
  DT_ASSIGN_OR_RETURN(const auto factor, fields.Float("block_ffn_dim_multiplier"));
  if (factor && !(*factor > 0 && *factor <= 64))
    return fields.Error("block_ffn_dim_multiplier", absl::StrCat("is ", *factor, "; it must be in (0, 64]"));
  int64_t size = 2 * config.intermediate_size / 3;
  size = static_cast<int64_t>(factor.value_or(1.0) * static_cast<double>(size));
  config.intermediate_size = (size + multiple - 1) / multiple * multiple;
  return absl::OkStatus();
}

absl::Status ReadLfm2(const JsonFields& fields, ModelConfig& config) {
  DT_ASSIGN_OR_RETURN(const int64_t width, Size(fields, "conv_L_cache", 3));
  DT_ASSIGN_OR_RETURN(const bool bias, Flag(fields, "conv_bias", false));
  DT_RETURN_IF_ERROR(SetConvolutionState(fields.file(), width, bias, config));
  config.qk_norm = true;
  return ReadLfm2Mlp(fields, config);
}

absl::Status ReadGptOss(const JsonFields& fields, ModelConfig& config) {
  ExpertConfig experts;
  DT_RETURN_IF_ERROR(ReadExperts(fields, experts, "num_local_experts", "intermediate_size"));
  experts.score = ExpertConfig::Score::kSoftmaxOfChosen;
  experts.router_bias = experts.bias = true;
  config.experts = experts;
  AllSparse(config);
  config.sinks = true;
  DT_ASSIGN_OR_RETURN(const auto limit, fields.Float("swiglu_limit"));
  if (limit.value_or(7) != 7) return Unimplemented(fields.file(), ": swiglu_limit ", *limit, " is not served; 7 is");
  if (config.activation != Activation::kSilu)
    return Unimplemented(fields.file(), ": hidden_act of gpt_oss must be silu");
  config.activation = Activation::kClampedSwiglu;
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
  DT_RETURN_IF_ERROR(ReadSigmoidExperts(fields, experts, {"num_experts", "num_expert_group", "moe_renormalize"}));
  DT_ASSIGN_OR_RETURN(const auto shared, fields.Int("num_shared_experts"));
  experts.shared_intermediate = std::clamp<int64_t>(shared.value_or(0), 0, 64) * experts.intermediate;
  config.experts = experts;
  DT_ASSIGN_OR_RETURN(const auto types, fields.Strings("mlp_layer_types"));
  DT_ASSIGN_OR_RETURN(const auto first, fields.Int("first_k_dense_replace"));
  if (types && types->size() != config.layers.size())
    return fields.Error("mlp_layer_types",
                        absl::StrCat("has ", types->size(), " entries for ", config.layers.size(), " layers"));
  for (size_t i = 0; types && i < types->size(); ++i)
    if ((*types)[i] != "sparse" && (*types)[i] != "dense")
      return Unimplemented(fields.file(), ": mlp_layer_types[", i, "] is '", Printable((*types)[i]),
                           "'; sparse and dense are served");
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
    case Architecture::kQwen3Moe: return ReadQwenExperts(fields, config);
    case Architecture::kMiniMax: return ReadMiniMax(fields, config);
    case Architecture::kQwen3Next:
    case Architecture::kQwen35:
    case Architecture::kQwen35Moe: return ReadGatedDelta(fields, config);
    case Architecture::kKimiLinear: return ReadKimi(fields, config);
    case Architecture::kOlmoHybrid: return ReadOlmo(fields, config);
    case Architecture::kLfm2: return ReadLfm2(fields, config);
    case Architecture::kGptOss: return ReadGptOss(fields, config);
    case Architecture::kMamba2:
    case Architecture::kBamba:
    case Architecture::kGraniteHybrid:
    case Architecture::kNemotronH:
    case Architecture::kFalconH1: return ReadMambaHybrid(fields, config);
    default: return absl::OkStatus();
  }
}

}  // namespace dovetail::model
