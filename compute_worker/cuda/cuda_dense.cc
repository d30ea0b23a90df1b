#include "compute_worker/cuda/cuda_dense.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <variant>

#include "base/check.h"
#include "compute_worker/cuda/fuse.h"
#include "compute_worker/cuda/lower.h"
#include "compute_worker/cuda/weight_names.h"
#include "compute_worker/cuda/wire_element.h"
#include "kernels/cuda/experts/expert_ops.h"

namespace dovetail::compute {

using kernels::cuda::CudaProduct;
using kernels::cuda::CudaStream;

namespace {

// Products of less weights than that take so little time that no choice matters.
constexpr size_t kLeastToChoose = size_t{64} << 20;

float* Floats(const std::unique_ptr<kernels::Buffer>& buffer) { return reinterpret_cast<float*>(buffer->data()); }

// Nor are its logits or final states asked for.
bool DrawsNothing(const proto::StepPlan& plan) {
  return std::none_of(plan.entries.begin(), plan.entries.end(), [](const proto::StepEntry& entry) {
    return entry.sample || entry.prompt_logprobs >= 0 || entry.logits_rows > 0 || entry.pool_rows > 0;
  });
}

// Which layers have kernels whose bits do not depend on the other rows of a step.
absl::Status CheckDeterministic(const CudaModel& model) {
  const kernels::cuda::DeviceLimits limits = model.device().limits();
  if (limits.major != 9 || limits.minor != 0)
    return FailedPrecondition("--deterministic: ", model.device().name(),
                              " is no GPU of compute capability 9.0, for which there are kernels whose results do not "
                              "depend on the other rows of a step; leave the flag out, or take such a GPU or the CPU");
  if (model.keeps())
    return Unimplemented(
        "--deterministic: weights are kept in 4 or 8 bits, whose kernels depend on the number of "
        "rows; --gpu-weights dequantise");
  if (model.model().config().state)
    return Unimplemented(
        "--deterministic: this model has linear layers, which on GPUs add tokens of a prompt to their states many at a "
        "time, and others one by one; leave the flag out, or take --device cpu");
  return absl::OkStatus();
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
  if (options.deterministic) DT_RETURN_IF_ERROR(CheckDeterministic(model));
  DT_ASSIGN_OR_RETURN(CudaStream* const stream, model.device().WorkerStream());
  std::unique_ptr<CudaDense> dense(new CudaDense(model, table, *stream));
  DT_RETURN_IF_ERROR(dense->Allocate(options, shared_gpu));
  DT_RETURN_IF_ERROR(dense->ChooseProducts());
  return std::unique_ptr<DenseBackend>(std::move(dense));
}

absl::Status CudaDense::Allocate(const ComputeWorkerOptions& options, exchange::SharedGpu* shared_gpu) {
  kernels::cuda::CudaDevice& device = model_.device();
  DT_ASSIGN_OR_RETURN(product_, kernels::cuda::CudaProduct::Create(device, model_.keeps(), options.deterministic));
  DT_ASSIGN_OR_RETURN(const bool groups, kernels::cuda::GroupsProducts(stream_));
  DT_ASSIGN_OR_RETURN(experts_, kernels::cuda::ExpertProduct::Create(device, model_.expert_scratch_bytes()));
  runner_ = std::make_unique<LaunchRunner>(model_, *product_, *experts_, groups);
  DT_RETURN_IF_ERROR(LowerSteps());
  most_rows_ = options.max_step_tokens;
  const int64_t rows = most_rows_ + kProductRowStep;
  DT_RETURN_IF_ERROR(AllocateLane(shared_, stream_, options.micro_batches));
  micro_batches_.resize(options.micro_batches);
  for (size_t i = 0; i < micro_batches_.size(); ++i) {
    micro_batches_[i].id = MicroBatchId(static_cast<uint16_t>(i));
    micro_batches_[i].lane = &shared_;
    DT_RETURN_IF_ERROR(AllocateMicroBatch(micro_batches_[i], rows));
  }
  // Products of weights in few bits have one scratch, so all steps run one behind the other.
  if (options.hosts_apart && !model_.keeps()) {
    DT_ASSIGN_OR_RETURN(hosts_, MakeLane(options.micro_batches));
  }
  Lane& hosts = hosts_ != nullptr ? *hosts_ : shared_;
  if (options.prompt_blocks > 0) {
    if (options.rank_rows) {
      DT_ASSIGN_OR_RETURN(rank_memory_, CudaRankMemory::Create(device, /*in_process=*/options.rank_rows_on_device));
      DT_ASSIGN_OR_RETURN(rank_rows_, CudaRankRows::Create(device, *rank_memory_));
    }
    DT_ASSIGN_OR_RETURN(prompts_,
                        CudaPromptAttention::Create(device, *hosts.stream, table_, options, rank_rows_.get()));
  }
  if (options.linear_prompts) {
    DT_ASSIGN_OR_RETURN(states_, CudaPromptStates::Create(device, stream_, table_, options.micro_batches));
  }
  DT_ASSIGN_OR_RETURN(through_hosts_, CudaHostCrossing::Create(table_, device, hosts, options.micro_batches,
                                                               prompts_.get(), states_.get(), rank_rows_.get()));
  if (shared_gpu != nullptr)
    on_one_gpu_ = std::make_unique<CudaOneGpuCrossing>(table_, *shared_gpu, shared_, options.micro_batches);
  CudaPeerCrossing::MakeLane make_lane;
  if (!model_.keeps()) make_lane = [this] { return MakeLane(/*micro_batches=*/1); };
  DT_ASSIGN_OR_RETURN(between_gpus_, CudaPeerCrossing::Create(table_, stream_, shared_, std::move(make_lane),
                                                              options.micro_batches, prompts_.get()));
  return absl::OkStatus();
}

// For every number of rows that products distinguish: a step with a new one would wait for it, some 30 ms.
absl::Status CudaDense::ChooseProducts() {
  if (model_.weight_bytes() < kLeastToChoose || micro_batches_.empty()) return absl::OkStatus();
  MicroBatch& batch = micro_batches_.front();
  batch.NameTensors();
  if (batch.lane->hybrid != nullptr) batch.lane->hybrid->NameTensors(batch);
  batch.arrived = shared_.attended->data();
  for (batch.rows = kProductRowStep; batch.rows <= std::min(CudaBatch::kMostGraphRows, most_rows_);
       batch.rows += kProductRowStep) {
    const LaunchProgram& program = ProgramFor(batch.rows);
    for (size_t step = 0; step < model_.steps().size(); ++step)
      DT_RETURN_IF_ERROR(runner_->ChooseProducts(program.StepLaunches(step), batch));
    DT_RETURN_IF_ERROR(shared_.sampler->ChooseHead(static_cast<size_t>(batch.rows)));
  }
  batch.rows = 0;
  batch.arrived = nullptr;
  return absl::OkStatus();
}

absl::Status CudaDense::LowerSteps() {
  const auto shape_of = [this](WeightName name) {
    return ShapeOf(model_.steps()[static_cast<size_t>(name.step)], name.weight);
  };
  const std::vector<model::LayerStep>& steps = model_.model().steps;
  DT_ASSIGN_OR_RETURN(const LaunchList list, Lower({steps, table_, hidden(), model_.type(), shape_of}));
  for (int parts = 1; parts <= CudaProduct::kMostParts; ++parts)
    programs_.emplace_back(Fuse(list, {.parts = parts, .in_order = product_->in_order()}), steps.size());
  return absl::OkStatus();
}

const LaunchProgram& CudaDense::ProgramFor(int64_t rows) const {
  const int parts = product_->in_order() ? CudaProduct::kMostParts : CudaProduct::PartsFor(rows);
  return programs_[static_cast<size_t>(parts) - 1];
}

absl::StatusOr<std::unique_ptr<CudaLane>> CudaDense::MakeLane(int micro_batches) const {
  auto lane = std::make_unique<Lane>();
  DT_ASSIGN_OR_RETURN(lane->own_stream, model_.device().CreateCudaStream());
  DT_RETURN_IF_ERROR(AllocateLane(*lane, *lane->own_stream, micro_batches));
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
  const int64_t rows = most_rows_ + kProductRowStep;
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
  return AllocateHybrid(lane, micro_batches);
}

absl::Status CudaDense::AllocateHybrid(Lane& lane, int micro_batches) const {
  std::vector<const CudaHybridWeights*> weights;
  for (const CudaStep& step : model_.steps()) weights.push_back(step.hybrid.get());
  if (std::all_of(weights.begin(), weights.end(), [](const CudaHybridWeights* of) { return of == nullptr; }))
    return absl::OkStatus();
  DT_ASSIGN_OR_RETURN(lane.hybrid, CudaHybrid::Create(model_.device(), model_.model(), table_, weights,
                                                      {most_rows_ + kProductRowStep, micro_batches}));
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

absl::Status CudaDense::PlaceParts(MicroBatch& batch) const {
  if (!product_->in_order() || batch.rows <= CudaProduct::kMostPartRows) return absl::OkStatus();
  if (batch.parts_of_many == nullptr) {
    const size_t bytes = static_cast<size_t>(CudaProduct::kMostParts * most_rows_ * hidden()) * sizeof(float);
    DT_ASSIGN_OR_RETURN(batch.parts_of_many, model_.device().Allocate(bytes));
  }
  batch.tensors[static_cast<size_t>(Tensor::kParts)] = batch.parts_of_many->data();
  return absl::OkStatus();
}

absl::Status CudaDense::PrepareStep(const ComputeWorkerCore& core, MicroBatchId id, const exchange::Seam& seam) {
  MicroBatch& batch = micro_batches_[id.value()];
  const Lane* const before = batch.lane;
  batch.crossing = &CrossingOf(seam);
  DT_RETURN_IF_ERROR(batch.crossing->Use(seam, batch));
  batch.ranks_reach = rank_memory_ != nullptr && rank_memory_->ReachedByRanksOf(core.PlanOf(id));
  // Kernels of a step that failed there may still read what the next step writes here.
  if (before != batch.lane) DT_RETURN_IF_ERROR(before->stream->SynchronizeStatus());
  batch.NameTensors();
  if (batch.lane->hybrid != nullptr) batch.lane->hybrid->NameTensors(batch);
  batch.rows = 0;
  for (const proto::StepEntry& entry : core.PlanOf(id).entries) batch.rows += static_cast<int64_t>(entry.tokens.size());
  if (batch.rows > most_rows_)
    return ResourceExhausted("a step of ", batch.rows, " tokens; ", most_rows_, " is the most on this GPU");
  DT_RETURN_IF_ERROR(PlaceParts(batch));
  DT_RETURN_IF_ERROR(batch.crossing->Begin(core, batch));
  return EmbedTokens(core, id);
}

absl::Status CudaDense::Run(const ComputeWorkerCore& core, MicroBatchId id, int index) {
  MicroBatch& batch = micro_batches_[id.value()];
  const LaunchProgram& program = ProgramFor(batch.rows);
  const std::span<const Launch> launches = program.StepLaunches(static_cast<size_t>(index));
  if (launches.empty()) return absl::OkStatus();  // done with the queries
  const bool reads = std::holds_alternative<model::OutputProjection>(model_.model().steps[index]);
  const void* const arriving = reads ? batch.crossing->Arriving(core.PartsOf(id), batch) : nullptr;
  return batch.EnqueueRecords(program.StepKey(static_cast<size_t>(index)), arriving,
                              [this, &core, &batch, launches, arriving](CudaStream&) {
                                return runner_->Run(launches, core.PartsOf(batch.id), arriving, batch);
                              });
}

absl::Status CudaDense::AttendPrompts(const ComputeWorkerCore& core, MicroBatchId id, int op) {
  MicroBatch& batch = micro_batches_[id.value()];
  return batch.crossing->AttendPrompts(core, op, batch);
}

absl::Status CudaDense::AttendRankShard(const ComputeWorkerCore& core, const AttendShard& shard) {
  MicroBatch& batch = micro_batches_[shard.micro_batch.value()];
  return batch.crossing->AttendShard(core, shard, batch);
}

absl::StatusOr<transport::LentBytes> CudaDense::RankHeads(const ComputeWorkerCore& core, MicroBatchId id, int op,
                                                          const proto::HeadRange& heads) {
  MicroBatch& batch = micro_batches_[id.value()];
  return batch.crossing->RankHeads(core, op, heads, batch);
}

absl::Status CudaDense::AttendRankHeads(const ComputeWorkerCore& core, const AttendHeads& attend) {
  MicroBatch& batch = micro_batches_[attend.micro_batch.value()];
  return batch.crossing->AttendHeads(core, attend, batch);
}

absl::StatusOr<transport::LentBytes> CudaDense::TakeRankOutputs(const ComputeWorkerCore&, MicroBatchId id) {
  MicroBatch& batch = micro_batches_[id.value()];
  return batch.crossing->TakeRankOutputs(batch);
}

absl::StatusOr<bool> CudaDense::GivenReady(std::span<const std::byte> lent) {
  return rank_rows_ == nullptr ? absl::StatusOr<bool>(true) : rank_rows_->Filled(lent);
}

absl::Status CudaDense::PlaceOutputs(const ComputeWorkerCore& core, const PlaceRankOutputs& place) {
  MicroBatch& batch = micro_batches_[place.micro_batch.value()];
  return batch.crossing->PlaceOutputs(core, place, batch);
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

absl::StatusOr<transport::LentBytes> CudaDense::HandOnRows(MicroBatchId id, const proto::SoftmaxSpec& spec,
                                                           const RankTensor& rows, int64_t first_row) {
  return rank_rows_ != nullptr
             ? rank_rows_->HandOn(spec, rows.bytes, rows.owner, first_row, micro_batches_[id.value()].ranks_reach)
             : DenseBackend::HandOnRows(id, spec, rows, first_row);
}

absl::StatusOr<bool> CudaDense::HandOnReady(std::span<const std::byte> rows) {
  return rank_rows_ != nullptr ? rank_rows_->HandedOn(rows) : DenseBackend::HandOnReady(rows);
}

absl::Status CudaDense::KeepRankRows(const ComputeWorkerCore& core, const compute::KeepRankRows& keep,
                                     const PromptScratch::Part& part) {
  if (prompts_ == nullptr || rank_rows_ == nullptr) return DenseBackend::KeepRankRows(core, keep, part);
  return prompts_->Keep(core, keep, part, PromptStream());
}

absl::Status CudaDense::KeepEarlierRows(const ComputeWorkerCore& core, const compute::KeepEarlierRows& keep) {
  if (prompts_ == nullptr || rank_rows_ == nullptr) return DenseBackend::KeepEarlierRows(core, keep);
  return prompts_->Keep(core, keep, PromptStream());
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
