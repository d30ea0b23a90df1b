#include <cmath>

#include "model/loader.h"

namespace dovetail::model {
namespace {

using Family = StateConfig::Family;

class HybridReader {
 public:
  HybridReader(Loader& loader, int layer, int& ops, std::vector<LayerStep>& steps)
      : loader_(loader),
        c_(loader.config()),
        l_(c_.layers[layer]),
        ops_(ops),
        prefix_(absl::StrCat("layers.", layer, ".")),
        steps_(steps) {}

  absl::Status Read() {
    if (l_.kind != LayerKind::kMlpOnly) DT_RETURN_IF_ERROR(ReadInputNorm(l_.kind == LayerKind::kLinearState));
    if (HasAttention(l_.kind)) {
      op_ = ops_++;
      DT_RETURN_IF_ERROR(ReadAttention());
    }
    if (HasState(l_.kind)) {
      op_ = ops_++;
      DT_RETURN_IF_ERROR(c_.state->family == Family::kConvolution ? ReadConvolution() : ReadState());
    }
    switch (l_.mlp) {
      case MlpKind::kNone: return absl::OkStatus();
      case MlpKind::kDense: return ReadMlp();
      case MlpKind::kExperts: return ReadExperts();
    }
    return absl::OkStatus();
  }

 private:
  bool Has(const std::string& name) const { return loader_.checkpoint().Find(prefix_ + name).ok(); }
  absl::StatusOr<Projection> Project(const std::string& name, bool bias = false) {
    return loader_.ReadProjection(prefix_ + name, bias);
  }
  bool HasGate() const { return c_.activation != Activation::kRelu2; }
  std::optional<float> Restart(float alpha) const {
    return c_.residual.from_norm ? std::optional<float>(alpha) : std::nullopt;
  }

  absl::Status ReadInputNorm(bool linear) {
    InputNorm step;
    DT_ASSIGN_OR_RETURN(step.norm, loader_.ReadNormIf(Has("input_norm.weight"), prefix_ + "input_norm"));
    step.restart = Restart(linear ? c_.residual.linear_alpha : c_.residual.full_alpha);
    steps_.push_back(std::move(step));
    return absl::OkStatus();
  }

  absl::Status ReadAttention() {
    QueryProjection query;
    query.op = op_;
    query.rope = l_.rope;
    DT_ASSIGN_OR_RETURN(query.q, Project("attn.q_proj", c_.q_bias));
    DT_ASSIGN_OR_RETURN(query.head_norm, loader_.ReadNormIf(c_.qk_norm, prefix_ + "attn.q_norm"));
    steps_.push_back(std::move(query));
    KeyValueProjection key_value;
    key_value.op = op_;
    key_value.rope = l_.rope;
    if (c_.latent) {
      DT_ASSIGN_OR_RETURN(key_value.latent, ReadLatent());
    } else {
      DT_ASSIGN_OR_RETURN(key_value.k, Project("attn.k_proj", c_.k_bias));
      DT_ASSIGN_OR_RETURN(key_value.v, Project("attn.v_proj", c_.v_bias));
    }
    DT_ASSIGN_OR_RETURN(key_value.head_norm, loader_.ReadNormIf(c_.qk_norm, prefix_ + "attn.k_norm"));
    steps_.push_back(std::move(key_value));
    steps_.push_back(AttentionCut{op_});
    OutputProjection output;
    output.op = op_;
    output.scale = c_.residual.full_beta;
    DT_ASSIGN_OR_RETURN(output.o, Project("attn.o_proj", c_.o_bias));
    DT_ASSIGN_OR_RETURN(output.post_norm, loader_.ReadNormIf(Has("post_attn_norm.weight"), prefix_ + "post_attn_norm"));
    if (c_.gated_attention) {
      OutputGate gate;
      gate.gate.emplace();
      DT_ASSIGN_OR_RETURN(gate.gate->out, Project("attn.gate_proj", c_.q_bias));
      output.gate = std::move(gate);
    }
    steps_.push_back(std::move(output));
    return absl::OkStatus();
  }

  absl::StatusOr<LatentKeyValue> ReadLatent() {
    LatentKeyValue latent;
    DT_ASSIGN_OR_RETURN(latent.down, Project("attn.latent_proj"));
    DT_ASSIGN_OR_RETURN(latent.norm, loader_.ReadNorm(prefix_ + "attn.latent_norm"));
    DT_ASSIGN_OR_RETURN(latent.k_up, Project("attn.k_up_proj"));
    DT_ASSIGN_OR_RETURN(latent.v_up, Project("attn.v_up_proj"));
    latent.heads = static_cast<int>(c_.heads);
    latent.own = static_cast<int>(c_.latent->own_key_dim);
    latent.shared = static_cast<int>(c_.latent->shared_key_dim);
    return latent;
  }

