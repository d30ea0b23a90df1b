#include <string_view>

#include "absl/strings/numbers.h"
#include "model/families/hybrid_needs.h"

// Where llama.cpp's converter puts the weights of hybrids and of models with experts: its names, experts stacked, fused
// projections in its order. By canonical names (checkpoint_tensors_hybrid.cc). Facts: the PyPI package gguf (constants,
// tensor_mapping) and ggml-org/llama.cpp, conversion/.

namespace dovetail::model {
namespace {

using Family = StateConfig::Family;

// Names that mean the same in all of them, before .weight and .bias.
constexpr std::pair<std::string_view, std::string_view> kNames[] = {
    {"input_norm", "attn_norm"},
    {"pre_mlp_norm", "ffn_norm"},
    {"attn.q_proj", "attn_q"},
    {"attn.gate_proj", "attn_q"},
    {"attn.k_proj", "attn_k"},
    {"attn.v_proj", "attn_v"},
    {"attn.o_proj", "attn_output"},
    {"attn.q_norm", "attn_q_norm"},
    {"attn.k_norm", "attn_k_norm"},
    {"attn.latent_proj", "attn_kv_a_mqa"},
    {"attn.latent_norm", "attn_kv_a_norm"},
    {"mlp.gate_proj", "ffn_gate"},
    {"mlp.up_proj", "ffn_up"},
    {"mlp.down_proj", "ffn_down"},
    {"router", "ffn_gate_inp"},
    {"experts.latent_down_proj", "ffn_latent_down"},
    {"experts.latent_up_proj", "ffn_latent_up"},
    {"shared_expert.gate_proj", "ffn_gate_shexp"},
    {"shared_expert.up_proj", "ffn_up_shexp"},
    {"shared_expert.down_proj", "ffn_down_shexp"},
    {"shared_gate", "ffn_gate_inp_shexp"},
    {"state.out_norm", "ssm_norm"},
    {"state.o_proj", "ssm_out"},
};

bool IsPlaced(Architecture architecture) {
  switch (architecture) {
    case Architecture::kMixtral:
    case Architecture::kQwen3Moe:
    case Architecture::kMiniMaxM2:
    case Architecture::kQwen3Next:
    case Architecture::kQwen35:
    case Architecture::kQwen35Moe:
    case Architecture::kKimiLinear:
    case Architecture::kBamba:
    case Architecture::kGraniteHybrid:
    case Architecture::kFalconH1: return true;
    default: return false;
  }
}

class Placer {
 public:
  Placer(const ModelConfig& config, size_t layer)
      : c_(config), canonical_(absl::StrCat("layers.", layer, ".")), gguf_(absl::StrCat("blk.", layer, ".")) {}

  void Place(TensorNeed& need) const {
    const std::string_view name = std::string_view(need.canonical).substr(canonical_.size());
    if (name.starts_with("experts.") && name[8] >= '0' && name[8] <= '9') return PlaceExpert(need, name.substr(8));
    // Nemotron-H without experts, LFM2 and the others that were there first are named by GgufName.
    if (name == "router.selection_bias") return Put(need, "exp_probs_b.bias");
    if (c_.architecture == Architecture::kNemotronH && !name.starts_with("shared_expert.") &&
        !name.starts_with("experts.") && !name.starts_with("router."))
      return;
    if (name == "attn.k_up_proj.weight" || name == "attn.v_up_proj.weight") return PlaceLatent(need, name);
    if (name.starts_with("state.") && PlaceState(need, name.substr(6))) return;
    for (const std::string_view ending : {".weight", ".bias"}) {
      if (!name.ends_with(ending)) continue;
      const std::string_view base = name.substr(0, name.size() - ending.size());
      for (const auto& [canonical, gguf] : kNames)
        if (base == canonical) PlaceNamed(need, base, std::string(gguf), ending);
    }
  }

 private:
  bool IsQwen35() const {
    return c_.architecture == Architecture::kQwen35 || c_.architecture == Architecture::kQwen35Moe;
  }

  StoredPlace At(const TensorNeed& need, const std::string& name, const RowPattern& pattern, int64_t rows) const {
    StoredPlace place;
    place.names = {gguf_ + name};
    place.pattern = pattern;
    place.stored_rows = rows > 0 ? rows : need.rows;
    return place;
  }
  void Put(TensorNeed& need, const std::string& name, const RowPattern& pattern = {}, int64_t rows = 0) const {
    need.in_gguf.push_back(At(need, name, pattern, rows));
  }

  void PlaceNamed(TensorNeed& need, std::string_view base, std::string name, std::string_view ending) const {
    const bool qwen = c_.architecture == Architecture::kQwen3Next || IsQwen35();
    if (base == "pre_mlp_norm" && qwen) name = "post_attention_norm";
    if (base == "pre_mlp_norm" && c_.architecture == Architecture::kFalconH1) Put(need, name);  // without .weight
    const bool kimi = c_.architecture == Architecture::kKimiLinear;
    if (base == "state.o_proj" && kimi) name = "attn_output";
    name += ending;
    if (c_.gated_attention && (base == "attn.q_proj" || base == "attn.gate_proj"))
      return Put(need, name, need.pattern, need.stored_rows);
    // The converter interleaves the halves of each head for these, whether they have rope or not.
    const bool interleaved = c_.architecture == Architecture::kMixtral || c_.architecture == Architecture::kBamba ||
                             c_.architecture == Architecture::kGraniteHybrid;
    if (interleaved && (base == "attn.q_proj" || base == "attn.k_proj")) need.interleaved_head_rows = c_.key_dim;
    Put(need, name);
  }

