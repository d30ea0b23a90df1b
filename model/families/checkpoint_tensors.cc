#include "model/families/checkpoint_tensors.h"

#include <charconv>

#include "absl/strings/str_cat.h"

namespace dovetail::model {
namespace {

// Names of one layer's tensors in both formats and their shapes, appended in the order of use.
class LayerNeeds {
 public:
  LayerNeeds(const ModelConfig& config, size_t layer, std::vector<TensorNeed>& out)
      : c_(config),
        canonical_(absl::StrCat("layers.", layer, ".")),
        hf_(absl::StrCat("model.layers.", layer, ".")),
        gguf_(absl::StrCat("blk.", layer, ".")),
        out_(out) {}

  void Append() {
    Norm("input_norm", "input_layernorm", "attn_norm", c_.hidden_size);
    Attention();
    if (c_.post_norms) {
      Norm("post_attn_norm", "post_attention_layernorm", "post_attention_norm", c_.hidden_size);
      Norm("pre_mlp_norm", "pre_feedforward_layernorm", "ffn_norm", c_.hidden_size);
    } else {
      Norm("pre_mlp_norm", "post_attention_layernorm", "ffn_norm", c_.hidden_size);
    }
    Mlp();
    if (c_.post_norms) Norm("post_mlp_norm", "post_feedforward_layernorm", "post_ffw_norm", c_.hidden_size);
  }

 private:
  TensorNeed& Add(const std::string& canonical, const std::string& hf, const std::string& gguf, int64_t rows,
                  int64_t cols) {
    TensorNeed need{
        .canonical = canonical_ + canonical, .hf = hf_ + hf, .gguf = gguf_ + gguf, .rows = rows, .cols = cols};
    need.stored_rows = rows;
    return out_.emplace_back(std::move(need));
  }

  void Norm(const char* canonical, const char* hf, const char* gguf, int64_t size) {
    Add(absl::StrCat(canonical, ".weight"), absl::StrCat(hf, ".weight"), absl::StrCat(gguf, ".weight"), size, 0).norm =
        true;
  }

  // A projection and, if it has one, its bias. `head_rows` > 0: rotated by rope, so GGUF may hold it interleaved.
  void Projection(const char* canonical, const char* hf, const char* gguf, int64_t rows, int64_t cols, bool bias,
                  int64_t head_rows = 0) {
    const bool interleaved = c_.architecture == Architecture::kLlama || c_.architecture == Architecture::kMistral ||
                             c_.architecture == Architecture::kSmolLm3;
    const int64_t swap = interleaved ? head_rows : 0;
    Add(absl::StrCat(canonical, ".weight"), absl::StrCat(hf, ".weight"), absl::StrCat(gguf, ".weight"), rows, cols)
        .interleaved_head_rows = swap;
    if (bias)
      Add(absl::StrCat(canonical, ".bias"), absl::StrCat(hf, ".bias"), absl::StrCat(gguf, ".bias"), rows, 0)
          .interleaved_head_rows = swap;
  }

  // Rows [first, first + rows) of a fused tensor.
  void Part(const char* canonical, const char* hf, const char* gguf, int64_t first, int64_t rows, int64_t total) {
    TensorNeed& need = Add(absl::StrCat(canonical, ".weight"), absl::StrCat(hf, ".weight"),
                           absl::StrCat(gguf, ".weight"), rows, c_.hidden_size);
    need.first_row = first;
    need.stored_rows = total;
  }

  void Attention() {
    const int64_t q = c_.heads * c_.key_dim, k = c_.kv_heads * c_.key_dim, v = c_.kv_heads * c_.value_dim;
    if (c_.architecture == Architecture::kPhi3) {
      Part("attn.q_proj", "self_attn.qkv_proj", "attn_qkv", 0, q, q + k + v);
      Part("attn.k_proj", "self_attn.qkv_proj", "attn_qkv", q, k, q + k + v);
      Part("attn.v_proj", "self_attn.qkv_proj", "attn_qkv", q + k, v, q + k + v);
    } else {
      Projection("attn.q_proj", "self_attn.q_proj", "attn_q", q, c_.hidden_size, c_.q_bias, c_.key_dim);
      Projection("attn.k_proj", "self_attn.k_proj", "attn_k", k, c_.hidden_size, c_.k_bias, c_.key_dim);
      Projection("attn.v_proj", "self_attn.v_proj", "attn_v", v, c_.hidden_size, c_.v_bias);
    }
    if (c_.qk_norm) {
      Norm("attn.q_norm", "self_attn.q_norm", "attn_q_norm", c_.key_dim);
      Norm("attn.k_norm", "self_attn.k_norm", "attn_k_norm", c_.key_dim);
    }
    Projection("attn.o_proj", "self_attn.o_proj", "attn_output", c_.hidden_size, c_.heads * c_.value_dim, c_.o_bias);
  }

