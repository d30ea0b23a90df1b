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

enum class Architecture {
  kLlama,
  kMistral,
  kSmolLm3,
  kQwen2,
  kQwen3,
  kPhi3,
  kGemma3,
  kMixtral,
  kQwen3Moe,
  kMiniMaxM2,
  kGptOss,  // experts
  kMiniMax,
  kQwen3Next,
  kQwen35,
  kQwen35Moe,
  kOlmoHybrid,
  kKimiLinear,  // linear states
  kMamba2,
  kBamba,
  kGraniteHybrid,
  kNemotronH,
  kFalconH1,
  kLfm2,
};
std::string_view Name(Architecture architecture);  // transformers' model_type: "llama", "gemma3_text", ...

enum class Activation {
  kSilu,
  kGeluTanh,       // of the gate: down(act(gate x) * (up x))
  kClampedSwiglu,  // GPT-OSS (kernels/activation.h)
  kRelu2,          // there is no gate: down(relu(up x)^2)
};

// What a layer does between its projections.
enum class LayerKind {
  kFullAttention,
  kSlidingAttention,
  kLinearState,
  kAttentionAndState,  // both, of the same normed x
  kMlpOnly,            // neither
};
inline bool HasState(LayerKind kind) {
  return kind == LayerKind::kLinearState || kind == LayerKind::kAttentionAndState;
}
inline bool HasAttention(LayerKind kind) { return kind != LayerKind::kLinearState && kind != LayerKind::kMlpOnly; }

// What comes after that.
enum class MlpKind { kDense, kExperts, kNone };

// The linear states of a hybrid (kernels/linear_state.h; models' own names in checkpoint_tensors_hybrid.cc). Head h
// reads the q and k of key head h / (heads / key_heads).
struct StateConfig {
  enum class Family {
    kLightning,    // silu of q, k, v; a constant decay a head and layer
    kGatedDelta,   // convolution, delta rule, one decay a head
    kKda,          // convolution, delta rule, one decay a key channel
    kMamba2,       // convolution over x, B, C: v, k, q; the step size is decay and rate
    kConvolution,  // v through a convolution and nothing else; q and k are 0
  };
  Family family = Family::kLightning;
  int64_t heads = 0, key_heads = 0;
  int64_t key_dim = 0, value_dim = 0;
  int64_t conv_width = 0;  // 0: no convolution
  bool conv_bias = false;
  bool proj_bias = false;                 // of what goes in and what comes out
  float rate_scale = 1;                   // of the delta rule's rate: 2 allows negative eigenvalues
  float step_low = 0, step_high = 3e38f;  // of Mamba-2's step size
  double out_norm_eps = 1e-6;
  bool out_norm = true;
  bool norm_first = false;      // Mamba-2: before the gate
  int64_t out_norm_groups = 1;  // Mamba-2: each is normed for itself
  // Of what the input projection gives.
  struct Multipliers {
    float gate = 1, q = 1, k = 1, v = 1, step = 1;
  } multipliers;
  int64_t key_width() const { return key_heads * key_dim; }
  int64_t value_width() const { return heads * value_dim; }
  int64_t repeat() const { return heads / key_heads; }
  int64_t decay_width() const { return family == Family::kKda ? key_dim : 1; }  // of a head
};

// Keys and values of softmax layers that come from a latent (DeepSeek's MLA), expanded before they are sent.
struct LatentConfig {
  int64_t rank = 0;
  int64_t own_key_dim = 0;     // of a head
  int64_t shared_key_dim = 0;  // the same for all heads
};

// The expert layers' MLPs.
struct ExpertConfig {
  enum class Score { kSoftmax, kSigmoid, kSoftmaxOfChosen };
  int64_t experts = 0, chosen = 0;
  // Experts lie in groups of equal size; only those of the groups whose two best experts score highest may be chosen.
  int64_t groups = 1, chosen_groups = 1;
  int64_t intermediate = 0;
  int64_t shared_intermediate = 0;  // 0: no shared expert
  bool shared_gate = false;         // the shared expert is weighed by a sigmoid of its own
  Score score = Score::kSoftmax;
  bool renormalise = true;
  bool selection_bias = false;  // added to the scores to choose by
  bool router_bias = false;     // added to the logits
  bool bias = false;            // of the experts' projections
  int64_t latent = 0;           // 0: experts read the layer's h; else a projection of it to so many, and back
  float scale = 1;              // of the chosen experts' sum
};

