#include <algorithm>
#include <cmath>

#include "model/config.h"
#include "model/families/config_gguf_hybrid.h"
#include "model/formats/dequantize.h"
#include "model/formats/file_errors.h"
#include "model/formats/gguf.h"

// GGUF metadata, with what llama.cpp keeps in code instead of the file (Gemma's layer pattern, SmolLM3's layers without
// rope).

namespace dovetail::model {
namespace {

struct Family {
  const char* name;  // general.architecture
  Architecture architecture;
};

constexpr Family kFamilies[] = {
    {"llama", Architecture::kLlama},
    {"smollm3", Architecture::kSmolLm3},
    {"qwen2", Architecture::kQwen2},
    {"qwen3", Architecture::kQwen3},
    {"phi3", Architecture::kPhi3},
    {"gemma3", Architecture::kGemma3},
    {"lfm2", Architecture::kLfm2},
    {"mamba2", Architecture::kMamba2},
    {"nemotron_h", Architecture::kNemotronH},
    {"gpt-oss", Architecture::kGptOss},
    {"qwen3moe", Architecture::kQwen3Moe},
    {"minimax-m2", Architecture::kMiniMaxM2},
    {"qwen3next", Architecture::kQwen3Next},
    {"qwen35", Architecture::kQwen35},
    {"qwen35moe", Architecture::kQwen35Moe},
    {"kimi-linear", Architecture::kKimiLinear},
    {"granitehybrid", Architecture::kGraniteHybrid},  // Bamba, too
    {"falcon-h1", Architecture::kFalconH1},
    {"nemotron_h_moe", Architecture::kNemotronH},
};

constexpr int64_t kGemmaPattern = 6;  // five local layers, one global
constexpr double kGemmaLocalTheta = 1e4;
constexpr int64_t kGemma27bLayers = 62;  // the only size whose scale is not key_dim^-0.5
constexpr int64_t kSmolLm3NoRopeInterval = 4;

class Reader {
 public:
  explicit Reader(const GgufFile& gguf) : gguf_(gguf) {}

  absl::StatusOr<ModelConfig> Read() {
    DT_RETURN_IF_ERROR(ReadArchitecture());
    DT_RETURN_IF_ERROR(ReadSizes());
    DT_RETURN_IF_ERROR(ReadStyle());
    DT_RETURN_IF_ERROR(ReadLayers());
    if (IsHybridGguf(config_.architecture)) DT_RETURN_IF_ERROR(ReadHybridGguf(gguf_, prefix_, config_));
    DT_RETURN_IF_ERROR(ReadTokens());
    DT_RETURN_IF_ERROR(ReadSampling());
    DT_RETURN_IF_ERROR(ValidateConfig(gguf_.name(), config_));
    return std::move(config_);
  }

 private:
  // "<architecture>.<suffix>".
  std::string Key(const char* suffix) const { return absl::StrCat(prefix_, ".", suffix); }

  template <typename... Args>
  absl::Status Bad(const Args&... args) const {
    return InvalidArgument(gguf_.name(), ": ", args...);
  }

  // One integer, or an array of equal ones (a value per layer).
  absl::StatusOr<std::optional<int64_t>> Uniform(const char* suffix) const {
    const std::string key = Key(suffix);
    const GgufValue* value = gguf_.Find(key);
    if (value == nullptr || value->type != GgufValueType::kArray) return gguf_.Int(key);
    DT_ASSIGN_OR_RETURN(const auto read, gguf_.Ints(key));
    const std::vector<int64_t> values = read.value_or(std::vector<int64_t>());
    if (values.empty()) return Bad("metadata key ", key, " is an empty array");
    if (std::adjacent_find(values.begin(), values.end(), std::not_equal_to<>()) != values.end()) {
      return Unimplemented(gguf_.name(), ": metadata key ", key, " differs between layers, which is not served");
    }
    return values.front();
  }

  absl::StatusOr<int64_t> Required(const char* suffix) const {
    DT_ASSIGN_OR_RETURN(const auto value, Uniform(suffix));
    if (!value) return Bad("metadata key ", Key(suffix), " is missing");
    if (*value < 1) return Bad("metadata key ", Key(suffix), " is ", *value, "; it must be at least 1");
    return *value;
  }

