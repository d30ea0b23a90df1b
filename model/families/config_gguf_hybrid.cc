#include "model/families/config_gguf_hybrid.h"

#include <algorithm>
#include <cmath>

#include "model/formats/file_errors.h"

namespace dovetail::model {
namespace {

constexpr int64_t kMaxSize = int64_t{1} << 24;

class HybridKeys {
 public:
  HybridKeys(const GgufFile& gguf, const std::string& prefix, ModelConfig& config)
      : gguf_(gguf), prefix_(prefix), c_(config) {}

  absl::Status Sizes() {
    DT_ASSIGN_OR_RETURN(const std::vector<int64_t> mlp, PerLayer("feed_forward_length", OnlyExperts() ? 1 : 0));
    DT_ASSIGN_OR_RETURN(const std::vector<int64_t> heads, PerLayer("attention.head_count", 0));
    DT_ASSIGN_OR_RETURN(const std::vector<int64_t> kv_heads, PerLayer("attention.head_count_kv", heads[0]));
    DT_ASSIGN_OR_RETURN(c_.intermediate_size, OneOf("feed_forward_length", mlp));
    DT_ASSIGN_OR_RETURN(c_.heads, OneOf("attention.head_count", heads));
    DT_ASSIGN_OR_RETURN(c_.kv_heads, OneOf("attention.head_count_kv", kv_heads));
    DT_ASSIGN_OR_RETURN(const int64_t every, Interval());
    const bool mamba = c_.architecture == Architecture::kMamba2;
    const bool nemotron = c_.architecture == Architecture::kNemotronH;
    for (size_t i = 0; i < c_.layers.size(); ++i) {
      LayerConfig& layer = c_.layers[i];
      const bool counted = !mamba && heads[i] > 0 && kv_heads[i] > 0;
      const bool attends = counted && (every == 0 || (i + 1) % static_cast<size_t>(every) == 0);
      if (!counted && AllAttend()) return Bad("attention.head_count_kv", absl::StrCat("is 0 for layer ", i));
      if (!attends) layer.kind = nemotron && mlp[i] > 0 ? LayerKind::kMlpOnly : LayerKind::kLinearState;
      layer.mlp = mamba || mlp[i] == 0 ? MlpKind::kNone : MlpKind::kDense;
    }
    return absl::OkStatus();
  }

  absl::Status States() {
    switch (c_.architecture) {
      case Architecture::kLfm2: return Lfm2();
      case Architecture::kMamba2: return Mamba();
      case Architecture::kNemotronH:
        c_.activation = Activation::kRelu2;
        for (LayerConfig& layer : c_.layers) layer.rope = -1;
        c_.ropes.clear();
        DT_RETURN_IF_ERROR(Mamba());
        c_.state->out_norm_groups = c_.state->key_heads;
        return prefix_ == "nemotron_h_moe" ? NemotronExperts() : absl::OkStatus();
      case Architecture::kGptOss: return GptOss();
      case Architecture::kMixtral: {
        ExpertConfig experts;
        return Experts(experts, c_.intermediate_size);
      }
      case Architecture::kQwen3Moe: {
        ExpertConfig experts;
        c_.qk_norm = true;
        return Experts(experts, 0);
      }
      case Architecture::kMiniMaxM2: {
        ExpertConfig experts;
        experts.score = ExpertConfig::Score::kSigmoid;
        experts.selection_bias = true;
        c_.qk_norm = c_.whole_qk_norm = true;
        return Experts(experts, c_.intermediate_size);
      }
      case Architecture::kQwen3Next:
      case Architecture::kQwen35:
      case Architecture::kQwen35Moe: return GatedDelta();
      case Architecture::kKimiLinear: return Kimi();
      case Architecture::kGraniteHybrid: return Granite();
      case Architecture::kFalconH1:
        for (LayerConfig& layer : c_.layers) layer.kind = LayerKind::kAttentionAndState;
        DT_RETURN_IF_ERROR(Mamba());
        if (c_.state->out_norm) c_.state->out_norm_groups = c_.state->key_heads;
        return absl::OkStatus();
      default: return absl::OkStatus();
    }
  }

