#include "compute_worker/host_crossing.h"

#include "compute_worker/step_frames.h"

namespace dovetail::compute {

using proto::FrameType;

absl::Status HostCrossing::SendBegin(SendStepBegin& begin) {
  return SendBeginFrame(port_, FrameType::kStepBegin, begin);
}

absl::Status HostCrossing::SendQuery(MicroBatchId id, int op) {
  return SendPayloads(core_, dense_, port_, id, op, FrameType::kQuery);
}

absl::Status HostCrossing::SendKeyValue(MicroBatchId id, int op) {
  return SendPayloads(core_, dense_, port_, id, op, FrameType::kKeyValue);
}

}  // namespace dovetail::compute
