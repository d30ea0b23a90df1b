#include "compute_worker/cuda/cuda_peer_prompts.h"

#include <algorithm>

#include "compute_worker/cuda/wire_element.h"
#include "kernels/cuda/exchange/cuda_exchange.h"

namespace dovetail::compute {

using exchange::GpuExchange;
using kernels::cuda::CudaStream;

CudaPeerPrompts::~CudaPeerPrompts() {
  for (const Step& step : steps_)
    if (step.copies != nullptr) (void)step.copies->SynchronizeStatus();
}

absl::Status CudaPeerPrompts::Make(Step& step) {
  if (step.copies != nullptr) return absl::OkStatus();
  DT_ASSIGN_OR_RETURN(step.made, device_.CreateEvent());
  DT_ASSIGN_OR_RETURN(step.copied, device_.CreateEvent());
  DT_ASSIGN_OR_RETURN(step.times, PromptStepTimes::Create(device_, table_.op_count()));
  DT_ASSIGN_OR_RETURN(step.copies, device_.CreateCudaStream());
  return absl::OkStatus();
}

absl::Status CudaPeerPrompts::Settle(const CudaBatch& batch) {
  Step& step = steps_[batch.id.value()];
  if (!step.under_way) return absl::OkStatus();
  DT_RETURN_IF_ERROR(batch.stream().SynchronizeStatus());
  DT_RETURN_IF_ERROR(step.copies->SynchronizeStatus());
  prompts_.Ended(batch.id);
  step.under_way = false;
  return absl::OkStatus();
}

absl::Status CudaPeerPrompts::Begin(const ComputeWorkerCore& core, CudaBatch& batch,
                                    const std::vector<GpuExchange*>& peers, const RowSpread& spread) {
  Step& step = steps_[batch.id.value()];
  DT_RETURN_IF_ERROR(Make(step));
  step.peers = peers;
  step.runs = spread.runs;
  step.part_rows.assign(spread.part_rows.begin(), spread.part_rows.end());
  step.asks = std::any_of(step.runs.begin(), step.runs.end(), [](const auto& run) { return !run.attended_here; });
  step.last_op.reset();
  step.under_way = true;
  for (GpuExchange* const peer : peers) peer->StoresFrom(*step.copies);
  DT_RETURN_IF_ERROR(prompts_.Prepare(core, batch));
  return step.times->Begin(batch.stream());
}

// The copies of the last op read what is about to be written.
absl::Status CudaPeerPrompts::BeforeHeads(CudaBatch& batch) {
  const Step& step = steps_[batch.id.value()];
  return step.last_op ? batch.stream().Wait(step.copied) : absl::OkStatus();
}

absl::Status CudaPeerPrompts::Await(int op, MicroBatchId id, CudaStream& stream) {
  for (const GpuExchange* const peer : steps_[id.value()].peers)
    DT_RETURN_IF_ERROR(kernels::cuda::ExchangeAwait(stream, {peer->End(id), static_cast<uint32_t>(op)}));
  return absl::OkStatus();
}

absl::Status CudaPeerPrompts::Copy(int op, const RowSpread::Run& run, CudaBatch& batch) {
  const Step& step = steps_[batch.id.value()];
  const proto::SoftmaxSpec& spec = table_.softmax(table_.op_group[op]);
  const GpuExchange& peer = *step.peers[run.part];
  std::byte* const slot = peer.peer_slot(batch.id);
  const int64_t query = int64_t{spec.query_heads} * spec.key_dim * kElement;
  const int64_t key = int64_t{spec.kv_heads} * spec.key_dim * kElement;
  const int64_t value = int64_t{spec.kv_heads} * spec.value_dim * kElement;
  const std::byte* const keys = batch.key_value->data();
  const std::byte* const values = keys + batch.rows * key;
  std::byte* const keys_there = slot + peer.key_value_at();
  std::byte* const values_there = keys_there + step.part_rows[run.part] * key;
  if (!run.attended_here)
    DT_RETURN_IF_ERROR(step.copies->Copy(slot + run.query_row * query, batch.query->data() + run.first_row * query,
                                         run.count * query));
  DT_RETURN_IF_ERROR(
      step.copies->Copy(keys_there + run.key_value_row * key, keys + run.first_row * key, run.count * key));
  return step.copies->Copy(values_there + run.key_value_row * value, values + run.first_row * value, run.count * value);
}

absl::Status CudaPeerPrompts::Leave(int op, CudaBatch& batch) {
  Step& step = steps_[batch.id.value()];
  DT_RETURN_IF_ERROR(step.times->Leaves(op, batch.stream()));
  DT_RETURN_IF_ERROR(batch.stream().Record(step.made));
  DT_RETURN_IF_ERROR(step.copies->Wait(step.made));
  if (step.last_op && !step.asks) DT_RETURN_IF_ERROR(Await(*step.last_op, batch.id, *step.copies));
  for (const RowSpread::Run& run : step.runs) DT_RETURN_IF_ERROR(Copy(op, run, batch));
  for (const GpuExchange* const peer : step.peers)
    DT_RETURN_IF_ERROR(kernels::cuda::ExchangeSignal(*step.copies, {peer->End(batch.id), static_cast<uint32_t>(op)}));
  step.last_op = op;
  return step.copies->Record(step.copied);
}

// Attention fills the GPU, and the kernel that sends a number would wait for it. So rows that attention workers attend
// leave before: those are attended meanwhile.
absl::Status CudaPeerPrompts::Attend(const ComputeWorkerCore& core, int op, CudaBatch& batch) {
  Step& step = steps_[batch.id.value()];
  if (step.asks) DT_RETURN_IF_ERROR(batch.stream().Wait(step.copied));
  DT_RETURN_IF_ERROR(step.times->Attends(op, batch.stream()));
  DT_RETURN_IF_ERROR(prompts_.Attend(core, op, batch));
  return step.times->Attended(op, batch.stream());
}

absl::StatusOr<const void*> CudaPeerPrompts::Arrive(int op, CudaBatch& batch) {
  Step& step = steps_[batch.id.value()];
  if (step.asks) DT_RETURN_IF_ERROR(Await(op, batch.id, batch.stream()));
  DT_RETURN_IF_ERROR(step.times->GoesOn(op, batch.stream()));
  const proto::SoftmaxSpec& spec = table_.softmax(table_.op_group[op]);
  const int64_t row = int64_t{spec.query_heads} * spec.value_dim * kElement;
  std::byte* const o = prompts_.attended(batch);
  for (const RowSpread::Run& run : step.runs) {
    if (run.attended_here) continue;
    DT_RETURN_IF_ERROR(batch.stream().Copy(
        o + run.first_row * row, step.peers[run.part]->own_slot(batch.id) + run.query_row * row, run.count * row));
  }
  return o;
}

absl::Status CudaPeerPrompts::AwaitLast(CudaBatch& batch) {
  const Step& step = steps_[batch.id.value()];
  if (step.asks || !step.last_op) return absl::OkStatus();
  DT_RETURN_IF_ERROR(batch.stream().Wait(step.copied));
  return Await(*step.last_op, batch.id, batch.stream());
}

absl::Status CudaPeerPrompts::End(CudaBatch& batch) { return steps_[batch.id.value()].times->End(batch.stream()); }

bool CudaPeerPrompts::Ran(MicroBatchId id) const { return steps_[id.value()].times->Ended(); }

absl::Status CudaPeerPrompts::Ended(MicroBatchId id) {
  Step& step = steps_[id.value()];
  DT_RETURN_IF_ERROR(step.times->Await());
  DT_RETURN_IF_ERROR(step.copies->SynchronizeStatus());
  prompts_.Ended(id);
  step.under_way = false;
  return absl::OkStatus();
}

std::optional<DenseBackend::GpuTimes> CudaPeerPrompts::TimesOf(MicroBatchId id) const {
  const Step& step = steps_[id.value()];
  std::optional<DenseBackend::GpuTimes> times = step.times->Sum();
  if (times.has_value()) times->attention = exchange::TimesOf(step.peers, id).peer_busy;
  return times;
}

}  // namespace dovetail::compute