 private:
  std::string Key(const char* suffix) const { return absl::StrCat(prefix_, ".", suffix); }
  absl::Status Bad(const char* suffix, const std::string& what) const {
    return InvalidArgument(gguf_.name(), ": metadata key ", Key(suffix), " ", what);
  }
  absl::StatusOr<std::vector<int64_t>> PerLayer(const char* suffix, int64_t missing) const {
    return GgufPerLayer(gguf_, Key(suffix), c_.layers.size(), missing);
  }

  // What all layers share that have any; 1 where none has.
  absl::StatusOr<int64_t> OneOf(const char* suffix, const std::vector<int64_t>& values) const {
    int64_t one = 0;
    for (const int64_t value : values) {
      if (value != 0 && one != 0 && value != one)
        return Unimplemented(gguf_.name(), ": metadata key ", Key(suffix),
                             " differs between layers, which is not served");
      if (value != 0) one = value;
    }
    return std::max<int64_t>(one, 1);
  }

  absl::StatusOr<int64_t> Size(const char* suffix) const {
    DT_ASSIGN_OR_RETURN(const auto value, gguf_.Int(Key(suffix)));
    if (!value) return Bad(suffix, "is missing");
    if (*value < 1 || *value > kMaxSize) return Bad(suffix, absl::StrCat("is ", *value, "; it must be positive"));
    return *value;
  }

  bool HasTensor(const char* name) const {  // in any layer
    for (size_t i = 0; i < c_.layers.size(); ++i)
      if (gguf_.FindTensor(absl::StrCat("blk.", i, ".", name)) != nullptr) return true;
    return false;
  }

  bool Has(size_t layer, const char* name) const {
    return gguf_.FindTensor(absl::StrCat("blk.", layer, ".", name)) != nullptr;
  }

  // Without a layer that is nothing but a state.
  bool AllAttend() const {
    switch (c_.architecture) {
      case Architecture::kGptOss:
      case Architecture::kMixtral:
      case Architecture::kQwen3Moe:
      case Architecture::kMiniMaxM2:
      case Architecture::kFalconH1: return true;
      default: return false;
    }
  }

  // In every layer, so that no other MLP has a size.
  bool OnlyExperts() const { return c_.architecture == Architecture::kQwen35Moe; }

  // Of Qwen's hybrids every so many layers attend; 0: the number of KV heads says which do.
  absl::StatusOr<int64_t> Interval() const {
    if (c_.architecture != Architecture::kQwen3Next && c_.architecture != Architecture::kQwen35 && !OnlyExperts())
      return 0;
    DT_ASSIGN_OR_RETURN(const auto every, gguf_.Int(Key("full_attention_interval")));
    if (every.value_or(4) < 1 || every.value_or(4) > 1024)
      return Bad("full_attention_interval", absl::StrCat("is ", *every, "; it must be in [1, 1024]"));
    return every.value_or(4);  // what llama.cpp takes
  }

  absl::StatusOr<bool> Bool(const char* suffix, bool missing) const {
    const GgufValue* value = gguf_.Find(Key(suffix));
    if (value == nullptr) return missing;
    if (value->type != GgufValueType::kBool) return Bad(suffix, "is no bool");
    DT_ASSIGN_OR_RETURN(const auto read, gguf_.Bool(Key(suffix)));
    return read.value_or(missing);
  }
  absl::StatusOr<float> Factor(const char* suffix, float missing) const {
    DT_ASSIGN_OR_RETURN(const auto value, gguf_.Float(Key(suffix)));
    if (!value) return missing;
    if (!(std::abs(*value) > 0 && std::abs(*value) <= 1e6))
      return Bad(suffix, absl::StrCat("is ", *value, "; it must be a factor other than 0, up to 1e6"));
    return static_cast<float>(*value);
  }

