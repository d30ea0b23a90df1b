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
                          Payloads& payloads) {
  const bool asks = payloads.type == FrameType::kQuery;
  const std::vector<WorkerPart>& parts = core.PartsOf(id);
  for (size_t& p = payloads.part; p < parts.size(); ++p) {
    const proto::StepLayout& layout = parts[p].layouts[core.table().op_group[payloads.op].value()];
    if (layout.items.empty() || (asks && !layout.asks())) continue;
    if (!payloads.packed) {
      const int part = static_cast<int>(p);
      DT_ASSIGN_OR_RETURN(payloads.packed, asks ? dense.PackQuery(core, id, part, payloads.op)
                                                : dense.PackKeyValue(core, id, part, payloads.op));
    }
    const auto header =
        MakeHeader(payloads.type, parts[p].epoch, core.PlanOf(id).step, id, payloads.op, payloads.packed->size());
    DT_RETURN_IF_ERROR(UnlessUnreachable(port.SendTensor(parts[p].node, header, *payloads.packed)));
    payloads.packed.reset();
  }
  return absl::OkStatus();
}

}  // namespace dovetail::compute
