#include <algorithm>
#include <cstring>
#include <variant>

#include "compute_worker/cpu/dense_executor.h"
#include "kernels/activation.h"
#include "kernels/gemm.h"
#include "kernels/moe.h"
#include "kernels/rms_norm.h"
#include "kernels/state_gates.h"

// The dense steps around linear states, and experts.

namespace dovetail::compute {

DenseExecutor::Widths DenseExecutor::WidthsOf(const model::LoadedModel& model) {
  Widths w;
  w.cols = model.config().hidden_size;
  const auto widen = [](int64_t& width, int64_t needed) { width = std::max(width, needed); };
  const auto low_rank = [&](const model::LowRankProjection& projection) {
    widen(w.gate, projection.out.weights.rows());
    if (projection.low) widen(w.up, projection.low->weights.rows());
    widen(w.cols, projection.out.weights.cols());
  };
  const auto mlp = [&](const auto& gated, int64_t copies) {
    widen(w.gate, copies * gated.up.weights.rows());
    widen(w.up, copies * gated.up.weights.rows());
    widen(w.cols, gated.down.weights.cols());
  };
  for (const model::LayerStep& step : model.steps) {
    if (const auto* query = std::get_if<model::QueryProjection>(&step)) {
      widen(w.heads, query->q.weights.rows());
    } else if (const auto* key_value = std::get_if<model::KeyValueProjection>(&step)) {
      widen(w.heads, key_value->k.weights.rows() + key_value->v.weights.rows());
      if (const auto& latent = key_value->latent) {
        widen(w.heads, int64_t{latent->heads} * (latent->own + latent->shared) + latent->v_up.weights.rows());
        widen(w.gate, std::max(latent->down.weights.rows(), latent->k_up.weights.rows()));
        widen(w.up, latent->k_up.weights.cols());
        widen(w.cols, latent->k_up.weights.cols());
      }
      if (key_value->v_factor) widen(w.gate, key_value->v_factor->weights.rows());
      if (!key_value->gates) continue;
      low_rank(key_value->gates->decay);
      if (key_value->gates->rate) widen(w.up, key_value->gates->rate->weights.rows());
    } else if (const auto* output = std::get_if<model::OutputProjection>(&step)) {
      widen(w.heads, output->o.weights.cols());
      widen(w.cols, output->o.weights.cols());
      if (output->gate && output->gate->gate) low_rank(*output->gate->gate);
    } else if (const auto* dense = std::get_if<model::GatedMlp>(&step)) {
      mlp(*dense, 1);
    } else if (const auto* experts = std::get_if<model::ExpertMlp>(&step)) {
      widen(w.experts, static_cast<int64_t>(experts->experts.size()));
      widen(w.chosen, experts->chosen);
      mlp(experts->experts[0], 1);  // one expert at a time, for at most all rows
      if (experts->shared) mlp(*experts->shared, 1);
      if (experts->latent_down) widen(w.up, experts->latent_down->weights.rows());
    }
  }
  return w;
}

absl::Status DenseExecutor::Restart(const std::optional<float>& alpha, MicroBatch& batch) {
  if (!alpha.has_value()) return absl::OkStatus();
  return kernels::Scale(context_, Floats(*batch.h), *alpha, Floats(*batch.x),
                        batch.wire->rows() * model_.config().hidden_size);
}

absl::Status DenseExecutor::Silu(float* x, int64_t n) {
  constexpr int64_t kRun = 4096;
  DT_RETURN_IF_ERROR(kernels::SigmoidGate(context_, {.x = x, .gate = x, .out = x, .rows = n / kRun, .size = kRun}));
  float* rest = x + n / kRun * kRun;
  return kernels::SigmoidGate(context_, {.x = rest, .gate = rest, .out = rest, .rows = 1, .size = n % kRun});
}

absl::Status DenseExecutor::Multiply(const model::Projection& projection, const float* in, int64_t rows, float* out) {
  const kernels::GemmOutput output{&projection.weights,       out,   projection.weights.rows(),
                                   projection.bias_or_null(), false, projection.activations};
  return kernels::Gemm({in, projection.weights.cols(), rows, std::span(&output, 1), gemm_scratch()}, *stream_);
}

absl::Status DenseExecutor::ProjectLowRank(const model::LowRankProjection& projection, const float* in, int64_t rows,
                                           float* out) {
  if (!projection.low.has_value()) return Multiply(projection.out, in, rows, out);
  DT_RETURN_IF_ERROR(Multiply(*projection.low, in, rows, Floats(*up_)));
  return Multiply(projection.out, Floats(*up_), rows, out);
}

// k [rows, heads, own + shared] and v, from the latent of h.
absl::Status DenseExecutor::ExpandLatent(const model::LatentKeyValue& latent, MicroBatch& batch, float* k, float* v) {
  const int64_t rows = batch.wire->rows(), rank = latent.k_up.weights.cols(), width = latent.down.weights.rows();
  const int64_t dim = latent.own + latent.shared;
  DT_RETURN_IF_ERROR(Multiply(latent.down, Floats(*batch.h), rows, Floats(*gate_)));
  kernels::RmsNormArgs norm;
  norm.x = Floats(*gate_);
  norm.weight = latent.norm.weight.data();
  norm.eps = latent.norm.eps;
  norm.rows = rows;
  norm.size = static_cast<int>(rank);
  norm.out = Floats(*up_);
  norm.x_step = width;
  DT_RETURN_IF_ERROR(kernels::RmsNorm(context_, norm));
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t head = 0; head < latent.heads; ++head)
      std::memcpy(k + (row * latent.heads + head) * dim + latent.own, Floats(*gate_) + row * width + rank,
                  latent.shared * sizeof(float));
  DT_RETURN_IF_ERROR(Multiply(latent.k_up, Floats(*up_), rows, Floats(*gate_)));
  for (int64_t i = 0; i < rows * latent.heads; ++i)
    std::memcpy(k + i * dim, Floats(*gate_) + i * latent.own, latent.own * sizeof(float));
  return Multiply(latent.v_up, Floats(*up_), rows, v);
}