  // Counts and widths; layers without a router's tensor, but with those of an MLP, have no experts. `intermediate` is
  // what the experts have where no key says so; 0: one must.
  absl::Status Experts(ExpertConfig experts, int64_t intermediate) {
    DT_ASSIGN_OR_RETURN(experts.experts, Size("expert_count"));
    DT_ASSIGN_OR_RETURN(experts.chosen, Size("expert_used_count"));
    experts.intermediate = intermediate;
    if (intermediate == 0 || gguf_.Find(Key("expert_feed_forward_length")) != nullptr) {
      DT_ASSIGN_OR_RETURN(experts.intermediate, Size("expert_feed_forward_length"));
    }
    DT_ASSIGN_OR_RETURN(const auto gating, gguf_.Int(Key("expert_gating_func")));
    const int64_t own = experts.score == ExpertConfig::Score::kSigmoid ? 2 : 1;  // llama.cpp's numbers
    if (gating.value_or(0) != 0 && *gating != own && experts.score != ExpertConfig::Score::kSoftmaxOfChosen)
      return Unimplemented(gguf_.name(), ": metadata key ", Key("expert_gating_func"), " is ", *gating, "; of ",
                           prefix_, " ", own, " is served");
    DT_ASSIGN_OR_RETURN(experts.renormalise, Bool("expert_weights_norm", true));
    DT_ASSIGN_OR_RETURN(experts.scale, Factor("expert_weights_scale", 1));
    DT_ASSIGN_OR_RETURN(const auto groups, gguf_.Int(Key("expert_group_count")));
    if (groups.value_or(0) > 1) {
      experts.groups = *groups;
      DT_ASSIGN_OR_RETURN(experts.chosen_groups, Size("expert_group_used_count"));
      DT_RETURN_IF_ERROR(
          ValidateExpertGroups(gguf_.name(), experts, Key("expert_group_count"), Key("expert_group_used_count")));
    }
    c_.experts = experts;
    for (size_t i = 0; i < c_.layers.size(); ++i) {
      LayerConfig& layer = c_.layers[i];
      const bool dense = !Has(i, "ffn_gate_inp.weight") && Has(i, "ffn_up.weight");
      if (layer.mlp != MlpKind::kNone && !dense) layer.mlp = MlpKind::kExperts;
    }
    return absl::OkStatus();
  }

  absl::Status NemotronExperts() {
    ExpertConfig experts;
    experts.score = ExpertConfig::Score::kSigmoid;
    experts.selection_bias = true;
    DT_ASSIGN_OR_RETURN(experts.shared_intermediate, Size("expert_shared_feed_forward_length"));
    if (HasTensor("ffn_latent_down.weight")) {
      DT_ASSIGN_OR_RETURN(experts.latent, Size("moe_latent_size"));
    }
    return Experts(experts, 0);
  }

  absl::Status GatedDelta() {
    StateConfig state;
    state.family = StateConfig::Family::kGatedDelta;
    DT_ASSIGN_OR_RETURN(state.heads, Size("ssm.time_step_rank"));
    DT_ASSIGN_OR_RETURN(state.key_heads, Size("ssm.group_count"));
    DT_ASSIGN_OR_RETURN(state.key_dim, Size("ssm.state_size"));
    DT_ASSIGN_OR_RETURN(state.conv_width, Size("ssm.conv_kernel"));
    DT_ASSIGN_OR_RETURN(state.value_dim, ValueDim(state.heads));
    state.out_norm_eps = c_.norm_eps;
    c_.qk_norm = c_.gated_attention = true;  // norms hold 1 + w here
    c_.state = state;
    if (c_.architecture == Architecture::kQwen35) return absl::OkStatus();
    ExpertConfig experts;
    DT_ASSIGN_OR_RETURN(experts.shared_intermediate, Size("expert_shared_feed_forward_length"));
    experts.shared_gate = true;
    return Experts(experts, 0);
  }

  // What the inner size leaves each head.
  absl::StatusOr<int64_t> ValueDim(int64_t heads) const {
    DT_ASSIGN_OR_RETURN(const int64_t inner, Size("ssm.inner_size"));
    if (inner % heads == 0) return inner / heads;
    return Bad("ssm.inner_size", absl::StrCat("is ", inner, ", which ", heads, " heads cannot share evenly"));
  }

