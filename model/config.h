#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "base/ids.h"
#include "base/status.h"
#include "model/rope.h"
#include "nlohmann/json.hpp"

namespace dovetail::model {

class GgufFile;

enum class Architecture { kLlama, kMistral, kSmolLm3, kQwen2, kQwen3, kPhi3, kGemma3 };
std::string_view Name(Architecture architecture);  // transformers' model_type: "llama", "gemma3_text", ...

enum class Activation { kSilu, kGeluTanh };  // of the gate: down(act(gate x) * (up x))

// What a layer does between its projections. Linear-state and expert layers become further kinds.
enum class LayerKind { kFullAttention, kSlidingAttention };

struct LayerConfig {
  LayerKind kind = LayerKind::kFullAttention;
  int64_t window = 0;  // a query at position i sees keys j with i - window < j <= i; 0 = all
  int rope = -1;       // index into ModelConfig::ropes; -1 = no position embedding in this layer

  bool operator==(const LayerConfig&) const = default;
};

// What generation_config.json proposes when a request says nothing. Absent fields are the server's to choose.
struct SamplingDefaults {
  std::optional<double> temperature, top_p, min_p, repetition_penalty;
  std::optional<int64_t> top_k;
  std::optional<bool> do_sample;  // false: greedy unless a request asks otherwise
};

// A dense decoder as one immutable struct, the same whether it was read from config.json or from GGUF metadata.
// Checked: a ModelConfig that was returned holds sane, agreeing numbers. With H hidden_size, n_h heads, n_kv kv_heads:
//
//   x = embed[token] * embedding_scale
//   per layer: a = attention(rmsnorm(x) * input_norm); x += post_norms ? rmsnorm(a) * post_attn_norm : a
//              m = mlp(rmsnorm(x) * pre_mlp_norm);     x += post_norms ? rmsnorm(m) * post_mlp_norm : m
//   logits = lm_head(rmsnorm(x) * final_norm)
//
// Q is [n_h * key_dim, H], K [n_kv * key_dim, H], V [n_kv * value_dim, H], O [H, n_h * value_dim]; query head h reads
// KV head h / (n_h / n_kv). With qk_norm, rmsnorm over key_dim of each head of q and k comes before rope. Norm weights
// that a family stores as w for (1 + w) are given out as 1 + w (checkpoint.h).
struct ModelConfig {
  Architecture architecture = Architecture::kLlama;
  std::string name;  // what the file calls itself; may be empty

  int64_t hidden_size = 0;
  int64_t heads = 0, kv_heads = 0;
  int64_t key_dim = 0, value_dim = 0;
  int64_t intermediate_size = 0;
  int64_t vocab_size = 0;     // rows of the embedding; a tokenizer may know fewer tokens
  int64_t max_positions = 0;  // longest sequence; with dynamic rope, factor times what the model was trained at

  double norm_eps = 0;
  float attention_scale = 0;  // of q . k
  float embedding_scale = 1;
  Activation activation = Activation::kSilu;
  bool qk_norm = false;
  bool q_bias = false, k_bias = false, v_bias = false, o_bias = false, mlp_bias = false;
  bool post_norms = false;              // Gemma's four norms a layer
  bool norms_stored_minus_one = false;  // the file holds w of (1 + w)
  bool tie_embeddings = false;          // lm_head is embed

  std::vector<RopeSpec> ropes;  // the different ones; layers point into it
  std::vector<LayerConfig> layers;

  std::optional<TokenId> bos;
  std::vector<TokenId> stop_ids;  // every id that ends a generation, ascending
  SamplingDefaults sampling;
  DType weights_dtype = DType::kF32;  // what the model was made in; the files may store other types

  const RopeSpec* RopeOf(const LayerConfig& layer) const {
    return layer.rope < 0 ? nullptr : &ropes[static_cast<size_t>(layer.rope)];
  }
};

// From config.json, in the spelling of transformers 4 or 5, and generation_config.json (null when there is none).
// `file` names config.json in error texts. Errors: kUnimplemented for an architecture, layer kind, rope kind or feature
// that is not served; kInvalidArgument for a field that is missing, of the wrong type, out of range, or contradicts
// another. Both name the field.
absl::StatusOr<ModelConfig> ConfigFromJson(const std::string& file, const nlohmann::json& config,
                                           const nlohmann::json& generation_config);

// From GGUF metadata and the tensors that are there (biases, tied embeddings, rope factors). Errors as above, naming
// the key.
absl::StatusOr<ModelConfig> ConfigFromGguf(const GgufFile& gguf);

// The checks both share: ranges and agreement. `file` is for error texts.
absl::Status ValidateConfig(const std::string& file, const ModelConfig& config);

// Appends `rope` to config.ropes unless it is there; its index.
int AddRope(ModelConfig& config, const RopeSpec& rope);

}  // namespace dovetail::model
