#include "model/families/hybrid_needs.h"

// Weights of layers with linear states or experts, by canonical names (heads n, key heads m, dk, dv; H hidden):
//   state.{q,k}_proj.weight    [n dk, H]   key heads repeated for the heads that share them
//   state.v_proj.weight        [n dv, H];  state.v_factor_proj.weight likewise where v is a product
//   state.decay_proj.weight    [n or n dk, H or low rank], after state.decay_low_proj.weight where a family has it
//   state.decay_bias, state.a_log    [n or n dk], [n]
//   state.rate_proj.weight     [n, H]
//   state.conv_{q,k,v}.weight  [n dk or n dv, width] and .bias
//   state.skip                 [n]
//   state.gate_proj.weight     [n dv, H or low rank], after state.gate_low_proj.weight
//   state.out_norm.weight      [n dv] or [dv];   state.o_proj.weight [H, n dv]
//   attn.*                     as in checkpoint.h; attn.gate_proj.weight [n_h dv, H] where attention is gated
//   router.weight, .bias       [experts, H], [experts];   router.selection_bias [experts]
//   experts.E.{gate,up,down}_proj.weight and .bias;   experts.latent_{down,up}_proj.weight [latent, H], [H, latent]
//   shared_expert.{gate,up,down}_proj.weight, shared_gate.weight [1, H]

