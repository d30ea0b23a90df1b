#include "compute_worker/earlier_rows.h"

#include "compute_worker/step_frames.h"
#include "proto/gather_frames.h"

namespace dovetail::compute {

absl::Status EarlierRows::Send(const AskRows& ask) {
  const auto header = proto::MakeHeader(proto::kAskRows, ask.epoch, core_.PlanOf(ask.micro_batch).step, ask.micro_batch,
                                        ask.op, 0, /*busy_us=*/0, static_cast<uint64_t>(ask.piece));
  return UnlessUnreachable(port_.SendMessage(ask.to, header, {}));
}

absl::Status EarlierRows::Ask(const AskRows& ask, bool late) {
  if (!late) return Send(ask);
  waiting_.push_back({core_.PlanOf(ask.micro_batch).step, ask});
  return absl::OkStatus();
}

absl::Status EarlierRows::AskLate(MicroBatchId id) {
  std::vector<Waiting> others;
  absl::Status sent;
  for (Waiting& waiting : waiting_) {
    if (waiting.ask.micro_batch != id)
      others.push_back(waiting);
    else if (sent.ok() && core_.running(id) && core_.PlanOf(id).step == waiting.step)  // else it has failed
      sent = Send(waiting.ask);
  }
  waiting_ = std::move(others);
  return sent;
}

}  // namespace dovetail::compute
