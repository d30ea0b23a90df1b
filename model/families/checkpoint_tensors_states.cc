#include "model/families/hybrid_needs.h"

// Weights of linear states; canonical names are in checkpoint_tensors_hybrid.cc.

namespace dovetail::model {
namespace {

class StateNeeds {
 public:
  explicit StateNeeds(HybridNeeds& needs) : needs_(needs), c_(needs.config), s_(*c_.state) {}

  void Lightning() {
    const int64_t h = c_.hidden_size, d = s_.key_dim, width = s_.value_width();
    const char* names[] = {"q", "k", "v"};
    for (int64_t i = 0; i < 3; ++i)
      needs_.Add(absl::StrCat("state.", names[i], "_proj.weight"), "self_attn.qkv_proj.weight", width, h,
                 {d, 3 * d, i * d}, 3 * width);
    needs_.Add("state.gate_proj.weight", "self_attn.output_gate.weight", width, h);
    needs_.Add("state.out_norm.weight", "self_attn.norm.weight", width, 0);
    needs_.Add("state.o_proj.weight", "self_attn.out_proj.weight", h, width);
  }

  void QwenNext() {
    const int64_t h = c_.hidden_size, dk = s_.key_dim, r = s_.repeat(), v = r * s_.value_dim;
    const int64_t stride = 2 * dk + 2 * v, total = s_.key_heads * stride, keys = s_.heads * dk;
    const char* fused = "linear_attn.in_proj_qkvz.weight";
    needs_.Add("state.q_proj.weight", fused, keys, h, {dk, stride, 0, r}, total);
    needs_.Add("state.k_proj.weight", fused, keys, h, {dk, stride, dk, r}, total);
    needs_.Add("state.v_proj.weight", fused, s_.value_width(), h, {v, stride, 2 * dk}, total);
    needs_.Add("state.gate_proj.weight", fused, s_.value_width(), h, {v, stride, 2 * dk + v}, total);
    const char* gates = "linear_attn.in_proj_ba.weight";
    needs_.Add("state.rate_proj.weight", gates, s_.heads, h, {r, 2 * r, 0}, 2 * s_.heads);
    needs_.Add("state.decay_proj.weight", gates, s_.heads, h, {r, 2 * r, r}, 2 * s_.heads);
    FusedConvolution("linear_attn.conv1d");
    DeltaRest("norm", "out_proj");
  }

  void Qwen35() {
    const int64_t h = c_.hidden_size, dk = s_.key_dim, r = s_.repeat(), keys = s_.key_width();
    const int64_t total = 2 * keys + s_.value_width();
    const char* fused = "linear_attn.in_proj_qkv.weight";
    needs_.Add("state.q_proj.weight", fused, s_.heads * dk, h, {dk, dk, 0, r}, total);
    needs_.Add("state.k_proj.weight", fused, s_.heads * dk, h, {dk, dk, keys, r}, total);
    needs_.Add("state.v_proj.weight", fused, s_.value_width(), h, {s_.value_width(), 0, 2 * keys}, total);
    needs_.Add("state.gate_proj.weight", "linear_attn.in_proj_z.weight", s_.value_width(), h);
    needs_.Add("state.rate_proj.weight", "linear_attn.in_proj_b.weight", s_.heads, h);
    needs_.Add("state.decay_proj.weight", "linear_attn.in_proj_a.weight", s_.heads, h);
    FusedConvolution("linear_attn.conv1d");
    DeltaRest("norm", "out_proj");
  }

  // Everything apart. The convolutions of q, k and v are three tensors; transformers 5.17 saves the one it makes of
  // them in three equal parts, wherever q ends. Together they are the same.
  void Olmo() {
    const int64_t h = c_.hidden_size, dk = s_.key_dim, r = s_.repeat(), keys = s_.key_width();
    const std::string m = "linear_attn.";
    needs_.Add("state.q_proj.weight", m + "q_proj.weight", s_.heads * dk, h, {dk, dk, 0, r}, keys);
    needs_.Add("state.k_proj.weight", m + "k_proj.weight", s_.heads * dk, h, {dk, dk, 0, r}, keys);
    needs_.Add("state.v_proj.weight", m + "v_proj.weight", s_.value_width(), h);
    needs_.Add("state.gate_proj.weight", m + "g_proj.weight", s_.value_width(), h);
    needs_.Add("state.rate_proj.weight", m + "b_proj.weight", s_.heads, h);
    needs_.Add("state.decay_proj.weight", m + "a_proj.weight", s_.heads, h);
    FusedConvolution(m + "conv1d", {m + "q_conv1d", m + "k_conv1d", m + "v_conv1d"});
    DeltaRest("o_norm", "o_proj");
  }

  void Kda() {
    const int64_t h = c_.hidden_size, width = s_.heads * s_.key_dim, low = s_.key_dim;
    const std::string m = "self_attn.";
    for (const char* name : {"q", "k", "v"})
      needs_.Add(absl::StrCat("state.", name, "_proj.weight"), absl::StrCat(m, name, "_proj.weight"), width, h);
    for (const char* name : {"q", "k", "v"}) Convolution(name, absl::StrCat(m, name, "_conv1d"), width, {}, width);
    needs_.Add("state.decay_low_proj.weight", m + "f_a_proj.weight", low, h);
    needs_.Add("state.decay_proj.weight", m + "f_b_proj.weight", width, low);
    needs_.Add("state.decay_bias", m + "dt_bias", width, 0);
    needs_.Add("state.a_log", m + "A_log", s_.heads, 0);
    needs_.Add("state.rate_proj.weight", m + "b_proj.weight", s_.heads, h);
    needs_.Add("state.gate_low_proj.weight", m + "g_a_proj.weight", low, h);
    needs_.Add("state.gate_proj.weight", m + "g_b_proj.weight", width, low);
    needs_.Add("state.out_norm.weight", m + "o_norm.weight", s_.value_dim, 0);
    needs_.Add("state.o_proj.weight", m + "o_proj.weight", h, width);
  }

