#include "compute_worker/cuda/cuda_hybrid_model.h"

#include <variant>

#include "kernels/cuda/experts/expert_ops.h"

namespace dovetail::compute {
namespace {

using model::Activation;
using model::Projection;

constexpr int64_t kMostStateDim = 256;

bool IsPlain(Activation activation) { return activation == Activation::kSilu || activation == Activation::kGeluTanh; }

absl::Status LoadLowRank(const model::LowRankProjection& from, CudaWeightReader& reader, bool f32_bias,
                         CudaLowRank& out) {
  if (from.low.has_value()) {
    DT_ASSIGN_OR_RETURN(out.low, reader.Stack({&*from.low}, /*f32_bias=*/false));
  }
  DT_ASSIGN_OR_RETURN(out.out, reader.Stack({&from.out}, f32_bias));
  return absl::OkStatus();
}

absl::Status LoadHeads(const model::KeyValueProjection& step, CudaWeightReader& reader, CudaHybridWeights& out) {
  if (step.gates.has_value()) {
    DT_RETURN_IF_ERROR(LoadLowRank(step.gates->decay, reader, /*f32_bias=*/true, out.decay));
    DT_ASSIGN_OR_RETURN(out.decay_bias, reader.Upload(step.gates->bias));
    DT_ASSIGN_OR_RETURN(out.decay_factor, reader.Upload(step.gates->factor));
    if (step.gates->rate.has_value()) {
      DT_ASSIGN_OR_RETURN(out.rate, reader.Stack({&*step.gates->rate}, /*f32_bias=*/true));
    }
  }
  if (step.v_factor.has_value()) {
    DT_ASSIGN_OR_RETURN(out.v_factor, reader.Stack({&*step.v_factor}, /*f32_bias=*/false));
  }
  if (!step.latent.has_value()) return absl::OkStatus();
  DT_ASSIGN_OR_RETURN(out.latent_down, reader.Stack({&step.latent->down}, /*f32_bias=*/false));
  DT_ASSIGN_OR_RETURN(out.latent_k, reader.Stack({&step.latent->k_up}, /*f32_bias=*/false));
  DT_ASSIGN_OR_RETURN(out.latent_v, reader.Stack({&step.latent->v_up}, /*f32_bias=*/false));
  DT_ASSIGN_OR_RETURN(out.latent_norm, reader.Norm(step.latent->norm));
  return absl::OkStatus();
}

absl::Status LoadExperts(const model::ExpertMlp& step, CudaWeightReader& reader, CudaHybridWeights& out) {
  DT_ASSIGN_OR_RETURN(out.router, reader.FloatMatrix(step.router));
  if (!step.router.bias.empty()) {
    DT_ASSIGN_OR_RETURN(out.router_bias, reader.Upload(step.router.bias));
  }
  if (!step.selection_bias.empty()) {
    DT_ASSIGN_OR_RETURN(out.selection_bias, reader.Upload(step.selection_bias));
  }
  std::vector<const Projection*> gate_up, down;
  const bool gated = step.activation != Activation::kRelu2;
  for (const model::ExpertMlp::Expert& expert : step.experts) {
    if (gated) gate_up.push_back(&expert.gate);
    gate_up.push_back(&expert.up);
    down.push_back(&expert.down);
  }
  DT_ASSIGN_OR_RETURN(CudaProjection stacked, reader.StackExperts(gate_up, gated ? 2 : 1));
  out.expert_gate_up = std::move(stacked.weights);
  out.expert_gate_up_bias = std::move(stacked.bias);
  DT_ASSIGN_OR_RETURN(stacked, reader.StackExperts(down, 1));
  out.expert_down = std::move(stacked.weights);
  out.expert_down_bias = std::move(stacked.bias);
  if (step.latent_down.has_value()) {
    DT_ASSIGN_OR_RETURN(out.experts_latent_down, reader.Stack({&*step.latent_down}, /*f32_bias=*/false));
    DT_ASSIGN_OR_RETURN(out.experts_latent_up, reader.Stack({&*step.latent_up}, /*f32_bias=*/true));
  }
  if (step.shared_gate.has_value()) {
    DT_ASSIGN_OR_RETURN(out.shared_gate, reader.FloatMatrix(*step.shared_gate));
  }
  if (!step.shared.has_value()) return absl::OkStatus();
  std::vector<const Projection*> shared;
  if (gated) shared.push_back(&step.shared->gate);
  shared.push_back(&step.shared->up);
  DT_ASSIGN_OR_RETURN(out.shared_gate_up, reader.Stack(shared, /*f32_bias=*/false));
  DT_ASSIGN_OR_RETURN(out.shared_down, reader.Stack({&step.shared->down}, /*f32_bias=*/true));
  return absl::OkStatus();
}

}  // namespace

bool IsHybridStep(const model::LayerStep& step) {
  if (const auto* key_value = std::get_if<model::KeyValueProjection>(&step))
    return key_value->silu || key_value->gates || key_value->latent || key_value->v_factor;
  if (const auto* output = std::get_if<model::OutputProjection>(&step)) return output->gate.has_value();
  if (const auto* mlp = std::get_if<model::GatedMlp>(&step)) return !IsPlain(mlp->activation);
  return std::holds_alternative<model::ExpertMlp>(step);
}

absl::StatusOr<std::unique_ptr<CudaHybridWeights>> LoadHybridStep(const model::LoadedModel& model, size_t index,
                                                                  CudaWeightReader& reader) {
  auto out = std::make_unique<CudaHybridWeights>();
  const model::LayerStep& step = model.steps[index];
  if (std::holds_alternative<model::QueryProjection>(step)) {
    DT_RETURN_IF_ERROR(LoadHeads(std::get<model::KeyValueProjection>(model.steps[index + 1]), reader, *out));
  } else if (const auto* output = std::get_if<model::OutputProjection>(&step)) {
    if (output->gate->gate.has_value())
      DT_RETURN_IF_ERROR(LoadLowRank(*output->gate->gate, reader, /*f32_bias=*/false, out->gate));
    if (output->gate->norm.has_value()) {
      DT_ASSIGN_OR_RETURN(out->gate_norm, reader.Norm(*output->gate->norm));
    }
  } else if (const auto* experts = std::get_if<model::ExpertMlp>(&step)) {
    DT_RETURN_IF_ERROR(LoadExperts(*experts, reader, *out));
  }
  return out;
}

absl::Status SupportsHybrid(const model::ModelConfig& config) {
  if (config.state.has_value()) {
    const model::StateConfig& state = *config.state;
    if (state.key_dim > kMostStateDim || state.value_dim > kMostStateDim)
      return Unimplemented("linear-attention states of ", state.key_dim, " x ", state.value_dim, "; up to ",
                           kMostStateDim, " x ", kMostStateDim, " run on a GPU");
    if (state.value_width() % 8 != 0 || 2 * state.heads * state.key_dim % 8 != 0)
      return Unimplemented("linear-attention states of ", state.heads, " heads of ", state.key_dim, " x ",
                           state.value_dim, ": a multiple of 8 runs on a GPU");
  }
  if (config.experts.has_value()) {
    const model::ExpertConfig& experts = *config.experts;
    if (experts.experts > kernels::cuda::kMostCudaExperts)
      return Unimplemented(experts.experts, " experts; up to ", kernels::cuda::kMostCudaExperts, " run on a GPU");
    for (const int64_t size : {experts.intermediate, experts.shared_intermediate, experts.latent})
      if (size % 8 != 0) return Unimplemented("experts of ", size, " dimensions; multiples of 8 run on a GPU");
  }
  return absl::OkStatus();
}

uint64_t LayerElements(const model::ModelConfig& config) {
  const uint64_t h = config.hidden_size, mats = config.activation == Activation::kRelu2 ? 2 : 3;
  uint64_t elements = 0;
  for (const model::LayerConfig& layer : config.layers) {
    if (model::HasAttention(layer.kind)) {
      const uint64_t q = config.heads * config.key_dim, o = config.heads * config.value_dim;
      const uint64_t k = config.kv_heads * config.key_dim, v = config.kv_heads * config.value_dim;
      elements += h * (q + o + (config.gated_attention ? o : 0));
      if (!config.latent.has_value()) {
        elements += h * (k + v);
      } else {
        const model::LatentConfig& latent = *config.latent;
        elements += h * (latent.rank + latent.shared_key_dim) + latent.rank * (config.heads * latent.own_key_dim + o);
      }
    }
    if (model::HasState(layer.kind)) {
      const model::StateConfig& state = *config.state;
      elements +=
          h * (2 * state.heads * state.key_dim + 3 * state.value_width() + 2 * state.heads * state.decay_width());
    }
    if (layer.mlp == model::MlpKind::kDense) elements += mats * h * config.intermediate_size;
    if (layer.mlp != model::MlpKind::kExperts) continue;
    const model::ExpertConfig& experts = *config.experts;
    const uint64_t in = experts.latent > 0 ? experts.latent : h;
    elements += mats * (experts.experts * experts.intermediate * in + experts.shared_intermediate * h) +
                2 * experts.experts * h + 2 * experts.latent * h;  // the router takes 4 bytes
  }
  return elements;
}

}  // namespace dovetail::compute