// x = alpha x + beta f(norm(x)); with from_norm alpha norm(x) + beta f(norm(x)).
struct ResidualConfig {
  bool from_norm = false;
  float full_alpha = 1, full_beta = 1;
  float linear_alpha = 1, linear_beta = 1;
  float mlp_alpha = 1, mlp_beta = 1;
  float mlp_input = 1;  // of the norm before the MLP
};

struct LayerConfig {
  LayerKind kind = LayerKind::kFullAttention;
  int64_t window = 0;  // a query at position i sees keys j with i - window < j <= i; 0 = all
  int rope = -1;       // index into ModelConfig::ropes; -1 = no position embedding in this layer
  MlpKind mlp = MlpKind::kDense;

  bool operator==(const LayerConfig&) const = default;
};

// What generation_config.json proposes when a request says nothing. Absent fields are the server's to choose.
struct SamplingDefaults {
  std::optional<double> temperature, top_p, min_p, repetition_penalty;
  std::optional<int64_t> top_k;
  std::optional<bool> do_sample;  // false: greedy unless a request asks otherwise
};

// A decoder as one struct, the same whether it was read from config.json or from GGUF metadata.
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
// Threads: immutable once returned.
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
  bool post_norms = false;               // Gemma's four norms a layer
  bool norms_stored_minus_one = false;   // the file holds w of (1 + w)
  bool tie_embeddings = false;           // lm_head is embed
  bool whole_qk_norm = false;            // with qk_norm: over all heads of q and of k together
  bool gated_attention = false;          // attention's result times a sigmoid of rows next to those of q
  bool sinks = false;                    // a logit without a value a head, in every layer's softmax
  float logits_scale = 1;                // of the head's output
  std::string tensor_prefix = "model.";  // of the weights' names in a Hugging Face folder

  std::optional<StateConfig> state;
  std::optional<ExpertConfig> experts;
  std::optional<LatentConfig> latent;
  ResidualConfig residual;
  // Of each layer, read from the weights: attention workers need them (proto::LinearConstants).
  struct LayerConstants {
    std::vector<float> conv, conv_bias, skip;  // of linear states
    std::vector<float> sinks;
  };
  std::vector<LayerConstants> constants;  // by layer; empty if no layer has any

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

// Attention as workers count it: ops in layer order, in one layer softmax before a linear state.
struct AttentionOp {
  size_t layer = 0;
  bool state = false;
};
// Threads: pure.
std::vector<AttentionOp> AttentionOpsOf(const ModelConfig& config);

// From config.json, in the spelling of transformers 4 or 5, and generation_config.json (null when there is none).
// `file` names config.json in error texts.
// Errors: kUnimplemented for an architecture, layer kind, rope kind or feature that is not served; kInvalidArgument for
// a field that is missing, of the wrong type, out of range, or contradicts another. Both name the field.
// Threads: pure.
absl::StatusOr<ModelConfig> ConfigFromJson(const std::string& file, const nlohmann::json& config,
                                           const nlohmann::json& generation_config);

// From GGUF metadata and the tensors that are there (biases, tied embeddings, rope factors). Errors as above, naming
// the key.
absl::StatusOr<ModelConfig> ConfigFromGguf(const GgufFile& gguf);

// The checks both share: ranges and agreement. `file` is for error texts.
absl::Status ValidateConfig(const std::string& file, const ModelConfig& config);
// Whether the experts can lie in such groups; `groups` and `chosen_groups` are what the file calls their numbers.
absl::Status ValidateExpertGroups(const std::string& file, const ExpertConfig& experts, const std::string& groups,
                                  const std::string& chosen_groups);

// A state that is a short convolution over the hidden size and nothing else. Its channels are spread over as many heads
// as softmax has for keys, or a multiple of them: attention workers share states by heads.
absl::Status SetConvolutionState(const std::string& file, int64_t width, bool bias, ModelConfig& config);

// Appends `rope` to config.ropes unless it is there; its index.
int AddRope(ModelConfig& config, const RopeSpec& rope);

}  // namespace dovetail::model
