#pragma once
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "compute_worker/cuda/cuda_crossing.h"
#include "compute_worker/cuda/cuda_divided_rows.h"
#include "compute_worker/cuda/cuda_peer_prompts.h"
#include "compute_worker/row_spread.h"
#include "compute_worker/turn_choice.h"
#include "exchange/cuda/step_exchange.h"

namespace dovetail::compute {

// BetweenGpus: kernels store q, k and v into the memory of the attention workers' GPUs and wait for o in this one's.
// Each micro-batch has a lane of its own where it can, so that a wait of one does not hold up another. In a step with
// prompts that are attended here, the copy engine takes q, k and v there instead (CudaPeerPrompts); in one with divided
// sequences a kernel of its own does (CudaDividedRows).
// Threads: reactor-owned, as CudaDense.
class CudaPeerCrossing final : public CudaCrossing {
 public:
  // A lane with a stream of its own. kResourceExhausted: no memory for it.
  using MakeLane = std::function<absl::StatusOr<std::unique_ptr<CudaLane>>()>;

  // `table`, the device of `stream`, `shared` and `prompts` outlive it. `make_lane` null: all micro-batches share one
  // lane. `prompts` null: all are attended on attention workers.
  static absl::StatusOr<std::unique_ptr<CudaPeerCrossing>> Create(const proto::AttentionTable& table,
                                                                  kernels::cuda::CudaStream& stream, CudaLane& shared,
                                                                  MakeLane make_lane, int micro_batches,
                                                                  CudaPromptAttention* prompts);
  ~CudaPeerCrossing() override;  // waits for the lanes: recorded work may still run

  void SetTurns(TurnChoice::Policy policy) { turns_.Set(policy); }

  absl::Status Use(const exchange::Seam& seam, CudaBatch& batch) override;
  absl::Status Begin(const ComputeWorkerCore& core, CudaBatch& batch) override;
  void AddTo(kernels::cuda::UploadLayout& layout, const CudaBatch& batch) override;
  void Fill(std::byte* host, const std::byte* device, const CudaBatch& batch) override;
  std::array<uint64_t, 3> Words(const CudaBatch& batch) const override;
  absl::Status BeforeHeads(CudaBatch& batch) override;
  void LeaveFrom(int op, const CudaBatch& batch, kernels::cuda::KvAppendLaunch& out) override;
  absl::Status Leave(int op, CudaBatch& batch) override;
  absl::Status AttendPrompts(const ComputeWorkerCore& core, int op, CudaBatch& batch) override;
  absl::StatusOr<transport::LentBytes> PackQuery(const std::vector<WorkerPart>&, int, int, CudaBatch&) override {
    return Internal("a step between GPUs has no payloads of frames");
  }
  absl::StatusOr<transport::LentBytes> PackKeyValue(const std::vector<WorkerPart>&, int, int, CudaBatch&) override {
    return Internal("a step between GPUs has no payloads of frames");
  }
  const void* Arriving(const std::vector<WorkerPart>& parts, const CudaBatch& batch) const override;
  absl::StatusOr<const void*> Arrive(int op, const std::vector<WorkerPart>& parts, const void* arriving,
                                     CudaBatch& batch) override;
  absl::Status BeforeDraws(CudaBatch& batch) override;
  absl::Status Launch(CudaBatch& batch) override;
  bool WaitsForEnd(MicroBatchId id) const override { return steps_[id.value()].attends; }
  bool Ran(MicroBatchId id) const override { return !steps_[id.value()].attends || prompts_->Ran(id); }
  absl::Status Ended(MicroBatchId id, StepId step, const absl::Status& drawn) override;
  std::optional<DenseBackend::GpuTimes> TimesOf(MicroBatchId id) const override;

  // The room that AddTo takes at most.
  static size_t UploadBytes(int64_t rows);

 private:
  // Of a micro-batch.
  struct Step {
    kernels::cuda::StepWork work;
    std::vector<exchange::GpuExchange*> peers;  // by part
    RowSpread spread;
    bool attends = false;                              // prompts
    bool divides = false;                              // CrossesAsDivided
    CudaDividedRows divided;                           // if so
    size_t fan_at = 0, fan_rows_at = 0;                // in the upload
    const kernels::cuda::ExchangeFan* fan = nullptr;   // on the device, of several peers; null: there is only one
    const kernels::cuda::ExchangeRow* rows = nullptr;  // likewise
    CudaLane* lane = nullptr;                          // of the last step that was launched
    int64_t row_count = 0;                             // likewise
    kernels::cuda::CudaEvent begun, ended;             // its launch, or all of an immediate step
    bool launched = false;                             // in one piece
    TurnChoice::Load load;                             // as it began
    bool takes_turns = false;
    exchange::GpuExchange* only() const { return peers.size() == 1 && !divides ? peers[0] : nullptr; }
    bool fans() const { return peers.size() > 1 && !attends && !divides; }
  };
  CudaPeerCrossing(const proto::AttentionTable& table, CudaLane& shared, MakeLane make_lane, int micro_batches)
      : table_(table), shared_(shared), make_lane_(std::move(make_lane)), steps_(micro_batches) {}

  Step& StepOf(const CudaBatch& batch) { return steps_[batch.id.value()]; }
  const Step& StepOf(const CudaBatch& batch) const { return steps_[batch.id.value()]; }
  absl::Status UploadSinks(kernels::cuda::CudaStream& stream);
  const float* SinksOf(int op) const;  // on the device, or null
  CudaLane* LaneFor(MicroBatchId id);
  absl::Status Await(int op, CudaBatch& batch);
  absl::Status FetchStatus(CudaBatch& batch);
  // Steps of several micro-batches share the GPU: they take turns in its dense layers or run side by side.
  TurnChoice::Load LoadWith(const CudaBatch& batch) const;  // as its step begins
  absl::Status EndTurn(CudaBatch& batch);

  const proto::AttentionTable& table_;
  CudaLane& shared_;
  MakeLane make_lane_;                                  // null: no more lanes
  std::map<int, std::unique_ptr<CudaLane>> own_lanes_;  // by micro-batch, from 1 on
  std::vector<Step> steps_;                             // by micro-batch
  std::unique_ptr<kernels::Buffer> turn_;               // a kernels::cuda::ExchangeTurn
  TurnChoice turns_;
  std::vector<std::unique_ptr<kernels::Buffer>> sinks_;  // by op, where it has any
  std::unique_ptr<CudaPeerPrompts> prompts_;             // null: all are attended on attention workers
};

}  // namespace dovetail::compute
