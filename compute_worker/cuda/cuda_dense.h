#pragma once
#include <array>
#include <list>
#include <map>
#include <memory>
#include <vector>

#include "compute_worker/cuda/cuda_hybrid.h"
#include "compute_worker/cuda/cuda_model.h"
#include "compute_worker/cuda/cuda_token_sampler.h"
#include "compute_worker/row_spread.h"
#include "compute_worker/step_wire.h"
#include "compute_worker/turn_choice.h"
#include "exchange/cuda/step_exchange.h"
#include "kernels/cuda/products/cuda_product.h"
#include "kernels/cuda/rows/row_ops.h"
#include "kernels/cuda/runtime/staged_upload.h"
#include "kernels/cuda/runtime/step_work.h"

namespace dovetail::compute {

// The dense pieces of a model on a GPU; what only hybrids and experts have is CudaHybrid's. The residual stream is kept
// in f32, other activations in the wire type; products sum in f32. All work goes into the device's worker stream, so
// pieces return when they are enqueued.
//
// Two ways across the seam. If payloads stay on the device, one attention worker there holds every sequence whole: q,
// k, v and what it answers are tensors in device memory, and nobody waits before tokens are drawn. Otherwise q, k and v
// are copied to pinned memory, where StepWire packs them for any placement, and what comes back is joined there.
//
// If they stay, a step of up to kMostGraphRows rows is enqueued when all its pieces are known, with those of the
// attention worker, and recorded (kernels/cuda/runtime/step_work.h); its new K and V go where that worker says. Such a
// step is drawn on the device, too, and the next one may take its tokens there.
class CudaDense final : public DenseBackend {
 public:
  static constexpr int64_t kMostGraphRows = 256;

  // Takes all memory that a step of options.max_step_tokens rows needs: kResourceExhausted if it is not there.
  // kFailedPrecondition without cuBLASLt. `model` outlives it.
  static absl::StatusOr<std::unique_ptr<DenseBackend>> Create(const CudaModel& model,
                                                              const proto::AttentionTable& table,
                                                              const ComputeWorkerOptions& options, bool stay_on_device);

  absl::Status UseExchange(MicroBatchId id, std::span<exchange::GpuExchange* const> exchanges) override;
  std::vector<SequenceId> PendingGrammars(const proto::StepPlan& plan) override {
    return shared_.sampler->PendingGrammars(plan);  // what it waits for, all samplers have
  }
  absl::Status PrepareStep(const ComputeWorkerCore& core, MicroBatchId id) override;
  absl::Status Run(const ComputeWorkerCore& core, MicroBatchId id, int index) override;
  absl::Status AttendPrompts(const ComputeWorkerCore& core, MicroBatchId id, int op) override;
  absl::StatusOr<transport::LentBytes> PackQuery(const ComputeWorkerCore& core, MicroBatchId id, int p,
                                                 int op) override;
  absl::StatusOr<transport::LentBytes> PackKeyValue(const ComputeWorkerCore& core, MicroBatchId id, int p,
                                                    int op) override;
  absl::StatusOr<bool> BeginSample(const proto::StepPlan& plan, MicroBatchId id) override;
  bool Drawn(MicroBatchId id) override;
  void SetTurns(TurnChoice::Policy policy) override { turns_.Set(policy); }
  std::optional<GpuTimes> TimesOf(MicroBatchId id) const override;
  absl::Status Sample(const proto::StepPlan& plan, MicroBatchId id, proto::StepResult& result) override;

 private:
  using BufferPtr = std::unique_ptr<kernels::Buffer>;
  struct RopeAngles {
    BufferPtr cos, sin;  // [rows, pairs]
    int pairs = 0;
  };
  // What pieces that run one after the other share: a stream and scratch.
  struct Lane {
    kernels::cuda::CudaStream* stream = nullptr;
    std::unique_ptr<kernels::cuda::CudaStream> own_stream;  // unless it is the workers'
    BufferPtr h, qkv, attended, gate_up, act, aside;        // scratch of a piece
    std::unique_ptr<CudaTokenSampler> sampler;
  };
  struct MicroBatch {
    kernels::cuda::CudaStream& stream() const { return *lane->stream; }
    Lane* lane = nullptr;  // of the step
    int64_t rows = 0;
    BufferPtr x;                     // [rows, hidden] f32
    BufferPtr parts;                 // of what is added to x next: [CudaProduct::kMostParts, rows, hidden] f32
    BufferPtr query, key_value;      // [rows, query heads * key_dim]; [rows, KV heads * key_dim], then v likewise
    std::vector<RopeAngles> angles;  // by rope of the config
    std::unique_ptr<kernels::cuda::StagedUpload> upload;  // ids, positions; whose rows are whose
    std::unique_ptr<StepWire> wire;                       // unless payloads stay on the device
    bool copied = false;                                  // q, k and v have reached `wire`
    kernels::cuda::StepWork* work = nullptr;              // of the step
    kernels::cuda::CudaEvent begun, ended;                // timed: the launch of an exchanged step's work
    bool timed = false;
    TurnChoice::Load load;  // as the step began
    bool takes_turns = false;
    // With GPUs of other processes, by part of the step, if it uses them; what kernels know of several of them.
    std::vector<exchange::GpuExchange*> exchanges;
    const kernels::cuda::ExchangeFan* fan = nullptr;  // null: only one
    const kernels::cuda::ExchangeRow* fan_rows = nullptr;
    exchange::GpuExchange* only() const { return exchanges.size() == 1 ? exchanges[0] : nullptr; }
  };
  struct CachedRope {
    int rope = 0;
    int64_t variant = 0;
    model::RopeTable table;
    BufferPtr inv_freq;
  };

