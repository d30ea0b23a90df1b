#include "compute_worker/host_crossing.h"

#include "compute_worker/step_frames.h"

namespace dovetail::compute {

using proto::FrameType;

absl::Status HostCrossing::SendBegin(SendStepBegin& begin) {
  late_[begin.micro_batch.value()].clear();  // of a step that failed
  return SendBeginFrame(port_, FrameType::kStepBegin, begin);
}

absl::Status HostCrossing::Send(MicroBatchId id, int op, FrameType type) {
  if (late_[id.value()].empty()) {
    DT_ASSIGN_OR_RETURN(const bool ready, dense_.PayloadsReady(id, op));
    if (ready) return SendPayloads(core_, dense_, port_, id, op, type);
  }
  late_[id.value()].push_back({core_.PlanOf(id).step, op, type});
  return absl::OkStatus();
}

absl::Status HostCrossing::SendQuery(MicroBatchId id, int op) { return Send(id, op, FrameType::kQuery); }

absl::Status HostCrossing::SendKeyValue(MicroBatchId id, int op) { return Send(id, op, FrameType::kKeyValue); }

absl::StatusOr<Crossing::Late> HostCrossing::SendLate(MicroBatchId id) {
  std::deque<Payloads>& late = late_[id.value()];
  Late result;
  while (!late.empty()) {
    const Payloads payloads = late.front();
    if (!core_.running(id) || core_.PlanOf(id).step != payloads.step) {
      late.clear();
      break;
    }
    DT_ASSIGN_OR_RETURN(const bool ready, dense_.PayloadsReady(id, payloads.op));
    if (!ready) break;
    late.pop_front();
    ++result.sent;
    DT_RETURN_IF_ERROR(SendPayloads(core_, dense_, port_, id, payloads.op, payloads.type));
  }
  result.waiting = static_cast<int>(late.size());
  return result;
}

}  // namespace dovetail::compute
