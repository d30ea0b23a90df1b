#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/kv_storage.h"
#include "base/status.h"
#include "compute_worker/core/compute_worker_core.h"
#include "compute_worker/cpu/pass_q_attention.h"
#include "compute_worker/cpu/prompt_attention.h"
#include "compute_worker/cpu/prompt_states.h"
#include "compute_worker/cpu/switch_attention.h"
#include "compute_worker/cpu/switch_states.h"
#include "compute_worker/rope_runs.h"
#include "compute_worker/step_wire.h"
#include "kernels/device.h"
#include "kernels/op_context.h"
#include "model/loaded_model.h"

namespace dovetail::compute {

// The straight-line program of a model: every layer step as a dense piece, cut where q, k, v leave and partials arrive.
// Without `q_first` q leaves with k and v.
StepProgram ProgramOf(const model::LoadedModel& model, bool q_first = true);

// Runs dense pieces. What a micro-batch carries from piece to piece (the residual stream, h, rope angles, wire tensors)
// is its own; scratch is shared, since pieces run one at a time. Run() neither allocates nor locks.
// Threads: reactor-owned.
class DenseExecutor {
 public:
  // `model` and `device` outlive it.
  DenseExecutor(const model::LoadedModel& model, const proto::AttentionTable& table, kernels::Device& device,
                int micro_batches, KvStorage storage = KvStorage::kAsSent);

  // Sizes buffers for the plan that `core` runs in this micro-batch, embeds its tokens and computes rope angles.
  // kResourceExhausted: no memory; kInvalidArgument: a token outside the vocabulary. Allocates.
  absl::Status PrepareStep(const ComputeWorkerCore& core, MicroBatchId id);

  // Runs piece `index` of the model's steps over all rows of the micro-batch and waits for it. Reads and writes only
  // that micro-batch's tensors; the partials of OutputProjection come from core.PartsOf(id). Errors are those of the
  // kernels.
  absl::Status Run(const ComputeWorkerCore& core, MicroBatchId id, int index);

  // Attends the micro-batch's prompts, as far as they are attended here; of a linear op, runs it for them.
  absl::Status AttendPrompts(const ComputeWorkerCore& core, MicroBatchId id, int op) {
    if (table_.linear(table_.op_group[op]) != nullptr) return states_.Run(core, id, op, wire(id), context_);
    if (core.PromptsOf(id)[0].asks_ranks) return queries_of_ranks_.Run(core, id, op, wire(id), *stream_);
    return prompts_.Run(core, id, op, wire(id), *stream_);
  }

  absl::Status AttendRankShard(const ComputeWorkerCore& core, const AttendShard& shard) {
    return prompts_.RunShard(core, shard, wire(shard.micro_batch), *stream_);
  }

  // Of a head switch: DenseBackend's functions of these names.
  std::vector<std::byte> RankHeads(const ComputeWorkerCore& core, MicroBatchId id, int op,
                                   const proto::HeadRange& heads) {
    if (core.table().linear(core.table().op_group[op]) != nullptr)
      return states_of_ranks_.Pack(core, id, op, heads, wire(id));
    return heads_of_ranks_.Pack(core, id, op, heads, wire(id));
  }
  absl::Status AttendRankHeads(const ComputeWorkerCore& core, const AttendHeads& attend) {
    if (core.table().linear(core.table().op_group[attend.op]) != nullptr)
      return states_of_ranks_.Run(core, attend, wire(attend.micro_batch), context_);
    return heads_of_ranks_.Attend(core, attend, wire(attend.micro_batch), *stream_);
  }
  void PlaceOutputs(const ComputeWorkerCore& core, const PlaceRankOutputs& place) {
    StepWire& rows = wire(place.micro_batch);
    if (core.table().linear(core.table().op_group[place.op]) != nullptr)
      return states_of_ranks_.Place(core, place, rows);
    if (core.PromptsOf(place.micro_batch)[0].asks_ranks) return queries_of_ranks_.Place(core, place, rows);
    heads_of_ranks_.Place(core, place, rows);
  }
  // And of ranks that ask each other.
  std::vector<std::byte> RankQueries(MicroBatchId id, int op, int64_t rows) {
    return queries_of_ranks_.Pack(op, rows, wire(id));
  }
  absl::Status AttendRankQueries(const ComputeWorkerCore& core, const AttendQueries& attend) {
    return queries_of_ranks_.Answer(core, attend, *stream_);
  }
  std::vector<std::byte> TakeRankOutputs(const ComputeWorkerCore& core, MicroBatchId id) {
    if (std::vector<std::byte> outputs = states_of_ranks_.TakeOutputs(id); !outputs.empty()) return outputs;
    const bool asks = core.PlanOf(id).entries[0].exchange == proto::PrefixExchange::kPassQ;  // it may have ended
    return asks ? queries_of_ranks_.TakeOutputs(id) : heads_of_ranks_.TakeOutputs(id);
  }
  absl::Status KeepRankRows(const ComputeWorkerCore& core, const compute::KeepRankRows& keep,
                            const PromptScratch::Part& part) {
    return prompts_.Keep(core, keep, part, *stream_);
  }
  absl::Status KeepEarlierRows(const ComputeWorkerCore& core, const compute::KeepEarlierRows& keep) {
    return prompts_.Keep(core, keep, *stream_);
  }

  // DenseBackend::TakeRankState.
  std::vector<std::byte> TakeRankState(MicroBatchId id) { return states_.TakeRankState(id); }