  // `name` begins with the expert's number.
  void PlaceExpert(TensorNeed& need, std::string_view name) const {
    const size_t dot = name.find('.');
    int64_t x = 0;
    if (!absl::SimpleAtoi(absl::string_view(name.data(), dot), &x)) return;
    const std::string part(name.substr(dot + 1, name.find('_', dot) - dot - 1));  // gate, up, down
    const int64_t experts = c_.experts->experts, rows = need.rows;
    Put(need, absl::StrCat("ffn_", part, "_exps.weight"), {rows, 0, rows * x}, experts * rows);
    if (part == "down" || c_.activation == Activation::kRelu2) return;
    const int64_t second = part == "up" ? rows : 0;
    Put(need, "ffn_gate_up_exps.weight", {rows, 0, 2 * rows * x + second}, 2 * experts * rows);
  }

  // K from the latent is stored transposed, head by head; older files hold both as Hugging Face folders do.
  void PlaceLatent(TensorNeed& need, std::string_view name) const {
    const LatentConfig& l = *c_.latent;
    if (name == "attn.v_up_proj.weight") {
      Put(need, "attn_v_b.weight");
    } else {
      StoredPlace place = At(need, "attn_k_b.weight", {l.own_key_dim, l.rank * l.own_key_dim, 0}, c_.heads * l.rank);
      place.layout = TensorLayout::kColumns;
      place.stored_cols = l.own_key_dim;
      need.in_gguf.push_back(std::move(place));
    }
    Put(need, "attn_kv_b.weight", need.pattern, need.stored_rows);
  }

  bool PlaceState(TensorNeed& need, std::string_view name) const {
    if (name == "a_log") return Put(need, "ssm_a"), true;
    if (name == "skip") return Put(need, "ssm_d"), true;
    if (name == "decay_bias") return Put(need, "ssm_dt.bias"), true;
    switch (c_.state->family) {
      case Family::kMamba2: return PlaceMamba(need, name);
      case Family::kKda: return PlaceKda(need, name);
      case Family::kGatedDelta: return PlaceDelta(need, name);
      default: return false;
    }
  }

  // Fused as in Hugging Face folders.
  bool PlaceMamba(TensorNeed& need, std::string_view name) const {
    if (name.starts_with("o_proj") || name.starts_with("out_norm")) return false;
    const std::string ending = name.ends_with(".bias") ? ".bias" : ".weight";
    Put(need, (name.starts_with("conv_") ? "ssm_conv1d" : "ssm_in") + ending, need.pattern, need.stored_rows);
    return true;
  }

  bool PlaceKda(TensorNeed& need, std::string_view name) const {
    constexpr std::pair<std::string_view, std::string_view> kKda[] = {
        {"q_proj", "attn_q"},          {"k_proj", "attn_k"},       {"v_proj", "attn_v"},
        {"conv_q", "ssm_conv1d_q"},    {"conv_k", "ssm_conv1d_k"}, {"conv_v", "ssm_conv1d_v"},
        {"decay_low_proj", "ssm_f_a"}, {"decay_proj", "ssm_f_b"},  {"rate_proj", "ssm_beta"},
        {"gate_low_proj", "ssm_g_a"},  {"gate_proj", "ssm_g_b"},
    };
    for (const auto& [canonical, gguf] : kKda)
      if (name == absl::StrCat(absl::string_view(canonical.data(), canonical.size()), ".weight"))
        return Put(need, std::string(gguf) + ".weight"), true;
    return false;
  }

  // q, k and v in one tensor, in this order. Qwen3.5's value heads are sorted by their place among those that share a
  // key head, so that key heads repeat as a whole: 0 1 2 0 1 2. They are taken in that order.
  bool PlaceDelta(TensorNeed& need, std::string_view name) const {
    const StateConfig& s = *c_.state;
    const bool tiled = IsQwen35();
    const int64_t dk = s.key_dim, keys = s.key_width(), all = 2 * keys + s.value_width(), r = s.repeat();
    const RowPattern q{dk, dk, 0, tiled ? 1 : r, tiled ? s.key_heads : 0};
    RowPattern k = q;
    k.first = keys;
    const RowPattern v{s.value_width(), 0, 2 * keys};
    const bool conv = name.starts_with("conv_");
    if (conv || name == "q_proj.weight" || name == "k_proj.weight" || name == "v_proj.weight") {
      const char which = name[conv ? 5 : 0];
      Put(need, conv ? "ssm_conv1d.weight" : "attn_qkv.weight", which == 'q' ? q : which == 'k' ? k : v, all);
      return true;
    }
    if (name == "gate_proj.weight") return Put(need, "attn_gate.weight"), true;
    const bool rate = name == "rate_proj.weight";
    if (!rate && name != "decay_proj.weight") return false;
    if (tiled) return Put(need, rate ? "ssm_beta.weight" : "ssm_alpha.weight"), true;
    Put(need, "ssm_ba.weight", need.pattern, need.stored_rows);
    return true;
  }

  const ModelConfig& c_;
  const std::string canonical_, gguf_;
};

}  // namespace

void PlaceInGguf(const ModelConfig& config, size_t layer, size_t first, std::vector<TensorNeed>& needs) {
  const bool nemotron = config.architecture == Architecture::kNemotronH && config.experts;
  if (!IsPlaced(config.architecture) && !nemotron) return;
  const Placer placer(config, layer);
  for (size_t i = first; i < needs.size(); ++i) placer.Place(needs[i]);
}

}  // namespace dovetail::model
