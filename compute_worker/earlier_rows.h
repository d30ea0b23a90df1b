#pragma once
#include <vector>

#include "base/status.h"
#include "compute_worker/core/compute_worker_core.h"
#include "transport/fabric.h"

namespace dovetail::compute {

// Asks attention workers for pieces of earlier tokens' K and V (proto/gather_frames.h). An ask answers what its sender
// was handed before, and goes behind k and v of its op: it waits while payloads of its step wait for the device.
//   Errors:  those of the port; a peer that cannot be reached is none (step_frames.h)
//   Threads: reactor-owned; nothing blocks
class EarlierRows {
 public:
  EarlierRows(const ComputeWorkerCore& core, transport::Port& port) : core_(core), port_(port) {}  // both outlive this

  // Of a step that runs. `late`: payloads of its micro-batch were not sent yet, and AskLate will follow.
  absl::Status Ask(const AskRows& ask, bool late);
  // All payloads of the micro-batch were sent.
  absl::Status AskLate(MicroBatchId id);

 private:
  struct Waiting {
    StepId step;
    AskRows ask;
  };
  absl::Status Send(const AskRows& ask);

  const ComputeWorkerCore& core_;
  transport::Port& port_;
  std::vector<Waiting> waiting_;  // in order; at most kGatherPiecesAhead for each attention worker of a step
};

}  // namespace dovetail::compute
