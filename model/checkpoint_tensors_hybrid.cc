#include "absl/strings/str_cat.h"
#include "model/checkpoint_tensors.h"

// Weights of layers with linear states or experts, by canonical names (heads n, key heads m, dk, dv; H hidden):
//   state.{q,k}_proj.weight    [n dk, H]   key heads repeated for the heads that share them
//   state.v_proj.weight        [n dv, H]
//   state.decay_proj.weight    [n or n dk, H or low rank], after state.decay_low_proj.weight where a family has it
//   state.decay_bias, state.a_log    [n or n dk], [n]
//   state.rate_proj.weight     [n, H]
//   state.conv_{q,k,v}.weight  [n dk or n dv, width] and .bias
//   state.skip                 [n]
//   state.gate_proj.weight     [n dv, H or low rank], after state.gate_low_proj.weight
//   state.out_norm.weight      [n dv] or [dv];   state.o_proj.weight [H, n dv]
//   attn.*                     as in checkpoint.h; attn.gate_proj.weight [n_h dv, H] where attention is gated
//   router.weight, router.bias [experts, H], [experts];   experts.E.{gate,up,down}_proj.weight
//   shared_expert.{gate,up,down}_proj.weight, shared_gate.weight [1, H]

namespace dovetail::model {
namespace {

using Family = StateConfig::Family;

class HybridLayer {
 public:
  HybridLayer(const ModelConfig& config, size_t layer, std::vector<TensorNeed>& out)
      : c_(config), l_(config.layers[layer]), canonical_(absl::StrCat("layers.", layer, ".")),
        stored_(absl::StrCat(config.tensor_prefix, "layers.", layer, ".")), out_(out) {}

  void Append() {
    switch (c_.architecture) {
      case Architecture::kMamba2:
        Norm("input_norm", "norm");
        break;
      default:
        Norm("input_norm", "input_layernorm");
    }
    l_.kind == LayerKind::kLinearState ? State() : Attention();
    switch (c_.architecture) {
      case Architecture::kMamba2:
        break;
      case Architecture::kBamba:
        Norm("pre_mlp_norm", "pre_ff_layernorm");
        break;
      default:
        Norm("pre_mlp_norm", "post_attention_layernorm");
    }
    if (l_.mlp == MlpKind::kExperts) Experts();
    if (l_.mlp == MlpKind::kDense) Mlp();
  }

 private:
  TensorNeed& Add(const std::string& canonical, const std::string& stored, int64_t rows, int64_t cols,
                  const RowPattern& pattern = {}, int64_t stored_rows = 0) {
    TensorNeed need;
    need.canonical = canonical_ + canonical;
    need.hf = stored_ + stored;
    need.rows = rows;
    need.cols = cols;
    need.pattern = pattern;
    need.stored_rows = stored_rows > 0 ? stored_rows : rows;
    need.flattened = true;
    return out_.emplace_back(std::move(need));
  }

  void Norm(const char* canonical, const std::string& stored, int64_t size = 0) {
    Add(absl::StrCat(canonical, ".weight"), stored + ".weight", size > 0 ? size : c_.hidden_size, 0).norm = true;
  }

  void Attention() {
    const int64_t h = c_.hidden_size, q = c_.heads * c_.key_dim, k = c_.kv_heads * c_.key_dim;
    const int64_t v = c_.kv_heads * c_.value_dim, o = c_.heads * c_.value_dim;
    const auto project = [&](const char* name, int64_t rows, int64_t cols, bool bias) {
      Add(absl::StrCat("attn.", name, ".weight"), absl::StrCat("self_attn.", name, ".weight"), rows, cols);
      if (bias) Add(absl::StrCat("attn.", name, ".bias"), absl::StrCat("self_attn.", name, ".bias"), rows, 0);
    };
    if (c_.gated_attention) {  // rows of q and of the gate, head by head
      const int64_t d = c_.key_dim;
      Add("attn.q_proj.weight", "self_attn.q_proj.weight", q, h, {d, 2 * d, 0}, 2 * q);
      Add("attn.gate_proj.weight", "self_attn.q_proj.weight", q, h, {d, 2 * d, d}, 2 * q);
    } else {
      project("q_proj", q, h, c_.q_bias);
    }
    if (c_.latent) {
      const LatentConfig& l = *c_.latent;
      const int64_t own = l.own_key_dim, stride = own + c_.value_dim, total = c_.heads * stride;
      Add("attn.latent_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", l.rank + l.shared_key_dim, h);
      Norm("attn.latent_norm", "self_attn.kv_a_layernorm", l.rank);
      Add("attn.k_up_proj.weight", "self_attn.kv_b_proj.weight", c_.heads * own, l.rank, {own, stride, 0}, total);
      Add("attn.v_up_proj.weight", "self_attn.kv_b_proj.weight", v, l.rank, {c_.value_dim, stride, own}, total);
      project("o_proj", h, o, c_.o_bias);
      return;
    }
    project("k_proj", k, h, c_.k_bias);
    project("v_proj", v, h, c_.v_bias);
    if (c_.qk_norm) {
      Norm("attn.q_norm", "self_attn.q_norm", c_.whole_qk_norm ? q : c_.key_dim);
      Norm("attn.k_norm", "self_attn.k_norm", c_.whole_qk_norm ? k : c_.key_dim);
    }
    project("o_proj", h, o, c_.o_bias);
  }

