#include "compute_worker/cuda/prompt_step_times.h"

#include <utility>

#include "base/check.h"

namespace dovetail::compute {

using kernels::cuda::CudaEvent;
using kernels::cuda::CudaStream;

namespace {

bool AddTime(double& to, const CudaEvent& from, const CudaEvent& until) {
  const absl::StatusOr<float> ms = until.MillisecondsSince(from);
  if (ms.ok()) to += *ms;
  return ms.ok();
}

}  // namespace

absl::StatusOr<std::unique_ptr<PromptStepTimes>> PromptStepTimes::Create(kernels::cuda::CudaDevice& device, int ops) {
  std::unique_ptr<PromptStepTimes> made(new PromptStepTimes(device));
  DT_ASSIGN_OR_RETURN(made->begun_, device.CreateEvent(/*timed=*/true));
  DT_ASSIGN_OR_RETURN(made->ended_, device.CreateEvent(/*timed=*/true));
  made->ops_.resize(ops);
  for (Op& op : made->ops_)
    for (CudaEvent* const event : {&op.left, &op.goes_on}) {
      DT_ASSIGN_OR_RETURN(*event, device.CreateEvent(/*timed=*/true));
    }
  return made;
}

absl::Status PromptStepTimes::Begin(CudaStream& stream, int parts) {
  for (Op& op : ops_) {
    op.marked = false;
    op.attended = 0;
    while (op.parts.size() < static_cast<size_t>(parts)) {
      Part part;
      DT_ASSIGN_OR_RETURN(part.attends, device_.CreateEvent(/*timed=*/true));
      DT_ASSIGN_OR_RETURN(part.attended, device_.CreateEvent(/*timed=*/true));
      op.parts.push_back(std::move(part));
    }
  }
  return stream.Record(begun_);
}

absl::Status PromptStepTimes::Leaves(int op, CudaStream& stream) { return stream.Record(ops_[op].left); }

absl::Status PromptStepTimes::Attends(int op, CudaStream& stream) {
  DT_CHECK(ops_[op].attended < ops_[op].parts.size(), "an op is attended in more parts than its step was begun with");
  return stream.Record(ops_[op].parts[ops_[op].attended].attends);
}

absl::Status PromptStepTimes::Attended(int op, CudaStream& stream) {
  return stream.Record(ops_[op].parts[ops_[op].attended++].attended);
}

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

// False: a time is not known.
bool PromptStepTimes::Add(const Op& op, double& attended, double& waited) {
  const CudaEvent* before = &op.left;
  for (size_t i = 0; i < op.attended; ++i) {
    if (!AddTime(waited, *before, op.parts[i].attends)) return false;
    if (!AddTime(attended, op.parts[i].attends, op.parts[i].attended)) return false;
    before = &op.parts[i].attended;
  }
  return AddTime(waited, *before, op.goes_on);
}

std::optional<DenseBackend::GpuTimes> PromptStepTimes::Sum() const {
  double all = 0, prompts = 0, linear = 0, waited = 0;
  bool any = false;
  for (const Op& op : ops_) {
    if (!op.marked) continue;
    any = true;
    if (!Add(op, op.linear ? linear : prompts, waited)) return std::nullopt;
  }
  if (!any || !AddTime(all, begun_, ended_)) return std::nullopt;
  DenseBackend::GpuTimes times;
  times.busy = absl::Milliseconds(all - prompts - linear - waited);
  times.waited = absl::Milliseconds(waited);
  times.prompts = absl::Milliseconds(prompts + linear);
  times.linear = absl::Milliseconds(linear);
  return times;
}

}  // namespace dovetail::compute
