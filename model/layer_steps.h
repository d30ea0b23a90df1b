#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "kernels/packed_weights.h"
#include "model/config.h"

namespace dovetail::model {

// A layer is a short list of typed steps, cut at attention. A compute worker runs them in order over the residual
// stream x [rows, hidden] (f32) and two working tensors: h (a normed x) and a (what attention gave back). A
// linear-state layer or an expert layer is further kinds of step; nothing else changes.
// Threads: immutable once loaded.

struct RmsNorm {
  std::vector<float> weight;
  float eps = 0;
};

// y = x W^T + bias.
struct Projection {
  kernels::PackedWeights weights;  // [out, in]
  std::vector<float> bias;         // [out] or empty
  std::string name;                // of the weights: checkpoint.Find(name + ".weight")
  // How finely x is rounded before it meets quantised or bf16 weights. With eight bits the small values in the group of
  // an outlier are lost: the logits of SmolLM2-135M (Q4_1) are then up to 9.7e-2 (relative RMS) off, with 16 bits
  // everywhere 1.1e-4 (1.1e-2 with KV in bf16). With its weights in bf16, and KV in f32, it is 1.5e-2 with 8 bits and
  // 4.3e-3 with 16.
  kernels::ActivationBits activations = kernels::ActivationBits::k16;
  const float* bias_or_null() const { return bias.empty() ? nullptr : bias.data(); }
};

// A wide projection as two narrow ones, or one.
struct LowRankProjection {
  std::optional<Projection> low;
  Projection out;
};

struct InputNorm {               // h = norm(x)
  std::optional<RmsNorm> norm;   // absent: h = x
  std::optional<float> restart;  // then x = restart * h: the residual stream begins anew
};
struct QueryProjection {  // q = rope(head_norm(h Wq)); sent as soon as it is there
  int op = 0;
  Projection q;                      // [heads * key_dim, hidden]
  std::optional<RmsNorm> head_norm;  // over key_dim, or over all heads together
  int rope = -1;                     // index into ModelConfig::ropes; -1: none
  bool silu = false;                 // q = silu(q)
};
// What the tokens of a linear state bring in addition to k and v, [rows, heads, decays + rates] in f32.
struct StateGates {
  LowRankProjection decay;          // log decay = factor clamp(softplus(h W + bias), low, high)
  std::vector<float> bias, factor;  // [heads * width]
  float low = 0, high = 3e38f;
  int width = 1;                   // decays of a head
  float input_scale = 1;           // of h W
  bool step_is_rate = false;       // Mamba-2: the clamped step size is also the rate
  std::optional<Projection> rate;  // else rate = rate_scale sigmoid(h W), where there is one
  float rate_scale = 1;
};
// Keys and values from one narrow latent: c = norm(first rows of h down), k = [c k_up | the other rows, for all heads].
struct LatentKeyValue {
  Projection down;                     // [rank + shared, hidden]
  RmsNorm norm;                        // over the rank
  Projection k_up, v_up;               // [heads * own, rank], [heads * value_dim, rank]
  int heads = 0, own = 0, shared = 0;  // of a head's key dimensions
};
struct KeyValueProjection {  // k = rope(head_norm(h Wk)), v = h Wv
  int op = 0;
  Projection k, v;
  std::optional<RmsNorm> head_norm;
  int rope = -1;
  bool silu = false;  // of k and v
  std::optional<StateGates> gates;
  std::optional<LatentKeyValue> latent;  // instead of k and v
  std::optional<Projection> v_factor;    // v = (h Wv) * (h W)
};
struct AttentionCut {  // a = attention(op): computed where the KV lives
  int op = 0;
};
// a = norm(a) * act(h W), or norm(a * act(h W)).
struct OutputGate {
  enum class Kind { kSigmoid, kSilu, kPlain };
  std::optional<LowRankProjection> gate;  // absent: only the norm
  Kind kind = Kind::kSigmoid;
  float scale = 1;              // of h W
  std::optional<RmsNorm> norm;  // over vectors of its weight's size
  int norm_groups = 1;          // parts of the weight that norm a vector each
  bool gate_first = false;      // gated before the norm
};
struct OutputProjection {  // x += scale post_norm(gated(a) Wo)
  int op = 0;              // whose result a is
  Projection o;
  std::optional<RmsNorm> post_norm;
  std::optional<OutputGate> gate;
  float scale = 1;
};
struct GatedMlp {               // x += scale post_norm(down(act(gate h) * up h)), h = norm(x)
  std::optional<RmsNorm> norm;  // absent: h = x
  Projection gate, up, down;    // gate is empty with kRelu2
  Activation activation = Activation::kSilu;
  std::optional<RmsNorm> post_norm;
  std::optional<float> restart;  // as in InputNorm
  float scale = 1;
};
// x += scale sum of weight_e expert_e(h) over the experts that the router chooses, + shared(h); h = norm(x).
struct ExpertMlp {
  struct Expert {
    Projection gate, up, down;  // gate is empty with kRelu2
  };
  RmsNorm norm;
  std::optional<float> restart;
  Projection router;  // [experts, hidden], f32
  std::vector<float> selection_bias;
  ExpertConfig::Score score = ExpertConfig::Score::kSoftmax;
  bool renormalise = true;
  float route_scale = 1;
  int chosen = 1;
  int groups = 1, chosen_groups = 1;  // as in ExpertConfig
  std::vector<Expert> experts;
  std::optional<Projection> latent_down, latent_up;  // experts read h latent_down; their sum goes through latent_up
  std::optional<Expert> shared;
  std::optional<Projection> shared_gate;  // [1, hidden]: the shared expert times sigmoid(h w)
  Activation activation = Activation::kSilu;
  float scale = 1;
};

using LayerStep =
    std::variant<InputNorm, QueryProjection, KeyValueProjection, AttentionCut, OutputProjection, GatedMlp, ExpertMlp>;

}  // namespace dovetail::model