  // in_proj gives z, x, B, C and the step size; x is v, B is k, C is q.
  void Mamba() {
    const bool mixer = c_.architecture == Architecture::kMamba2 || c_.architecture == Architecture::kNemotronH;
    const std::string m = mixer ? "mixer." : "mamba.";
    const int64_t h = c_.hidden_size, dk = s_.key_dim, r = s_.repeat(), inner = s_.value_width(), n = s_.heads;
    const int64_t keys = s_.key_width(), conv = inner + 2 * keys, total = inner + conv + n;
    const std::string fused = m + "in_proj", conv1d = m + "conv1d";
    const bool bias = s_.proj_bias;
    needs_.Project("state.gate_proj", fused, inner, h, bias, {inner, 0, 0}, total);
    needs_.Project("state.v_proj", fused, inner, h, bias, {inner, 0, inner}, total);
    needs_.Project("state.k_proj", fused, n * dk, h, bias, {dk, dk, 2 * inner, r}, total);
    needs_.Project("state.q_proj", fused, n * dk, h, bias, {dk, dk, 2 * inner + keys, r}, total);
    needs_.Project("state.decay_proj", fused, n, h, bias, {n, 0, inner + conv}, total);
    Convolution("q", conv1d, n * dk, {dk, dk, inner + keys, r}, conv);
    Convolution("k", conv1d, n * dk, {dk, dk, inner, r}, conv);
    Convolution("v", conv1d, inner, {inner, 0, 0}, conv);
    needs_.Add("state.decay_bias", m + "dt_bias", n, 0);
    needs_.Add("state.a_log", m + "A_log", n, 0);
    needs_.Add("state.skip", m + "D", n, 0);
    if (s_.out_norm) needs_.Add("state.out_norm.weight", m + "norm.weight", inner, 0);
    needs_.Project("state.o_proj", m + "out_proj", h, inner, bias);
  }

  // in_proj gives B, C and x: y = C * conv(B * x).
  void ShortConvolution() {
    const int64_t h = c_.hidden_size, width = s_.value_width();
    const bool bias = s_.proj_bias;
    const std::string fused = "conv.in_proj";
    needs_.Project("state.v_factor_proj", fused, width, h, bias, {width, 0, 0}, 3 * width);
    needs_.Project("state.gate_proj", fused, width, h, bias, {width, 0, width}, 3 * width);
    needs_.Project("state.v_proj", fused, width, h, bias, {width, 0, 2 * width}, 3 * width);
    Convolution("v", "conv.conv", width, {}, width);
    needs_.Project("state.o_proj", "conv.out_proj", h, width, bias);
  }

 private:
  TensorNeed& Convolution(const char* name, const std::string& stored, int64_t rows, const RowPattern& pattern,
                          int64_t stored_rows) {
    const std::string canonical = absl::StrCat("state.conv_", name);
    if (s_.conv_bias) needs_.Add(canonical + ".bias", stored + ".bias", rows, 0, pattern, stored_rows);
    return needs_.Add(canonical + ".weight", stored + ".weight", rows, s_.conv_width, pattern, stored_rows);
  }

  // One convolution over q, k and v of a delta rule; or, one after the other, `parts`.
  void FusedConvolution(const std::string& conv, const std::vector<std::string>& parts = {}) {
    const int64_t dk = s_.key_dim, keys = s_.key_width(), all = 2 * keys + s_.value_width(), r = s_.repeat();
    const auto part = [&](const char* name, int64_t rows, const RowPattern& pattern) {
      TensorNeed& need = Convolution(name, conv, rows, pattern, all);
      if (parts.empty()) return;
      StoredPlace place;
      for (const std::string& stored : parts) place.names.push_back(needs_.Stored(stored + ".weight"));
      place.layout = TensorLayout::kJoined;
      place.pattern = pattern;
      place.stored_rows = all;
      need.others.push_back(std::move(place));
    };
    part("q", s_.heads * dk, {dk, dk, 0, r});
    part("k", s_.heads * dk, {dk, dk, keys, r});
    part("v", s_.value_width(), {s_.value_width(), 0, 2 * keys});
  }

  void DeltaRest(const std::string& norm, const std::string& out) {
    const std::string m = "linear_attn.";
    needs_.Add("state.decay_bias", m + "dt_bias", s_.heads, 0);
    needs_.Add("state.a_log", m + "A_log", s_.heads, 0);
    needs_.Add("state.out_norm.weight", m + norm + ".weight", s_.value_dim, 0);
    needs_.Add("state.o_proj.weight", m + out + ".weight", c_.hidden_size, s_.value_width());
  }

  HybridNeeds& needs_;
  const ModelConfig& c_;
  const StateConfig& s_;
};

}  // namespace

void AppendState(HybridNeeds& needs) {
  StateNeeds state(needs);
  switch (needs.config.architecture) {
    case Architecture::kMiniMax: return state.Lightning();
    case Architecture::kQwen3Next: return state.QwenNext();
    case Architecture::kQwen35:
    case Architecture::kQwen35Moe: return state.Qwen35();
    case Architecture::kOlmoHybrid: return state.Olmo();
    case Architecture::kKimiLinear: return state.Kda();
    case Architecture::kLfm2: return state.ShortConvolution();
    default: return state.Mamba();
  }
}

}  // namespace dovetail::model