  CudaDense(const CudaModel& model, const proto::AttentionTable& table, kernels::cuda::CudaStream& stream,
            bool stay_on_device);
  absl::Status Allocate(const ComputeWorkerOptions& options);
  absl::Status AllocateLane(Lane& lane, kernels::cuda::CudaStream& stream, int micro_batches) const;
  Lane* LaneFor(MicroBatchId id);
  // The micro-batch as its lane's sampler knows it.
  MicroBatchId DrawId(const MicroBatch& batch) const { return batch.lane == &shared_ ? IdOf(batch) : MicroBatchId(0); }
  absl::Status AllocateMicroBatch(MicroBatch& batch, int64_t rows);
  absl::Status FindRows(const ComputeWorkerCore& core, MicroBatchId id);
  void FillFan(const MicroBatch& batch, std::byte* fan, std::byte* rows) const;
  // q, k and v are stored where they are attended; o lies in the one peer's slot, or of several in lane->attended.
  void SendToPeers(int op, int64_t k_width, const MicroBatch& batch, kernels::cuda::KvAppendLaunch& out) const;
  absl::Status AwaitPeers(int op, const MicroBatch& batch);
  absl::Status FetchStatus(MicroBatch& batch);
  // Steps of several micro-batches share the GPU: they take turns in its dense layers or run side by side.
  absl::Status BeginExchange(MicroBatch& batch, StepId step);
  TurnChoice::Load LoadWith(const MicroBatch& batch) const;  // as its step begins
  absl::Status EndTurn(MicroBatch& batch);
  void NoteTurns(const MicroBatch& batch);  // the step has ended well
  absl::Status EmbedTokens(const ComputeWorkerCore& core, MicroBatchId id);
  absl::Status UploadTokens(const ComputeWorkerCore& core, MicroBatchId id, int32_t* ids, int32_t* positions) const;
  absl::Status ComputeAngles(const proto::StepPlan& plan, const int32_t* positions, MicroBatch& batch);
  absl::StatusOr<const CachedRope*> RopeFor(int rope, int64_t length);
  absl::Status Enqueue(MicroBatch& batch, std::array<uint64_t, 2> what, kernels::cuda::StepWork::Enqueue enqueue);

  absl::Status RunPiece(const ComputeWorkerCore& core, MicroBatchId id, int index, const void* attended);

  absl::Status RunStep(const model::InputNorm& step, const CudaStep& weights, MicroBatch& batch);
  absl::Status RunStep(const model::QueryProjection& step, const CudaStep& weights, MicroBatch& batch);
  absl::Status RunOutput(const model::OutputProjection& step, const CudaStep& weights, MicroBatch& batch,
                         const std::vector<WorkerPart>& parts, const void* attended);
  absl::Status GateAndUp(const model::GatedMlp& step, const CudaStep& weights, MicroBatch& batch);
  absl::Status RunStep(const model::GatedMlp& step, const CudaStep& weights, MicroBatch& batch);
  absl::Status RunStep(const model::ExpertMlp& step, const CudaStep& weights, MicroBatch& batch);
  absl::Status MultiplyHeads(size_t index, MicroBatch& batch);
  int IndexOf(const MicroBatch& batch) const { return static_cast<int>(&batch - micro_batches_.data()); }
  MicroBatchId IdOf(const MicroBatch& batch) const { return MicroBatchId(static_cast<uint16_t>(IndexOf(batch))); }
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
  absl::Status CopyToWire(int op, MicroBatch& batch);
  absl::Status AwaitWire(MicroBatch& batch);
  // q, k, v and o of the micro-batch's step are device memory.
  bool OnDevice(const MicroBatch& batch) const { return stay_on_device_ || !batch.exchanges.empty(); }
  kernels::cuda::GemmType gemm_type() const {
    return model_.type() == kernels::cuda::WireType::kBF16 ? kernels::cuda::GemmType::kBF16
                                                           : kernels::cuda::GemmType::kF16;
  }
  int64_t hidden() const { return model_.model().config().hidden_size; }

  const CudaModel& model_;
  const proto::AttentionTable table_;
  kernels::cuda::CudaStream& stream_;
  const bool stay_on_device_;
  kernels::cuda::PinnedHost pinned_;
  std::unique_ptr<kernels::cuda::CudaProduct> product_;
  std::unique_ptr<CudaHybrid> hybrid_;  // null for a dense model
  int64_t most_rows_ = 0;
  Lane shared_;
  std::map<int, std::unique_ptr<Lane>> own_lanes_;  // by micro-batch, from 1 on
  bool no_more_lanes_ = false;
  std::vector<MicroBatch> micro_batches_;
  BufferPtr turn_;  // a kernels::cuda::ExchangeTurn
  TurnChoice turns_;
  RowSpread spread_;                  // of the step that is being prepared
  std::list<CachedRope> rope_cache_;  // front: used last
};

}  // namespace dovetail::compute