  void Conv(const std::string& q, const std::string& k, const std::string& v, const RowPattern& q_rows,
            const RowPattern& k_rows, const RowPattern& v_rows, int64_t stored_keys, int64_t stored_values) {
    const StateConfig& s = *c_.state;
    const auto part = [&](const char* name, const std::string& stored, int64_t rows, const RowPattern& pattern,
                          int64_t stored_rows) {
      Add(absl::StrCat("state.conv_", name, ".weight"), stored + ".weight", rows, s.conv_width, pattern, stored_rows);
      if (s.conv_bias) Add(absl::StrCat("state.conv_", name, ".bias"), stored + ".bias", rows, 0, pattern, stored_rows);
    };
    part("q", q, s.heads * s.key_dim, q_rows, stored_keys);
    part("k", k, s.heads * s.key_dim, k_rows, stored_keys);
    part("v", v, s.value_width(), v_rows, stored_values);
  }

  void State() {
    switch (c_.architecture) {
      case Architecture::kMiniMax: return Lightning();
      case Architecture::kQwen3Next: return QwenNext();
      case Architecture::kQwen35: return Qwen35();
      case Architecture::kKimiLinear: return Kda();
      default: return Mamba();
    }
  }

  void Lightning() {
    const StateConfig& s = *c_.state;
    const int64_t h = c_.hidden_size, d = s.key_dim, width = s.value_width();
    const char* names[] = {"q", "k", "v"};
    for (int64_t i = 0; i < 3; ++i)
      Add(absl::StrCat("state.", names[i], "_proj.weight"), "self_attn.qkv_proj.weight", width, h, {d, 3 * d, i * d},
          3 * width);
    Add("state.gate_proj.weight", "self_attn.output_gate.weight", width, h);
    Add("state.out_norm.weight", "self_attn.norm.weight", width, 0);
    Add("state.o_proj.weight", "self_attn.out_proj.weight", h, width);
  }

  // What all gated delta nets with one fused convolution share.
  void DeltaRest() {
    const StateConfig& s = *c_.state;
    const int64_t dk = s.key_dim, keys = s.key_width(), all = 2 * keys + s.value_width(), r = s.repeat();
    const std::string conv = "linear_attn.conv1d";
    Conv(conv, conv, conv, {dk, dk, 0, r}, {dk, dk, keys, r}, {s.value_width(), 0, 2 * keys}, all, all);
    Add("state.decay_bias", "linear_attn.dt_bias", s.heads, 0);
    Add("state.a_log", "linear_attn.A_log", s.heads, 0);
    Add("state.out_norm.weight", "linear_attn.norm.weight", s.value_dim, 0);
    Add("state.o_proj.weight", "linear_attn.out_proj.weight", c_.hidden_size, s.value_width());
  }

  void QwenNext() {
    const StateConfig& s = *c_.state;
    const int64_t h = c_.hidden_size, dk = s.key_dim, r = s.repeat(), v = r * s.value_dim;
    const int64_t stride = 2 * dk + 2 * v, total = s.key_heads * stride, keys = s.heads * dk;
    const char* fused = "linear_attn.in_proj_qkvz.weight";
    Add("state.q_proj.weight", fused, keys, h, {dk, stride, 0, r}, total);
    Add("state.k_proj.weight", fused, keys, h, {dk, stride, dk, r}, total);
    Add("state.v_proj.weight", fused, s.value_width(), h, {v, stride, 2 * dk}, total);
    Add("state.gate_proj.weight", fused, s.value_width(), h, {v, stride, 2 * dk + v}, total);
    const char* gates = "linear_attn.in_proj_ba.weight";
    Add("state.rate_proj.weight", gates, s.heads, h, {r, 2 * r, 0}, 2 * s.heads);
    Add("state.decay_proj.weight", gates, s.heads, h, {r, 2 * r, r}, 2 * s.heads);
    DeltaRest();
  }

