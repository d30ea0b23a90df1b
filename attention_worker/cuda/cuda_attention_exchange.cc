// Steps of CudaAttentionExecutor whose q, k, v and o cross between the GPUs of two processes by themselves.
#include "attention_worker/cuda/cuda_attention_executor.h"
#include "kernels/cuda/exchange/cuda_exchange.h"

namespace dovetail::attention {

using kernels::cuda::CudaStream;

absl::Status CudaAttentionExecutor::UseExchange(MicroBatchId id, exchange::GpuExchange* exchange) {
  MicroBatch& batch = micro_batches_[id.value()];
  batch.exchange = exchange;
  batch.stream = &stream_;
  if (payloads_on_device_) return exchange == nullptr ? absl::OkStatus() : Internal("the peer is in this process");
  batch.work = nullptr;
  if (exchange == nullptr) return absl::OkStatus();
  if (batch.exchanged_work == nullptr) {
    DT_ASSIGN_OR_RETURN(batch.own_stream, device_.CreateCudaStream());
    DT_ASSIGN_OR_RETURN(batch.copied, device_.CreateEvent());
    batch.exchanged_work = std::make_unique<kernels::cuda::StepWork>();
  }
  batch.work = batch.exchanged_work.get();
  batch.stream = batch.own_stream.get();
  // One micro-batch alone waits with its append; a thread block of that would hold up those of others.
  batch.waits_apart = last_exchanged_.has_value() && *last_exchanged_ != id;
  last_exchanged_ = id;
  DT_RETURN_IF_ERROR(stream_.Record(batch.copied));  // blocks that were copied for the step
  return batch.stream->Wait(batch.copied);
}

absl::Status CudaAttentionExecutor::LaunchExchanged(MicroBatchId id) {
  MicroBatch& batch = micro_batches_[id.value()];
  return batch.exchange != nullptr ? batch.work->Launch(*batch.stream) : absl::OkStatus();
}

// Waits for q, k and v with the append; o is stored into the peer's memory as it is computed.
absl::Status CudaAttentionExecutor::AddExchanged(MicroBatch& batch, MicroBatchId id, int op,
                                                 const std::byte* key_value) {
  using kernels::cuda::StepWork;
  const LayerGroup group = core_.table().op_group[op];
  const int op_index = core_.table().op_index_in_group[op];
  const GroupStep& step = batch.groups[group.value()];
  if (!step.partials.empty() || step.appends.empty() || (!step.attends && step.prompts->empty()))
    return Internal("attention op ", op, ": a step of divided sequences cannot stay on GPUs");
  const auto offset = static_cast<uint64_t>(op_index * step.op_step);
  uint64_t appends = 0;
  for (const AppendRun& run : step.appends) {
    for (const int64_t value : {int64_t{run.rows}, int64_t{run.kv_heads}, int64_t{run.first_row}, run.key_offset})
      appends = (appends ^ static_cast<uint64_t>(value)) * 0x9e3779b97f4a7c15ull;
  }
  const std::byte* const query = batch.payload.data();
  std::byte* const answer = batch.exchange->peer_slot(id);
  const kernels::cuda::ExchangeEnd end = batch.exchange->End(id);
  return batch.work->Add(
      *batch.stream,
      {StepWork::Word(this), static_cast<uint64_t>(op), batch.waits_apart ? 1u : 0u, offset, appends,
       StepWork::Word(query), StepWork::Word(key_value), StepWork::Word(answer), StepWork::Word(end.own),
       StepWork::Word(end.peer), StepWork::Word(step.items), StepWork::Word(step.positions),
       StepWork::Word(step.row_items), step.attends ? step.attention->Launches() : 0},
      [this, &batch, group, op, op_index, query, key_value, answer, end](CudaStream& stream) -> absl::Status {
        if (batch.waits_apart)
          DT_RETURN_IF_ERROR(kernels::cuda::ExchangeAwait(stream, {end, static_cast<uint32_t>(op)}));
        DT_RETURN_IF_ERROR(Append(batch, group, op_index, key_value, &end, op));
        DT_RETURN_IF_ERROR(Attend(batch, group, op_index, query, key_value, answer));
        return kernels::cuda::ExchangeSignal(stream, {end, static_cast<uint32_t>(op)});
      });
}

}  // namespace dovetail::attention
