#include "compute_worker/cpu/dense_executor.h"

#include <algorithm>
#include <variant>

#include "kernels/activation.h"
#include "kernels/convert.h"
#include "kernels/gemm.h"
#include "kernels/rms_norm.h"
#include "kernels/rope.h"
#include "kernels/thread_pool.h"

namespace dovetail::compute {

StepProgram ProgramOf(const model::LoadedModel& model, bool q_first) {
  StepProgram program;
  const std::vector<model::AttentionOp> ops = model::AttentionOpsOf(model.config());
  for (size_t i = 0; i < model.steps.size(); ++i) {
    const int index = static_cast<int>(i);
    if (const auto* cut = std::get_if<model::AttentionCut>(&model.steps[i]))
      program.push_back({StageKind::kAwaitPartials, cut->op});
    else
      program.push_back({StageKind::kDense, index});
    const auto* query = std::get_if<model::QueryProjection>(&model.steps[i]);
    if (query != nullptr && q_first) program.push_back({StageKind::kSendQuery, query->op});
    const auto* key_value = std::get_if<model::KeyValueProjection>(&model.steps[i]);
    if (key_value == nullptr) continue;
    if (!q_first) program.push_back({StageKind::kSendQuery, key_value->op});
    // What a linear layer leaves goes with its k and v.
    const bool state = ops[key_value->op].state;
    if (state) program.push_back({StageKind::kAttendPrompts, key_value->op});
    program.push_back({StageKind::kSendKeyValue, key_value->op});
    if (!state) program.push_back({StageKind::kAttendPrompts, key_value->op});
  }
  return program;
}

DenseExecutor::DenseExecutor(const model::LoadedModel& model, const proto::AttentionTable& table,
                             kernels::Device& device, int micro_batches, KvStorage storage)
    : model_(model),
      table_(table),
      device_(device),
      stream_(device.CreateStream()),
      context_(kernels::ContextOf(*stream_)),
      prompts_(device, table, micro_batches, storage),
      states_(device, table, micro_batches),
      heads_of_ranks_(device, table, micro_batches, storage),
      states_of_ranks_(device, table, micro_batches),
      queries_of_ranks_(device, table, micro_batches, storage),
      micro_batches_(micro_batches),
      widths_(WidthsOf(model)) {
  for (MicroBatch& batch : micro_batches_) {
    batch.wire = std::make_unique<StepWire>(device, table);
    batch.angles.resize(model.config().ropes.size());
  }
}

absl::Status DenseExecutor::Grow(BufferPtr& buffer, size_t bytes) {
  if (buffer != nullptr && buffer->size_bytes() >= bytes) return absl::OkStatus();
  buffer.reset();
  DT_ASSIGN_OR_RETURN(buffer, device_.Allocate(bytes + bytes / 4));
  return absl::OkStatus();
}

absl::Status DenseExecutor::GrowScratch(int64_t rows) {
  const int64_t hidden = model_.config().hidden_size;
  DT_RETURN_IF_ERROR(Grow(heads_, rows * widths_.heads * sizeof(float)));
  DT_RETURN_IF_ERROR(Grow(gate_, rows * widths_.gate * sizeof(float)));
  DT_RETURN_IF_ERROR(Grow(up_, rows * widths_.up * sizeof(float)));
  DT_RETURN_IF_ERROR(Grow(out_, rows * hidden * sizeof(float)));
  DT_RETURN_IF_ERROR(Grow(router_, rows * widths_.experts * sizeof(float)));
  DT_RETURN_IF_ERROR(Grow(expert_in_, rows * widths_.chosen * hidden * sizeof(float)));
  DT_RETURN_IF_ERROR(Grow(expert_out_, rows * widths_.chosen * hidden * sizeof(float)));
  for (std::vector<int32_t>* list : {&route_, &slot_, &member_}) list->resize(rows * widths_.chosen);
  route_weight_.resize(rows * widths_.chosen);
  return Grow(gemm_scratch_, kernels::GemmScratchBytes(rows, widths_.cols));
}

absl::Status DenseExecutor::PrepareStep(const ComputeWorkerCore& core, MicroBatchId id) {
  MicroBatch& batch = micro_batches_[id.value()];
  const proto::StepPlan& plan = core.PlanOf(id);
  DT_RETURN_IF_ERROR(batch.wire->Prepare(core, id));
  DT_RETURN_IF_ERROR(prompts_.Prepare(core, id, stream_->pool().threads(), *batch.wire));
  DT_RETURN_IF_ERROR(heads_of_ranks_.Prepare(core, id, stream_->pool().threads(), *batch.wire));
  DT_RETURN_IF_ERROR(queries_of_ranks_.Prepare(core, id, stream_->pool().threads(), *batch.wire));
  DT_RETURN_IF_ERROR(states_of_ranks_.Prepare(core, id));
  DT_RETURN_IF_ERROR(states_.Prepare(core, id));
  const int64_t rows = batch.wire->rows();
  const size_t stream_bytes = rows * model_.config().hidden_size * sizeof(float);
  DT_RETURN_IF_ERROR(Grow(batch.x, stream_bytes));
  DT_RETURN_IF_ERROR(Grow(batch.h, stream_bytes));
  DT_RETURN_IF_ERROR(GrowScratch(rows));
  batch.tokens.clear();
  batch.positions.clear();
  for (const proto::StepEntry& entry : plan.entries)
    for (size_t i = 0; i < entry.tokens.size(); ++i) {
      batch.tokens.push_back(entry.tokens[i]);
      batch.positions.push_back(static_cast<int32_t>(entry.ctx_len + static_cast<Position>(i)));
    }
  DT_RETURN_IF_ERROR(model_.embedding.Gather(batch.tokens, Floats(*batch.x)));
  return ComputeAngles(plan, batch);
}

absl::Status DenseExecutor::ComputeAngles(const proto::StepPlan& plan, MicroBatch& batch) {
  const int64_t rows = batch.wire->rows();
  for (size_t rope = 0; rope < batch.angles.size(); ++rope) {
    RopeAngles& angles = batch.angles[rope];
    angles.pairs = model_.config().ropes[rope].rotary_dims / 2;
    DT_RETURN_IF_ERROR(Grow(angles.cos, rows * angles.pairs * sizeof(float)));
    DT_RETURN_IF_ERROR(Grow(angles.sin, rows * angles.pairs * sizeof(float)));
    const model::RopeSpec& spec = model_.config().ropes[rope];
    const auto compute = [&](const RopeRun& run) -> absl::Status {
      const auto make = [&] { return absl::StatusOr<model::RopeTable>(model::MakeRopeTable(spec, run.length)); };
      DT_ASSIGN_OR_RETURN(const model::RopeTable* const table,
                          rope_cache_.Get(static_cast<int>(rope), run.variant, make));
      kernels::ComputeRopeTable(context_, std::span(batch.positions).subspan(run.first, run.rows), table->inv_freq,
                                table->multiplier, Floats(*angles.cos) + run.first * angles.pairs,
                                Floats(*angles.sin) + run.first * angles.pairs);
      return absl::OkStatus();
    };
    DT_RETURN_IF_ERROR(ForEachRopeRun(spec, plan, compute));
  }
  return absl::OkStatus();
}

absl::Status DenseExecutor::Run(const ComputeWorkerCore& core, MicroBatchId id, int index) {
  MicroBatch& batch = micro_batches_[id.value()];
  const std::vector<WorkerPart>& parts = core.PartsOf(id);
  return std::visit([&](const auto& step) { return RunStep(step, batch, parts); }, model_.steps[index]);
}

absl::Status DenseExecutor::Norm(const model::RmsNorm& norm, float* x, float* out, int64_t rows, int vectors) {
  kernels::RmsNormArgs args;
  args.x = x;
  args.weight = norm.weight.data();
  args.eps = norm.eps;
  args.rows = rows;
  args.vectors = vectors;
  args.size = static_cast<int>(norm.weight.size());
  args.out = out;
  return kernels::RmsNorm(context_, args);
}

absl::Status DenseExecutor::RunStep(const model::InputNorm& step, MicroBatch& batch, const std::vector<WorkerPart>&) {
  const int64_t rows = batch.wire->rows(), floats = rows * model_.config().hidden_size;
  if (!step.norm) return kernels::Scale(context_, Floats(*batch.x), 1, Floats(*batch.h), floats);
  DT_RETURN_IF_ERROR(Norm(*step.norm, Floats(*batch.x), Floats(*batch.h), rows, 1));
  return Restart(step.restart, batch);
}

absl::Status DenseExecutor::ToWire(float* x, int64_t rows, int heads, int dim,
                                   const std::optional<model::RmsNorm>& head_norm, int rope, const MicroBatch& batch,
                                   DType type, std::byte* out) {
  if (head_norm.has_value()) {  // over each head, or over all of them
    const int64_t vectors = int64_t{heads} * dim / static_cast<int64_t>(head_norm->weight.size());
    DT_RETURN_IF_ERROR(Norm(*head_norm, x, x, rows, static_cast<int>(vectors)));
  }
  kernels::RopeArgs args;
  args.x = x;
  args.rows = rows;
  args.heads = heads;
  args.head_dim = dim;
  if (rope >= 0) {
    const RopeAngles& angles = batch.angles[rope];
    args.rotary = 2 * angles.pairs;
    args.cos = Floats(*angles.cos);
    args.sin = Floats(*angles.sin);
  }
  args.dtype = type;
  args.out = out;
  return kernels::Rope(context_, args);
}

namespace {

kernels::GemmOutput OutputOf(const model::Projection& projection, float* y) {
  return kernels::GemmOutput{&projection.weights,       y,     projection.weights.rows(),
                             projection.bias_or_null(), false, projection.activations};
}

}  // namespace

absl::Status DenseExecutor::RunStep(const model::QueryProjection& step, MicroBatch& batch,
                                    const std::vector<WorkerPart>&) {
  const int64_t rows = batch.wire->rows(), hidden = model_.config().hidden_size;
  const LayerGroup group = table_.op_group[step.op];
  const proto::SoftmaxSpec& spec = table_.softmax(group);
  const kernels::GemmOutput outputs[] = {OutputOf(step.q, Floats(*heads_))};
  DT_RETURN_IF_ERROR(kernels::Gemm(
      {Floats(*batch.h), hidden, rows, outputs, {gemm_scratch_->data(), gemm_scratch_->size_bytes()}}, *stream_));
  if (step.silu) DT_RETURN_IF_ERROR(Silu(Floats(*heads_), rows * spec.query_heads * spec.key_dim));
  return ToWire(Floats(*heads_), rows, spec.query_heads, spec.key_dim, step.head_norm, step.rope, batch, spec.kv,
                batch.wire->query());
}

absl::Status DenseExecutor::RunStep(const model::KeyValueProjection& step, MicroBatch& batch,
                                    const std::vector<WorkerPart>&) {
  const int64_t rows = batch.wire->rows(), hidden = model_.config().hidden_size;
  const LayerGroup group = table_.op_group[step.op];
  const proto::SoftmaxSpec& spec = table_.softmax(group);
  float* k = Floats(*heads_);
  float* v = k + rows * spec.kv_heads * spec.key_dim;
  if (step.latent.has_value()) {
    DT_RETURN_IF_ERROR(ExpandLatent(*step.latent, batch, k, v));
  } else {
    const kernels::GemmOutput outputs[] = {OutputOf(step.k, k), OutputOf(step.v, v)};
    DT_RETURN_IF_ERROR(kernels::Gemm(
        {Floats(*batch.h), hidden, rows, outputs, {gemm_scratch_->data(), gemm_scratch_->size_bytes()}}, *stream_));
  }
  if (step.v_factor.has_value()) {
    DT_RETURN_IF_ERROR(Multiply(*step.v_factor, Floats(*batch.h), rows, Floats(*gate_)));
    kernels::GatedActivationArgs product;
    product.activation = kernels::Activation::kIdentity;
    product.gate = Floats(*gate_);
    product.up = product.out = v;
    product.rows = rows;
    product.size = int64_t{spec.kv_heads} * spec.value_dim;
    DT_RETURN_IF_ERROR(kernels::GatedActivation(context_, product));
  }
  if (step.silu) DT_RETURN_IF_ERROR(Silu(k, rows * spec.kv_heads * (spec.key_dim + spec.value_dim)));
  DT_RETURN_IF_ERROR(ToWire(k, rows, spec.kv_heads, spec.key_dim, step.head_norm, step.rope, batch, spec.kv,
                            batch.wire->key(step.op)));
  kernels::FromFloat(context_, spec.kv, v, batch.wire->value(step.op),
                     {rows, int64_t{spec.kv_heads} * spec.value_dim, 0, 0});
  if (step.gates.has_value()) return ComputeGates(*step.gates, step.op, batch);
  return absl::OkStatus();
}

absl::Status DenseExecutor::RunStep(const model::AttentionCut& step, MicroBatch&, const std::vector<WorkerPart>&) {
  return Internal("attention op ", step.op, " runs on attention workers, not here");
}

absl::Status DenseExecutor::AddProjection(const model::Projection& projection,
                                          const std::optional<model::RmsNorm>& post_norm, float scale, const float* in,
                                          MicroBatch& batch) {
  const int64_t rows = batch.wire->rows(), hidden = model_.config().hidden_size;
  float* x = Floats(*batch.x);
  const bool aside = post_norm.has_value() || scale != 1;
  kernels::GemmOutput output = OutputOf(projection, aside ? Floats(*out_) : x);
  output.accumulate = !aside;
  DT_RETURN_IF_ERROR(kernels::Gemm({in,
                                    projection.weights.cols(),
                                    rows,
                                    std::span(&output, 1),
                                    {gemm_scratch_->data(), gemm_scratch_->size_bytes()}},
                                   *stream_));
  if (!aside) return absl::OkStatus();
  if (post_norm.has_value()) DT_RETURN_IF_ERROR(Norm(*post_norm, Floats(*out_), Floats(*out_), rows, 1));
  if (scale != 1) DT_RETURN_IF_ERROR(kernels::Scale(context_, Floats(*out_), scale, Floats(*out_), rows * hidden));
  return kernels::Add(context_, x, Floats(*out_), x, rows * hidden);
}

absl::Status DenseExecutor::RunStep(const model::OutputProjection& step, MicroBatch& batch,
                                    const std::vector<WorkerPart>& parts) {
  const LayerGroup group = table_.op_group[step.op];
  const proto::SoftmaxSpec& spec = table_.softmax(group);
  DT_ASSIGN_OR_RETURN(const std::byte* attended, batch.wire->JoinPartials(parts, step.op, context_));
  kernels::ToFloat(context_, spec.kv, attended, Floats(*heads_),
                   {batch.wire->rows(), int64_t{spec.query_heads} * spec.value_dim, 0, 0});
  if (step.gate.has_value())
    DT_RETURN_IF_ERROR(ApplyGate(*step.gate, Floats(*heads_), int64_t{spec.query_heads} * spec.value_dim, batch));
  return AddProjection(step.o, step.post_norm, step.scale, Floats(*heads_), batch);
}

absl::Status DenseExecutor::RunStep(const model::GatedMlp& step, MicroBatch& batch, const std::vector<WorkerPart>&) {
  const int64_t rows = batch.wire->rows();
  float* h = step.norm.has_value() ? Floats(*batch.h) : Floats(*batch.x);
  if (step.norm.has_value()) DT_RETURN_IF_ERROR(Norm(*step.norm, Floats(*batch.x), h, rows, 1));
  DT_RETURN_IF_ERROR(Restart(step.restart, batch));
  DT_RETURN_IF_ERROR(RunGatedMlp(step.gate, step.up, step.activation, h, rows));
  return AddProjection(step.down, step.post_norm, step.scale, Floats(*gate_), batch);
}

}  // namespace dovetail::compute
