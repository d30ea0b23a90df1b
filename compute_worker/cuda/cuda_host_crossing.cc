#include "compute_worker/cuda/cuda_host_crossing.h"

#include "compute_worker/cuda/cuda_hybrid.h"
#include "kernels/op_context.h"

namespace dovetail::compute {
namespace {

constexpr size_t kElement = 2;  // bytes of the wire types of a GPU

}  // namespace

CudaHostCrossing::CudaHostCrossing(const proto::AttentionTable& table, kernels::cuda::CudaDevice& device,
                                   CudaLane& lane, int micro_batches)
    : table_(table), pinned_(device), lane_(lane), steps_(micro_batches) {
  for (Step& step : steps_) step.wire = std::make_unique<StepWire>(pinned_, table_);
}

absl::Status CudaHostCrossing::Use(const exchange::Seam&, CudaBatch& batch) {
  batch.lane = &lane_;
  batch.work = nullptr;  // each op waits in any case
  return absl::OkStatus();
}

absl::Status CudaHostCrossing::Begin(const ComputeWorkerCore& core, CudaBatch& batch) {
  return steps_[batch.id.value()].wire->Prepare(core, batch.id);
}

absl::Status CudaHostCrossing::Leave(int op, CudaBatch& batch) {
  Step& step = steps_[batch.id.value()];
  const proto::SoftmaxSpec& spec = table_.softmax(table_.op_group[op]);
  const size_t query = batch.rows * spec.query_heads * spec.key_dim * kElement;
  const size_t key = batch.rows * spec.kv_heads * spec.key_dim * kElement;
  const size_t value = batch.rows * spec.kv_heads * spec.value_dim * kElement;
  DT_RETURN_IF_ERROR(batch.stream().Copy(step.wire->query(), batch.query->data(), query));
  DT_RETURN_IF_ERROR(batch.stream().Copy(step.wire->key(op), batch.key_value->data(), key));
  DT_RETURN_IF_ERROR(batch.stream().Copy(step.wire->value(op), batch.key_value->data() + key, value));
  if (spec.gates > 0)
    DT_RETURN_IF_ERROR(batch.stream().Copy(step.wire->gates(op),
                                           batch.key_value->data() + CudaHybrid::GatesAt(spec, batch.rows),
                                           CudaHybrid::GateBytes(spec, batch.rows)));
  step.copied = false;
  return absl::OkStatus();
}

absl::Status CudaHostCrossing::Await(CudaBatch& batch) {
  Step& step = steps_[batch.id.value()];
  if (step.copied) return absl::OkStatus();
  DT_RETURN_IF_ERROR(batch.stream().SynchronizeStatus());
  step.copied = true;
  return absl::OkStatus();
}

absl::StatusOr<transport::LentBytes> CudaHostCrossing::PackQuery(const std::vector<WorkerPart>& parts, int p, int op,
                                                                 CudaBatch& batch) {
  DT_RETURN_IF_ERROR(Await(batch));
  return steps_[batch.id.value()].wire->PackQuery(parts, p, table_.op_group[op]);
}

absl::StatusOr<transport::LentBytes> CudaHostCrossing::PackKeyValue(const std::vector<WorkerPart>& parts, int p, int op,
                                                                    CudaBatch& batch) {
  DT_RETURN_IF_ERROR(Await(batch));
  return steps_[batch.id.value()].wire->PackKeyValue(parts, p, op);
}

absl::StatusOr<const void*> CudaHostCrossing::Arrive(int op, const std::vector<WorkerPart>& parts, const void*,
                                                     CudaBatch& batch) {
  const proto::SoftmaxSpec& spec = table_.softmax(table_.op_group[op]);
  DT_ASSIGN_OR_RETURN(const std::byte* const joined,
                      steps_[batch.id.value()].wire->JoinPartials(parts, op, kernels::ContextOf(batch.stream())));
  const size_t bytes = batch.rows * spec.query_heads * spec.value_dim * kElement;
  DT_RETURN_IF_ERROR(batch.stream().Copy(batch.lane->attended->data(), joined, bytes));
  return batch.lane->attended->data();
}

}  // namespace dovetail::compute
