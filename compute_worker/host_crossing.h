#pragma once
#include <deque>
#include <vector>

#include "compute_worker/crossing.h"
#include "compute_worker/dense_backend.h"
#include "compute_worker/step_frames.h"
#include "proto/frame.h"
#include "transport/fabric.h"

namespace dovetail::compute {

// Payloads in frames, from host memory to host memory: for any placement and device. Takes every step. Payloads that
// the device has not computed yet, or that a peer has no room for, are sent late, as are those that come behind them.
// Threads: reactor-owned, as Crossing.
class HostCrossing final : public Crossing {
 public:
  // All outlive it.
  HostCrossing(const ComputeWorkerCore& core, DenseBackend& dense, transport::Port& port)
      : core_(core), dense_(dense), port_(port), late_(core.options().micro_batches) {}

  absl::StatusOr<bool> Takes(MicroBatchId) override { return true; }
  exchange::Seam SeamOf(MicroBatchId) const override { return exchange::ThroughHosts(); }
  absl::Status SendBegin(SendStepBegin& begin) override;
  absl::Status SendQuery(MicroBatchId id, int op) override;
  absl::Status SendKeyValue(MicroBatchId id, int op) override;
  absl::StatusOr<Late> SendLate(MicroBatchId id) override;
  bool HasLate(MicroBatchId id) const override { return !late_[id.value()].empty(); }

 private:
  struct Waiting {
    StepId step;
    Payloads payloads;
  };
  absl::Status Send(MicroBatchId id, int op, proto::FrameType type);
  // What is there by now and has room; false: not all of it has been sent.
  absl::StatusOr<bool> Sent(MicroBatchId id, Payloads& payloads);

  const ComputeWorkerCore& core_;
  DenseBackend& dense_;
  transport::Port& port_;
  std::vector<std::deque<Waiting>> late_;  // by micro-batch
};

}  // namespace dovetail::compute
