#pragma once
#include <list>
#include <memory>
#include <vector>

#include "compute_worker/cuda/cuda_batch.h"
#include "compute_worker/cuda/cuda_host_crossing.h"
#include "compute_worker/cuda/cuda_hybrid.h"
#include "compute_worker/cuda/cuda_model.h"
#include "compute_worker/cuda/cuda_one_gpu_crossing.h"
#include "compute_worker/cuda/cuda_peer_crossing.h"
#include "compute_worker/cuda/cuda_prompt_attention.h"
#include "compute_worker/cuda/cuda_prompt_states.h"
#include "compute_worker/cuda/cuda_rank_rows.h"
#include "kernels/cuda/products/cuda_product.h"
#include "kernels/cuda/rows/row_ops.h"

namespace dovetail::compute {

// The dense pieces of a model on a GPU; what only hybrids and experts have is CudaHybrid's. The residual stream is kept
// in f32, other activations in the wire type; products sum in f32. All work goes into the stream of the step's lane, so
// pieces return when they are enqueued. How q, k, v and o cross the seam is the step's CudaCrossing's.
//
// A step whose launches are collected is enqueued when all its pieces are known, and recorded
// (kernels/cuda/runtime/step_work.h). Such a step is drawn on the device, too, and the next one may take its tokens
// there.
class CudaDense final : public DenseBackend {
 public:
  // Takes all memory that a step of options.max_step_tokens rows needs: kResourceExhausted if it is not there.
  // kFailedPrecondition without cuBLASLt. `model` and `shared_gpu`, which may be null, outlive it.
  static absl::StatusOr<std::unique_ptr<DenseBackend>> Create(const CudaModel& model,
                                                              const proto::AttentionTable& table,
                                                              const ComputeWorkerOptions& options,
                                                              exchange::SharedGpu* shared_gpu);

  std::vector<SequenceId> PendingGrammars(const proto::StepPlan& plan) override {
    return shared_.sampler->PendingGrammars(plan);  // what it waits for, all samplers have
  }
  absl::Status PrepareStep(const ComputeWorkerCore& core, MicroBatchId id, const exchange::Seam& seam) override;
  absl::Status Run(const ComputeWorkerCore& core, MicroBatchId id, int index) override;
  absl::Status AttendPrompts(const ComputeWorkerCore& core, MicroBatchId id, int op) override;
  absl::StatusOr<bool> PayloadsReady(MicroBatchId id, int op) override;
  absl::StatusOr<bool> RankRowsReady(MicroBatchId id, int op) override;
  absl::StatusOr<transport::LentBytes> PackQuery(const ComputeWorkerCore& core, MicroBatchId id, int p,
                                                 int op) override;
  absl::StatusOr<transport::LentBytes> PackKeyValue(const ComputeWorkerCore& core, MicroBatchId id, int p,
                                                    int op) override;
  std::vector<std::byte> TakeRankState(MicroBatchId id, int op) override;
  absl::StatusOr<bool> RankStateReady(MicroBatchId id, int op) override;
  absl::StatusOr<transport::LentBytes> RankRows(MicroBatchId id, int op, int64_t first_row) override;
  absl::StatusOr<RankTensor> TakeRankRows(std::span<const std::byte> rows) override;
  absl::StatusOr<bool> RankRowsTaken(const RankTensor& rows) override;
  absl::Status KeepRankRows(const ComputeWorkerCore& core, const compute::KeepRankRows& keep,
                            const PromptScratch::Part& part) override;
  absl::StatusOr<RankTensor> TakeEarlierRows(std::span<const std::byte> rows) override { return TakeRankRows(rows); }
  absl::Status KeepEarlierRows(const ComputeWorkerCore& core, const compute::KeepEarlierRows& keep) override;
  absl::StatusOr<bool> BeginSample(const proto::StepPlan& plan, MicroBatchId id) override;
  bool Drawn(MicroBatchId id) override;
  void SetTurns(TurnChoice::Policy policy) override { between_gpus_->SetTurns(policy); }
  std::optional<GpuTimes> TimesOf(MicroBatchId id) const override;
  bool only_enqueues() const override { return true; }
  absl::Status Sample(const proto::StepPlan& plan, MicroBatchId id, proto::StepResult& result) override;

 private:
  using BufferPtr = std::unique_ptr<kernels::Buffer>;
  using Lane = CudaLane;
  using MicroBatch = CudaBatch;
  using RopeAngles = CudaBatch::RopeAngles;
  struct CachedRope {
    int rope = 0;
    int64_t variant = 0;
    model::RopeTable table;
    BufferPtr inv_freq;
  };

