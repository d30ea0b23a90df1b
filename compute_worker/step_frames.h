#pragma once
#include "base/status.h"
#include "compute_worker/core/compute_worker_core.h"
#include "compute_worker/dense_backend.h"
#include "transport/fabric.h"

namespace dovetail::compute {

// The frames of a step that go to attention workers, as ways across the seam send them.
//
// Errors: those of the port and of the backend. A peer that cannot be reached is no error: it is about to be declared
// lost, which ends the step by LoseAttentionWorker. Failing the step here would blame the request.
// Threads: reactor-owned, as the port.
absl::Status UnlessUnreachable(const absl::Status& sent);

// `type`: proto::FrameType::kStepBegin or proto::kStepBeginOnDevice.
absl::Status SendBeginFrame(transport::Port& port, proto::FrameType type, const SendStepBegin& begin);

// kQuery or kKeyValue of an op to every part that has rows in it, with what the backend packs.
absl::Status SendPayloads(const ComputeWorkerCore& core, DenseBackend& dense, transport::Port& port, MicroBatchId id,
                          int op, proto::FrameType type);

}  // namespace dovetail::compute