  absl::Status ReadFloat(const char* suffix, double& value) const {
    DT_ASSIGN_OR_RETURN(const auto read, gguf_.Float(Key(suffix)));
    if (read) value = *read;
    return absl::OkStatus();
  }

  absl::Status ReadArchitecture() {
    DT_ASSIGN_OR_RETURN(const auto name, gguf_.String("general.architecture"));
    if (!name) return Bad("metadata key general.architecture is missing");
    std::string known;
    for (const Family& family : kFamilies) {
      if (*name == family.name) {
        config_.architecture = family.architecture;
        prefix_ = family.name;
      }
      known += absl::StrCat(known.empty() ? "" : ", ", family.name);
    }
    if (prefix_.empty()) {
      return Unimplemented(gguf_.name(), ": architecture '", Printable(*name), "' is not served; served are ", known);
    }
    DT_ASSIGN_OR_RETURN(const auto experts, gguf_.Int(Key("expert_count")));
    const bool some = experts.value_or(0) > 0;
    if (some && config_.architecture == Architecture::kLlama) config_.architecture = Architecture::kMixtral;
    if (some && !MayHaveExperts(config_.architecture, prefix_))
      return Unimplemented(gguf_.name(), ": has ", *experts, " experts, which are not served in ", prefix_);
    for (const char* field : {"attn_logit_softcapping", "final_logit_softcapping", "attention.temperature_scale"}) {
      if (gguf_.Find(Key(field)) != nullptr)
        return Unimplemented(gguf_.name(), ": metadata key ", Key(field), " is set, which is not served");
    }
    DT_ASSIGN_OR_RETURN(const auto title, gguf_.String("general.name"));
    config_.name = std::string(title.value_or(""));
    return absl::OkStatus();
  }

  absl::Status ReadSizes() {
    ModelConfig& c = config_;
    DT_ASSIGN_OR_RETURN(const int64_t layers, Required("block_count"));
    if (layers > 1024) return Bad("metadata key ", Key("block_count"), " is ", layers, "; at most 1024 are served");
    // Layers of multi-token prediction are counted, too; they lie behind the others and are not served.
    DT_ASSIGN_OR_RETURN(const auto predicted, gguf_.Int(Key("nextn_predict_layers")));
    if (predicted.value_or(0) < 0 || predicted.value_or(0) >= layers)
      return Bad("metadata key ", Key("nextn_predict_layers"), " is ", *predicted, " of ", layers, " layers");
    c.layers.resize(static_cast<size_t>(layers - predicted.value_or(0)));
    DT_ASSIGN_OR_RETURN(c.hidden_size, Required("embedding_length"));
    DT_ASSIGN_OR_RETURN(c.max_positions, Required("context_length"));
    if (IsHybridGguf(c.architecture)) {
      DT_RETURN_IF_ERROR(ReadHybridSizes(gguf_, prefix_, c));
    } else {
      DT_ASSIGN_OR_RETURN(c.intermediate_size, Required("feed_forward_length"));
      DT_ASSIGN_OR_RETURN(c.heads, Required("attention.head_count"));
      DT_ASSIGN_OR_RETURN(const auto kv_heads, Uniform("attention.head_count_kv"));
      c.kv_heads = kv_heads.value_or(c.heads);
    }
    DT_ASSIGN_OR_RETURN(const auto key_dim, gguf_.Int(Key("attention.key_length")));
    if (!key_dim && c.hidden_size % c.heads != 0) {
      return Bad("metadata key ", Key("attention.key_length"), " is missing, and ", c.hidden_size,
                 " is not a multiple of ", c.heads, " heads");
    }
    c.key_dim = key_dim.value_or(c.hidden_size / c.heads);
    DT_ASSIGN_OR_RETURN(const auto value_dim, gguf_.Int(Key("attention.value_length")));
    c.value_dim = value_dim.value_or(c.hidden_size / c.heads);
    if (c.architecture == Architecture::kMamba2) c.key_dim = c.value_dim = 2;  // of no attention
    if (c.key_dim < 2 || c.key_dim > 1024)
      return Bad("the key dimension of a head is ", c.key_dim, "; it must be in [2, 1024]");
    DT_ASSIGN_OR_RETURN(const auto eps, gguf_.Float(Key("attention.layer_norm_rms_epsilon")));
    if (!eps) return Bad("metadata key ", Key("attention.layer_norm_rms_epsilon"), " is missing");
    c.norm_eps = *eps;

    const GgufTensor* embedding = gguf_.FindTensor("token_embd.weight");
    if (embedding == nullptr)
      return Bad("tensor token_embd.weight is missing; this file holds no model (a vocabulary only?)");
    if (embedding->dims.size() != 2)
      return Bad("tensor token_embd.weight has ", embedding->dims.size(), " dimensions; it must have 2");
    c.vocab_size = embedding->dims[1];
    c.tie_embeddings = gguf_.FindTensor("output.weight") == nullptr;
    return absl::OkStatus();
  }

