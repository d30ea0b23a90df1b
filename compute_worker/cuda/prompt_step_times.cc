#include "compute_worker/cuda/prompt_step_times.h"

namespace dovetail::compute {

using kernels::cuda::CudaEvent;
using kernels::cuda::CudaStream;

absl::StatusOr<std::unique_ptr<PromptStepTimes>> PromptStepTimes::Create(kernels::cuda::CudaDevice& device, int ops) {
  auto made = std::make_unique<PromptStepTimes>();
  DT_ASSIGN_OR_RETURN(made->begun_, device.CreateEvent(/*timed=*/true));
  DT_ASSIGN_OR_RETURN(made->ended_, device.CreateEvent(/*timed=*/true));
  made->ops_.resize(ops);
  for (Op& op : made->ops_)
    for (CudaEvent* const event : {&op.left, &op.attends, &op.attended, &op.goes_on}) {
      DT_ASSIGN_OR_RETURN(*event, device.CreateEvent(/*timed=*/true));
    }
  return made;
}

absl::Status PromptStepTimes::Begin(CudaStream& stream) {
  for (Op& op : ops_) op.marked = false;
  return stream.Record(begun_);
}

absl::Status PromptStepTimes::Leaves(int op, CudaStream& stream) { return stream.Record(ops_[op].left); }

absl::Status PromptStepTimes::Attends(int op, CudaStream& stream) { return stream.Record(ops_[op].attends); }

absl::Status PromptStepTimes::Attended(int op, CudaStream& stream) { return stream.Record(ops_[op].attended); }

absl::Status PromptStepTimes::GoesOn(int op, CudaStream& stream, bool linear) {
  ops_[op].marked = true;
  ops_[op].linear = linear;
  return stream.Record(ops_[op].goes_on);
}

absl::Status PromptStepTimes::End(CudaStream& stream) { return stream.Record(ended_); }

absl::Status PromptStepTimes::Await() const { return ended_.Synchronize(); }

bool PromptStepTimes::Ended() const {
  const absl::StatusOr<bool> done = ended_.Done();
  return !done.ok() || *done;
}

std::optional<DenseBackend::GpuTimes> PromptStepTimes::Sum() const {
  double all = 0, prompts = 0, linear = 0, waited = 0;
  const auto add = [](double& to, const CudaEvent& from, const CudaEvent& until) {
    const absl::StatusOr<float> ms = until.MillisecondsSince(from);
    if (ms.ok()) to += *ms;
    return ms.ok();
  };
  bool any = false;
  for (const Op& op : ops_) {
    if (!op.marked) continue;
    any = true;
    if (!add(waited, op.left, op.attends) || !add(op.linear ? linear : prompts, op.attends, op.attended) ||
        !add(waited, op.attended, op.goes_on))
      return std::nullopt;
  }
  if (!any || !add(all, begun_, ended_)) return std::nullopt;
  DenseBackend::GpuTimes times;
  times.busy = absl::Milliseconds(all - prompts - linear - waited);
  times.waited = absl::Milliseconds(waited);
  times.prompts = absl::Milliseconds(prompts + linear);
  times.linear = absl::Milliseconds(linear);
  return times;
}

}  // namespace dovetail::compute
