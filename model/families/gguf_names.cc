#include <utility>

#include "model/families/hybrid_needs.h"

namespace dovetail::model {
namespace {

// Whole names, or names before .weight and .bias.
constexpr std::pair<std::string_view, std::string_view> kNames[] = {
    {"input_layernorm", "attn_norm"},
    {"operator_norm", "attn_norm"},
    {"norm", "attn_norm"},
    {"ffn_norm", "ffn_norm"},
    {"post_attention_layernorm", "post_attention_norm"},
    {"self_attn.q_proj", "attn_q"},
    {"self_attn.k_proj", "attn_k"},
    {"self_attn.v_proj", "attn_v"},
    {"self_attn.o_proj", "attn_output"},
    {"self_attn.out_proj", "attn_output"},
    {"self_attn.q_layernorm", "attn_q_norm"},
    {"self_attn.k_layernorm", "attn_k_norm"},
    {"self_attn.sinks", "attn_sinks.weight"},
    {"mixer.q_proj", "attn_q"},
    {"mixer.k_proj", "attn_k"},
    {"mixer.v_proj", "attn_v"},
    {"mixer.o_proj", "attn_output"},
    {"mixer.up_proj", "ffn_up"},
    {"mixer.down_proj", "ffn_down"},
    {"mixer.in_proj", "ssm_in"},
    {"mixer.conv1d", "ssm_conv1d"},
    {"mixer.dt_bias", "ssm_dt.bias"},
    {"mixer.A_log", "ssm_a"},  // as -exp(A_log)
    {"mixer.D", "ssm_d"},
    {"mixer.norm", "ssm_norm"},
    {"mixer.out_proj", "ssm_out"},
    {"feed_forward.w1", "ffn_gate"},
    {"feed_forward.w3", "ffn_up"},
    {"feed_forward.w2", "ffn_down"},
    {"conv.conv", "shortconv.conv"},
    {"conv.in_proj", "shortconv.in_proj"},
    {"conv.out_proj", "shortconv.out_proj"},
    {"mlp.router", "ffn_gate_inp"},
};

}  // namespace

std::string GgufName(const std::string& stored) {
  for (const char* ending : {"", ".weight", ".bias"}) {
    if (!std::string_view(stored).ends_with(ending)) continue;
    const std::string_view base = std::string_view(stored).substr(0, stored.size() - std::string_view(ending).size());
    for (const auto& [hf, gguf] : kNames)
      if (base == hf) return std::string(gguf) + ending;
  }
  return stored;
}

}  // namespace dovetail::model
