#include "compute_worker/one_gpu_crossing.h"

#include "compute_worker/step_frames.h"
#include "exchange/cuda/shared_gpu.h"

namespace dovetail::compute {

using proto::FrameType;

// Payloads are whole rows of the step's tensors then.
absl::StatusOr<bool> OneGpuCrossing::Takes(MicroBatchId id) {
  const std::vector<WorkerPart>& parts = core_.PartsOf(id);
  return parts.size() == 1 && parts[0].node == gpu_.attention() && !core_.PlanOf(id).part.in_group() &&
         core_.PromptsOf(id).empty() && SpreadRows(core_, id, spread_);
}

absl::Status OneGpuCrossing::SendBegin(SendStepBegin& begin) {
  gpu_.Carry(begin.micro_batch, begin.step);
  return SendBeginFrame(port_, FrameType::kStepBegin, begin);
}

absl::Status OneGpuCrossing::SendQuery(MicroBatchId id, int op) {
  Payloads payloads{.op = op, .type = FrameType::kQuery};
  return SendPayloads(core_, dense_, port_, id, payloads);
}

absl::Status OneGpuCrossing::SendKeyValue(MicroBatchId id, int op) {
  Payloads payloads{.op = op, .type = FrameType::kKeyValue};
  return SendPayloads(core_, dense_, port_, id, payloads);
}

}  // namespace dovetail::compute
