#pragma once
#include <cstddef>
#include <optional>

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

// kQuery or kKeyValue of an op, and what of it has still to be sent.
struct Payloads {
  int op = 0;
  proto::FrameType type = proto::FrameType::kQuery;
  size_t part = 0;                             // the first one that it has not been sent to
  std::optional<transport::LentBytes> packed;  // for that one
};
// To every part that has rows in it, with what the backend packs.
//   Errors: kResourceExhausted: a peer has no room yet; `payloads` says where the next call goes on
absl::Status SendPayloads(const ComputeWorkerCore& core, DenseBackend& dense, transport::Port& port, MicroBatchId id,
                          Payloads& payloads);

}  // namespace dovetail::compute
