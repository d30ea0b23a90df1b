#include "compute_worker/cuda/lower.h"

#include <algorithm>
#include <variant>

#include "compute_worker/cuda/cuda_hybrid_model.h"
#include "compute_worker/cuda/lowering.h"

namespace dovetail::compute {
namespace {

bool IsPlain(model::Activation activation) {
  return activation == model::Activation::kSilu || activation == model::Activation::kGeluTanh;
}

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

absl::StatusOr<LaunchList> Lower(const LowerInput& input) {
  Lowering lowering(input);
  for (size_t i = 0; i < input.steps.size(); ++i) DT_RETURN_IF_ERROR(lowering.AddStep(i));
  return lowering.Take();
}

Lowering::Lowering(const LowerInput& input)
    : input_(input), keeps_input_(std::any_of(input.steps.begin(), input.steps.end(), IsHybridStep)) {}

absl::Status Lowering::AddStep(size_t index) {
  index_ = index;
  return std::visit([this](const auto& step) { return Add(step); }, input_.steps[index]);
}

void Lowering::AddInput(const std::optional<model::RmsNorm>& norm, const std::optional<float>& restart) {
  if (norm.has_value()) {
    Emit(NormRecord{.x = At(Tensor::kX),
                    .out = At(Tensor::kH),
                    .w = Name(Weight::kNorm),
                    .x_step = hidden(),
                    .out_step = hidden(),
                    .size = hidden(),
                    .out_type = input_.type,
                    .eps = norm->eps});
  } else {
    Emit(CombineRecord{.a = At(Tensor::kX), .out = At(Tensor::kH), .out_type = input_.type, .width = hidden()});
  }
  if (!restart.has_value()) return;
  Emit(CombineRecord{
      .a = At(Tensor::kH), .out = At(Tensor::kX), .a_type = input_.type, .a_factor = *restart, .width = hidden()});
}

void Lowering::AddProduct(Weight weight, const Place& in, const Place& out, ProductResult result, int64_t out_step) {
  const WeightShape shape = ShapeOf(weight);
  Emit(ProductRecord{.x = in,
                     .y = out,
                     .w = Name(weight),
                     .n = shape.rows,
                     .k = shape.cols,
                     .y_step = out_step > 0 ? out_step : shape.rows,
                     .result = result,
                     .kept = shape.kept,
                     .biased = shape.biased});
}

void Lowering::AddLowRank(Weight low, Weight weight, const Place& in, const Place& out, ProductResult result) {
  if (ShapeOf(low).rows == 0) return AddProduct(weight, in, out, result);
  AddProduct(low, in, At(Tensor::kLow), ProductResult::kWire);
  AddProduct(weight, At(Tensor::kLow), out, result);
}

void Lowering::AddScaled(Weight weight, const Place& in, const std::optional<model::RmsNorm>& post_norm, float scale,
                         Tensor aside) {
  AddProduct(weight, in, At(aside), ProductResult::kF32);
  if (post_norm.has_value())
    Emit(NormRecord{.x = At(aside),
                    .out = At(aside),
                    .w = Name(Weight::kPostNorm),
                    .x_step = hidden(),
                    .out_step = hidden(),
                    .size = hidden(),
                    .out_type = WireType::kF32,
                    .eps = post_norm->eps});
  Emit(CombineRecord{.a = At(Tensor::kX), .b = At(aside), .out = At(Tensor::kX), .b_factor = scale, .width = hidden()});
}

void Lowering::AddActivation(model::Activation activation, Tensor gate_up, Tensor out, int64_t size, int64_t times) {
  Emit(MlpActivationRecord{.gate_up = At(gate_up),
                           .out = At(out),
                           .size = size,
                           .times = times,
                           .type = input_.type,
                           .kind = KindOf(activation)});
}

absl::Status Lowering::Add(const model::InputNorm& step) {
  AddInput(step.norm, step.restart);
  if (keeps_input_)
    Emit(CopyRecord{.from = At(Tensor::kH), .to = At(Tensor::kInput), .row_bytes = hidden() * kWireBytes});
  return absl::OkStatus();
}

absl::Status Lowering::Add(const model::OutputProjection& step) {
  Emit(SeamRecord{SeamCall::kArrive, step.op});
  if (step.gate.has_value()) DT_RETURN_IF_ERROR(AddOutputGate(step));
  AddScaled(Weight::kFirst, At(step.gate.has_value() ? Tensor::kGated : Tensor::kArrived), step.post_norm, step.scale,
            Tensor::kAside);
  return absl::OkStatus();
}

absl::Status Lowering::Add(const model::GatedMlp& step) {
  AddInput(step.norm, step.restart);
  const int64_t width = ShapeOf(Weight::kSecond).cols;
  AddProduct(Weight::kFirst, At(Tensor::kH), At(Tensor::kGateUp), ProductResult::kWire);
  if (IsPlain(step.activation)) {
    Emit(GatedActivationRecord{.gate_up = At(Tensor::kGateUp),
                               .out = At(Tensor::kAct),
                               .size = width,
                               .type = input_.type,
                               .gelu = step.activation == model::Activation::kGeluTanh});
  } else {
    AddActivation(step.activation, Tensor::kGateUp, Tensor::kAct, width, /*times=*/1);
  }
  AddScaled(Weight::kSecond, At(Tensor::kAct), step.post_norm, step.scale, Tensor::kAside);
  return absl::OkStatus();
}

}  // namespace dovetail::compute