  void Qwen35() {
    const StateConfig& s = *c_.state;
    const int64_t h = c_.hidden_size, dk = s.key_dim, r = s.repeat(), keys = s.key_width();
    const int64_t total = 2 * keys + s.value_width();
    const char* fused = "linear_attn.in_proj_qkv.weight";
    Add("state.q_proj.weight", fused, s.heads * dk, h, {dk, dk, 0, r}, total);
    Add("state.k_proj.weight", fused, s.heads * dk, h, {dk, dk, keys, r}, total);
    Add("state.v_proj.weight", fused, s.value_width(), h, {s.value_width(), 0, 2 * keys}, total);
    Add("state.gate_proj.weight", "linear_attn.in_proj_z.weight", s.value_width(), h);
    Add("state.rate_proj.weight", "linear_attn.in_proj_b.weight", s.heads, h);
    Add("state.decay_proj.weight", "linear_attn.in_proj_a.weight", s.heads, h);
    DeltaRest();
  }

  void Kda() {
    const StateConfig& s = *c_.state;
    const int64_t h = c_.hidden_size, width = s.heads * s.key_dim, low = s.key_dim;
    const std::string m = "self_attn.";
    for (const char* name : {"q", "k", "v"})
      Add(absl::StrCat("state.", name, "_proj.weight"), absl::StrCat(m, name, "_proj.weight"), width, h);
    Conv(m + "q_conv1d", m + "k_conv1d", m + "v_conv1d", {}, {}, {}, width, width);
    Add("state.decay_low_proj.weight", m + "f_a_proj.weight", low, h);
    Add("state.decay_proj.weight", m + "f_b_proj.weight", width, low);
    Add("state.decay_bias", m + "dt_bias", width, 0);
    Add("state.a_log", m + "A_log", s.heads, 0);
    Add("state.rate_proj.weight", m + "b_proj.weight", s.heads, h);
    Add("state.gate_low_proj.weight", m + "g_a_proj.weight", low, h);
    Add("state.gate_proj.weight", m + "g_b_proj.weight", width, low);
    Add("state.out_norm.weight", m + "o_norm.weight", s.value_dim, 0);
    Add("state.o_proj.weight", m + "o_proj.weight", h, width);
  }

  // in_proj gives z, x, B, C and the step size; x is v, B is k, C is q.
  void Mamba() {
    const StateConfig& s = *c_.state;
    const std::string m = c_.architecture == Architecture::kMamba2 ? "mixer." : "mamba.";
    const int64_t h = c_.hidden_size, dk = s.key_dim, r = s.repeat(), inner = s.value_width(), keys = s.key_width();
    const int64_t conv = inner + 2 * keys, total = inner + conv + s.heads;
    const std::string fused = m + "in_proj.weight", conv1d = m + "conv1d";
    Add("state.gate_proj.weight", fused, inner, h, {inner, 0, 0}, total);
    Add("state.v_proj.weight", fused, inner, h, {inner, 0, inner}, total);
    Add("state.k_proj.weight", fused, s.heads * dk, h, {dk, dk, 2 * inner, r}, total);
    Add("state.q_proj.weight", fused, s.heads * dk, h, {dk, dk, 2 * inner + keys, r}, total);
    Add("state.decay_proj.weight", fused, s.heads, h, {s.heads, 0, inner + conv}, total);
    Conv(conv1d, conv1d, conv1d, {dk, dk, inner + keys, r}, {dk, dk, inner, r}, {inner, 0, 0}, conv, conv);
    Add("state.decay_bias", m + "dt_bias", s.heads, 0);
    Add("state.a_log", m + "A_log", s.heads, 0);
    Add("state.skip", m + "D", s.heads, 0);
    if (s.out_norm) Add("state.out_norm.weight", m + "norm.weight", inner, 0);
    Add("state.o_proj.weight", m + "out_proj.weight", h, inner);
  }

