#include "compute_worker/cuda/weight_names.h"

namespace dovetail::compute {
namespace {

using BufferPtr = std::unique_ptr<kernels::Buffer>;

const CudaProjection* HybridProjection(const CudaHybridWeights& hybrid, Weight weight) {
  switch (weight) {
    case Weight::kDecayLow: return &hybrid.decay.low;
    case Weight::kDecay: return &hybrid.decay.out;
    case Weight::kRate: return &hybrid.rate;
    case Weight::kVFactor: return &hybrid.v_factor;
    case Weight::kLatentDown: return &hybrid.latent_down;
    case Weight::kLatentK: return &hybrid.latent_k;
    case Weight::kLatentV: return &hybrid.latent_v;
    case Weight::kGateLow: return &hybrid.gate.low;
    case Weight::kGate: return &hybrid.gate.out;
    case Weight::kExpertsLatentDown: return &hybrid.experts_latent_down;
    case Weight::kExpertsLatentUp: return &hybrid.experts_latent_up;
    case Weight::kSharedGateUp: return &hybrid.shared_gate_up;
    case Weight::kSharedDown: return &hybrid.shared_down;
    default: return nullptr;
  }
}

const CudaProjection* ProjectionOf(const CudaStep& step, Weight weight) {
  if (weight == Weight::kFirst) return &step.first;
  if (weight == Weight::kSecond) return &step.second;
  return step.hybrid != nullptr ? HybridProjection(*step.hybrid, weight) : nullptr;
}

const BufferPtr* HybridVector(const CudaHybridWeights& hybrid, Weight weight) {
  switch (weight) {
    case Weight::kDecayBias: return &hybrid.decay_bias;
    case Weight::kDecayFactor: return &hybrid.decay_factor;
    case Weight::kLatentNorm: return &hybrid.latent_norm;
    case Weight::kGateNorm: return &hybrid.gate_norm;
    case Weight::kRouter: return &hybrid.router;
    case Weight::kRouterBias: return &hybrid.router_bias;
    case Weight::kSelectionBias: return &hybrid.selection_bias;
    case Weight::kSharedGate: return &hybrid.shared_gate;
    default: return nullptr;
  }
}

const BufferPtr* BufferOf(const CudaStep& step, Weight weight) {
  switch (weight) {
    case Weight::kNorm: return &step.norm;
    case Weight::kPostNorm: return &step.post_norm;
    case Weight::kQNorm: return &step.q_norm;
    case Weight::kKNorm: return &step.k_norm;
    default: return step.hybrid != nullptr ? HybridVector(*step.hybrid, weight) : nullptr;
  }
}

const std::byte* DataOf(const BufferPtr* buffer) {
  return buffer != nullptr && *buffer != nullptr ? (*buffer)->data() : nullptr;
}

}  // namespace

const kernels::cuda::CudaWeights* WeightsOf(const CudaStep& step, Weight weight) {
  if (step.hybrid != nullptr && weight == Weight::kExpertGateUp) return &step.hybrid->expert_gate_up;
  if (step.hybrid != nullptr && weight == Weight::kExpertDown) return &step.hybrid->expert_down;
  const CudaProjection* const projection = ProjectionOf(step, weight);
  return projection != nullptr ? &projection->weights : nullptr;
}

const void* BiasOf(const CudaStep& step, Weight weight) {
  if (step.hybrid != nullptr && weight == Weight::kExpertGateUp) return DataOf(&step.hybrid->expert_gate_up_bias);
  if (step.hybrid != nullptr && weight == Weight::kExpertDown) return DataOf(&step.hybrid->expert_down_bias);
  const CudaProjection* const projection = ProjectionOf(step, weight);
  return projection != nullptr ? DataOf(&projection->bias) : nullptr;
}

const float* VectorOf(const CudaStep& step, Weight weight) {
  return reinterpret_cast<const float*>(DataOf(BufferOf(step, weight)));
}

WeightShape ShapeOf(const CudaStep& step, Weight weight) {
  const kernels::cuda::CudaWeights* const weights = WeightsOf(step, weight);
  if (weights == nullptr) return {};
  return {weights->rows(), weights->cols(), weights->is_kept(), BiasOf(step, weight) != nullptr};
}

}  // namespace dovetail::compute
