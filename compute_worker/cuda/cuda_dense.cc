#include "compute_worker/cuda/cuda_dense.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <variant>

#include "base/check.h"
#include "kernels/cuda/products/cuda_gemm.h"
#include "kernels/cuda/rows/row_ops.h"

namespace dovetail::compute {

using kernels::cuda::CudaProduct;
using kernels::cuda::CudaStream;
using kernels::cuda::StepWork;
using kernels::cuda::WireType;

namespace {

constexpr size_t kElement = 2;  // bytes of the wire types of a GPU

constexpr int64_t kRowStep = 8;  // products of more rows than that take a multiple of it
constexpr int64_t kMostPadded = 256;
constexpr int64_t kRunElements = 8;  // of 16 bytes

float* Floats(const std::unique_ptr<kernels::Buffer>& buffer) { return reinterpret_cast<float*>(buffer->data()); }

// Nor are its logits or final states asked for.
bool DrawsNothing(const proto::StepPlan& plan) {
  return std::none_of(plan.entries.begin(), plan.entries.end(), [](const proto::StepEntry& entry) {
    return entry.sample || entry.prompt_logprobs >= 0 || entry.logits_rows > 0 || entry.pool_rows > 0;
  });
}

// Products of so many rows: fewer sizes to choose algorithms for. The rows beyond are scratch.
int64_t PaddedRows(int64_t rows) {
  return rows <= kRowStep || rows > kMostPadded ? rows : (rows + kRowStep - 1) / kRowStep * kRowStep;
}

}  // namespace

CudaDense::CudaDense(const CudaModel& model, const proto::AttentionTable& table, CudaStream& stream)
    : model_(model), table_(table), stream_(stream) {}

absl::StatusOr<std::unique_ptr<DenseBackend>> CudaDense::Create(const CudaModel& model,
                                                                const proto::AttentionTable& table,
                                                                const ComputeWorkerOptions& options,
                                                                exchange::SharedGpu* shared_gpu) {
  for (int g = 0; g < table.group_count(); ++g) {
    const LayerGroup group(static_cast<uint16_t>(g));
    if (WireTypeOf(table.softmax(group).kv) != model.type()) {
      return InvalidArgument("K and V are ", std::string(Name(table.softmax(group).kv)),
                             ", but the weights on the GPU are not (--kv-cache-dtype)");
    }
  }
  DT_ASSIGN_OR_RETURN(CudaStream* const stream, model.device().WorkerStream());
  std::unique_ptr<CudaDense> dense(new CudaDense(model, table, *stream));
  DT_RETURN_IF_ERROR(dense->Allocate(options, shared_gpu));
  return std::unique_ptr<DenseBackend>(std::move(dense));
}

absl::Status CudaDense::Allocate(const ComputeWorkerOptions& options, exchange::SharedGpu* shared_gpu) {
  kernels::cuda::CudaDevice& device = model_.device();
  DT_ASSIGN_OR_RETURN(product_, kernels::cuda::CudaProduct::Create(device, model_.keeps()));
  most_rows_ = options.max_step_tokens;
  const int64_t rows = most_rows_ + kRowStep;
  DT_RETURN_IF_ERROR(AllocateLane(shared_, stream_, options.micro_batches));
  micro_batches_.resize(options.micro_batches);
  for (size_t i = 0; i < micro_batches_.size(); ++i) {
    micro_batches_[i].id = MicroBatchId(static_cast<uint16_t>(i));
    micro_batches_[i].lane = &shared_;
    DT_RETURN_IF_ERROR(AllocateMicroBatch(micro_batches_[i], rows));
  }
  std::vector<const CudaHybridWeights*> hybrid;
  for (const CudaStep& step : model_.steps()) hybrid.push_back(step.hybrid.get());
  if (std::any_of(hybrid.begin(), hybrid.end(), [](const CudaHybridWeights* weights) { return weights != nullptr; })) {
    DT_ASSIGN_OR_RETURN(hybrid_, CudaHybrid::Create(device, model_.model(), table_, std::move(hybrid), stream_,
                                                    *product_, {rows, options.micro_batches, model_.type()}));
  }
  if (options.prompt_blocks > 0) {
    if (options.rank_rows) {
      DT_ASSIGN_OR_RETURN(rank_rows_, CudaRankRows::Create(device, options.rank_rows_on_device));
    }
    DT_ASSIGN_OR_RETURN(prompts_, CudaPromptAttention::Create(device, stream_, table_, options, rank_rows_.get()));
  }
  if (options.linear_prompts) {
    DT_ASSIGN_OR_RETURN(states_, CudaPromptStates::Create(device, stream_, table_, options.micro_batches));
  }
  DT_ASSIGN_OR_RETURN(through_hosts_, CudaHostCrossing::Create(table_, device, shared_, options.micro_batches,
                                                               prompts_.get(), states_.get(), rank_rows_.get()));
  if (shared_gpu != nullptr)
    on_one_gpu_ = std::make_unique<CudaOneGpuCrossing>(table_, *shared_gpu, shared_, options.micro_batches);
  // Experts have one scratch, products of weights in few bits another.
  CudaPeerCrossing::MakeLane make_lane;
  if (hybrid_ == nullptr && !model_.keeps()) make_lane = [this] { return MakeLane(); };
  DT_ASSIGN_OR_RETURN(between_gpus_, CudaPeerCrossing::Create(table_, stream_, shared_, std::move(make_lane),
                                                              options.micro_batches, prompts_.get()));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<CudaLane>> CudaDense::MakeLane() const {
  auto lane = std::make_unique<Lane>();
  DT_ASSIGN_OR_RETURN(lane->own_stream, model_.device().CreateCudaStream());
  DT_RETURN_IF_ERROR(AllocateLane(*lane, *lane->own_stream, /*micro_batches=*/1));
  return lane;
}

CudaCrossing& CudaDense::CrossingOf(const exchange::Seam& seam) const {
  if (std::holds_alternative<exchange::BetweenGpus>(seam)) return *between_gpus_;
  if (std::holds_alternative<exchange::ThroughHosts>(seam)) return *through_hosts_;
  DT_CHECK(on_one_gpu_ != nullptr, "a step on one GPU, of a worker that shares none");
  return *on_one_gpu_;
}

absl::Status CudaDense::AllocateLane(Lane& lane, CudaStream& stream, int micro_batches) const {
  kernels::cuda::CudaDevice& device = model_.device();
  const int64_t rows = most_rows_ + kRowStep;
  int64_t qkv = 0, attended = 0, mlp = 0;
  for (size_t i = 0; i < model_.steps().size(); ++i) {
    const model::LayerStep& step = model_.model().steps[i];
    const CudaStep& weights = model_.steps()[i];
    if (const auto* query = std::get_if<model::QueryProjection>(&step)) {
      const proto::SoftmaxSpec& spec = table_.softmax(table_.op_group[query->op]);
      qkv = std::max(
          qkv, int64_t{spec.query_heads} * spec.key_dim + int64_t{spec.kv_heads} * (spec.key_dim + spec.value_dim));
    }
    if (std::holds_alternative<model::OutputProjection>(step))
      attended = std::max(attended, weights.first.weights.cols());
    if (std::holds_alternative<model::GatedMlp>(step)) mlp = std::max(mlp, weights.second.weights.cols());
  }
  lane.stream = &stream;
  DT_ASSIGN_OR_RETURN(lane.h, device.Allocate(rows * hidden() * kElement));
  DT_ASSIGN_OR_RETURN(lane.qkv, device.Allocate(rows * qkv * kElement));
  DT_ASSIGN_OR_RETURN(lane.attended, device.Allocate(rows * attended * kElement));
  DT_ASSIGN_OR_RETURN(lane.gate_up, device.Allocate(rows * 2 * mlp * kElement));
  DT_ASSIGN_OR_RETURN(lane.act, device.Allocate(rows * mlp * kElement));
  DT_ASSIGN_OR_RETURN(lane.aside, device.Allocate(rows * hidden() * sizeof(float)));
  DT_ASSIGN_OR_RETURN(lane.sampler,
                      CudaTokenSampler::Create(model_, stream, *product_, static_cast<int>(most_rows_), micro_batches));
  return absl::OkStatus();
}

absl::Status CudaDense::AllocateMicroBatch(MicroBatch& batch, int64_t rows) {
  kernels::cuda::CudaDevice& device = model_.device();
  size_t query = 0, key_value = 0;
  for (const proto::SoftmaxSpec& spec : table_.views) {
    query = std::max<size_t>(query, int64_t{spec.query_heads} * spec.key_dim);
    key_value = std::max<size_t>(key_value, int64_t{spec.kv_heads} * (spec.key_dim + spec.value_dim + 2 * spec.gates));
  }
  DT_ASSIGN_OR_RETURN(batch.x, device.Allocate(rows * hidden() * sizeof(float)));
  DT_ASSIGN_OR_RETURN(
      batch.parts,
      device.Allocate(CudaProduct::kMostParts * std::min(rows, CudaProduct::kMostPartRows) * hidden() * sizeof(float)));
  DT_ASSIGN_OR_RETURN(batch.query, device.Allocate(rows * query * kElement));
  DT_ASSIGN_OR_RETURN(batch.key_value, device.Allocate(rows * key_value * kElement + 4));
  for (const model::RopeSpec& spec : model_.model().config().ropes) {
    RopeAngles& angles = batch.angles.emplace_back();
    angles.pairs = spec.rotary_dims / 2;
    DT_ASSIGN_OR_RETURN(angles.cos, device.Allocate(rows * angles.pairs * sizeof(float)));
    DT_ASSIGN_OR_RETURN(angles.sin, device.Allocate(rows * angles.pairs * sizeof(float)));
  }
  batch.upload = std::make_unique<kernels::cuda::StagedUpload>(device);
  return batch.upload->Reserve(2 * (rows * sizeof(int32_t) + 256) + CudaPeerCrossing::UploadBytes(rows));
}

absl::Status CudaDense::PrepareStep(const ComputeWorkerCore& core, MicroBatchId id, const exchange::Seam& seam) {
  MicroBatch& batch = micro_batches_[id.value()];
  const Lane* const before = batch.lane;
  batch.crossing = &CrossingOf(seam);
  DT_RETURN_IF_ERROR(batch.crossing->Use(seam, batch));
  // Kernels of a step that failed there may still read what the next step writes here.
  if (before != batch.lane) DT_RETURN_IF_ERROR(before->stream->SynchronizeStatus());
  batch.rows = 0;
  for (const proto::StepEntry& entry : core.PlanOf(id).entries) batch.rows += static_cast<int64_t>(entry.tokens.size());
  if (batch.rows > most_rows_)
    return ResourceExhausted("a step of ", batch.rows, " tokens; ", most_rows_, " is the most on this GPU");
  DT_RETURN_IF_ERROR(batch.crossing->Begin(core, batch));
  return EmbedTokens(core, id);
}

absl::Status CudaDense::Run(const ComputeWorkerCore& core, MicroBatchId id, int index) {
  if (std::holds_alternative<model::KeyValueProjection>(model_.model().steps[index]))
    return absl::OkStatus();  // done with the queries
  MicroBatch& batch = micro_batches_[id.value()];
  const bool reads = std::holds_alternative<model::OutputProjection>(model_.model().steps[index]);
  const void* const arriving = reads ? batch.crossing->Arriving(core.PartsOf(id), batch) : nullptr;
  return batch.Enqueue({static_cast<uint64_t>(index), StepWork::Word(arriving)},
                       [this, &core, id, index, arriving](CudaStream&) { return RunPiece(core, id, index, arriving); });
}

absl::Status CudaDense::RunPiece(const ComputeWorkerCore& core, MicroBatchId id, int index, const void* arriving) {
  MicroBatch& batch = micro_batches_[id.value()];
  const model::LayerStep& step = model_.model().steps[index];
  const CudaStep& weights = model_.steps()[index];
  if (const auto* input = std::get_if<model::InputNorm>(&step)) return RunStep(*input, weights, batch);
  if (const auto* query = std::get_if<model::QueryProjection>(&step)) return RunStep(*query, weights, batch);
  if (const auto* output = std::get_if<model::OutputProjection>(&step))
    return RunOutput(*output, weights, batch, core.PartsOf(id), arriving);
  if (const auto* mlp = std::get_if<model::GatedMlp>(&step)) return RunStep(*mlp, weights, batch);
  if (const auto* experts = std::get_if<model::ExpertMlp>(&step)) return RunStep(*experts, weights, batch);
  return Internal("step ", index, " of the model does not run on a GPU");
}

absl::Status CudaDense::AttendPrompts(const ComputeWorkerCore& core, MicroBatchId id, int op) {
  MicroBatch& batch = micro_batches_[id.value()];
  return batch.crossing->AttendPrompts(core, op, batch);
}

absl::Status CudaDense::Norm(const BufferPtr& weight, float eps, const float* x, void* out, WireType out_type,
                             const MicroBatch& batch, int parts) {
  kernels::cuda::RmsNormLaunch norm;
  norm.x = const_cast<float*>(x);  // written only where there is a residual to add
  if (parts > 0) {
    norm.residual = batch.parts->data();
    norm.residual_step = hidden();
    norm.parts = parts;
    norm.part_step = PaddedRows(batch.rows) * hidden();
  }
  norm.weight = Floats(weight);
  norm.out = out;
  norm.x_step = norm.out_step = hidden();
  norm.x_type = WireType::kF32;
  norm.out_type = out_type;
  norm.eps = eps;
  norm.rows = static_cast<int32_t>(batch.rows);
  norm.size = static_cast<int32_t>(hidden());
  return kernels::cuda::RmsNorm(batch.stream(), norm);
}

int CudaDense::PartsLeftBy(size_t index, const MicroBatch& batch) const {
  const auto& steps = model_.model().steps;
  const int parts = CudaProduct::PartsFor(batch.rows);
  if (index + 1 >= steps.size() || parts == 1) return 0;
  const auto adds_as_it_is = [](const auto& step) { return !step.post_norm.has_value() && step.scale == 1; };
  const CudaStep& weights = model_.steps()[index];
  const CudaProjection* added = nullptr;
  if (const auto* output = std::get_if<model::OutputProjection>(&steps[index]); output && adds_as_it_is(*output))
    added = &weights.first;
  if (const auto* mlp = std::get_if<model::GatedMlp>(&steps[index]); mlp && adds_as_it_is(*mlp))
    added = &weights.second;
  const auto norms_first = [&](const auto* step) { return step != nullptr && step->norm.has_value(); };
  if (added == nullptr || added->weights.is_kept() || added->bias != nullptr ||
      added->weights.cols() % (parts * kRunElements) != 0)
    return 0;
  return norms_first(std::get_if<model::InputNorm>(&steps[index + 1])) ||
                 norms_first(std::get_if<model::GatedMlp>(&steps[index + 1]))
             ? parts
             : 0;
}

// h = norm(x), or x; then x begins anew as restart * h.
absl::Status CudaDense::NormOrConvert(const std::optional<model::RmsNorm>& norm, const std::optional<float>& restart,
                                      const CudaStep& weights, MicroBatch& batch) {
  kernels::cuda::CombineLaunch combine;
  combine.count = batch.rows * hidden();
  if (norm.has_value()) {
    const int parts = IndexOf(weights) > 0 ? PartsLeftBy(IndexOf(weights) - 1, batch) : 0;
    DT_RETURN_IF_ERROR(
        Norm(weights.norm, norm->eps, Floats(batch.x), batch.lane->h->data(), model_.type(), batch, parts));
  } else {
    combine.a = batch.x->data();
    combine.out = batch.lane->h->data();
    combine.out_type = model_.type();
    DT_RETURN_IF_ERROR(kernels::cuda::Combine(batch.stream(), combine));
  }
  if (!restart.has_value()) return absl::OkStatus();
  combine.a = batch.lane->h->data();
  combine.a_type = model_.type();
  combine.a_factor = *restart;
  combine.out = batch.x->data();
  combine.out_type = WireType::kF32;
  return kernels::cuda::Combine(batch.stream(), combine);
}

absl::Status CudaDense::RunStep(const model::InputNorm& step, const CudaStep& weights, MicroBatch& batch) {
  DT_RETURN_IF_ERROR(NormOrConvert(step.norm, step.restart, weights, batch));
  return hybrid_ != nullptr ? hybrid_->KeepInput(IndexOf(batch), batch.lane->h->data(), batch.rows) : absl::OkStatus();
}

// q, k and v of softmax attention below each other in its lane's qkv.
absl::Status CudaDense::MultiplyHeads(size_t index, MicroBatch& batch) {
  const CudaStep& weights = model_.steps()[index];
  if (weights.hybrid != nullptr)
    return hybrid_->LatentHeads(index, weights.first, batch.lane->h->data(), batch.rows, batch.lane->qkv->data());
  return Multiply(weights.first, batch.lane->h->data(), batch.lane->qkv->data(), batch);
}

absl::Status CudaDense::Multiply(const CudaProjection& w, const void* in, void* out, MicroBatch& batch) {
  kernels::cuda::GemmCall call{};
  call.x = in;
  call.y = out;
  call.bias = w.bias != nullptr ? w.bias->data() : nullptr;
  call.m = PaddedRows(batch.rows);
  call.n = w.weights.rows();
  call.k = call.x_stride = w.weights.cols();
  call.y_stride = call.n;
  call.type = gemm_type();
  return product_->Run(batch.stream(), w.weights, call);
}

absl::Status CudaDense::AddProjection(const CudaStep& step, const CudaProjection& w, float eps, float scale,
                                      const void* in, MicroBatch& batch) {
  const BufferPtr& post_norm = step.post_norm;
  const bool goes_aside = post_norm != nullptr || scale != 1;
  const BufferPtr& aside = batch.lane->aside;
  kernels::cuda::GemmCall call{};
  call.x = in;
  call.y = goes_aside ? aside->data() : batch.x->data();
  call.bias = w.bias != nullptr ? w.bias->data() : nullptr;
  call.m = PaddedRows(batch.rows);
  call.n = call.y_stride = w.weights.rows();
  call.k = call.x_stride = w.weights.cols();
  call.type = gemm_type();
  call.y_is_f32 = 1;
  call.accumulate = goes_aside ? 0 : 1;
  if (const int parts = PartsLeftBy(IndexOf(step), batch); parts > 0) {
    call.y = batch.parts->data();
    call.accumulate = 0;
    call.parts = parts;
    call.part_step = call.m * call.n;
  }
  DT_RETURN_IF_ERROR(product_->Run(batch.stream(), w.weights, call));
  if (!goes_aside) return absl::OkStatus();
  if (post_norm != nullptr)
    DT_RETURN_IF_ERROR(Norm(post_norm, eps, Floats(aside), aside->data(), WireType::kF32, batch));
  kernels::cuda::CombineLaunch sum;
  sum.a = batch.x->data();
  sum.b = aside->data();
  sum.out = batch.x->data();
  sum.b_factor = scale;
  sum.count = batch.rows * hidden();
  return kernels::cuda::Combine(batch.stream(), sum);
}

// A norm over all heads together; those over each head go with the rotation.
absl::Status CudaDense::NormWhole(const std::optional<model::RmsNorm>& norm, const BufferPtr& weight, std::byte* heads,
                                  int64_t width, int dim, int64_t step, const MicroBatch& batch) {
  if (!norm.has_value() || static_cast<int64_t>(norm->weight.size()) == dim) return absl::OkStatus();
  kernels::cuda::RmsNormLaunch launch;
  launch.x = launch.out = heads;
  launch.weight = Floats(weight);
  launch.x_step = launch.out_step = step;
  launch.x_type = launch.out_type = model_.type();
  launch.eps = norm->eps;
  launch.rows = static_cast<int32_t>(batch.rows);
  launch.size = static_cast<int32_t>(width);
  return kernels::cuda::RmsNorm(batch.stream(), launch);
}

// q, k and v in one product, normed and rotated on their way to the tensors that leave.
absl::Status CudaDense::RunStep(const model::QueryProjection& step, const CudaStep& weights, MicroBatch& batch) {
  const proto::SoftmaxSpec& spec = table_.softmax(table_.op_group[step.op]);
  const auto& next = std::get<model::KeyValueProjection>(
      model_.model().steps[static_cast<size_t>(&weights - model_.steps().data()) + 1]);
  const int64_t q_width = int64_t{spec.query_heads} * spec.key_dim, k_width = int64_t{spec.kv_heads} * spec.key_dim;
  const int64_t v_width = int64_t{spec.kv_heads} * spec.value_dim, width = q_width + k_width + v_width;
  if (table_.linear(table_.op_group[step.op]) != nullptr) {
    DT_RETURN_IF_ERROR(batch.crossing->BeforeHeads(batch));
    DT_RETURN_IF_ERROR(hybrid_->StateHeads(IndexOf(batch), IndexOf(weights), weights.first, batch.rows,
                                           batch.query->data(), batch.key_value->data()));
    return batch.crossing->Leave(step.op, batch);
  }
  DT_RETURN_IF_ERROR(MultiplyHeads(IndexOf(weights), batch));
  DT_RETURN_IF_ERROR(
      NormWhole(step.head_norm, weights.q_norm, batch.lane->qkv->data(), q_width, spec.key_dim, width, batch));
  DT_RETURN_IF_ERROR(NormWhole(next.head_norm, weights.k_norm, batch.lane->qkv->data() + q_width * kElement, k_width,
                               spec.key_dim, width, batch));
  kernels::cuda::KvAppendLaunch out;
  out.qkv = batch.lane->qkv->data();
  out.qkv_step = width;
  out.type = model_.type();
  out.q_out = batch.query->data();
  out.q_out_step = q_width;
  out.k_out = batch.key_value->data();
  out.k_out_step = k_width;
  out.v_out = batch.key_value->data() + batch.rows * k_width * kElement;
  out.v_out_step = v_width;
  out.layout = {spec.key_dim, spec.value_dim, kernels::cuda::KvType::kBF16};
  const auto per_head = [&](const std::optional<model::RmsNorm>& norm, const BufferPtr& weight) -> const float* {
    if (!norm.has_value() || static_cast<int>(norm->weight.size()) != spec.key_dim) return nullptr;
    out.norm_eps = norm->eps;
    return Floats(weight);
  };
  out.q_norm = per_head(step.head_norm, weights.q_norm);
  out.k_norm = per_head(next.head_norm, weights.k_norm);
  if (step.rope >= 0) {
    const RopeAngles& angles = batch.angles[step.rope];
    out.cos = Floats(angles.cos);
    out.sin = Floats(angles.sin);
    out.rotary = 2 * angles.pairs;
  }
  out.rows = static_cast<int32_t>(batch.rows);
  out.q_heads = spec.query_heads;
  out.kv_heads = spec.kv_heads;
  DT_RETURN_IF_ERROR(batch.crossing->BeforeHeads(batch));
  batch.crossing->LeaveFrom(step.op, batch, out);
  DT_RETURN_IF_ERROR(kernels::cuda::KvAppend(batch.stream(), out));
  return batch.crossing->Leave(step.op, batch);
}

absl::Status CudaDense::RunOutput(const model::OutputProjection& step, const CudaStep& weights, MicroBatch& batch,
                                  const std::vector<WorkerPart>& parts, const void* arriving) {
  DT_ASSIGN_OR_RETURN(const void* attended, batch.crossing->Arrive(step.op, parts, arriving, batch));
  if (step.gate.has_value()) {
    DT_ASSIGN_OR_RETURN(attended, hybrid_->Gated(IndexOf(batch), IndexOf(weights), attended, batch.rows));
  }
  return AddProjection(weights, weights.first, step.post_norm ? step.post_norm->eps : 0, step.scale, attended, batch);
}

// act(gate) * up of the rows in lane->h, to lane->act.
absl::Status CudaDense::GateAndUp(const model::GatedMlp& step, const CudaStep& weights, MicroBatch& batch) {
  const int64_t width = weights.second.weights.cols();
  const bool gelu = step.activation == model::Activation::kGeluTanh;
  const CudaProjection& w = weights.first;
  if (weights.hybrid == nullptr && !w.weights.is_kept() && w.bias == nullptr) {
    const int64_t in = w.weights.cols();
    const kernels::cuda::GatedProductCall call{.x = batch.lane->h->data(),
                                               .w = w.weights.data(),
                                               .y = batch.lane->act->data(),
                                               .m = PaddedRows(batch.rows),
                                               .n = width,
                                               .k = in,
                                               .x_stride = in,
                                               .w_stride = in,
                                               .y_stride = width,
                                               .type = gemm_type(),
                                               .gelu = gelu ? 1 : 0};
    DT_ASSIGN_OR_RETURN(const bool done, kernels::cuda::GatedProduct(batch.stream(), call));
    if (done) return absl::OkStatus();
  }
  DT_RETURN_IF_ERROR(Multiply(w, batch.lane->h->data(), batch.lane->gate_up->data(), batch));
  if (weights.hybrid != nullptr)
    return hybrid_->Activate(step.activation, batch.lane->gate_up->data(), batch.lane->act->data(), batch.rows, width);
  kernels::cuda::ActivationLaunch activation;
  activation.gate = batch.lane->gate_up->data();
  activation.up = batch.lane->gate_up->data() + width * kElement;
  activation.out = batch.lane->act->data();
  activation.gate_step = activation.up_step = 2 * width;
  activation.out_step = width;
  activation.type = model_.type();
  activation.gelu = gelu ? 1 : 0;
  activation.rows = static_cast<int32_t>(batch.rows);
  activation.size = static_cast<int32_t>(width);
  return kernels::cuda::GatedActivation(batch.stream(), activation);
}

absl::Status CudaDense::RunStep(const model::GatedMlp& step, const CudaStep& weights, MicroBatch& batch) {
  DT_RETURN_IF_ERROR(NormOrConvert(step.norm, step.restart, weights, batch));
  DT_RETURN_IF_ERROR(GateAndUp(step, weights, batch));
  return AddProjection(weights, weights.second, step.post_norm ? step.post_norm->eps : 0, step.scale,
                       batch.lane->act->data(), batch);
}

absl::Status CudaDense::RunStep(const model::ExpertMlp& step, const CudaStep& weights, MicroBatch& batch) {
  // The router reads x before it may begin anew, and unrounded: experts that are close would change places.
  DT_RETURN_IF_ERROR(hybrid_->Route(IndexOf(weights), Floats(batch.x), Floats(weights.norm), batch.rows));
  DT_RETURN_IF_ERROR(NormOrConvert(step.norm, step.restart, weights, batch));
  return hybrid_->RunExperts(IndexOf(weights), batch.lane->h->data(), Floats(batch.x), batch.rows);
}

absl::StatusOr<bool> CudaDense::BeginSample(const proto::StepPlan& plan, MicroBatchId id) {
  MicroBatch& batch = micro_batches_[id.value()];
  DT_RETURN_IF_ERROR(batch.crossing->BeforeDraws(batch));
  if (batch.work == nullptr) return false;
  CudaTokenSampler& sampler = *batch.lane->sampler;
  DT_ASSIGN_OR_RETURN(const bool begun, sampler.Begin(plan, Floats(batch.x), DrawId(batch), *batch.work));
  DT_RETURN_IF_ERROR(batch.crossing->Launch(batch));
  if (begun) DT_RETURN_IF_ERROR(sampler.Launched(DrawId(batch)));
  return begun || (DrawsNothing(plan) && batch.crossing->WaitsForEnd(id));
}

std::optional<DenseBackend::GpuTimes> CudaDense::TimesOf(MicroBatchId id) const {
  return micro_batches_[id.value()].crossing->TimesOf(id);
}

bool CudaDense::Drawn(MicroBatchId id) {
  const MicroBatch& batch = micro_batches_[id.value()];
  if (!batch.crossing->WaitsForPeers()) return true;
  const CudaTokenSampler& sampler = *batch.lane->sampler;
  return sampler.begun(DrawId(batch)) ? sampler.Done(DrawId(batch)) : batch.crossing->Ran(id);
}

absl::Status CudaDense::Sample(const proto::StepPlan& plan, MicroBatchId id, proto::StepResult& result) {
  const MicroBatch& batch = micro_batches_[id.value()];
  CudaTokenSampler& sampler = *batch.lane->sampler;
  const MicroBatchId draws = DrawId(batch);
  const absl::Status drawn =
      sampler.begun(draws) ? sampler.Finish(plan, draws, result) : sampler.Run(plan, Floats(batch.x), result);
  return batch.crossing->Ended(id, plan.step, drawn);
}

absl::StatusOr<bool> CudaDense::PayloadsReady(MicroBatchId id, int op) {
  const MicroBatch& batch = micro_batches_[id.value()];
  return batch.crossing->Ready(op, batch);
}

absl::StatusOr<bool> CudaDense::RankRowsReady(MicroBatchId id, int op) {
  const MicroBatch& batch = micro_batches_[id.value()];
  return batch.crossing->RankRowsReady(op, batch);
}

std::vector<std::byte> CudaDense::TakeRankState(MicroBatchId id, int op) {
  return states_ == nullptr ? std::vector<std::byte>() : states_->TakeRankState(id, op);
}

absl::StatusOr<bool> CudaDense::RankStateReady(MicroBatchId id, int op) {
  return states_ == nullptr ? absl::StatusOr<bool>(true) : states_->RankStateReady(id, op);
}

absl::StatusOr<transport::LentBytes> CudaDense::RankRows(MicroBatchId id, int op, int64_t first_row) {
  MicroBatch& batch = micro_batches_[id.value()];
  return batch.crossing->RankRows(op, first_row, batch);
}

absl::StatusOr<RankTensor> CudaDense::TakeRankRows(std::span<const std::byte> rows) {
  return rank_rows_ != nullptr ? rank_rows_->Take(rows) : DenseBackend::TakeRankRows(rows);
}

absl::Status CudaDense::KeepRankRows(const ComputeWorkerCore& core, const compute::KeepRankRows& keep,
                                     const PromptScratch::Part& part) {
  if (prompts_ == nullptr || rank_rows_ == nullptr) return DenseBackend::KeepRankRows(core, keep, part);
  return prompts_->Keep(core, keep, part, stream_);
}

absl::Status CudaDense::KeepEarlierRows(const ComputeWorkerCore& core, const compute::KeepEarlierRows& keep) {
  if (prompts_ == nullptr || rank_rows_ == nullptr) return DenseBackend::KeepEarlierRows(core, keep);
  return prompts_->Keep(core, keep, stream_);
}

absl::StatusOr<bool> CudaDense::RankRowsTaken(const RankTensor& rows) {
  return rank_rows_ != nullptr ? rank_rows_->Taken(rows) : DenseBackend::RankRowsTaken(rows);
}

absl::StatusOr<transport::LentBytes> CudaDense::PackQuery(const ComputeWorkerCore& core, MicroBatchId id, int p,
                                                          int op) {
  MicroBatch& batch = micro_batches_[id.value()];
  return batch.crossing->PackQuery(core.PartsOf(id), p, op, batch);
}

absl::StatusOr<transport::LentBytes> CudaDense::PackKeyValue(const ComputeWorkerCore& core, MicroBatchId id, int p,
                                                             int op) {
  MicroBatch& batch = micro_batches_[id.value()];
  return batch.crossing->PackKeyValue(core.PartsOf(id), p, op, batch);
}

}  // namespace dovetail::compute
