#include "compute_worker/cuda/cuda_hybrid.h"

#include <algorithm>
#include <variant>

#include "kernels/cuda/rows/row_ops.h"
#include "kernels/cuda/state/layer_ops.h"

namespace dovetail::compute {

using kernels::cuda::WireType;

namespace {

constexpr int64_t kElement = 2;  // bytes of the wire types of a GPU
constexpr int64_t kRowStep = 8;  // products of more rows than that take a multiple of it
constexpr int64_t kMostPadded = 256;

int64_t PaddedRows(int64_t rows) {
  return rows <= kRowStep || rows > kMostPadded ? rows : (rows + kRowStep - 1) / kRowStep * kRowStep;
}

float* Floats(const std::unique_ptr<kernels::Buffer>& buffer) {
  return buffer != nullptr ? reinterpret_cast<float*>(buffer->data()) : nullptr;
}

void Widen(int64_t& width, int64_t needed) { width = std::max(width, needed); }

}  // namespace

int64_t CudaHybrid::GatesAt(const proto::SoftmaxSpec& spec, int64_t rows) {
  return (rows * spec.kv_heads * (spec.key_dim + spec.value_dim) * kElement + 3) / 4 * 4;
}

absl::StatusOr<std::unique_ptr<CudaHybrid>> CudaHybrid::Create(
    kernels::cuda::CudaDevice& device, const model::LoadedModel& model, const proto::AttentionTable& table,
    std::vector<const CudaHybridWeights*> weights, kernels::cuda::CudaStream& stream,
    kernels::cuda::CudaProduct& product, const Shape& shape) {
  std::unique_ptr<CudaHybrid> hybrid(new CudaHybrid(device, model, table, std::move(weights), stream, product, shape));
  for (size_t i = 0; i < model.steps.size(); ++i)
    if (hybrid->weights_[i] != nullptr) hybrid->WidenFor(i);
  DT_RETURN_IF_ERROR(hybrid->Allocate());
  DT_RETURN_IF_ERROR(hybrid->AllocateExperts());
  return hybrid;
}

void CudaHybrid::WidenFor(size_t index) {
  const CudaHybridWeights& w = *weights_[index];
  const model::LayerStep& step = model_.steps[index];
  for (const CudaProjection* low : {&w.decay.low, &w.gate.low}) Widen(widths_.low, low->weights.rows());
  if (const auto* query = std::get_if<model::QueryProjection>(&step)) {
    const proto::SoftmaxSpec& spec = table_.softmax(table_.op_group[query->op]);
    Widen(widths_.heads,
          int64_t{spec.query_heads} * spec.key_dim + int64_t{spec.kv_heads} * (spec.key_dim + spec.value_dim));
    Widen(widths_.gates, w.decay.out.weights.rows());
    Widen(widths_.latent, w.latent_down.weights.rows());
    Widen(widths_.latent, w.latent_k.weights.rows());
    Widen(widths_.low, w.latent_k.weights.cols());
  } else if (std::holds_alternative<model::OutputProjection>(step)) {
    Widen(widths_.gated, w.gate.out.weights.rows());
    const auto& output = std::get<model::OutputProjection>(step);
    const proto::SoftmaxSpec& spec = table_.softmax(table_.op_group[output.op]);
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
    DT_ASSIGN_OR_RETURN(kept, device_.Allocate(rows * hidden() * kElement));
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

absl::Status CudaHybrid::Multiply(const CudaProjection& w, const void* in, int64_t rows, Result result, void* out,
                                  int64_t out_step) {
  kernels::cuda::GemmCall call{};
  call.x = in;
  call.y = out;
  call.bias = w.bias != nullptr ? w.bias->data() : nullptr;
  call.m = PaddedRows(rows);
  call.n = w.weights.rows();
  call.k = call.x_stride = w.weights.cols();
  call.y_stride = out_step > 0 ? out_step : call.n;
  call.type = shape_.type == WireType::kBF16 ? kernels::cuda::GemmType::kBF16 : kernels::cuda::GemmType::kF16;
  call.y_is_f32 = result != Result::kWire;
  call.accumulate = result == Result::kAdded;
  return product_.Run(stream_, w.weights, call);
}

absl::Status CudaHybrid::MultiplyLowRank(const CudaLowRank& w, const void* in, int64_t rows, Result result, void* out) {
  if (w.low.weights.rows() == 0) return Multiply(w.out, in, rows, result, out);
  DT_RETURN_IF_ERROR(Multiply(w.low, in, rows, Result::kWire, low_->data()));
  return Multiply(w.out, low_->data(), rows, result, out);
}

absl::Status CudaHybrid::KeepInput(int micro_batch, const void* h, int64_t rows) {
  return stream_.Copy(kept_[micro_batch]->data(), h, rows * hidden() * kElement);
}

absl::Status CudaHybrid::ComputeGates(const model::StateGates& gates, const CudaHybridWeights& weights,
                                      const proto::SoftmaxSpec& spec, const void* h, int64_t rows, float* out) {
  DT_RETURN_IF_ERROR(MultiplyLowRank(weights.decay, h, rows, Result::kF32, gates_->data()));
  kernels::cuda::StateGatesLaunch launch;
  launch.x = Floats(gates_);
  launch.bias = Floats(weights.decay_bias);
  launch.factor = Floats(weights.decay_factor);
  launch.scale = gates.input_scale;
  launch.low = gates.low;
  launch.high = gates.high;
  launch.rate_scale = gates.rate_scale;
  launch.step_is_rate = gates.step_is_rate;
  launch.rows = static_cast<int32_t>(rows);
  launch.heads = spec.kv_heads;
  launch.width = gates.width;
  launch.stride = spec.gates;
  launch.out = out;
  if (gates.rate.has_value()) {
    DT_RETURN_IF_ERROR(Multiply(weights.rate, h, rows, Result::kF32, rates_->data()));
    launch.rate = Floats(rates_);
  }
  return kernels::cuda::StateGates(stream_, launch);
}

absl::Status CudaHybrid::StateHeads(int micro_batch, size_t index, const CudaProjection& qkv, int64_t rows,
                                    std::byte* query, std::byte* key_value) {
  const auto& step = std::get<model::QueryProjection>(model_.steps[index]);
  const auto& next = std::get<model::KeyValueProjection>(model_.steps[index + 1]);
  const CudaHybridWeights& weights = *weights_[index];
  const proto::SoftmaxSpec& spec = table_.softmax(table_.op_group[step.op]);
  const void* const h = kept_[micro_batch]->data();
  kernels::cuda::StateInputsLaunch inputs;
  inputs.q_width = int64_t{spec.query_heads} * spec.key_dim;
  inputs.k_width = int64_t{spec.kv_heads} * spec.key_dim;
  inputs.v_width = int64_t{spec.kv_heads} * spec.value_dim;
  inputs.q = query;
  inputs.k = key_value;
  inputs.v = key_value + rows * inputs.k_width * kElement;
  inputs.qkv = heads_->data();
  inputs.type = shape_.type;
  inputs.silu = step.silu;
  inputs.rows = static_cast<int32_t>(rows);
  DT_RETURN_IF_ERROR(Multiply(qkv, h, rows, Result::kWire, heads_->data()));
  if (next.v_factor.has_value()) {
    DT_RETURN_IF_ERROR(Multiply(weights.v_factor, h, rows, Result::kWire, factor_->data()));
    inputs.v_factor = factor_->data();
  }
  DT_RETURN_IF_ERROR(kernels::cuda::StateInputs(stream_, inputs));
  if (!next.gates.has_value()) return absl::OkStatus();
  return ComputeGates(*next.gates, weights, spec, h, rows, reinterpret_cast<float*>(key_value + GatesAt(spec, rows)));
}

absl::Status CudaHybrid::LatentHeads(size_t index, const CudaProjection& q, const void* h, int64_t rows,
                                     std::byte* qkv) {
  const auto& step = std::get<model::QueryProjection>(model_.steps[index]);
  const auto& latent = *std::get<model::KeyValueProjection>(model_.steps[index + 1]).latent;
  const CudaHybridWeights& weights = *weights_[index];
  const proto::SoftmaxSpec& spec = table_.softmax(table_.op_group[step.op]);
  const int64_t q_width = int64_t{spec.query_heads} * spec.key_dim, k_width = int64_t{spec.kv_heads} * spec.key_dim;
  const int64_t width = q_width + k_width + int64_t{spec.kv_heads} * spec.value_dim;
  const int64_t down = weights.latent_down.weights.rows(), rank = weights.latent_k.weights.cols();
  std::byte* const own = latent_->data() + shape_.rows * widths_.latent * kElement;
  DT_RETURN_IF_ERROR(Multiply(q, h, rows, Result::kWire, qkv, width));
  DT_RETURN_IF_ERROR(Multiply(weights.latent_down, h, rows, Result::kWire, latent_->data()));
  kernels::cuda::RmsNormLaunch norm;
  norm.x = latent_->data();
  norm.out = low_->data();
  norm.weight = Floats(weights.latent_norm);
  norm.x_step = down;
  norm.out_step = rank;
  norm.x_type = norm.out_type = shape_.type;
  norm.eps = latent.norm.eps;
  norm.rows = static_cast<int32_t>(rows);
  norm.size = static_cast<int32_t>(rank);
  DT_RETURN_IF_ERROR(kernels::cuda::RmsNorm(stream_, norm));
  DT_RETURN_IF_ERROR(Multiply(weights.latent_k, low_->data(), rows, Result::kWire, own));
  kernels::cuda::JoinKeysLaunch join;
  join.own = own;
  join.shared = latent_->data() + rank * kElement;
  join.out = qkv + q_width * kElement;
  join.type = shape_.type;
  join.shared_step = down;
  join.out_step = width;
  join.rows = static_cast<int32_t>(rows);
  join.heads = latent.heads;
  join.own_dim = latent.own;
  join.shared_dim = latent.shared;
  DT_RETURN_IF_ERROR(kernels::cuda::JoinKeys(stream_, join));
  return Multiply(weights.latent_v, low_->data(), rows, Result::kWire, qkv + (q_width + k_width) * kElement, width);
}

namespace {

kernels::cuda::GateKind KindOf(model::OutputGate::Kind kind) {
  switch (kind) {
    case model::OutputGate::Kind::kSigmoid: return kernels::cuda::GateKind::kSigmoid;
    case model::OutputGate::Kind::kSilu: return kernels::cuda::GateKind::kSilu;
    case model::OutputGate::Kind::kPlain: return kernels::cuda::GateKind::kPlain;
  }
  return kernels::cuda::GateKind::kPlain;
}

}  // namespace

absl::StatusOr<const void*> CudaHybrid::Gated(int micro_batch, size_t index, const void* attended, int64_t rows) {
  const auto& step = std::get<model::OutputProjection>(model_.steps[index]);
  const model::OutputGate& gate = *step.gate;
  const CudaHybridWeights& weights = *weights_[index];
  const proto::SoftmaxSpec& spec = table_.softmax(table_.op_group[step.op]);
  kernels::cuda::OutputGateLaunch launch;
  launch.x = attended;
  launch.out = gated_->data();
  launch.type = shape_.type;
  launch.scale = gate.scale;
  launch.gate_first = gate.gate_first;
  launch.rows = static_cast<int32_t>(rows);
  launch.width = spec.query_heads * spec.value_dim;
  launch.size = launch.width;
  if (gate.gate.has_value()) {
    DT_RETURN_IF_ERROR(MultiplyLowRank(weights.gate, kept_[micro_batch]->data(), rows, Result::kWire, gate_->data()));
    launch.gate = gate_->data();
    launch.kind = KindOf(gate.kind);
  }
  if (gate.norm.has_value()) {
    const auto size = static_cast<int32_t>(gate.norm->weight.size());
    if (launch.width % size != 0 || size % gate.norm_groups != 0 || (gate.norm_groups > 1 && size != launch.width))
      return Internal("a norm of ", gate.norm_groups, " x ", size / gate.norm_groups, " does not divide ",
                      launch.width);
    launch.weight = Floats(weights.gate_norm);
    launch.weight_each = gate.norm_groups > 1;
    launch.size = size / gate.norm_groups;
    launch.eps = gate.norm->eps;
  } else {  // vectors of any size
    launch.size = spec.value_dim;
  }
  DT_RETURN_IF_ERROR(kernels::cuda::OutputGate(stream_, launch));
  return gated_->data();
}

namespace {

kernels::cuda::MlpKind KindOf(model::Activation activation) {
  switch (activation) {
    case model::Activation::kSilu: return kernels::cuda::MlpKind::kSilu;
    case model::Activation::kGeluTanh: return kernels::cuda::MlpKind::kGeluTanh;
    case model::Activation::kClampedSwiglu: return kernels::cuda::MlpKind::kClampedSwiglu;
    case model::Activation::kRelu2: return kernels::cuda::MlpKind::kRelu2;
  }
  return kernels::cuda::MlpKind::kSilu;
}

}  // namespace

absl::Status CudaHybrid::Activate(model::Activation activation, const void* gate_up, void* out, int64_t rows,
                                  int64_t width) {
  kernels::cuda::MlpActivationLaunch launch;
  launch.gate_up = gate_up;
  launch.out = out;
  launch.type = shape_.type;
  launch.kind = KindOf(activation);
  launch.rows = static_cast<int32_t>(rows);
  launch.size = static_cast<int32_t>(width);
  return kernels::cuda::MlpActivation(stream_, launch);
}

}  // namespace dovetail::compute
