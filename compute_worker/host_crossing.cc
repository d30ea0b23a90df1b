#include "compute_worker/host_crossing.h"

#include <utility>

namespace dovetail::compute {

using proto::FrameType;

absl::Status HostCrossing::SendBegin(SendStepBegin& begin) {
  late_[begin.micro_batch.value()].clear();  // of a step that failed
  return SendBeginFrame(port_, FrameType::kStepBegin, begin);
}

absl::StatusOr<bool> HostCrossing::Sent(MicroBatchId id, Payloads& payloads) {
  DT_ASSIGN_OR_RETURN(const bool ready, dense_.PayloadsReady(id, payloads.op));
  if (!ready) return false;
  const absl::Status sent = SendPayloads(core_, dense_, port_, id, payloads);
  if (absl::IsResourceExhausted(sent)) return false;
  DT_RETURN_IF_ERROR(sent);
  return true;
}

absl::Status HostCrossing::Send(MicroBatchId id, int op, FrameType type) {
  Payloads payloads{.op = op, .type = type};
  if (late_[id.value()].empty()) {
    DT_ASSIGN_OR_RETURN(const bool sent, Sent(id, payloads));
    if (sent) return absl::OkStatus();
  }
  late_[id.value()].push_back({core_.PlanOf(id).step, std::move(payloads)});
  return absl::OkStatus();
}

absl::Status HostCrossing::SendQuery(MicroBatchId id, int op) { return Send(id, op, FrameType::kQuery); }

absl::Status HostCrossing::SendKeyValue(MicroBatchId id, int op) { return Send(id, op, FrameType::kKeyValue); }

absl::StatusOr<Crossing::Late> HostCrossing::SendLate(MicroBatchId id) {
  std::deque<Waiting>& late = late_[id.value()];
  Late result;
  while (!late.empty()) {
    if (!core_.running(id) || core_.PlanOf(id).step != late.front().step) {
      late.clear();
      break;
    }
    DT_ASSIGN_OR_RETURN(const bool sent, Sent(id, late.front().payloads));
    if (!sent) break;
    late.pop_front();
    ++result.sent;
  }
  result.waiting = static_cast<int>(late.size());
  return result;
}

}  // namespace dovetail::compute