  void GatedMlp(const std::string& canonical, const std::string& gate, const std::string& up, const std::string& down,
                int64_t intermediate) {
    Add(canonical + "gate_proj.weight", gate, intermediate, c_.hidden_size);
    Add(canonical + "up_proj.weight", up, intermediate, c_.hidden_size);
    Add(canonical + "down_proj.weight", down, c_.hidden_size, intermediate);
  }

  void Mlp() {
    const int64_t i = c_.intermediate_size, h = c_.hidden_size;
    if (c_.architecture == Architecture::kGraniteHybrid) {
      Add("mlp.gate_proj.weight", "shared_mlp.input_linear.weight", i, h, {i, 0, 0}, 2 * i);
      Add("mlp.up_proj.weight", "shared_mlp.input_linear.weight", i, h, {i, 0, i}, 2 * i);
      Add("mlp.down_proj.weight", "shared_mlp.output_linear.weight", h, i);
      return;
    }
    const std::string mlp = c_.architecture == Architecture::kBamba         ? "feed_forward."
                            : c_.architecture == Architecture::kKimiLinear ? "block_sparse_moe."
                                                                           : "mlp.";
    GatedMlp("mlp.", mlp + "gate_proj.weight", mlp + "up_proj.weight", mlp + "down_proj.weight", i);
  }

  void Experts() {
    const ExpertConfig& e = *c_.experts;
    const int64_t h = c_.hidden_size, i = e.intermediate;
    const bool qwen = c_.architecture == Architecture::kQwen3Moe || c_.architecture == Architecture::kQwen3Next;
    if (c_.architecture == Architecture::kGraniteHybrid) {
      Add("router.weight", "block_sparse_moe.router.layer.weight", e.experts, h);
      for (int64_t x = 0; x < e.experts; ++x) {
        const std::string expert = absl::StrCat("experts.", x, ".");
        const std::string in = "block_sparse_moe.input_linear.weight";
        Add(expert + "gate_proj.weight", in, i, h, {i, 0, 2 * i * x}, 2 * i * e.experts);
        Add(expert + "up_proj.weight", in, i, h, {i, 0, 2 * i * x + i}, 2 * i * e.experts);
        Add(expert + "down_proj.weight", "block_sparse_moe.output_linear.weight", h, i, {h, 0, h * x}, h * e.experts);
      }
      const int64_t s = e.shared_intermediate;
      Add("shared_expert.gate_proj.weight", "shared_mlp.input_linear.weight", s, h, {s, 0, 0}, 2 * s);
      Add("shared_expert.up_proj.weight", "shared_mlp.input_linear.weight", s, h, {s, 0, s}, 2 * s);
      Add("shared_expert.down_proj.weight", "shared_mlp.output_linear.weight", h, s);
      return;
    }
    const std::string moe = qwen ? "mlp." : "block_sparse_moe.";
    Add("router.weight", moe + "gate.weight", e.experts, h);
    const bool kimi = c_.architecture == Architecture::kKimiLinear;
    if (e.selection_bias) Add("router.bias", moe + (kimi ? "gate." : "") + "e_score_correction_bias", e.experts, 0);
    for (int64_t x = 0; x < e.experts; ++x) {
      const std::string expert = absl::StrCat("experts.", x, "."), stored = absl::StrCat(moe, "experts.", x, ".");
      GatedMlp(expert, stored + (qwen ? "gate_proj.weight" : "w1.weight"),
               stored + (qwen ? "up_proj.weight" : "w3.weight"), stored + (qwen ? "down_proj.weight" : "w2.weight"), i);
    }
    if (e.shared_intermediate == 0) return;
    const std::string shared = moe + (kimi ? "shared_experts." : "shared_expert.");
    GatedMlp("shared_expert.", shared + "gate_proj.weight", shared + "up_proj.weight", shared + "down_proj.weight",
             e.shared_intermediate);
    if (e.shared_gate) Add("shared_gate.weight", moe + "shared_expert_gate.weight", 1, h);
  }

  const ModelConfig& c_;
  const LayerConfig& l_;
  const std::string canonical_, stored_;
  std::vector<TensorNeed>& out_;
};

}  // namespace

bool IsHybrid(const ModelConfig& config) { return config.state.has_value() || config.experts.has_value(); }

void AppendHybridLayer(const ModelConfig& config, size_t layer, std::vector<TensorNeed>& needs) {
  HybridLayer(config, layer, needs).Append();
}

}  // namespace dovetail::model