absl::Status DenseExecutor::ComputeGates(const model::StateGates& gates, int op, MicroBatch& batch) {
  const int64_t rows = batch.wire->rows();
  const proto::SoftmaxSpec& spec = table_.softmax(table_.op_group[op]);
  float* out = batch.wire->gates(op);
  DT_RETURN_IF_ERROR(ProjectLowRank(gates.decay, Floats(*batch.h), rows, Floats(*gate_)));
  if (gates.input_scale != 1)
    DT_RETURN_IF_ERROR(kernels::Scale(context_, Floats(*gate_), gates.input_scale, Floats(*gate_),
                                      rows * gates.decay.out.weights.rows()));
  kernels::StepDecayArgs decay;
  decay.x = Floats(*gate_);
  decay.bias = gates.bias.data();
  decay.factor = gates.factor.data();
  decay.low = gates.low;
  decay.high = gates.high;
  decay.rate = gates.step_is_rate;
  decay.rows = rows;
  decay.heads = spec.kv_heads;
  decay.width = gates.width;
  decay.stride = spec.gates;
  decay.out = out;
  DT_RETURN_IF_ERROR(kernels::StepDecay(context_, decay));
  if (!gates.rate.has_value()) return absl::OkStatus();
  DT_RETURN_IF_ERROR(Multiply(*gates.rate, Floats(*batch.h), rows, Floats(*up_)));
  return kernels::SigmoidRate(context_,
                              {Floats(*up_), gates.rate_scale, rows, spec.kv_heads, spec.gates, gates.width, out});
}

// a = a * act(scale h W).
absl::Status DenseExecutor::GateBy(const model::OutputGate& gate, float* attended, int64_t width, MicroBatch& batch) {
  const int64_t rows = batch.wire->rows();
  DT_RETURN_IF_ERROR(ProjectLowRank(*gate.gate, Floats(*batch.h), rows, Floats(*gate_)));
  if (gate.scale != 1)
    DT_RETURN_IF_ERROR(kernels::Scale(context_, Floats(*gate_), gate.scale, Floats(*gate_), rows * width));
  if (gate.kind == model::OutputGate::Kind::kSigmoid)
    return kernels::SigmoidGate(context_,
                                {.x = attended, .gate = Floats(*gate_), .out = attended, .rows = rows, .size = width});
  kernels::GatedActivationArgs args;
  const bool silu = gate.kind == model::OutputGate::Kind::kSilu;
  args.activation = silu ? kernels::Activation::kSilu : kernels::Activation::kIdentity;
  args.gate = Floats(*gate_);
  args.up = attended;
  args.out = attended;
  args.rows = rows;
  args.size = width;
  return kernels::GatedActivation(context_, args);
}

