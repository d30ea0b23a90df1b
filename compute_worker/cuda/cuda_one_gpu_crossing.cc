#include "compute_worker/cuda/cuda_one_gpu_crossing.h"

namespace dovetail::compute {

absl::Status CudaOneGpuCrossing::Use(const exchange::Seam&, CudaBatch& batch) {
  batch.lane = &lane_;
  batch.work = &gpu_.work(batch.id);
  return absl::OkStatus();
}

absl::Status CudaOneGpuCrossing::Begin(const ComputeWorkerCore&, CudaBatch& batch) {
  DT_RETURN_IF_ERROR(batch.BeginWork());
  Step& step = steps_[batch.id.value()];
  if (step.ended.handle() == nullptr) {
    DT_ASSIGN_OR_RETURN(step.ended, batch.stream().device().CreateEvent());
  }
  step.timed = batch.work->immediate();
  if (!step.timed) return absl::OkStatus();
  if (step.times == nullptr) {
    DT_ASSIGN_OR_RETURN(step.times, PromptStepTimes::Create(batch.stream().device(), table_.op_count()));
  }
  return step.times->Begin(batch.stream());
}

// What comes from here on in the stream, up to Arrive, is the attention worker's.
absl::Status CudaOneGpuCrossing::Leave(int op, CudaBatch& batch) {
  const Step& step = steps_[batch.id.value()];
  if (!step.timed) return absl::OkStatus();
  DT_RETURN_IF_ERROR(step.times->Leaves(op, batch.stream()));
  return step.times->Attends(op, batch.stream());
}

absl::StatusOr<const void*> CudaOneGpuCrossing::Arrive(int op, const std::vector<WorkerPart>&, const void* arriving,
                                                       CudaBatch& batch) {
  const Step& step = steps_[batch.id.value()];
  if (!step.timed) return arriving;
  DT_RETURN_IF_ERROR(step.times->Attended(op, batch.stream()));
  const bool linear = table_.linear(table_.op_group[op]) != nullptr;
  DT_RETURN_IF_ERROR(step.times->GoesOn(op, batch.stream(), linear));
  return arriving;
}

absl::Status CudaOneGpuCrossing::BeforeDraws(CudaBatch& batch) {
  const Step& step = steps_[batch.id.value()];
  return step.timed ? step.times->End(batch.stream()) : absl::OkStatus();
}

absl::Status CudaOneGpuCrossing::Launch(CudaBatch& batch) {
  DT_RETURN_IF_ERROR(CudaCrossing::Launch(batch));
  return batch.stream().Record(steps_[batch.id.value()].ended);
}

bool CudaOneGpuCrossing::Ran(MicroBatchId id) const {
  const absl::StatusOr<bool> ran = steps_[id.value()].ended.Done();
  return !ran.ok() || *ran;  // what is wrong is for Sample to say
}

// The attention worker attended: for the compute worker that was waiting, but for linear layers, whose time goes with
// the tokens.
std::optional<DenseBackend::GpuTimes> CudaOneGpuCrossing::TimesOf(MicroBatchId id) const {
  const Step& step = steps_[id.value()];
  std::optional<DenseBackend::GpuTimes> times;
  if (step.timed) times = step.times->Sum();
  if (!times.has_value()) return times;
  times->attention = times->prompts - times->linear;
  times->waited += *times->attention;
  times->prompts = times->linear;
  return times;
}

void CudaOneGpuCrossing::LeaveFrom(int op, const CudaBatch& batch, kernels::cuda::KvAppendLaunch& out) {
  const exchange::SharedGpu::AppendTarget* const target = gpu_.TargetOf(batch.id, op);
  if (target == nullptr) return;
  out.k_out = out.v_out = nullptr;
  out.k_out_step = out.v_out_step = 0;
  out.positions = target->positions;
  out.row_items = target->row_items;
  out.items = target->items;
  out.kv_offset = target->kv_offset;
  out.layout = target->layout;
}

absl::StatusOr<transport::LentBytes> CudaOneGpuCrossing::PackQuery(const std::vector<WorkerPart>& parts, int p, int op,
                                                                   CudaBatch& batch) {
  const size_t bytes = parts[p].layouts[table_.op_group[op].value()].query_bytes;
  return transport::LentBytes(std::span<const std::byte>(batch.query->data(), bytes));
}

absl::StatusOr<transport::LentBytes> CudaOneGpuCrossing::PackKeyValue(const std::vector<WorkerPart>& parts, int p,
                                                                      int op, CudaBatch& batch) {
  const size_t bytes = parts[p].layouts[table_.op_group[op].value()].key_value_bytes;
  return transport::LentBytes(std::span<const std::byte>(batch.key_value->data(), bytes));
}

}  // namespace dovetail::compute
