#include "model/config.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace dovetail::model {
namespace {

struct Range {
  const char* what;
  int64_t value, low, high;
};

// Wider than any model that is published, narrow enough that no product of three of them overflows.
std::vector<Range> Ranges(const ModelConfig& c) {
  return {
      {"the hidden size", c.hidden_size, 1, int64_t{1} << 17},
      {"the number of layers", static_cast<int64_t>(c.layers.size()), 1, 1024},
      {"the number of attention heads", c.heads, 1, 1024},
      {"the number of key/value heads", c.kv_heads, 1, 1024},
      {"the key dimension of a head", c.key_dim, 2, 1024},
      {"the value dimension of a head", c.value_dim, 2, 1024},
      {"the intermediate size", c.intermediate_size, 1, int64_t{1} << 20},
      {"the vocabulary size", c.vocab_size, 1, int64_t{1} << 22},
      {"the number of positions", c.max_positions, 1, int64_t{1} << 27},
  };
}

absl::Status ValidateRope(const std::string& file, const ModelConfig& config, const RopeSpec& rope) {
  const absl::string_view kind(Name(rope.kind).data(), Name(rope.kind).size());
  if (!(rope.theta > 1.0 && rope.theta <= 1e15))
    return InvalidArgument(file, ": the rope base is ", rope.theta, "; it must be in (1, 1e15]");
  if (rope.rotary_dims < 2 || rope.rotary_dims % 2 != 0 || rope.rotary_dims > config.key_dim) {
    return InvalidArgument(file, ": rope turns ", rope.rotary_dims,
                           " dimensions of a head; it must be even, from 2 to the ", config.key_dim, " there are");
  }
  if (!(rope.factor >= 1.0 && rope.factor <= 1e6))
    return InvalidArgument(file, ": the factor of ", kind, " rope is ", rope.factor, "; it must be in [1, 1e6]");
  if (!(rope.attention_factor > 0.0 && rope.attention_factor <= 1e3)) {
    return InvalidArgument(file, ": the attention factor of ", kind, " rope is ", rope.attention_factor,
                           "; it must be in (0, 1000]");
  }
  const bool needs_original =
      rope.kind == RopeKind::kLlama3 || rope.kind == RopeKind::kYarn || rope.kind == RopeKind::kLongRope;
  if (needs_original && (rope.original_max_positions < 2 || rope.original_max_positions > (int64_t{1} << 27))) {
    return InvalidArgument(file, ": original_max_position_embeddings of ", kind, " rope is ",
                           rope.original_max_positions, "; it must be in [2, 2^27]");
  }
  if (rope.kind == RopeKind::kLlama3 &&
      !(rope.low_freq_factor > 0 && rope.high_freq_factor > rope.low_freq_factor && rope.high_freq_factor <= 1e6)) {
    return InvalidArgument(file, ": llama3 rope needs 0 < low_freq_factor < high_freq_factor; they are ",
                           rope.low_freq_factor, " and ", rope.high_freq_factor);
  }
  if (rope.kind == RopeKind::kYarn &&
      !(rope.beta_slow > 0 && rope.beta_fast > rope.beta_slow && rope.beta_fast <= 1e6)) {
    return InvalidArgument(file, ": yarn rope needs 0 < beta_slow < beta_fast; they are ", rope.beta_slow, " and ",
                           rope.beta_fast);
  }
  const auto pairs = static_cast<size_t>(rope.rotary_dims / 2);
  const auto positive = [](const std::vector<float>& values) {
    return std::all_of(values.begin(), values.end(), [](float v) { return v > 0.0f && std::isfinite(v); });
  };
  for (const auto& [what, values, needed] :
       {std::tuple("short_factor", &rope.short_factor, rope.kind == RopeKind::kLongRope),
        std::tuple("long_factor", &rope.long_factor, rope.kind == RopeKind::kLongRope),
        std::tuple("rope_freqs", &rope.divisors, false)}) {
    if ((needed || !values->empty()) && values->size() != pairs) {
      return InvalidArgument(file, ": ", what, " of ", kind, " rope has ", values->size(), " numbers, but ",
                             rope.rotary_dims, " rotary dimensions need ", pairs);
    }
    if (!positive(*values))
      return InvalidArgument(file, ": ", what, " of ", kind, " rope holds a number that is not positive and finite");
  }
  return absl::OkStatus();
}

absl::Status ValidateLayers(const std::string& file, const ModelConfig& config) {
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const LayerConfig& layer = config.layers[i];
    DT_CHECK(layer.rope < static_cast<int>(config.ropes.size()));
    if (layer.kind == LayerKind::kSlidingAttention && (layer.window < 1 || layer.window > (int64_t{1} << 27))) {
      return InvalidArgument(file, ": layer ", i, " is sliding_attention, but its window is ", layer.window,
                             "; it must be at least 1");
    }
    if (layer.kind == LayerKind::kFullAttention && layer.window != 0) {
      return InvalidArgument(file, ": layer ", i, " is full_attention, but has a window of ", layer.window);
    }
  }
  return absl::OkStatus();
}

