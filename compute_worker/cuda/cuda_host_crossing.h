#pragma once
#include <memory>
#include <vector>

#include "compute_worker/cuda/cuda_crossing.h"
#include "compute_worker/step_wire.h"

namespace dovetail::compute {

// ThroughHosts: q, k and v are copied to pinned memory, where StepWire packs them for any placement, and what comes
// back is joined there. Each op waits for its copies.
class CudaHostCrossing final : public CudaCrossing {
 public:
  // All outlive it.
  CudaHostCrossing(const proto::AttentionTable& table, kernels::cuda::CudaDevice& device, CudaLane& lane,
                   int micro_batches);

  absl::Status Use(const exchange::Seam& seam, CudaBatch& batch) override;
  absl::Status Begin(const ComputeWorkerCore& core, CudaBatch& batch) override;
  absl::Status Leave(int op, CudaBatch& batch) override;
  absl::StatusOr<transport::LentBytes> PackQuery(const std::vector<WorkerPart>& parts, int p, int op,
                                                 CudaBatch& batch) override;
  absl::StatusOr<transport::LentBytes> PackKeyValue(const std::vector<WorkerPart>& parts, int p, int op,
                                                    CudaBatch& batch) override;
  absl::StatusOr<const void*> Arrive(int op, const std::vector<WorkerPart>& parts, const void* arriving,
                                     CudaBatch& batch) override;

 private:
  struct Step {
    std::unique_ptr<StepWire> wire;
    bool copied = false;  // q, k and v have reached it
  };
  absl::Status Await(CudaBatch& batch);

  const proto::AttentionTable& table_;
  kernels::cuda::PinnedHost pinned_;
  CudaLane& lane_;
  std::vector<Step> steps_;  // by micro-batch
};

}  // namespace dovetail::compute