  absl::StatusOr<StateGates> ReadGates() {
    const StateConfig& s = *c_.state;
    StateGates gates;
    if (Has("state.decay_low_proj.weight")) {
      DT_ASSIGN_OR_RETURN(gates.decay.low, Project("state.decay_low_proj"));
    }
    DT_ASSIGN_OR_RETURN(gates.decay.out, Project("state.decay_proj", c_.state->proj_bias));
    DT_ASSIGN_OR_RETURN(gates.bias, loader_.ReadVector(prefix_ + "state.decay_bias"));
    DT_ASSIGN_OR_RETURN(const std::vector<float> a_log, loader_.ReadVector(prefix_ + "state.a_log"));
    gates.width = static_cast<int>(s.decay_width());
    const bool done = loader_.checkpoint().format() == Checkpoint::Format::kGguf;  // those hold -exp(a) itself
    for (const float a : a_log)
      gates.factor.insert(gates.factor.end(), gates.width,
                          done ? a : static_cast<float>(-std::exp(static_cast<double>(a))));
    gates.low = s.step_low;
    gates.high = s.step_high;
    gates.input_scale = s.multipliers.step;
    gates.rate_scale = s.rate_scale;
    gates.step_is_rate = s.family == Family::kMamba2;
    if (!gates.step_is_rate) {
      DT_ASSIGN_OR_RETURN(gates.rate, Project("state.rate_proj"));
    }
    return gates;
  }

  absl::Status ReadState() {
    const StateConfig& s = *c_.state;
    QueryProjection query;
    query.op = op_;
    query.silu = s.family == Family::kLightning;
    DT_ASSIGN_OR_RETURN(query.q, Project("state.q_proj", s.proj_bias));
    steps_.push_back(std::move(query));
    KeyValueProjection key_value;
    key_value.op = op_;
    key_value.silu = s.family == Family::kLightning;
    DT_ASSIGN_OR_RETURN(key_value.k, Project("state.k_proj", s.proj_bias));
    DT_ASSIGN_OR_RETURN(key_value.v, Project("state.v_proj", s.proj_bias));
    if (s.family != Family::kLightning) {
      DT_ASSIGN_OR_RETURN(key_value.gates, ReadGates());
    }
    steps_.push_back(std::move(key_value));
    steps_.push_back(AttentionCut{op_});
    OutputProjection output;
    output.op = op_;
    output.scale = c_.residual.linear_beta;
    DT_ASSIGN_OR_RETURN(output.o, Project("state.o_proj", s.proj_bias));
    OutputGate gate;
    gate.gate.emplace();
    gate.scale = s.multipliers.gate;
    if (Has("state.gate_low_proj.weight")) {
      DT_ASSIGN_OR_RETURN(gate.gate->low, Project("state.gate_low_proj"));
    }
    DT_ASSIGN_OR_RETURN(gate.gate->out, Project("state.gate_proj", s.proj_bias));
    DT_ASSIGN_OR_RETURN(gate.norm, loader_.ReadNormIf(s.out_norm, prefix_ + "state.out_norm"));
    if (gate.norm) gate.norm->eps = static_cast<float>(s.out_norm_eps);
    gate.norm_groups = static_cast<int>(s.out_norm_groups);
    if (s.family == Family::kGatedDelta || s.family == Family::kMamba2) gate.kind = OutputGate::Kind::kSilu;
    gate.gate_first = s.family == Family::kMamba2 && !s.norm_first;
    output.gate = std::move(gate);
    steps_.push_back(std::move(output));
    return absl::OkStatus();
  }

  // y = (conv((h Wx) * (h Wb)) * (h Wc)) Wo: a state of nothing but the convolution's inputs, whose q and k are 0.
  absl::Status ReadConvolution() {
    const StateConfig& s = *c_.state;
    QueryProjection query;
    query.op = op_;
    DT_ASSIGN_OR_RETURN(query.q, loader_.Zeros(s.heads * s.key_dim));
    steps_.push_back(std::move(query));
    KeyValueProjection key_value;
    key_value.op = op_;
    DT_ASSIGN_OR_RETURN(key_value.k, loader_.Zeros(s.heads * s.key_dim));
    DT_ASSIGN_OR_RETURN(key_value.v, Project("state.v_proj", s.proj_bias));
    DT_ASSIGN_OR_RETURN(key_value.v_factor, Project("state.v_factor_proj", s.proj_bias));
    steps_.push_back(std::move(key_value));
    steps_.push_back(AttentionCut{op_});
    OutputProjection output;
    output.op = op_;
    OutputGate gate;
    gate.kind = OutputGate::Kind::kPlain;
    gate.gate.emplace();
    DT_ASSIGN_OR_RETURN(gate.gate->out, Project("state.gate_proj", s.proj_bias));
    output.gate = std::move(gate);
    DT_ASSIGN_OR_RETURN(output.o, Project("state.o_proj", s.proj_bias));
    steps_.push_back(std::move(output));
    return absl::OkStatus();
  }