  absl::Status Kimi() {
    StateConfig state;
    state.family = StateConfig::Family::kKda;
    state.heads = state.key_heads = c_.heads;
    DT_ASSIGN_OR_RETURN(state.key_dim, Size("kda.head_dim"));
    state.value_dim = state.key_dim;
    DT_ASSIGN_OR_RETURN(state.conv_width, Size("ssm.conv_kernel"));
    state.out_norm_eps = c_.norm_eps;
    c_.state = state;
    LatentConfig latent;
    DT_ASSIGN_OR_RETURN(latent.rank, Size("attention.kv_lora_rank"));
    DT_ASSIGN_OR_RETURN(latent.shared_key_dim, Size("rope.dimension_count"));
    DT_ASSIGN_OR_RETURN(c_.key_dim, Size("attention.key_length_mla"));
    DT_ASSIGN_OR_RETURN(c_.value_dim, Size("attention.value_length_mla"));
    latent.own_key_dim = c_.key_dim - latent.shared_key_dim;
    if (latent.own_key_dim < 1)
      return Bad("attention.key_length_mla", absl::StrCat("is ", c_.key_dim, ", of which ", latent.shared_key_dim,
                                                          " are shared (", Key("rope.dimension_count"), ")"));
    if (gguf_.Find(Key("attention.q_lora_rank")) != nullptr)
      return Unimplemented(gguf_.name(), ": metadata key ", Key("attention.q_lora_rank"),
                           " is set, which is not served");
    c_.kv_heads = c_.heads;
    c_.attention_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(c_.key_dim)));
    c_.latent = latent;
    for (LayerConfig& layer : c_.layers) layer.rope = -1;
    c_.ropes.clear();
    ExpertConfig experts;
    experts.score = ExpertConfig::Score::kSigmoid;
    experts.selection_bias = true;
    DT_ASSIGN_OR_RETURN(const auto shared, gguf_.Int(Key("expert_shared_count")));
    DT_ASSIGN_OR_RETURN(const int64_t each, Size("expert_feed_forward_length"));
    experts.shared_intermediate = std::clamp<int64_t>(shared.value_or(0), 0, 64) * each;
    return Experts(experts, 0);
  }

  // Granite 4 and Bamba.
  absl::Status Granite() {
    DT_RETURN_IF_ERROR(Mamba());
    DT_ASSIGN_OR_RETURN(c_.attention_scale, Factor("attention.scale", c_.attention_scale));
    DT_ASSIGN_OR_RETURN(c_.embedding_scale, Factor("embedding_scale", 1));
    DT_ASSIGN_OR_RETURN(const float residual, Factor("residual_scale", 1));
    c_.residual.full_beta = c_.residual.linear_beta = c_.residual.mlp_beta = residual;
    DT_ASSIGN_OR_RETURN(const float logits, Factor("logit_scale", 1));
    c_.logits_scale = 1 / logits;
    DT_ASSIGN_OR_RETURN(const bool rope, Bool("rope.scaling.finetuned", true));
    if (!rope) {
      for (LayerConfig& layer : c_.layers) layer.rope = -1;
      c_.ropes.clear();
    }
    DT_ASSIGN_OR_RETURN(const auto count, gguf_.Int(Key("expert_count")));
    if (count.value_or(0) == 0) return absl::OkStatus();
    ExpertConfig experts;
    experts.score = ExpertConfig::Score::kSoftmaxOfChosen;
    DT_ASSIGN_OR_RETURN(experts.shared_intermediate, Size("expert_shared_feed_forward_length"));
    return Experts(experts, c_.intermediate_size);
  }

  absl::Status Lfm2() {
    DT_ASSIGN_OR_RETURN(const int64_t width, Size("shortconv.l_cache"));
    const bool bias = HasTensor("shortconv.conv.bias");
    DT_RETURN_IF_ERROR(SetConvolutionState(gguf_.name(), width, bias, c_));
    c_.qk_norm = true;
    return absl::OkStatus();
  }

