#include "model/config_gguf_hybrid.h"

#include <algorithm>

#include "model/file_errors.h"

namespace dovetail::model {
namespace {

constexpr int64_t kMaxSize = int64_t{1} << 24;

class HybridKeys {
 public:
  HybridKeys(const GgufFile& gguf, const std::string& prefix, ModelConfig& config)
      : gguf_(gguf), prefix_(prefix), c_(config) {}

  absl::Status Sizes() {
    DT_ASSIGN_OR_RETURN(const std::vector<int64_t> mlp, PerLayer("feed_forward_length", 0));
    DT_ASSIGN_OR_RETURN(const std::vector<int64_t> heads, PerLayer("attention.head_count", 0));
    DT_ASSIGN_OR_RETURN(const std::vector<int64_t> kv_heads, PerLayer("attention.head_count_kv", heads[0]));
    DT_ASSIGN_OR_RETURN(c_.intermediate_size, OneOf("feed_forward_length", mlp));
    DT_ASSIGN_OR_RETURN(c_.heads, OneOf("attention.head_count", heads));
    DT_ASSIGN_OR_RETURN(c_.kv_heads, OneOf("attention.head_count_kv", kv_heads));
    const bool linear = c_.architecture != Architecture::kGptOss;
    for (size_t i = 0; i < c_.layers.size(); ++i) {
      LayerConfig& layer = c_.layers[i];
      const bool mamba = c_.architecture == Architecture::kMamba2;
      const bool nemotron = c_.architecture == Architecture::kNemotronH;
      const bool attends = !mamba && heads[i] > 0 && kv_heads[i] > 0;
      if (!linear && !attends) return Bad("attention.head_count_kv", absl::StrCat("is 0 for layer ", i));
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
        return absl::OkStatus();
      case Architecture::kGptOss: return GptOss();
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
    DT_ASSIGN_OR_RETURN(const int64_t inner, Size("ssm.inner_size"));
    DT_ASSIGN_OR_RETURN(state.key_heads, Size("ssm.group_count"));
    DT_ASSIGN_OR_RETURN(state.key_dim, Size("ssm.state_size"));
    DT_ASSIGN_OR_RETURN(state.conv_width, Size("ssm.conv_kernel"));
    if (inner % state.heads != 0)
      return Bad("ssm.inner_size", absl::StrCat("is ", inner, ", which ", state.heads, " heads cannot share evenly"));
    state.value_dim = inner / state.heads;
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
    if (number < 0 || number > kMaxSize)
      return InvalidArgument(gguf.name(), ": metadata key ", key, " holds ", number);
  return values;
}

bool IsHybridGguf(Architecture architecture) {
  return architecture == Architecture::kLfm2 || architecture == Architecture::kMamba2 ||
         architecture == Architecture::kNemotronH || architecture == Architecture::kGptOss;
}

absl::Status ReadHybridSizes(const GgufFile& gguf, const std::string& prefix, ModelConfig& config) {
  return HybridKeys(gguf, prefix, config).Sizes();
}

absl::Status ReadHybridGguf(const GgufFile& gguf, const std::string& prefix, ModelConfig& config) {
  return HybridKeys(gguf, prefix, config).States();
}

}  // namespace dovetail::model
