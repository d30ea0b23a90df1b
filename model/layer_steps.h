#pragma once
#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "kernels/packed_weights.h"
#include "model/config.h"

namespace dovetail::model {

// A layer is a short list of typed steps, cut at attention. A compute worker runs them in order over the residual stream x [rows, hidden]
// (f32) and two working tensors: h (a normed x) and a (what attention gave back). A linear-state layer or an expert layer is further kinds
// of step; nothing else changes. Immutable once loaded; thread-safe.

struct RmsNorm {
  std::vector<float> weight;
  float eps = 0;
};

// y = x W^T + bias.
struct Projection {
  kernels::PackedWeights weights;  // [out, in]
  std::vector<float> bias;         // [out] or empty
  // How finely x is quantised where the weights are. Eight bits lose what stands beside an outlier: the logits of SmolLM2-135M
  // (Q4_1) are then up to 9.7e-2 (relative RMS) off, with 16 bits everywhere 1.1e-4 (4.6e-3 with KV in bf16).
  kernels::ActivationBits activations = kernels::ActivationBits::k16;
  const float* bias_or_null() const { return bias.empty() ? nullptr : bias.data(); }
};

struct InputNorm {  // h = norm(x)
  RmsNorm norm;
};
struct QueryProjection {  // q = rope(head_norm(h Wq)); sent as soon as it is there
  int op = 0;
  Projection q;                      // [heads * key_dim, hidden]
  std::optional<RmsNorm> head_norm;  // over key_dim
  int rope = -1;                     // index into ModelConfig::ropes; -1: none
};
struct KeyValueProjection {  // k = rope(head_norm(h Wk)), v = h Wv
  int op = 0;
  Projection k, v;
  std::optional<RmsNorm> head_norm;
  int rope = -1;
};
struct AttentionCut {  // a = attention(op): computed where the KV lives
  int op = 0;
};
struct OutputProjection {  // x += post_norm(a Wo)
  int op = 0;                        // whose result a is
  Projection o;
  std::optional<RmsNorm> post_norm;
};
struct GatedMlp {  // x += post_norm(down(act(gate h) * up h)), h = norm(x)
  RmsNorm norm;
  Projection gate, up, down;
  Activation activation = Activation::kSilu;
  std::optional<RmsNorm> post_norm;
};

using LayerStep =
    std::variant<InputNorm, QueryProjection, KeyValueProjection, AttentionCut, OutputProjection, GatedMlp>;

}  // namespace dovetail::model
