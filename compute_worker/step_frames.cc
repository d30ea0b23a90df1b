#include "compute_worker/step_frames.h"

#include <utility>
#include <vector>

#include "proto/link_frames.h"

namespace dovetail::compute {

using proto::FrameType;
using proto::MakeHeader;

absl::Status UnlessUnreachable(const absl::Status& sent) {
  return absl::IsUnavailable(sent) || absl::IsNotFound(sent) ? absl::OkStatus() : sent;
}

absl::Status SendBeginFrame(transport::Port& port, FrameType type, const SendStepBegin& begin) {
  std::vector<std::byte> message;
  proto::Encode(begin.message, message);
  const auto header = MakeHeader(type, begin.epoch, begin.step, begin.micro_batch, 0, message.size());
  return UnlessUnreachable(port.SendMessage(begin.to, header, std::move(message)));
}

absl::Status SendPayloads(const ComputeWorkerCore& core, DenseBackend& dense, transport::Port& port, MicroBatchId id,
                          int op, FrameType type) {
  const LayerGroup group = core.table().op_group[op];
  const std::vector<WorkerPart>& parts = core.PartsOf(id);
  for (size_t p = 0; p < parts.size(); ++p) {
    const proto::StepLayout& layout = parts[p].layouts[group.value()];
    if (layout.items.empty() || (type == FrameType::kQuery && !layout.asks())) continue;
    DT_ASSIGN_OR_RETURN(transport::LentBytes payload, type == FrameType::kQuery
                                                          ? dense.PackQuery(core, id, static_cast<int>(p), op)
                                                          : dense.PackKeyValue(core, id, static_cast<int>(p), op));
    const auto header = MakeHeader(type, parts[p].epoch, core.PlanOf(id).step, id, op, payload.size());
    DT_RETURN_IF_ERROR(UnlessUnreachable(port.SendTensor(parts[p].node, header, std::move(payload))));
  }
  return absl::OkStatus();
}

}  // namespace dovetail::compute
