// Steps of CudaAttentionExecutor whose q, k, v and o cross between the GPUs of two processes by themselves.
#include "attention_worker/cuda/cuda_attention_executor.h"
#include "kernels/cuda/cuda_exchange.h"

namespace dovetail::attention {

using kernels::cuda::CudaStream;

absl::Status CudaAttentionExecutor::UseExchange(MicroBatchId id, exchange::GpuExchange* exchange) {
  MicroBatch& batch = micro_batches_[id.value()];
  batch.exchange = exchange;
  if (payloads_on_device_) return exchange == nullptr ? absl::OkStatus() : Internal("the peer is in this process");
  if (exchange != nullptr && batch.exchanged_work == nullptr)
    batch.exchanged_work = std::make_unique<kernels::cuda::StepWork>();
  batch.work = exchange != nullptr ? batch.exchanged_work.get() : nullptr;
  return absl::OkStatus();
}

absl::Status CudaAttentionExecutor::LaunchExchanged(MicroBatchId id) {
  MicroBatch& batch = micro_batches_[id.value()];
  return batch.exchange != nullptr ? batch.work->Launch(stream_) : absl::OkStatus();
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
      stream_,
      {StepWork::Word(this), static_cast<uint64_t>(op), offset, appends, StepWork::Word(query),
       StepWork::Word(key_value), StepWork::Word(answer), StepWork::Word(end.own), StepWork::Word(end.peer),
       StepWork::Word(step.items), StepWork::Word(step.positions), StepWork::Word(step.row_items),
       step.attends ? step.attention->Launches() : 0},
      [this, &batch, group, op, op_index, query, key_value, answer, end](CudaStream&) -> absl::Status {
        DT_RETURN_IF_ERROR(Append(batch, group, op_index, key_value, &end, op));
        DT_RETURN_IF_ERROR(Attend(batch, group, op_index, query, key_value, answer));
        return kernels::cuda::ExchangeSignal(stream_, {end, static_cast<uint32_t>(op)});
      });
}

}  // namespace dovetail::attention