absl::Status DenseExecutor::ApplyGate(const model::OutputGate& gate, float* attended, int64_t width,
                                      MicroBatch& batch) {
  if (gate.gate.has_value() && gate.gate_first) DT_RETURN_IF_ERROR(GateBy(gate, attended, width, batch));
  if (gate.norm.has_value()) {
    const auto weights = static_cast<int64_t>(gate.norm->weight.size());
    if (width % weights != 0 || weights % gate.norm_groups != 0 || (gate.norm_groups > 1 && weights != width))
      return Internal("a norm of ", gate.norm_groups, " x ", weights / gate.norm_groups, " does not divide ", width);
    kernels::RmsNormArgs args;
    args.x = args.out = attended;
    args.weight = gate.norm->weight.data();
    args.weight_each = gate.norm_groups > 1;
    args.eps = gate.norm->eps;
    args.rows = batch.wire->rows();
    args.size = static_cast<int>(weights / gate.norm_groups);
    args.vectors = static_cast<int>(width) / args.size;
    DT_RETURN_IF_ERROR(kernels::RmsNorm(context_, args));
  }
  return gate.gate.has_value() && !gate.gate_first ? GateBy(gate, attended, width, batch) : absl::OkStatus();
}

namespace {

kernels::Activation ActivationOf(model::Activation activation) {
  switch (activation) {
    case model::Activation::kSilu: return kernels::Activation::kSilu;
    case model::Activation::kGeluTanh: return kernels::Activation::kGeluTanh;
    case model::Activation::kClampedSwiglu: return kernels::Activation::kClampedSwiglu;
    case model::Activation::kRelu2: return kernels::Activation::kRelu;
  }
  return kernels::Activation::kSilu;
}

}  // namespace

// gate_ = act(in gate) * (in up); without a gate relu(in up)^2.
absl::Status DenseExecutor::RunGatedMlp(const model::Projection& gate, const model::Projection& up,
                                        model::Activation activation, const float* in, int64_t rows) {
  const auto output = [](const model::Projection& projection, float* y) {
    return kernels::GemmOutput{&projection.weights,       y,     projection.weights.rows(),
                               projection.bias_or_null(), false, projection.activations};
  };
  const bool gated = activation != model::Activation::kRelu2;
  const kernels::GemmOutput outputs[] = {output(up, Floats(gated ? *up_ : *gate_)), output(gate, Floats(*gate_))};
  DT_RETURN_IF_ERROR(
      kernels::Gemm({in, up.weights.cols(), rows, std::span(outputs, gated ? 2 : 1), gemm_scratch()}, *stream_));
  kernels::GatedActivationArgs args;
  args.activation = ActivationOf(activation);
  args.gate = Floats(*gate_);
  args.up = gated ? Floats(*up_) : args.gate;
  args.out = Floats(*gate_);
  args.rows = rows;
  args.size = up.weights.rows();
  return kernels::GatedActivation(context_, args);
}

namespace {

kernels::RouterScore ScoreOf(model::ExpertConfig::Score score) {
  switch (score) {
    case model::ExpertConfig::Score::kSoftmax: return kernels::RouterScore::kSoftmax;
    case model::ExpertConfig::Score::kSigmoid: return kernels::RouterScore::kSigmoid;
    case model::ExpertConfig::Score::kSoftmaxOfChosen: return kernels::RouterScore::kSoftmaxOfChosen;
  }
  return kernels::RouterScore::kSoftmax;
}

}  // namespace

