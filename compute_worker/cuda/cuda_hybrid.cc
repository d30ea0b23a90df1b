#include "compute_worker/cuda/cuda_hybrid.h"

#include <algorithm>
#include <variant>

#include "compute_worker/cuda/launch_runner.h"
#include "compute_worker/cuda/wire_element.h"
#include "kernels/cuda/experts/expert_ops.h"

namespace dovetail::compute {

using kernels::cuda::ExpertTile;

namespace {

void Widen(int64_t& width, int64_t needed) { width = std::max(width, needed); }

}  // namespace

int64_t CudaHybrid::GatesAt(const proto::SoftmaxSpec& spec, int64_t rows) {
  return (rows * spec.kv_heads * (spec.key_dim + spec.value_dim) * kElement + 3) / 4 * 4;
}

absl::StatusOr<std::unique_ptr<CudaHybrid>> CudaHybrid::Create(kernels::cuda::CudaDevice& device,
                                                               const model::LoadedModel& model,
                                                               const proto::AttentionTable& table,
                                                               const std::vector<const CudaHybridWeights*>& weights,
                                                               const Shape& shape) {
  std::unique_ptr<CudaHybrid> hybrid(new CudaHybrid(device, model.config().hidden_size, shape));
  for (size_t i = 0; i < model.steps.size(); ++i)
    if (weights[i] != nullptr) hybrid->WidenFor(model.steps[i], *weights[i], table);
  DT_RETURN_IF_ERROR(hybrid->Allocate());
  DT_RETURN_IF_ERROR(hybrid->AllocateExperts());
  return hybrid;
}

void CudaHybrid::WidenFor(const model::LayerStep& step, const CudaHybridWeights& w,
                          const proto::AttentionTable& table) {
  for (const CudaProjection* low : {&w.decay.low, &w.gate.low}) Widen(widths_.low, low->weights.rows());
  if (const auto* query = std::get_if<model::QueryProjection>(&step)) {
    const proto::SoftmaxSpec& spec = table.softmax(table.op_group[query->op]);
    Widen(widths_.heads,
          int64_t{spec.query_heads} * spec.key_dim + int64_t{spec.kv_heads} * (spec.key_dim + spec.value_dim));
    Widen(widths_.gates, w.decay.out.weights.rows());
    Widen(widths_.latent, w.latent_down.weights.rows());
    Widen(widths_.latent, w.latent_k.weights.rows());
    Widen(widths_.low, w.latent_k.weights.cols());
  } else if (std::holds_alternative<model::OutputProjection>(step)) {
    Widen(widths_.gated, w.gate.out.weights.rows());
    const auto& output = std::get<model::OutputProjection>(step);
    const proto::SoftmaxSpec& spec = table.softmax(table.op_group[output.op]);
    Widen(widths_.gated, int64_t{spec.query_heads} * spec.value_dim);
  } else if (const auto* mlp = std::get_if<model::ExpertMlp>(&step)) {
    Widen(widths_.experts, static_cast<int64_t>(mlp->experts.size()));
    Widen(widths_.chosen, mlp->chosen);
    const auto experts = static_cast<int64_t>(mlp->experts.size());
    Widen(widths_.expert_gate_up, w.expert_gate_up.rows() / experts);
    Widen(widths_.expert_act, w.expert_down.cols());
    Widen(widths_.expert_out, w.expert_down.rows() / experts);
    Widen(widths_.shared_gate_up, w.shared_gate_up.weights.rows());
    Widen(widths_.experts_latent, w.experts_latent_down.weights.rows());
  }
}

absl::Status CudaHybrid::Allocate() {
  const int64_t rows = shape_.rows;
  kept_.resize(shape_.micro_batches);
  for (BufferPtr& kept : kept_) {
    DT_ASSIGN_OR_RETURN(kept, device_.Allocate(rows * hidden_ * kElement));
  }
  DT_ASSIGN_OR_RETURN(heads_, device_.Allocate(rows * widths_.heads * kElement));
  DT_ASSIGN_OR_RETURN(factor_, device_.Allocate(rows * widths_.heads * kElement));
  DT_ASSIGN_OR_RETURN(low_, device_.Allocate(rows * widths_.low * kElement));
  DT_ASSIGN_OR_RETURN(gates_, device_.Allocate(rows * widths_.gates * sizeof(float)));
  DT_ASSIGN_OR_RETURN(rates_, device_.Allocate(rows * widths_.gates * sizeof(float)));
  DT_ASSIGN_OR_RETURN(gate_, device_.Allocate(rows * widths_.gated * kElement));
  DT_ASSIGN_OR_RETURN(gated_, device_.Allocate(rows * widths_.gated * kElement));
  DT_ASSIGN_OR_RETURN(latent_, device_.Allocate(2 * rows * widths_.latent * kElement));
  return absl::OkStatus();
}

absl::Status CudaHybrid::AllocateExperts() {
  const int64_t pairs = shape_.rows * widths_.chosen, rows = shape_.rows;
  if (widths_.experts == 0) return absl::OkStatus();
  const int64_t tiles = std::min(pairs, widths_.experts + pairs / kernels::cuda::kFewTileRows);
  DT_ASSIGN_OR_RETURN(chosen_, device_.Allocate(pairs * sizeof(int32_t)));
  DT_ASSIGN_OR_RETURN(route_weight_, device_.Allocate(pairs * sizeof(float)));
  DT_ASSIGN_OR_RETURN(slot_, device_.Allocate(pairs * sizeof(int32_t)));
  DT_ASSIGN_OR_RETURN(member_, device_.Allocate(pairs * sizeof(int32_t)));
  DT_ASSIGN_OR_RETURN(tiles_, device_.Allocate(tiles * sizeof(ExpertTile)));
  const int64_t gate_up = std::max(pairs * widths_.expert_gate_up, rows * widths_.shared_gate_up);
  const int64_t act = std::max(pairs * widths_.expert_act, rows * widths_.shared_gate_up);
  DT_ASSIGN_OR_RETURN(pair_gate_up_, device_.Allocate(gate_up * kElement));
  DT_ASSIGN_OR_RETURN(pair_act_, device_.Allocate(act * kElement));
  DT_ASSIGN_OR_RETURN(pair_out_, device_.Allocate(pairs * widths_.expert_out * sizeof(float)));
  DT_ASSIGN_OR_RETURN(experts_latent_, device_.Allocate(rows * widths_.experts_latent * kElement));
  DT_ASSIGN_OR_RETURN(experts_latent_sum_, device_.Allocate(rows * widths_.experts_latent * sizeof(float)));
  DT_ASSIGN_OR_RETURN(aside_, device_.Allocate(rows * hidden_ * sizeof(float)));
  return absl::OkStatus();
}

void CudaHybrid::NameTensors(CudaBatch& batch) const {
  const auto name = [&batch](Tensor tensor, const BufferPtr& buffer) {
    batch.tensors[static_cast<size_t>(tensor)] = buffer != nullptr ? buffer->data() : nullptr;
  };
  name(Tensor::kInput, kept_[batch.id.value() % kept_.size()]);
  name(Tensor::kHeads, heads_);
  name(Tensor::kFactor, factor_);
  name(Tensor::kLow, low_);
  name(Tensor::kGates, gates_);
  name(Tensor::kRates, rates_);
  name(Tensor::kGate, gate_);
  name(Tensor::kGated, gated_);
  name(Tensor::kLatent, latent_);
  batch.tensors[static_cast<size_t>(Tensor::kLatentOwn)] =
      latent_->data() + shape_.rows * widths_.latent * kElement;  // its second half
  name(Tensor::kChosen, chosen_);
  name(Tensor::kRouteWeight, route_weight_);
  name(Tensor::kSlot, slot_);
  name(Tensor::kMember, member_);
  name(Tensor::kTiles, tiles_);
  name(Tensor::kPairGateUp, pair_gate_up_);
  name(Tensor::kPairAct, pair_act_);
  name(Tensor::kPairOut, pair_out_);
  name(Tensor::kExpertsLatent, experts_latent_);
  name(Tensor::kExpertsLatentSum, experts_latent_sum_);
  name(Tensor::kExpertsAside, aside_);
}

}  // namespace dovetail::compute
