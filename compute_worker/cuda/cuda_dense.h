#pragma once
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
#include "compute_worker/cuda/launch_list.h"
#include "compute_worker/cuda/launch_runner.h"
#include "compute_worker/rope_runs.h"
#include "kernels/cuda/products/cuda_product.h"
#include "kernels/cuda/rows/row_ops.h"

namespace dovetail::compute {

// The dense pieces of a model on a GPU: lists of launches, made once from the model's steps (lower.h, fuse.h) and run
// again in every step (launch_runner.h). The residual stream is kept in f32, other activations in the wire type;
// products sum in f32. All work goes into the stream of the step's lane, so pieces return when they are enqueued. How
// q, k, v and o cross the seam is the step's CudaCrossing's.
//
// A step whose launches are collected is enqueued when all its pieces are known, and recorded
// (kernels/cuda/runtime/step_work.h). Such a step is drawn on the device, too, and the next one may take its tokens
// there.
// Threads: reactor-owned, as DenseBackend.
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
  absl::Status AttendRankShard(const ComputeWorkerCore& core, const AttendShard& shard) override;
  absl::StatusOr<transport::LentBytes> RankHeads(const ComputeWorkerCore& core, MicroBatchId id, int op,
                                                 const proto::HeadRange& heads) override;
  absl::Status AttendRankHeads(const ComputeWorkerCore& core, const AttendHeads& attend) override;
  absl::StatusOr<transport::LentBytes> TakeRankOutputs(const ComputeWorkerCore& core, MicroBatchId id) override;
  absl::StatusOr<bool> GivenReady(std::span<const std::byte> lent) override;
  absl::Status PlaceOutputs(const ComputeWorkerCore& core, const PlaceRankOutputs& place) override;
  absl::StatusOr<bool> PayloadsReady(MicroBatchId id, int op) override;
  absl::StatusOr<bool> RankRowsReady(MicroBatchId id, int op) override;
  absl::StatusOr<transport::LentBytes> PackQuery(const ComputeWorkerCore& core, MicroBatchId id, int p,
                                                 int op) override;
  absl::StatusOr<transport::LentBytes> PackKeyValue(const ComputeWorkerCore& core, MicroBatchId id, int p,
                                                    int op) override;
  std::vector<std::byte> TakeRankState(MicroBatchId id, int op) override;
  absl::StatusOr<bool> RankStateReady(MicroBatchId id, int op) override;
  absl::StatusOr<transport::LentBytes> RankRows(MicroBatchId id, int op, int64_t first_row) override;
  RankMemory* rank_memory() override {
    return rank_memory_ == nullptr || rank_memory_->in_process() ? nullptr : rank_memory_.get();
  }
  absl::StatusOr<RankTensor> TakeRankRows(std::span<const std::byte> rows) override;
  absl::StatusOr<bool> RankRowsTaken(const RankTensor& rows) override;
  absl::StatusOr<transport::LentBytes> HandOnRows(MicroBatchId id, const proto::SoftmaxSpec& spec,
                                                  const RankTensor& rows, int64_t first_row) override;
  absl::StatusOr<bool> HandOnReady(std::span<const std::byte> rows) override;
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
  struct RopeOnGpu {
    float multiplier = 1;
    BufferPtr inv_freq;
  };

  CudaDense(const CudaModel& model, const proto::AttentionTable& table, kernels::cuda::CudaStream& stream);
  absl::Status Allocate(const ComputeWorkerOptions& options, exchange::SharedGpu* shared_gpu);
  absl::Status AllocateLane(Lane& lane, kernels::cuda::CudaStream& stream, int micro_batches) const;
  absl::Status AllocateHybrid(Lane& lane, int micro_batches) const;
  absl::StatusOr<std::unique_ptr<Lane>> MakeLane(int micro_batches) const;
  CudaCrossing& CrossingOf(const exchange::Seam& seam) const;
  // The micro-batch as its lane's sampler knows it.
  MicroBatchId DrawId(const MicroBatch& batch) const { return batch.lane == &shared_ ? batch.id : MicroBatchId(0); }
  absl::Status AllocateMicroBatch(MicroBatch& batch, int64_t rows);
  // Where products of the step's rows leave parts. Of many rows only products in order do, and few micro-batches have
  // prompts: memory for those is taken once one comes. kResourceExhausted: there is none.
  absl::Status PlaceParts(MicroBatch& batch) const;
  absl::Status EmbedTokens(const ComputeWorkerCore& core, MicroBatchId id);
  absl::Status UploadTokens(const ComputeWorkerCore& core, MicroBatchId id, int32_t* ids, int32_t* positions) const;
  absl::Status ComputeAngles(const proto::StepPlan& plan, const int32_t* positions, MicroBatch& batch);
  absl::StatusOr<const RopeOnGpu*> RopeFor(int rope, const RopeRun& run);

  // The stream in which this GPU attends prompts.
  kernels::cuda::CudaStream& PromptStream() const { return hosts_ != nullptr ? *hosts_->stream : stream_; }
  // Makes the launches of the model's steps, once.
  absl::Status LowerSteps();
  absl::Status ChooseProducts();
  const LaunchProgram& ProgramFor(int64_t rows) const;

  int64_t hidden() const { return model_.model().config().hidden_size; }

  const CudaModel& model_;
  const proto::AttentionTable table_;
  kernels::cuda::CudaStream& stream_;
  std::unique_ptr<kernels::cuda::CudaProduct> product_;
  std::unique_ptr<kernels::cuda::ExpertProduct> experts_;
  std::unique_ptr<LaunchRunner> runner_;
  std::vector<LaunchProgram> programs_;  // by how many parts products leave, less one
  int64_t most_rows_ = 0;
  Lane shared_;
  std::unique_ptr<Lane> hosts_;                   // of steps that cross through the hosts; null: the shared one
  std::unique_ptr<CudaRankMemory> rank_memory_;   // null: as rank_rows_
  std::unique_ptr<CudaRankRows> rank_rows_;       // null: prompts are not divided among ranks that give each other rows
  std::unique_ptr<CudaPromptAttention> prompts_;  // null: attention workers attend them
  std::unique_ptr<CudaPromptStates> states_;      // null: they run the linear layers of prompts
  // The ways across the seam.
  std::unique_ptr<CudaHostCrossing> through_hosts_;
  std::unique_ptr<CudaOneGpuCrossing> on_one_gpu_;  // null: no attention worker of this process has this GPU
  std::unique_ptr<CudaPeerCrossing> between_gpus_;
  std::vector<MicroBatch> micro_batches_;
  RopeCache<RopeOnGpu> rope_cache_;
};

}  // namespace dovetail::compute