absl::Status ValidateHybrid(const std::string& file, const ModelConfig& config) {
  for (size_t i = 0; i < config.layers.size(); ++i) {
    if (HasState(config.layers[i].kind) && !config.state)
      return InvalidArgument(file, ": layer ", i, " is a linear state, but its sizes are missing");
    if (config.layers[i].mlp == MlpKind::kExperts && !config.experts)
      return InvalidArgument(file, ": layer ", i, " has experts, but their number is missing");
  }
  if (config.state) {
    const StateConfig& s = *config.state;
    for (const Range& range : {Range{"the number of linear-state heads", s.heads, 1, 1024},
                               Range{"the number of linear-state key heads", s.key_heads, 1, 1024},
                               Range{"the key dimension of a linear state", s.key_dim, 1, 256},
                               Range{"the value dimension of a linear state", s.value_dim, 1, 256},
                               Range{"the width of the convolution", s.conv_width == 0 ? 2 : s.conv_width, 2, 8}})
      if (range.value < range.low || range.value > range.high)
        return InvalidArgument(file, ": ", range.what, " is ", range.value, "; it must be in [", range.low, ", ",
                               range.high, "]");
    if (s.heads % s.key_heads != 0)
      return InvalidArgument(file, ": ", s.heads, " linear-state heads cannot share ", s.key_heads,
                             " key heads evenly");
    if (s.out_norm_groups < 1 || s.value_width() % s.out_norm_groups != 0)
      return InvalidArgument(file, ": the norm after the linear state has ", s.out_norm_groups, " groups of ",
                             s.value_width(), " values");
    for (const float m : {s.multipliers.gate, s.multipliers.q, s.multipliers.k, s.multipliers.v, s.multipliers.step})
      if (!std::isfinite(m) || std::abs(m) > 1e6f)
        return InvalidArgument(file, ": a multiplier of the linear state's inputs is ", m);
    if (!(s.step_low <= s.step_high))
      return InvalidArgument(file, ": the step sizes' limits are ", s.step_low, " and ", s.step_high);
  }
  if (config.latent) {
    const LatentConfig& l = *config.latent;
    if (l.rank < 1 || l.rank > (1 << 16) || l.own_key_dim < 1 || l.shared_key_dim < 1 ||
        l.own_key_dim + l.shared_key_dim != config.key_dim)
      return InvalidArgument(file, ": latent attention of rank ", l.rank, " with key dimensions ", l.own_key_dim,
                             " and ", l.shared_key_dim);
  }
  if (config.experts) {
    const ExpertConfig& e = *config.experts;
    if (e.experts < 1 || e.experts > 1024 || e.chosen < 1 || e.chosen > e.experts)
      return InvalidArgument(file, ": a token goes to ", e.chosen, " of ", e.experts,
                             " experts; from 1 of at most 1024 is served");
    if (e.latent < 0 || e.latent > config.hidden_size)
      return InvalidArgument(file, ": the experts' latent size is ", e.latent, "; it must be at most the hidden size ",
                             config.hidden_size);
    if (e.intermediate < 1 || e.intermediate > (1 << 20) || e.shared_intermediate < 0 ||
        e.shared_intermediate > (1 << 20))
      return InvalidArgument(file, ": the experts' intermediate sizes are ", e.intermediate, " and ",
                             e.shared_intermediate);
  }
  const ResidualConfig& r = config.residual;
  for (const float scale : {r.full_alpha, r.full_beta, r.linear_alpha, r.linear_beta, r.mlp_alpha, r.mlp_beta,
                            r.mlp_input, config.logits_scale, config.embedding_scale})
    if (!std::isfinite(scale) || std::abs(scale) > 1e6f)
      return InvalidArgument(file, ": a residual, embedding or logits multiplier is ", scale);
  return absl::OkStatus();
}

absl::Status ValidateTokens(const std::string& file, const ModelConfig& config) {
  std::vector<std::pair<const char*, TokenId>> ids;
  if (config.bos) ids.emplace_back("the beginning-of-sequence", *config.bos);
  for (const TokenId id : config.stop_ids) ids.emplace_back("an end-of-sequence", id);
  for (const auto& [what, id] : ids) {
    if (id < 0 || id >= config.vocab_size) {
      return InvalidArgument(file, ": ", what, " token is ", id, ", but the vocabulary has ", config.vocab_size,
                             " tokens");
    }
  }
  return absl::OkStatus();
}

}  // namespace