  absl::Status Mamba() {
    StateConfig state;
    state.family = StateConfig::Family::kMamba2;
    DT_ASSIGN_OR_RETURN(state.heads, Size("ssm.time_step_rank"));
    DT_ASSIGN_OR_RETURN(state.value_dim, ValueDim(state.heads));
    DT_ASSIGN_OR_RETURN(state.key_heads, Size("ssm.group_count"));
    DT_ASSIGN_OR_RETURN(state.key_dim, Size("ssm.state_size"));
    DT_ASSIGN_OR_RETURN(state.conv_width, Size("ssm.conv_kernel"));
    state.conv_bias = HasTensor("ssm_conv1d.bias");
    state.proj_bias = HasTensor("ssm_in.bias");
    state.out_norm = HasTensor("ssm_norm.weight");
    state.out_norm_eps = c_.norm_eps;
    c_.state = state;
    return absl::OkStatus();
  }

  absl::Status GptOss() {
    ExpertConfig experts;
    DT_ASSIGN_OR_RETURN(experts.experts, Size("expert_count"));
    DT_ASSIGN_OR_RETURN(experts.chosen, Size("expert_used_count"));
    DT_ASSIGN_OR_RETURN(experts.intermediate, Size("expert_feed_forward_length"));
    experts.score = ExpertConfig::Score::kSoftmaxOfChosen;
    experts.router_bias = experts.bias = true;
    c_.experts = experts;
    c_.activation = Activation::kClampedSwiglu;
    c_.sinks = true;
    for (LayerConfig& layer : c_.layers) layer.mlp = MlpKind::kExperts;
    return absl::OkStatus();
  }

  const GgufFile& gguf_;
  const std::string& prefix_;
  ModelConfig& c_;
};

}  // namespace

absl::StatusOr<std::vector<int64_t>> GgufPerLayer(const GgufFile& gguf, const std::string& key, size_t layers,
                                                  int64_t missing) {
  const GgufValue* value = gguf.Find(key);
  std::vector<int64_t> values;
  if (value != nullptr && value->type == GgufValueType::kArray) {
    DT_ASSIGN_OR_RETURN(const auto read, gguf.Ints(key));
    values = read.value_or(std::vector<int64_t>());
    if (values.size() != layers)
      return InvalidArgument(gguf.name(), ": metadata key ", key, " has ", values.size(), " entries for ", layers,
                             " layers");
  } else {
    DT_ASSIGN_OR_RETURN(const auto read, gguf.Int(key));
    values.assign(layers, read.value_or(missing));
  }
  for (const int64_t number : values)
    if (number < 0 || number > kMaxSize) return InvalidArgument(gguf.name(), ": metadata key ", key, " holds ", number);
  return values;
}

bool IsHybridGguf(Architecture architecture) {
  switch (architecture) {
    case Architecture::kLfm2:
    case Architecture::kMamba2:
    case Architecture::kNemotronH:
    case Architecture::kGptOss:
    case Architecture::kMixtral:
    case Architecture::kQwen3Moe:
    case Architecture::kMiniMaxM2:
    case Architecture::kQwen3Next:
    case Architecture::kQwen35:
    case Architecture::kQwen35Moe:
    case Architecture::kKimiLinear:
    case Architecture::kGraniteHybrid:
    case Architecture::kFalconH1: return true;
    default: return false;
  }
}

bool MayHaveExperts(Architecture architecture, const std::string& name) {
  switch (architecture) {
    case Architecture::kGptOss:
    case Architecture::kMixtral:
    case Architecture::kQwen3Moe:
    case Architecture::kMiniMaxM2:
    case Architecture::kQwen3Next:
    case Architecture::kQwen35Moe:
    case Architecture::kKimiLinear:
    case Architecture::kGraniteHybrid: return true;
    default: return name == "nemotron_h_moe";
  }
}

absl::Status ReadHybridSizes(const GgufFile& gguf, const std::string& prefix, ModelConfig& config) {
  return HybridKeys(gguf, prefix, config).Sizes();
}

absl::Status ReadHybridGguf(const GgufFile& gguf, const std::string& prefix, ModelConfig& config) {
  return HybridKeys(gguf, prefix, config).States();
}

}  // namespace dovetail::model