  // Owned here; valid as long as the executor.
  StepWire& wire(MicroBatchId id) { return *micro_batches_[id.value()].wire; }
  // The residual stream after the last piece: [rows, hidden], f32; valid until the micro-batch's next PrepareStep.
  const float* residual(MicroBatchId id) const { return Floats(*micro_batches_[id.value()].x); }
  kernels::Stream& stream() { return *stream_; }

 private:
  using BufferPtr = std::unique_ptr<kernels::Buffer>;
  struct RopeAngles {
    BufferPtr cos, sin;  // [rows, pairs]
    int pairs = 0;
  };
  struct MicroBatch {
    BufferPtr x, h;                  // [rows, hidden]
    std::vector<RopeAngles> angles;  // by rope of the config
    std::vector<int32_t> positions;
    std::vector<TokenId> tokens;
    std::unique_ptr<StepWire> wire;
  };

  static float* Floats(kernels::Buffer& buffer) { return reinterpret_cast<float*>(buffer.data()); }
  static const float* Floats(const kernels::Buffer& buffer) {
    return reinterpret_cast<const float*>(const_cast<kernels::Buffer&>(buffer).data());
  }
  absl::Status Grow(BufferPtr& buffer, size_t bytes);
  absl::Status GrowScratch(int64_t rows);
  absl::Status ComputeAngles(const proto::StepPlan& plan, MicroBatch& batch);

  absl::Status RunStep(const model::InputNorm& step, MicroBatch& batch, const std::vector<WorkerPart>& parts);
  absl::Status RunStep(const model::QueryProjection& step, MicroBatch& batch, const std::vector<WorkerPart>& parts);
  absl::Status RunStep(const model::KeyValueProjection& step, MicroBatch& batch, const std::vector<WorkerPart>& parts);
  absl::Status RunStep(const model::AttentionCut& step, MicroBatch& batch, const std::vector<WorkerPart>& parts);
  absl::Status RunStep(const model::OutputProjection& step, MicroBatch& batch, const std::vector<WorkerPart>& parts);
  absl::Status RunStep(const model::GatedMlp& step, MicroBatch& batch, const std::vector<WorkerPart>& parts);
  absl::Status RunStep(const model::ExpertMlp& step, MicroBatch& batch, const std::vector<WorkerPart>& parts);

  // hybrid_steps.cc: linear states and experts.
  absl::Status Restart(const std::optional<float>& alpha, MicroBatch& batch);
  absl::Status Silu(float* x, int64_t n);
  absl::Status ExpandLatent(const model::LatentKeyValue& latent, MicroBatch& batch, float* k, float* v);
  absl::Status ComputeGates(const model::StateGates& gates, int op, MicroBatch& batch);
  absl::Status GateBy(const model::OutputGate& gate, float* attended, int64_t width, MicroBatch& batch);
  absl::Status ApplyGate(const model::OutputGate& gate, float* attended, int64_t width, MicroBatch& batch);
  absl::Status ProjectLowRank(const model::LowRankProjection& projection, const float* in, int64_t rows, float* out);
  absl::Status RunGatedMlp(const model::Projection& gate, const model::Projection& up, model::Activation activation,
                           const float* in, int64_t rows);
  absl::Status RunExperts(const model::ExpertMlp& step, const float* h, int64_t width, int64_t rows);
  absl::Status AddSharedExpert(const model::ExpertMlp& step, const float* h, MicroBatch& batch);
  absl::Status Multiply(const model::Projection& projection, const float* in, int64_t rows, float* out);

  absl::Status Norm(const model::RmsNorm& norm, float* x, float* out, int64_t rows, int vectors);
  // [rows, heads, dim] f32 -> wire type, head-normed and rotated on the way.
  absl::Status ToWire(float* x, int64_t rows, int heads, int dim, const std::optional<model::RmsNorm>& head_norm,
                      int rope, const MicroBatch& batch, DType type, std::byte* out);
  // x += scale post_norm(in W + b).
  absl::Status AddProjection(const model::Projection& projection, const std::optional<model::RmsNorm>& post_norm,
                             float scale, const float* in, MicroBatch& batch);

  // The most floats a row takes in each scratch buffer, over the steps of the model.
  struct Widths {
    int64_t heads = 0, gate = 0, up = 0, cols = 0;
    int64_t experts = 0, chosen = 0;
  };
  static Widths WidthsOf(const model::LoadedModel& model);
  std::span<std::byte> gemm_scratch() { return {gemm_scratch_->data(), gemm_scratch_->size_bytes()}; }

  const model::LoadedModel& model_;
  const proto::AttentionTable& table_;
  kernels::Device& device_;
  std::unique_ptr<kernels::Stream> stream_;
  kernels::OpContext context_;
  PromptAttention prompts_;
  PromptStates states_;
  SwitchAttention heads_of_ranks_;
  SwitchStates states_of_ranks_;
  PassQAttention queries_of_ranks_;
  std::vector<MicroBatch> micro_batches_;
  RopeCache<model::RopeTable> rope_cache_;
  const Widths widths_;
  BufferPtr heads_, gate_, up_, out_, gemm_scratch_;
  BufferPtr router_, expert_in_, expert_out_;   // logits [rows, experts]; [rows * chosen, hidden]
  std::vector<int32_t> route_, slot_, member_;  // [rows * chosen]: experts; rows of expert_out_; its rows' step rows
  std::vector<float> route_weight_;
};

}  // namespace dovetail::compute
