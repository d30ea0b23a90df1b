#include "compute_worker/cuda/cuda_one_gpu_crossing.h"

namespace dovetail::compute {

absl::Status CudaOneGpuCrossing::Use(const exchange::Seam&, CudaBatch& batch) {
  batch.lane = &lane_;
  batch.work = &gpu_.work(batch.id);
  return absl::OkStatus();
}

absl::Status CudaOneGpuCrossing::Begin(const ComputeWorkerCore&, CudaBatch& batch) { return batch.BeginWork(); }

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
