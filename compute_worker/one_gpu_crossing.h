#pragma once
#include "compute_worker/crossing.h"
#include "compute_worker/dense_backend.h"
#include "compute_worker/row_spread.h"
#include "transport/fabric.h"

namespace dovetail::exchange {
class SharedGpu;
}

namespace dovetail::compute {

// On the GPU that this worker shares with the only attention worker of a step: payloads of frames are addresses there.
// Threads: reactor-owned, as Crossing.
class OneGpuCrossing final : public Crossing {
 public:
  // All outlive it.
  OneGpuCrossing(const ComputeWorkerCore& core, DenseBackend& dense, exchange::SharedGpu& gpu, transport::Port& port)
      : core_(core), dense_(dense), gpu_(gpu), port_(port) {}

  absl::StatusOr<bool> Takes(MicroBatchId id) override;
  exchange::Seam SeamOf(MicroBatchId) const override { return exchange::OnOneGpu{&gpu_}; }
  absl::Status SendBegin(SendStepBegin& begin) override;
  absl::Status SendQuery(MicroBatchId id, int op) override;
  absl::Status SendKeyValue(MicroBatchId id, int op) override;

 private:
  const ComputeWorkerCore& core_;
  DenseBackend& dense_;
  exchange::SharedGpu& gpu_;
  transport::Port& port_;
  RowSpread spread_;  // scratch
};

}  // namespace dovetail::compute