  bool HasInFirstLayer(const char* tensor) const {  // of those with attention
    size_t first = 0;
    while (first + 1 < config_.layers.size() && !HasAttention(config_.layers[first].kind)) ++first;
    return gguf_.FindTensor(absl::StrCat("blk.", first, ".", tensor)) != nullptr;
  }

  absl::Status ReadStyle() {
    ModelConfig& c = config_;
    c.q_bias = HasInFirstLayer("attn_q.bias");
    c.k_bias = HasInFirstLayer("attn_k.bias");
    c.v_bias = HasInFirstLayer("attn_v.bias");
    c.o_bias = HasInFirstLayer("attn_output.bias");
    c.mlp_bias = HasInFirstLayer("ffn_gate.bias");
    c.qk_norm = c.architecture == Architecture::kQwen3 || c.architecture == Architecture::kGemma3;
    c.attention_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(c.key_dim)));
    if (c.architecture != Architecture::kGemma3) return absl::OkStatus();
    c.post_norms = true;
    c.activation = Activation::kGeluTanh;
    c.embedding_scale = static_cast<float>(std::sqrt(static_cast<double>(c.hidden_size)));
    if (static_cast<int64_t>(c.layers.size()) == kGemma27bLayers) {
      c.attention_scale =
          static_cast<float>(1.0 / std::sqrt(static_cast<double>(c.hidden_size) / static_cast<double>(c.heads)));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<float>> FactorTensor(const char* name) const {
    const GgufTensor* tensor = gguf_.FindTensor(name);
    if (tensor == nullptr) return std::vector<float>();
    if (tensor->dims.size() != 1 || tensor->elements > 1024) {
      return Bad("tensor ", name, " has ", Commas(static_cast<uint64_t>(tensor->elements)),
                 " numbers; rope needs one per pair of dimensions");
    }
    std::vector<float> values(static_cast<size_t>(tensor->elements));
    Dequantize(tensor->type, tensor->bytes.data(), tensor->elements, values.data());
    return values;
  }

  absl::StatusOr<RopeKind> ReadRopeKind(const RopeSpec& rope) const {
    DT_ASSIGN_OR_RETURN(const auto type, gguf_.String(Key("rope.scaling.type")));
    if (!rope.long_factor.empty() || !rope.short_factor.empty()) return RopeKind::kLongRope;
    if (!type || *type == "none") return RopeKind::kDefault;
    if (*type == "linear") return RopeKind::kLinear;
    if (*type == "yarn") return RopeKind::kYarn;
    if (*type == "longrope")
      return Bad("metadata key ", Key("rope.scaling.type"),
                 " is longrope, but tensors rope_factors_long.weight and rope_factors_short.weight are missing");
    return Unimplemented(gguf_.name(), ": rope scaling type '", Printable(*type),
                         "' is not served; served are none, linear, yarn and longrope");
  }

  absl::StatusOr<RopeSpec> ReadRope() const {
    RopeSpec rope;
    DT_RETURN_IF_ERROR(ReadFloat("rope.freq_base", rope.theta));
    DT_ASSIGN_OR_RETURN(const auto dims, gguf_.Int(Key("rope.dimension_count")));
    if (dims.value_or(2) < 2 || dims.value_or(2) > config_.key_dim) {
      return Bad("metadata key ", Key("rope.dimension_count"), " is ", *dims, "; it must be in [2, ", config_.key_dim,
                 "]");
    }
    rope.rotary_dims = static_cast<int>(dims.value_or(config_.key_dim));
    const bool interleaved = config_.architecture == Architecture::kLlama ||
                             config_.architecture == Architecture::kSmolLm3 ||
                             config_.architecture == Architecture::kMixtral;
    if (interleaved &&
        rope.rotary_dims !=
            config_.key_dim) {  // the converter interleaves whole heads, so which dimensions turn is lost
      return Unimplemented(gguf_.name(), ": rope turns ", rope.rotary_dims, " of ", config_.key_dim,
                           " dimensions, which is not served for ", prefix_);
    }
    rope.max_positions = config_.max_positions;
    DT_ASSIGN_OR_RETURN(rope.divisors, FactorTensor("rope_freqs.weight"));
    DT_ASSIGN_OR_RETURN(rope.long_factor, FactorTensor("rope_factors_long.weight"));
    DT_ASSIGN_OR_RETURN(rope.short_factor, FactorTensor("rope_factors_short.weight"));
    DT_ASSIGN_OR_RETURN(rope.kind, ReadRopeKind(rope));
    rope.truncate = config_.architecture != Architecture::kGptOss;  // no key says so
    if (rope.kind == RopeKind::kDefault) return rope;

    DT_ASSIGN_OR_RETURN(const auto original, gguf_.Int(Key("rope.scaling.original_context_length")));
    rope.original_max_positions = original.value_or(config_.max_positions);
    if (rope.original_max_positions < 1)
      return Bad("metadata key ", Key("rope.scaling.original_context_length"), " must be at least 1");
    if (rope.kind != RopeKind::kLongRope && gguf_.Find(Key("rope.scaling.factor")) == nullptr) {
      return Bad("metadata key ", Key("rope.scaling.factor"), " is missing");
    }
    rope.factor =
        std::max(1.0, static_cast<double>(config_.max_positions) / static_cast<double>(rope.original_max_positions));
    DT_RETURN_IF_ERROR(ReadFloat("rope.scaling.factor", rope.factor));
    DT_RETURN_IF_ERROR(ReadFloat("rope.scaling.yarn_beta_fast", rope.beta_fast));
    DT_RETURN_IF_ERROR(ReadFloat("rope.scaling.yarn_beta_slow", rope.beta_slow));
    return WithAttentionFactor(rope);
  }

  absl::StatusOr<RopeSpec> WithAttentionFactor(RopeSpec rope) const {
    DT_ASSIGN_OR_RETURN(const auto explicit_factor, gguf_.Float(Key("rope.scaling.attn_factor")));
    if (rope.kind == RopeKind::kYarn)
      rope.attention_factor = explicit_factor.value_or(1.0) * YarnMscale(rope.factor);  // as llama.cpp
    if (rope.kind == RopeKind::kLongRope) {
      rope.attention_factor =
          explicit_factor.value_or(LongRopeMultiplier(rope.factor, std::max<int64_t>(rope.original_max_positions, 2)));
    }
    return rope;
  }

  // Gemma's sliding layers are never scaled and have their own base.
  absl::StatusOr<RopeSpec> SlidingRope(const RopeSpec& full) const {
    if (config_.architecture != Architecture::kGemma3) return full;
    RopeSpec rope;
    rope.theta = kGemmaLocalTheta;
    rope.rotary_dims = full.rotary_dims;
    rope.max_positions = full.max_positions;
    DT_RETURN_IF_ERROR(ReadFloat("rope.freq_base_swa", rope.theta));
    return rope;
  }

  absl::StatusOr<std::vector<bool>> ReadSliding(int64_t window) const {
    std::vector<bool> sliding(config_.layers.size(), window > 0);
    if (config_.architecture == Architecture::kGptOss)  // every other layer, the first one too
      for (size_t i = 1; i < sliding.size(); i += 2) sliding[i] = false;
    if (config_.architecture != Architecture::kGemma3) return sliding;
    if (window < 1)
      return Bad("metadata key ", Key("attention.sliding_window"), " is missing or 0, but Gemma 3 has sliding layers");
    const std::string key = Key("attention.sliding_window_pattern");
    const GgufValue* value = gguf_.Find(key);
    if (value != nullptr && value->type == GgufValueType::kArray) {
      DT_ASSIGN_OR_RETURN(const auto flags, gguf_.Ints(key));
      if (flags->size() != sliding.size())
        return Bad("metadata key ", key, " has ", flags->size(), " entries for ", sliding.size(), " layers");
      for (size_t i = 0; i < sliding.size(); ++i) sliding[i] = (*flags)[i] != 0;
      return sliding;
    }
    DT_ASSIGN_OR_RETURN(const auto pattern, gguf_.Int(key));
    const int64_t every = pattern.value_or(kGemmaPattern);
    if (every < 1) return Bad("metadata key ", key, " is ", every, "; it must be at least 1");
    for (size_t i = 0; i < sliding.size(); ++i) sliding[i] = static_cast<int64_t>(i + 1) % every != 0;
    return sliding;
  }

  absl::Status ReadLayers() {
    DT_ASSIGN_OR_RETURN(const RopeSpec full, ReadRope());
    DT_ASSIGN_OR_RETURN(const RopeSpec local, SlidingRope(full));
    DT_ASSIGN_OR_RETURN(const auto window, gguf_.Int(Key("attention.sliding_window")));
    DT_ASSIGN_OR_RETURN(const std::vector<bool> sliding, ReadSliding(window.value_or(0)));
    for (size_t i = 0; i < config_.layers.size(); ++i) {
      LayerConfig& layer = config_.layers[i];
      if (!HasAttention(layer.kind)) continue;
      layer.kind = sliding[i] ? LayerKind::kSlidingAttention : LayerKind::kFullAttention;
      layer.window = sliding[i] ? *window : 0;
      const bool no_rope =
          config_.architecture == Architecture::kSmolLm3 && static_cast<int64_t>(i + 1) % kSmolLm3NoRopeInterval == 0;
      layer.rope = no_rope ? -1 : AddRope(config_, sliding[i] ? local : full);
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::optional<TokenId>> ReadToken(const char* key) const {
    DT_ASSIGN_OR_RETURN(const auto id, gguf_.Int(key));
    if (!id) return std::nullopt;
    if (*id < 0 || *id >= config_.vocab_size) {
      return Bad("metadata key ", key, " is ", *id, ", but the vocabulary has ", config_.vocab_size, " tokens");
    }
    return static_cast<TokenId>(*id);
  }

  absl::Status ReadTokens() {
    DT_ASSIGN_OR_RETURN(config_.bos, ReadToken("tokenizer.ggml.bos_token_id"));
    std::vector<TokenId>& stops = config_.stop_ids;
    for (const char* key :
         {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"}) {
      DT_ASSIGN_OR_RETURN(const auto id, ReadToken(key));
      if (id) stops.push_back(*id);
    }
    std::sort(stops.begin(), stops.end());
    stops.erase(std::unique(stops.begin(), stops.end()), stops.end());
    return absl::OkStatus();
  }

  absl::Status ReadSampling() {
    SamplingDefaults& sampling = config_.sampling;
    DT_ASSIGN_OR_RETURN(sampling.temperature, gguf_.Float("general.sampling.temp"));
    DT_ASSIGN_OR_RETURN(sampling.top_p, gguf_.Float("general.sampling.top_p"));
    DT_ASSIGN_OR_RETURN(sampling.min_p, gguf_.Float("general.sampling.min_p"));
    DT_ASSIGN_OR_RETURN(sampling.repetition_penalty, gguf_.Float("general.sampling.penalty_repeat"));
    DT_ASSIGN_OR_RETURN(sampling.top_k, gguf_.Int("general.sampling.top_k"));
    // Most such files recommend nothing, and many are small models or have few bits: at temperature 1 without a filter
    // they wander off. llama.cpp's values.
    if (!sampling.temperature && !sampling.top_p && !sampling.min_p && !sampling.repetition_penalty &&
        !sampling.top_k) {
      sampling.temperature = 0.8;
      sampling.top_p = 0.95;
      sampling.min_p = 0.05;
    }
    return absl::OkStatus();
  }

  const GgufFile& gguf_;
  std::string prefix_;
  ModelConfig config_;
};

}  // namespace

absl::StatusOr<ModelConfig> ConfigFromGguf(const GgufFile& gguf) { return Reader(gguf).Read(); }

}  // namespace dovetail::model