namespace dovetail::model {
namespace {

void AppendInputNorm(HybridNeeds& needs) {
  const LayerConfig& layer = needs.layer;
  switch (needs.config.architecture) {
    case Architecture::kMamba2:
    case Architecture::kNemotronH:
      if (layer.kind != LayerKind::kMlpOnly) needs.Norm("input_norm", "norm");
      return;
    case Architecture::kLfm2: needs.Norm("input_norm", "operator_norm"); return;
    case Architecture::kOlmoHybrid:  // softmax layers norm what comes out
      if (HasState(layer.kind)) needs.OrCalled(needs.Norm("input_norm", "attention_layer_norm"), "input_layernorm");
      return;
    default: needs.Norm("input_norm", "input_layernorm");
  }
}

void AppendMlpNorm(HybridNeeds& needs) {
  const LayerConfig& layer = needs.layer;
  switch (needs.config.architecture) {
    case Architecture::kMamba2: return;
    case Architecture::kNemotronH:
      if (layer.mlp != MlpKind::kNone) needs.Norm("pre_mlp_norm", "norm");
      return;
    case Architecture::kBamba:
    case Architecture::kFalconH1: needs.Norm("pre_mlp_norm", "pre_ff_layernorm"); return;
    case Architecture::kLfm2: needs.Norm("pre_mlp_norm", "ffn_norm"); return;
    case Architecture::kOlmoHybrid:
      if (HasState(layer.kind)) {
        needs.OrCalled(needs.Norm("pre_mlp_norm", "feedforward_layer_norm"), "post_attention_layernorm");
      } else {  // transformers 5.17 saves it under the name that it has in the other layers
        needs.OrCalled(needs.Norm("post_attn_norm", "post_attention_layernorm"), "feedforward_layer_norm");
        needs.Norm("post_mlp_norm", "post_feedforward_layernorm");
      }
      return;
    default: needs.Norm("pre_mlp_norm", "post_attention_layernorm");
  }
}

void AppendLatent(HybridNeeds& needs, const std::string& m) {
  const ModelConfig& c = needs.config;
  const LatentConfig& l = *c.latent;
  const int64_t own = l.own_key_dim, stride = own + c.value_dim, total = c.heads * stride, v = c.kv_heads * c.value_dim;
  needs.Add("attn.latent_proj.weight", m + "kv_a_proj_with_mqa.weight", l.rank + l.shared_key_dim, c.hidden_size);
  needs.Norm("attn.latent_norm", m + "kv_a_layernorm", l.rank);
  const std::string up = m + "kv_b_proj.weight";
  needs.Add("attn.k_up_proj.weight", up, c.heads * own, l.rank, {own, stride, 0}, total);
  needs.Add("attn.v_up_proj.weight", up, v, l.rank, {c.value_dim, stride, own}, total);
}

void AppendAttention(HybridNeeds& needs) {
  const ModelConfig& c = needs.config;
  const bool lfm2 = c.architecture == Architecture::kLfm2;
  const std::string m = c.architecture == Architecture::kNemotronH ? "mixer." : "self_attn.";
  const int64_t h = c.hidden_size, q = c.heads * c.key_dim, k = c.kv_heads * c.key_dim;
  const int64_t v = c.kv_heads * c.value_dim, o = c.heads * c.value_dim;
  if (c.gated_attention) {  // rows of q and of the gate, head by head
    const int64_t d = c.key_dim;
    needs.Project("attn.q_proj", m + "q_proj", q, h, c.q_bias, {d, 2 * d, 0}, 2 * q);
    needs.Project("attn.gate_proj", m + "q_proj", q, h, c.q_bias, {d, 2 * d, d}, 2 * q);
  } else {
    needs.Project("attn.q_proj", m + "q_proj", q, h, c.q_bias);
  }
  if (c.latent) {
    AppendLatent(needs, m);
  } else {
    needs.Project("attn.k_proj", m + "k_proj", k, h, c.k_bias);
    needs.Project("attn.v_proj", m + "v_proj", v, h, c.v_bias);
  }
  if (c.qk_norm) {
    needs.Norm("attn.q_norm", m + (lfm2 ? "q_layernorm" : "q_norm"), c.whole_qk_norm ? q : c.key_dim);
    needs.Norm("attn.k_norm", m + (lfm2 ? "k_layernorm" : "k_norm"), c.whole_qk_norm ? k : c.key_dim);
  }
  if (c.sinks) needs.Add("attn.sinks", m + "sinks", c.heads, 0);
  needs.Project("attn.o_proj", m + (lfm2 ? "out_proj" : "o_proj"), h, o, c.o_bias);
}

void AppendMlp(HybridNeeds& needs) {
  const ModelConfig& c = needs.config;
  const int64_t i = c.intermediate_size, h = c.hidden_size;
  const bool bias = c.mlp_bias;
  switch (c.architecture) {
    case Architecture::kGraniteHybrid:
      needs.Project("mlp.gate_proj", "shared_mlp.input_linear", i, h, bias, {i, 0, 0}, 2 * i);
      needs.Project("mlp.up_proj", "shared_mlp.input_linear", i, h, bias, {i, 0, i}, 2 * i);
      needs.Project("mlp.down_proj", "shared_mlp.output_linear", h, i, bias);
      return;
    case Architecture::kLfm2:
      needs.Project("mlp.gate_proj", "feed_forward.w1", i, h, bias);
      needs.Project("mlp.up_proj", "feed_forward.w3", i, h, bias);
      needs.Project("mlp.down_proj", "feed_forward.w2", h, i, bias);
      return;
    default: break;
  }
  const std::string mlp = c.architecture == Architecture::kBamba || c.architecture == Architecture::kFalconH1
                              ? "feed_forward."
                          : c.architecture == Architecture::kKimiLinear ? "block_sparse_moe."
                          : c.architecture == Architecture::kNemotronH  ? "mixer."
                                                                        : "mlp.";
  if (c.activation != Activation::kRelu2) needs.Project("mlp.gate_proj", mlp + "gate_proj", i, h, bias);
  needs.Project("mlp.up_proj", mlp + "up_proj", i, h, bias);
  needs.Project("mlp.down_proj", mlp + "down_proj", h, i, bias);
}

}  // namespace

bool IsHybrid(const ModelConfig& config) { return config.state.has_value() || config.experts.has_value(); }

void AppendHybridLayer(const ModelConfig& config, size_t layer, std::vector<TensorNeed>& out) {
  const size_t first = out.size();
  HybridNeeds needs(config, layer, out);
  AppendInputNorm(needs);
  if (HasAttention(needs.layer.kind)) AppendAttention(needs);
  if (HasState(needs.layer.kind)) AppendState(needs);
  AppendMlpNorm(needs);
  if (needs.layer.mlp == MlpKind::kExperts) AppendExperts(needs);
  if (needs.layer.mlp == MlpKind::kDense) AppendMlp(needs);
  PlaceInGguf(config, layer, first, out);
}

}  // namespace dovetail::model
