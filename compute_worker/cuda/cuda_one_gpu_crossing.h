#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "compute_worker/cuda/cuda_crossing.h"
#include "compute_worker/cuda/prompt_step_times.h"
#include "exchange/cuda/shared_gpu.h"

namespace dovetail::compute {

// OnOneGpu: payloads are the batch's tensors themselves, and what the attention worker answers is memory of the same
// GPU. New K and V go where that worker says, if it does. Marks in the stream say how long layers and attention take,
// in steps whose launches are not recorded.
// Errors: kInternal: the device is lost.
// Threads: reactor-owned, as CudaDense.
class CudaOneGpuCrossing final : public CudaCrossing {
 public:
  // All outlive it.
  CudaOneGpuCrossing(const proto::AttentionTable& table, exchange::SharedGpu& gpu, CudaLane& lane, int micro_batches)
      : table_(table), gpu_(gpu), lane_(lane), steps_(micro_batches) {}

  absl::Status Use(const exchange::Seam& seam, CudaBatch& batch) override;
  absl::Status Begin(const ComputeWorkerCore& core, CudaBatch& batch) override;
  void LeaveFrom(int op, const CudaBatch& batch, kernels::cuda::KvAppendLaunch& out) override;
  absl::Status Leave(int op, CudaBatch& batch) override;
  absl::StatusOr<transport::LentBytes> PackQuery(const std::vector<WorkerPart>& parts, int p, int op,
                                                 CudaBatch& batch) override;
  absl::StatusOr<transport::LentBytes> PackKeyValue(const std::vector<WorkerPart>& parts, int p, int op,
                                                    CudaBatch& batch) override;
  // The attention worker's memory grows now and then.
  const void* Arriving(const std::vector<WorkerPart>& parts, const CudaBatch&) const override {
    return parts[0].partial.data();
  }
  absl::StatusOr<const void*> Arrive(int op, const std::vector<WorkerPart>&, const void* arriving,
                                     CudaBatch& batch) override;
  absl::Status BeforeDraws(CudaBatch& batch) override;
  absl::Status Launch(CudaBatch& batch) override;
  bool WaitsForEnd(MicroBatchId) const override { return true; }
  bool Ran(MicroBatchId id) const override;
  std::optional<DenseBackend::GpuTimes> TimesOf(MicroBatchId id) const override;

 private:
  struct Step {
    std::unique_ptr<PromptStepTimes> times;
    kernels::cuda::CudaEvent ended;
    bool timed = false;  // the step at hand
  };
  const proto::AttentionTable& table_;
  exchange::SharedGpu& gpu_;
  CudaLane& lane_;
  std::vector<Step> steps_;  // by micro-batch
};

}  // namespace dovetail::compute