  absl::Status ReadMlp() {
    GatedMlp mlp;
    mlp.activation = c_.activation;
    mlp.scale = c_.residual.mlp_beta;
    mlp.restart = Restart(c_.residual.mlp_alpha);
    DT_ASSIGN_OR_RETURN(mlp.norm, loader_.ReadNormIf(Has("pre_mlp_norm.weight"), prefix_ + "pre_mlp_norm"));
    if (mlp.norm)
      for (float& weight : mlp.norm->weight) weight *= c_.residual.mlp_input;
    if (HasGate()) {
      DT_ASSIGN_OR_RETURN(mlp.gate, Project("mlp.gate_proj", c_.mlp_bias));
    }
    DT_ASSIGN_OR_RETURN(mlp.up, Project("mlp.up_proj", c_.mlp_bias));
    DT_ASSIGN_OR_RETURN(mlp.down, Project("mlp.down_proj", c_.mlp_bias));
    DT_ASSIGN_OR_RETURN(mlp.post_norm, loader_.ReadNormIf(Has("post_mlp_norm.weight"), prefix_ + "post_mlp_norm"));
    steps_.push_back(std::move(mlp));
    return absl::OkStatus();
  }

  absl::StatusOr<ExpertMlp::Expert> ReadExpert(const std::string& name) {
    ExpertMlp::Expert expert;
    const bool bias = c_.experts->bias;
    if (HasGate()) {
      DT_ASSIGN_OR_RETURN(expert.gate, Project(name + "gate_proj", bias));
    }
    DT_ASSIGN_OR_RETURN(expert.up, Project(name + "up_proj", bias));
    DT_ASSIGN_OR_RETURN(expert.down, Project(name + "down_proj", bias));
    return expert;
  }

  absl::Status ReadExperts() {
    const ExpertConfig& e = *c_.experts;
    ExpertMlp mlp;
    mlp.activation = c_.activation;
    mlp.scale = c_.residual.mlp_beta;
    mlp.restart = Restart(c_.residual.mlp_alpha);
    mlp.score = e.score;
    mlp.renormalise = e.renormalise;
    mlp.route_scale = e.scale;
    mlp.chosen = static_cast<int>(e.chosen);
    mlp.groups = static_cast<int>(e.groups);
    mlp.chosen_groups = static_cast<int>(e.chosen_groups);
    DT_ASSIGN_OR_RETURN(mlp.norm, loader_.ReadNorm(prefix_ + "pre_mlp_norm"));
    // Rounding the router's weights or inputs would send tokens to other experts.
    DT_ASSIGN_OR_RETURN(mlp.router, loader_.ReadProjection(prefix_ + "router", e.router_bias, WeightFormat::kF32));
    if (e.selection_bias) {
      DT_ASSIGN_OR_RETURN(mlp.selection_bias, loader_.ReadVector(prefix_ + "router.selection_bias"));
    }
    if (e.latent > 0) {
      DT_ASSIGN_OR_RETURN(mlp.latent_down, Project("experts.latent_down_proj"));
      DT_ASSIGN_OR_RETURN(mlp.latent_up, Project("experts.latent_up_proj"));
    }
    for (int64_t x = 0; x < e.experts; ++x) {
      DT_ASSIGN_OR_RETURN(auto expert, ReadExpert(absl::StrCat("experts.", x, ".")));
      mlp.experts.push_back(std::move(expert));
    }
    if (e.shared_intermediate > 0) {
      DT_ASSIGN_OR_RETURN(mlp.shared, ReadExpert("shared_expert."));
    }
    if (e.shared_gate) {
      DT_ASSIGN_OR_RETURN(mlp.shared_gate, loader_.ReadProjection(prefix_ + "shared_gate", false, WeightFormat::kF32));
    }
    steps_.push_back(std::move(mlp));
    return absl::OkStatus();
  }

  Loader& loader_;
  const ModelConfig& c_;
  const LayerConfig& l_;
  int& ops_;    // attention ops of the layers before
  int op_ = 0;  // the one at hand
  const std::string prefix_;
  std::vector<LayerStep>& steps_;
};

}  // namespace

absl::Status ReadHybridLayer(Loader& loader, int layer, int& ops, std::vector<LayerStep>& steps) {
  return HybridReader(loader, layer, ops, steps).Read();
}

}  // namespace dovetail::model
