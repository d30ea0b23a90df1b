// Lowering of what goes into attention and linear states, and of what gates their results.
#include <variant>

#include "compute_worker/cuda/cuda_hybrid_model.h"
#include "compute_worker/cuda/lowering.h"

namespace dovetail::compute {
namespace {

kernels::cuda::GateKind KindOf(model::OutputGate::Kind kind) {
  switch (kind) {
    case model::OutputGate::Kind::kSigmoid: return kernels::cuda::GateKind::kSigmoid;
    case model::OutputGate::Kind::kSilu: return kernels::cuda::GateKind::kSilu;
    case model::OutputGate::Kind::kPlain: return kernels::cuda::GateKind::kPlain;
  }
  return kernels::cuda::GateKind::kPlain;
}

bool IsPerHead(const std::optional<model::RmsNorm>& norm, int dim) {
  return norm.has_value() && static_cast<int>(norm->weight.size()) == dim;
}

}  // namespace

Lowering::HeadWidths Lowering::WidthsOf(int op) const {
  const proto::SoftmaxSpec& spec = SpecOf(op);
  return {int64_t{spec.query_heads} * spec.key_dim, int64_t{spec.kv_heads} * spec.key_dim,
          int64_t{spec.kv_heads} * spec.value_dim};
}

absl::Status Lowering::Add(const model::QueryProjection& step) {
  const model::LayerStep* const after = index_ + 1 < input_.steps.size() ? &input_.steps[index_ + 1] : nullptr;
  const auto* const next = after != nullptr ? std::get_if<model::KeyValueProjection>(after) : nullptr;
  if (next == nullptr) return Internal("the queries of attention op ", step.op, " have no keys behind them");
  const bool is_state = input_.table.linear(input_.table.op_group[step.op]) != nullptr;
  if (!is_state && IsHybridStep(*after) && !next->latent.has_value())
    return Unimplemented("attention op ", step.op, ": softmax attention with what only linear states have on a GPU");
  if (is_state) {
    Emit(SeamRecord{SeamCall::kBeforeHeads, step.op});
    AddStateHeads(step, *next);
  } else {
    AddSoftmaxHeads(step, *next);
  }
  Emit(SeamRecord{SeamCall::kLeave, step.op});
  return absl::OkStatus();
}

// A norm over all heads together; those over each head go with the rotation.
void Lowering::AddWholeNorm(const std::optional<model::RmsNorm>& norm, Weight weight, int64_t at, int64_t width,
                            int dim, int64_t step) {
  if (!norm.has_value() || IsPerHead(norm, dim)) return;
  const Place heads = {.tensor = Tensor::kQkv, .at = at * kWireBytes};
  Emit(NormRecord{.x = heads,
                  .out = heads,
                  .w = Name(weight),
                  .x_step = step,
                  .out_step = step,
                  .size = width,
                  .x_type = input_.type,
                  .out_type = input_.type,
                  .eps = norm->eps});
}

// q, k and v in one product, normed and rotated on their way to the tensors that leave.
void Lowering::AddSoftmaxHeads(const model::QueryProjection& step, const model::KeyValueProjection& next) {
  const proto::SoftmaxSpec& spec = SpecOf(step.op);
  const HeadWidths widths = WidthsOf(step.op);
  const bool latent = next.latent.has_value();
  AddProduct(Weight::kFirst, At(Tensor::kH), At(Tensor::kQkv), ProductResult::kWire, latent ? widths.all() : 0);
  if (latent) AddLatentHeads(*next.latent, widths);
  AddWholeNorm(step.head_norm, Weight::kQNorm, 0, widths.q, spec.key_dim, widths.all());
  AddWholeNorm(next.head_norm, Weight::kKNorm, widths.q, widths.k, spec.key_dim, widths.all());
  const bool norms_q = IsPerHead(step.head_norm, spec.key_dim), norms_k = IsPerHead(next.head_norm, spec.key_dim);
  Emit(SeamRecord{SeamCall::kBeforeHeads, step.op});
  Emit(HeadsRecord{.qkv = At(Tensor::kQkv),
                   .q_out = At(Tensor::kQuery),
                   .k_out = At(Tensor::kKeyValue),
                   .v_out = {.tensor = Tensor::kKeyValue, .row = widths.k * kWireBytes},
                   .q_norm = NameIf(norms_q, Weight::kQNorm),
                   .k_norm = NameIf(norms_k, Weight::kKNorm),
                   .qkv_step = widths.all(),
                   .q_step = widths.q,
                   .k_step = widths.k,
                   .v_step = widths.v,
                   .eps = norms_k   ? next.head_norm->eps
                          : norms_q ? step.head_norm->eps
                                    : 0.0f,
                   .type = input_.type,
                   .op = step.op,
                   .rope = step.rope,
                   .q_heads = spec.query_heads,
                   .kv_heads = spec.kv_heads,
                   .key_dim = spec.key_dim,
                   .value_dim = spec.value_dim});
}

void Lowering::AddLatentHeads(const model::LatentKeyValue& latent, const HeadWidths& widths) {
  const int64_t down = ShapeOf(Weight::kLatentDown).rows, rank = ShapeOf(Weight::kLatentK).cols;
  AddProduct(Weight::kLatentDown, At(Tensor::kH), At(Tensor::kLatent), ProductResult::kWire);
  Emit(NormRecord{.x = At(Tensor::kLatent),
                  .out = At(Tensor::kLow),
                  .w = Name(Weight::kLatentNorm),
                  .x_step = down,
                  .out_step = rank,
                  .size = rank,
                  .x_type = input_.type,
                  .out_type = input_.type,
                  .eps = latent.norm.eps});
  AddProduct(Weight::kLatentK, At(Tensor::kLow), At(Tensor::kLatentOwn), ProductResult::kWire);
  Emit(JoinKeysRecord{.own = At(Tensor::kLatentOwn),
                      .shared = {.tensor = Tensor::kLatent, .at = rank * kWireBytes},
                      .out = {.tensor = Tensor::kQkv, .at = widths.q * kWireBytes},
                      .shared_step = down,
                      .out_step = widths.all(),
                      .type = input_.type,
                      .heads = latent.heads,
                      .own_dim = latent.own,
                      .shared_dim = latent.shared});
  AddProduct(Weight::kLatentV, At(Tensor::kLow), {.tensor = Tensor::kQkv, .at = (widths.q + widths.k) * kWireBytes},
             ProductResult::kWire, widths.all());
}

void Lowering::AddStateHeads(const model::QueryProjection& step, const model::KeyValueProjection& next) {
  const HeadWidths widths = WidthsOf(step.op);
  AddProduct(Weight::kFirst, At(Tensor::kInput), At(Tensor::kHeads), ProductResult::kWire);
  if (next.v_factor.has_value())
    AddProduct(Weight::kVFactor, At(Tensor::kInput), At(Tensor::kFactor), ProductResult::kWire);
  Emit(StateInputsRecord{.qkv = At(Tensor::kHeads),
                         .v_factor = At(next.v_factor.has_value() ? Tensor::kFactor : Tensor::kNone),
                         .q = At(Tensor::kQuery),
                         .k = At(Tensor::kKeyValue),
                         .v = {.tensor = Tensor::kKeyValue, .row = widths.k * kWireBytes},
                         .q_width = widths.q,
                         .k_width = widths.k,
                         .v_width = widths.v,
                         .type = input_.type,
                         .silu = step.silu});
  if (next.gates.has_value()) AddStateGates(*next.gates, step.op);
}

void Lowering::AddStateGates(const model::StateGates& gates, int op) {
  const HeadWidths widths = WidthsOf(op);
  AddLowRank(Weight::kDecayLow, Weight::kDecay, At(Tensor::kInput), At(Tensor::kGates), ProductResult::kF32);
  if (gates.rate.has_value()) AddProduct(Weight::kRate, At(Tensor::kInput), At(Tensor::kRates), ProductResult::kF32);
  Emit(StateGatesRecord{
      .x = At(Tensor::kGates),
      .rate = At(gates.rate.has_value() ? Tensor::kRates : Tensor::kNone),
      .out = {.tensor = Tensor::kKeyValue, .align = sizeof(float), .row = (widths.k + widths.v) * kWireBytes},
      .bias = Name(Weight::kDecayBias),
      .factor = Name(Weight::kDecayFactor),
      .scale = gates.input_scale,
      .low = gates.low,
      .high = gates.high,
      .rate_scale = gates.rate_scale,
      .step_is_rate = gates.step_is_rate,
      .heads = SpecOf(op).kv_heads,
      .width = gates.width,
      .stride = SpecOf(op).gates});
}

absl::Status Lowering::AddOutputGate(const model::OutputProjection& step) {
  const model::OutputGate& gate = *step.gate;
  const proto::SoftmaxSpec& spec = SpecOf(step.op);
  OutputGateRecord record{.x = At(Tensor::kArrived),
                          .out = At(Tensor::kGated),
                          .type = input_.type,
                          .scale = gate.scale,
                          .gate_first = gate.gate_first,
                          .width = spec.query_heads * spec.value_dim,
                          .size = spec.value_dim};  // without a norm vectors may have any size
  if (gate.gate.has_value()) {
    AddLowRank(Weight::kGateLow, Weight::kGate, At(Tensor::kInput), At(Tensor::kGate), ProductResult::kWire);
    record.gate = At(Tensor::kGate);
    record.kind = KindOf(gate.kind);
  }
  if (gate.norm.has_value()) {
    const auto size = static_cast<int32_t>(gate.norm->weight.size());
    if (record.width % size != 0 || size % gate.norm_groups != 0 || (gate.norm_groups > 1 && size != record.width))
      return Internal("a norm of ", gate.norm_groups, " x ", size / gate.norm_groups, " does not divide ",
                      record.width);
    record.w = Name(Weight::kGateNorm);
    record.weight_each = gate.norm_groups > 1;
    record.size = size / gate.norm_groups;
    record.eps = gate.norm->eps;
  }
  Emit(record);
  return absl::OkStatus();
}

}  // namespace dovetail::compute