std::string_view Name(Architecture architecture) {
  switch (architecture) {
    case Architecture::kLlama: return "llama";
    case Architecture::kMistral: return "mistral";
    case Architecture::kSmolLm3: return "smollm3";
    case Architecture::kQwen2: return "qwen2";
    case Architecture::kQwen3: return "qwen3";
    case Architecture::kPhi3: return "phi3";
    case Architecture::kGemma3: return "gemma3_text";
    case Architecture::kMixtral: return "mixtral";
    case Architecture::kQwen3Moe: return "qwen3_moe";
    case Architecture::kMiniMaxM2: return "minimax_m2";
    case Architecture::kMiniMax: return "minimax";
    case Architecture::kQwen3Next: return "qwen3_next";
    case Architecture::kQwen35: return "qwen3_5_text";
    case Architecture::kQwen35Moe: return "qwen3_5_moe_text";
    case Architecture::kKimiLinear: return "kimi_linear";
    case Architecture::kMamba2: return "mamba2";
    case Architecture::kBamba: return "bamba";
    case Architecture::kGraniteHybrid: return "granitemoehybrid";
    case Architecture::kNemotronH: return "nemotron_h";
    case Architecture::kFalconH1: return "falcon_h1";
    case Architecture::kLfm2: return "lfm2";
    case Architecture::kOlmoHybrid: return "olmo_hybrid";
    case Architecture::kGptOss: return "gpt_oss";
  }
  return "unknown";
}

absl::Status ValidateExpertGroups(const std::string& file, const ExpertConfig& e, const std::string& groups,
                                  const std::string& chosen_groups) {
  if (e.groups < 1 || e.experts % e.groups != 0 || (e.groups > 1 && e.experts / e.groups < 2))
    return InvalidArgument(file, ": ", groups, " is ", e.groups, ", but ", e.experts,
                           " experts cannot lie in so many equal groups of at least 2");
  if (e.chosen_groups < 1 || e.chosen_groups > e.groups)
    return InvalidArgument(file, ": ", chosen_groups, " is ", e.chosen_groups, "; it must be from 1 to ", groups, ", ",
                           e.groups);
  if (e.chosen > e.chosen_groups * (e.experts / e.groups))
    return InvalidArgument(file, ": a token goes to ", e.chosen, " experts, but the groups that it looks at (",
                           chosen_groups, " ", e.chosen_groups, " of ", groups, " ", e.groups, ") have ",
                           e.chosen_groups * (e.experts / e.groups));
  return absl::OkStatus();
}

absl::Status ValidateConfig(const std::string& file, const ModelConfig& config) {
  for (const Range& range : Ranges(config)) {
    if (range.value < range.low || range.value > range.high) {
      return InvalidArgument(file, ": ", range.what, " is ", range.value, "; it must be in [", range.low, ", ",
                             range.high, "]");
    }
  }
  if (config.heads % config.kv_heads != 0) {
    return InvalidArgument(file, ": ", config.heads, " attention heads cannot share ", config.kv_heads,
                           " key/value heads evenly");
  }
  if (!(config.norm_eps > 0 && config.norm_eps <= 0.1))
    return InvalidArgument(file, ": the norm epsilon is ", config.norm_eps, "; it must be in (0, 0.1]");
  if (!(config.attention_scale > 0 && config.attention_scale <= 1e3f)) {
    return InvalidArgument(file, ": the attention scale is ", config.attention_scale, "; it must be in (0, 1000]");
  }
  for (const RopeSpec& rope : config.ropes) DT_RETURN_IF_ERROR(ValidateRope(file, config, rope));
  DT_RETURN_IF_ERROR(ValidateLayers(file, config));
  if (AttentionOpsOf(config).empty())
    return Unimplemented(file, ": no layer has attention or a linear state, which is not served");
  DT_RETURN_IF_ERROR(ValidateHybrid(file, config));
  return ValidateTokens(file, config);
}

absl::Status SetConvolutionState(const std::string& file, int64_t width, bool bias, ModelConfig& config) {
  StateConfig state;
  state.family = StateConfig::Family::kConvolution;
  const int64_t kv_heads = std::clamp<int64_t>(config.kv_heads, 1, 1024);  // its range is checked later
  state.heads = kv_heads;
  while (config.hidden_size % state.heads != 0 || config.hidden_size / state.heads > 256) {
    state.heads += kv_heads;
    if (state.heads > 1024)
      return Unimplemented(file, ": a hidden size of ", config.hidden_size,
                           " cannot be shared evenly by a multiple of ", config.kv_heads,
                           " heads of at most 256 channels");
  }
  state.key_heads = state.heads;
  state.key_dim = 2;  // of nothing
  state.value_dim = config.hidden_size / state.heads;
  if (width < 2) return InvalidArgument(file, ": the convolution is over ", width, " tokens; it must be over 2 to 8");
  state.conv_width = width;
  state.conv_bias = state.proj_bias = bias;
  state.out_norm = false;
  config.state = state;
  return absl::OkStatus();
}

std::vector<AttentionOp> AttentionOpsOf(const ModelConfig& config) {
  std::vector<AttentionOp> ops;
  for (size_t layer = 0; layer < config.layers.size(); ++layer) {
    if (HasAttention(config.layers[layer].kind)) ops.push_back({layer, false});
    if (HasState(config.layers[layer].kind)) ops.push_back({layer, true});
  }
  return ops;
}

int AddRope(ModelConfig& config, const RopeSpec& rope) {
  const auto it = std::find(config.ropes.begin(), config.ropes.end(), rope);
  if (it != config.ropes.end()) return static_cast<int>(it - config.ropes.begin());
  config.ropes.push_back(rope);
  return static_cast<int>(config.ropes.size()) - 1;
}

}  // namespace dovetail::model