// Expert by expert over the rows that chose it: their outputs lie in expert_out_, slot_ says where.
absl::Status DenseExecutor::RunExperts(const model::ExpertMlp& step, const float* h, int64_t width, int64_t rows) {
  const int64_t pairs = rows * step.chosen;
  int32_t next = 0;
  for (size_t e = 0; e < step.experts.size(); ++e) {
    const int32_t first = next;
    for (int64_t pair = 0; pair < pairs; ++pair) {
      if (route_[pair] != static_cast<int32_t>(e)) continue;
      slot_[pair] = next;
      member_[next++] = static_cast<int32_t>(pair / step.chosen);
    }
    if (next == first) continue;
    float* in = Floats(*expert_in_);
    for (int32_t i = first; i < next; ++i)
      std::memcpy(in + (i - first) * width, h + member_[i] * width, width * sizeof(float));
    const model::ExpertMlp::Expert& expert = step.experts[e];
    DT_RETURN_IF_ERROR(RunGatedMlp(expert.gate, expert.up, step.activation, in, next - first));
    DT_RETURN_IF_ERROR(Multiply(expert.down, Floats(*gate_), next - first, Floats(*expert_out_) + first * width));
  }
  return absl::OkStatus();
}

// x += scale sigmoid(h gate) shared(h).
absl::Status DenseExecutor::AddSharedExpert(const model::ExpertMlp& step, const float* h, MicroBatch& batch) {
  const int64_t rows = batch.wire->rows(), hidden = model_.config().hidden_size;
  DT_RETURN_IF_ERROR(RunGatedMlp(step.shared->gate, step.shared->up, step.activation, h, rows));
  if (!step.shared_gate.has_value())
    return AddProjection(step.shared->down, std::nullopt, step.scale, Floats(*gate_), batch);
  float* out = Floats(*out_);
  DT_RETURN_IF_ERROR(Multiply(step.shared->down, Floats(*gate_), rows, out));
  float* weight = Floats(*router_);
  DT_RETURN_IF_ERROR(Multiply(*step.shared_gate, h, rows, weight));
  DT_RETURN_IF_ERROR(kernels::SigmoidRate(context_, {weight, step.scale, rows, 1, 1, 0, weight}));
  for (int64_t row = 0; row < rows; ++row)
    DT_RETURN_IF_ERROR(kernels::Scale(context_, out + row * hidden, weight[row], out + row * hidden, hidden));
  return kernels::Add(context_, Floats(*batch.x), out, Floats(*batch.x), rows * hidden);
}

absl::Status DenseExecutor::RunStep(const model::ExpertMlp& step, MicroBatch& batch, const std::vector<WorkerPart>&) {
  const int64_t rows = batch.wire->rows(), hidden = model_.config().hidden_size;
  float* h = Floats(*batch.h);
  DT_RETURN_IF_ERROR(Norm(step.norm, Floats(*batch.x), h, rows, 1));
  DT_RETURN_IF_ERROR(Restart(step.restart, batch));
  DT_RETURN_IF_ERROR(Multiply(step.router, h, rows, Floats(*router_)));
  kernels::RouteArgs route;
  route.logits = Floats(*router_);
  route.selection_bias = step.selection_bias.empty() ? nullptr : step.selection_bias.data();
  route.score = ScoreOf(step.score);
  route.renormalise = step.renormalise;
  route.scale = step.route_scale;
  route.rows = rows;
  route.experts = static_cast<int>(step.experts.size());
  route.chosen = step.chosen;
  route.groups = step.groups;
  route.chosen_groups = step.chosen_groups;
  route.expert = route_.data();
  route.weight = route_weight_.data();
  DT_RETURN_IF_ERROR(kernels::Route(context_, route));
  const auto combine = [&](int64_t width, float scale, float* out) {
    return kernels::CombineExperts(
        context_, {Floats(*expert_out_), slot_.data(), route_weight_.data(), rows, step.chosen, width, scale, out});
  };
  if (step.latent_down.has_value()) {
    const int64_t latent = step.latent_down->weights.rows();
    DT_RETURN_IF_ERROR(Multiply(*step.latent_down, h, rows, Floats(*out_)));
    DT_RETURN_IF_ERROR(RunExperts(step, Floats(*out_), latent, rows));
    std::fill_n(Floats(*up_), rows * latent, 0.0f);
    DT_RETURN_IF_ERROR(combine(latent, 1, Floats(*up_)));
    DT_RETURN_IF_ERROR(AddProjection(*step.latent_up, std::nullopt, step.scale, Floats(*up_), batch));
  } else {
    DT_RETURN_IF_ERROR(RunExperts(step, h, hidden, rows));
    DT_RETURN_IF_ERROR(combine(hidden, step.scale, Floats(*batch.x)));
  }
  return step.shared.has_value() ? AddSharedExpert(step, h, batch) : absl::OkStatus();
}

}  // namespace dovetail::compute
