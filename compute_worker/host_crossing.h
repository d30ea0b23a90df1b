#pragma once
#include "compute_worker/crossing.h"
#include "compute_worker/dense_backend.h"
#include "transport/fabric.h"

namespace dovetail::compute {

// Payloads in frames, from host memory to host memory: for any placement and device. Takes every step.
class HostCrossing final : public Crossing {
 public:
  // All outlive it.
  HostCrossing(const ComputeWorkerCore& core, DenseBackend& dense, transport::Port& port)
      : core_(core), dense_(dense), port_(port) {}

  absl::StatusOr<bool> Takes(MicroBatchId) override { return true; }
  exchange::Seam SeamOf(MicroBatchId) const override { return exchange::ThroughHosts(); }
  absl::Status SendBegin(SendStepBegin& begin) override;
  absl::Status SendQuery(MicroBatchId id, int op) override;
  absl::Status SendKeyValue(MicroBatchId id, int op) override;

 private:
  const ComputeWorkerCore& core_;
  DenseBackend& dense_;
  transport::Port& port_;
};

}  // namespace dovetail::compute