  void Mlp() {
    const int64_t i = c_.intermediate_size;
    if (c_.architecture == Architecture::kPhi3) {
      Part("mlp.gate_proj", "mlp.gate_up_proj", "ffn_up", 0, i, 2 * i);
      Part("mlp.up_proj", "mlp.gate_up_proj", "ffn_up", i, i, 2 * i);
    } else {
      Projection("mlp.gate_proj", "mlp.gate_proj", "ffn_gate", i, c_.hidden_size, c_.mlp_bias);
      Projection("mlp.up_proj", "mlp.up_proj", "ffn_up", i, c_.hidden_size, c_.mlp_bias);
    }
    Projection("mlp.down_proj", "mlp.down_proj", "ffn_down", c_.hidden_size, i, c_.mlp_bias);
  }

  const ModelConfig& c_;
  const std::string canonical_, hf_, gguf_;
  std::vector<TensorNeed>& out_;
};

TensorNeed Whole(const char* canonical, const char* hf, const char* gguf, int64_t rows, int64_t cols,
                 bool norm = false) {
  return {
      .canonical = canonical, .hf = hf, .gguf = gguf, .rows = rows, .cols = cols, .stored_rows = rows, .norm = norm};
}

}  // namespace

std::vector<TensorNeed> TensorsOf(const ModelConfig& config) {
  std::vector<TensorNeed> needs;
  const bool mamba = config.architecture == Architecture::kMamba2 || config.architecture == Architecture::kNemotronH;
  const bool bamba = config.architecture == Architecture::kBamba || config.architecture == Architecture::kFalconH1;
  const std::string embed = absl::StrCat(config.tensor_prefix, mamba ? "embeddings.weight" : "embed_tokens.weight");
  const std::string norm =
      absl::StrCat(config.tensor_prefix, mamba                                        ? "norm_f.weight"
                                         : bamba                                      ? "final_layernorm.weight"
                                         : config.architecture == Architecture::kLfm2 ? "embedding_norm.weight"
                                                                                      : "norm.weight");
  needs.push_back(Whole("embed.weight", embed.c_str(), "token_embd.weight", config.vocab_size, config.hidden_size));
  for (size_t layer = 0; layer < config.layers.size(); ++layer) {
    if (IsHybrid(config)) {
      AppendHybridLayer(config, layer, needs);
    } else {
      LayerNeeds(config, layer, needs).Append();
    }
  }
  const char* gguf_norm = config.architecture == Architecture::kLfm2 ? "token_embd_norm.weight" : "output_norm.weight";
  needs.push_back(Whole("final_norm.weight", norm.c_str(), gguf_norm, config.hidden_size, 0, /*norm=*/true));
  TensorNeed head = Whole("lm_head.weight", "lm_head.weight", "output.weight", config.vocab_size, config.hidden_size);
  if (config.tie_embeddings) head.hf = needs.front().hf, head.gguf = needs.front().gguf;
  needs.push_back(std::move(head));
  return needs;
}

// Qwen3.5's GGUF files hold the layers of multi-token prediction behind the others.
static bool IsPredictedLayer(const ModelConfig& config, std::string_view name) {
  if (config.architecture != Architecture::kQwen35 && config.architecture != Architecture::kQwen35Moe) return false;
  if (!name.starts_with("blk.")) return false;
  size_t layer = 0;
  const std::string_view number = name.substr(4, name.find('.', 4) - 4);
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), layer);
  return error == std::errc() && end == number.data() + number.size() && layer >= config.layers.size();
}

bool IsIgnoredTensor(const ModelConfig& config, std::string_view stored_name) {
  if (stored_name.ends_with(".rotary_emb.inv_freq")) return true;  // a buffer that old checkpoints saved
  if (config.tie_embeddings && stored_name == "lm_head.weight") return true;
  // Buffers that transformers saves with lightning attention; multi-token prediction.
  for (const char* buffer : {".slope_rate", ".query_decay", ".key_decay", ".diagonal_decay"})
    if (stored_name.ends_with(buffer)) return true;
  if (stored_name.starts_with("mtp.") || IsPredictedLayer(config, stored_name)) return true;
  if (stored_name.ends_with(".input_scale")) return true;  // of FP8 activations, which stay in 16 bits here
  return stored_name == "rope_freqs.weight" || stored_name == "rope_factors_long.weight" ||
         stored_name == "rope_factors_short.weight";
}

}  // namespace dovetail::model