  CudaDense(const CudaModel& model, const proto::AttentionTable& table, kernels::cuda::CudaStream& stream);
  absl::Status Allocate(const ComputeWorkerOptions& options, exchange::SharedGpu* shared_gpu);
  absl::Status AllocateLane(Lane& lane, kernels::cuda::CudaStream& stream, int micro_batches) const;
  absl::StatusOr<std::unique_ptr<Lane>> MakeLane() const;
  CudaCrossing& CrossingOf(const exchange::Seam& seam) const;
  // The micro-batch as its lane's sampler knows it.
  MicroBatchId DrawId(const MicroBatch& batch) const { return batch.lane == &shared_ ? batch.id : MicroBatchId(0); }
  absl::Status AllocateMicroBatch(MicroBatch& batch, int64_t rows);
  absl::Status EmbedTokens(const ComputeWorkerCore& core, MicroBatchId id);
  absl::Status UploadTokens(const ComputeWorkerCore& core, MicroBatchId id, int32_t* ids, int32_t* positions) const;
  absl::Status ComputeAngles(const proto::StepPlan& plan, const int32_t* positions, MicroBatch& batch);
  absl::StatusOr<const CachedRope*> RopeFor(int rope, int64_t length);

  absl::Status RunPiece(const ComputeWorkerCore& core, MicroBatchId id, int index, const void* arriving);

  absl::Status RunStep(const model::InputNorm& step, const CudaStep& weights, MicroBatch& batch);
  absl::Status RunStep(const model::QueryProjection& step, const CudaStep& weights, MicroBatch& batch);
  absl::Status RunOutput(const model::OutputProjection& step, const CudaStep& weights, MicroBatch& batch,
                         const std::vector<WorkerPart>& parts, const void* arriving);
  absl::Status GateAndUp(const model::GatedMlp& step, const CudaStep& weights, MicroBatch& batch);
  absl::Status RunStep(const model::GatedMlp& step, const CudaStep& weights, MicroBatch& batch);
  absl::Status RunStep(const model::ExpertMlp& step, const CudaStep& weights, MicroBatch& batch);
  absl::Status MultiplyHeads(size_t index, MicroBatch& batch);
  static int IndexOf(const MicroBatch& batch) { return batch.id.value(); }
  size_t IndexOf(const CudaStep& step) const { return static_cast<size_t>(&step - model_.steps().data()); }

  // `parts` of batch.parts are added to x first.
  absl::Status Norm(const BufferPtr& weight, float eps, const float* x, void* out, kernels::cuda::WireType out_type,
                    const MicroBatch& batch, int parts = 0);
  // In how many parts a step leaves what it adds to x, for the next step's norm to add; 0: it adds it itself.
  int PartsLeftBy(size_t index, const MicroBatch& batch) const;
  absl::Status NormOrConvert(const std::optional<model::RmsNorm>& norm, const std::optional<float>& restart,
                             const CudaStep& weights, MicroBatch& batch);
  absl::Status NormWhole(const std::optional<model::RmsNorm>& norm, const BufferPtr& weight, std::byte* heads,
                         int64_t width, int dim, int64_t step, const MicroBatch& batch);
  absl::Status Multiply(const CudaProjection& w, const void* in, void* out, MicroBatch& batch);
  // x += scale post_norm(in W + b).
  absl::Status AddProjection(const CudaStep& step, const CudaProjection& w, float eps, float scale, const void* in,
                             MicroBatch& batch);
  kernels::cuda::GemmType gemm_type() const {
    return model_.type() == kernels::cuda::WireType::kBF16 ? kernels::cuda::GemmType::kBF16
                                                           : kernels::cuda::GemmType::kF16;
  }
  int64_t hidden() const { return model_.model().config().hidden_size; }

  const CudaModel& model_;
  const proto::AttentionTable table_;
  kernels::cuda::CudaStream& stream_;
  std::unique_ptr<kernels::cuda::CudaProduct> product_;
  std::unique_ptr<CudaHybrid> hybrid_;  // null for a dense model
  int64_t most_rows_ = 0;
  Lane shared_;
  std::unique_ptr<CudaRankRows> rank_rows_;       // null: prompts are not divided among ranks that give each other rows
  std::unique_ptr<CudaPromptAttention> prompts_;  // null: attention workers attend them
  std::unique_ptr<CudaPromptStates> states_;      // null: they run the linear layers of prompts
  // The ways across the seam.
  std::unique_ptr<CudaHostCrossing> through_hosts_;
  std::unique_ptr<CudaOneGpuCrossing> on_one_gpu_;  // null: no attention worker of this process has this GPU
  std::unique_ptr<CudaPeerCrossing> between_gpus_;
  std::vector<MicroBatch> micro_batches_;
  std::list<CachedRope> rope_cache_;  // front: used last
};

}  // namespace dovetail::compute
