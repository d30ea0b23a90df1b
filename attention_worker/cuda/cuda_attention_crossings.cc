#include "attention_worker/cuda/cuda_attention_crossings.h"

#include <algorithm>
#include <variant>

#include "kernels/cuda/exchange/cuda_exchange.h"

namespace dovetail::attention {

using kernels::cuda::CudaStream;

absl::StatusOr<transport::LentBytes> CudaAttentionExecutor::Crossing::Lend(int op, const MicroBatch& batch) const {
  const LayerGroup group = executor_.core_.table().op_group[op];
  if (!batch.groups[group.value()].partials.empty())
    return Internal("the answer of a token shard cannot stay on one GPU");
  const MicroBatchId id(static_cast<uint16_t>(&batch - executor_.micro_batches_.data()));
  return transport::Lend(batch.partial, executor_.core_.LayoutOf(id, group).partial_bytes);
}

CudaAttentionExecutor::Crossing::AttendRecord CudaAttentionExecutor::Crossing::RecordOf(int op,
                                                                                        const std::byte* key_value,
                                                                                        MicroBatch& batch) const {
  const LayerGroup group = executor_.core_.table().op_group[op];
  const GroupStep& step = batch.groups[group.value()];
  AttendRecord record;
  record.executor = &executor_;
  record.batch = &batch;
  record.query = batch.payload.data();
  record.key_value = key_value;
  record.items = step.items;
  record.positions = step.positions;
  record.row_items = step.row_items;
  record.op = op;
  record.op_index = executor_.core_.table().op_index_in_group[op];
  record.group = group.value();
  record.offset = static_cast<uint64_t>(record.op_index * step.op_step);
  record.launches = step.attends ? step.attention->Launches() : 0;
  return record;
}

uint64_t CudaAttentionExecutor::Crossing::WordOf(const std::vector<AppendRun>& appends, uint64_t word) {
  for (const AppendRun& run : appends) {
    for (const int64_t value : {int64_t{run.rows}, int64_t{run.kv_heads}, int64_t{run.first_row}, run.key_offset})
      word = (word ^ static_cast<uint64_t>(value)) * 0x9e3779b97f4a7c15ull;
  }
  return word;
}

absl::Status CudaAttentionExecutor::Crossing::CheckTokensCome(MicroBatchId id, int op) const {
  const proto::StepLayout& layout = executor_.core_.LayoutOf(id, executor_.core_.table().op_group[op]);
  if (!layout.with_states && layout.query_bytes > 0) return absl::OkStatus();
  return Internal("attention op ", op, ": a state that crosses does not come from GPU to GPU");
}

// In a stream of its own, the step waits for the work that the shared stream holds now, which includes blocks that were
// copied for the step. It does not wait for steps that are launched there later.
absl::Status CudaAttentionExecutor::HostCrossing::Use(const exchange::Seam&, MicroBatchId, MicroBatch& batch) {
  batch.stream = &executor_.HostsStream();
  batch.work = nullptr;
  if (executor_.hosts_stream_ == nullptr) return absl::OkStatus();
  DT_RETURN_IF_ERROR(executor_.stream_.Record(executor_.before_hosts_));
  return batch.stream->Wait(executor_.before_hosts_);
}

absl::Status CudaAttentionExecutor::HostCrossing::TakeQuery(MicroBatch& batch) {
  if (batch.payload.empty()) return absl::OkStatus();
  return batch.stream->Copy(batch.query->data(), batch.payload.data(), batch.payload.size());
}

absl::StatusOr<transport::LentBytes> CudaAttentionExecutor::HostCrossing::Run(MicroBatchId id, int op,
                                                                              std::span<const std::byte> key_value,
                                                                              MicroBatch& batch) {
  const LayerGroup group = executor_.core_.table().op_group[op];
  const int op_index = executor_.core_.table().op_index_in_group[op];
  std::byte* const appended = batch.key_value->data();
  if (executor_.core_.LayoutOf(id, group).partial_bytes == 0) {  // nothing is to come back
    DT_RETURN_IF_ERROR(batch.incoming->Send(*batch.stream, appended, key_value));
    DT_RETURN_IF_ERROR(executor_.Append(batch, group, op_index, appended));
    DT_RETURN_IF_ERROR(batch.incoming->End(*batch.stream));
    return transport::LentBytes();
  }
  DT_RETURN_IF_ERROR(batch.stream->Copy(appended, key_value.data(), key_value.size()));
  DT_RETURN_IF_ERROR(executor_.Append(batch, group, op_index, appended));
  DT_RETURN_IF_ERROR(executor_.Attend(batch, group, op_index, batch.query->data()));
  return Answer(batch, batch.groups[group.value()], executor_.core_.LayoutOf(id, group).partial_bytes);
}

// Without queries it is a part of a move.
absl::StatusOr<transport::LentBytes> CudaAttentionExecutor::HostCrossing::RunState(MicroBatchId id, int op,
                                                                                   std::span<const std::byte> key_value,
                                                                                   MicroBatch& batch) {
  const proto::StepLayout& layout = executor_.core_.LayoutOf(id, executor_.core_.table().op_group[op]);
  CudaStateExecutor& states = *executor_.states_;
  if (layout.with_states) {
    DT_RETURN_IF_ERROR(states.TakeStates(id, op, key_value));
    if (layout.partial_bytes == 0) return std::span<const std::byte>();
  } else if (layout.query_bytes == 0) {
    DT_RETURN_IF_ERROR(states.Restore(id, op, key_value));
    return std::span<const std::byte>();
  }
  CudaStream& stream = executor_.stream_;
  const std::byte* const appended = batch.key_value->data();
  DT_RETURN_IF_ERROR(stream.Copy(batch.key_value->data(), key_value.data(), key_value.size()));
  const std::byte* const query = layout.with_states ? appended : batch.query->data();
  DT_RETURN_IF_ERROR(states.Run(id, op, {query, appended, batch.partial->data()}));
  DT_RETURN_IF_ERROR(stream.Copy(batch.partial_host->data(), batch.partial->data(), layout.partial_bytes));
  DT_RETURN_IF_ERROR(stream.SynchronizeStatus());  // also: payloads may be written anew once they are answered
  return transport::Lend(batch.partial_host, layout.partial_bytes);
}

absl::StatusOr<transport::LentBytes> CudaAttentionExecutor::HostCrossing::Answer(MicroBatch& batch,
                                                                                 const GroupStep& step, int64_t bytes) {
  CudaStream& stream = *batch.stream;
  if (step.finishes) DT_RETURN_IF_ERROR(stream.Copy(batch.partial_host->data(), batch.partial->data(), bytes));
  for (const PartialCopy& copy : step.partials) {
    const auto* floats = reinterpret_cast<const float*>(batch.partial_floats->data());
    auto* to = reinterpret_cast<float*>(batch.partial_host->data() + copy.to);
    DT_RETURN_IF_ERROR(stream.Copy(to, floats + copy.from_o, copy.o_floats * sizeof(float)));
    DT_RETURN_IF_ERROR(
        stream.Copy(to + copy.o_floats, floats + step.ml_at + copy.from_ml, copy.ml_floats * sizeof(float)));
  }
  DT_RETURN_IF_ERROR(stream.SynchronizeStatus());  // also: payloads may be written anew once they are answered
  return transport::Lend(batch.partial_host, bytes);
}

absl::Status CudaAttentionExecutor::OneGpuCrossing::Use(const exchange::Seam&, MicroBatchId id, MicroBatch& batch) {
  batch.stream = &executor_.stream_;
  batch.work = &gpu_.work(id);
  return absl::OkStatus();
}

absl::StatusOr<transport::LentBytes> CudaAttentionExecutor::OneGpuCrossing::Run(MicroBatchId id, int op,
                                                                                std::span<const std::byte> key_value,
                                                                                MicroBatch& batch) {
  if (!batch.work->immediate()) {
    DT_RETURN_IF_ERROR(Add(id, op, key_value.data(), batch));
    return Lend(op, batch);
  }
  const LayerGroup group = executor_.core_.table().op_group[op];
  const int op_index = executor_.core_.table().op_index_in_group[op];
  DT_RETURN_IF_ERROR(executor_.Append(batch, group, op_index, key_value.data()));
  DT_RETURN_IF_ERROR(executor_.Attend(batch, group, op_index, batch.payload.data()));
  return Lend(op, batch);
}

absl::StatusOr<transport::LentBytes> CudaAttentionExecutor::OneGpuCrossing::RunState(
    MicroBatchId id, int op, std::span<const std::byte> key_value, MicroBatch& batch) {
  DT_RETURN_IF_ERROR(CheckTokensCome(id, op));
  const LayerGroup group = executor_.core_.table().op_group[op];
  DT_RETURN_IF_ERROR(executor_.states_->Run(id, op, {batch.payload.data(), key_value.data(), batch.partial->data()}));
  return transport::Lend(batch.partial, executor_.core_.LayoutOf(id, group).partial_bytes);
}

// The same launches in every step of as many sequences, as long as no memory moves.
absl::Status CudaAttentionExecutor::OneGpuCrossing::Add(MicroBatchId id, int op, const std::byte* key_value,
                                                        MicroBatch& batch) {
  const LayerGroup group = executor_.core_.table().op_group[op];
  const proto::SoftmaxSpec& spec = executor_.core_.table().softmax(group);
  const GroupStep& step = batch.groups[group.value()];
  AttendRecord record = RecordOf(op, key_value, batch);
  const bool whole = step.appends.size() == 1 && step.appends[0].kv_heads == spec.kv_heads;
  if (whole) {
    gpu_.SetAppendTarget(
        id, op,
        {step.items, step.positions, step.row_items, static_cast<int64_t>(record.offset), executor_.LayoutOf(spec)});
  }
  // For a step whose appends are not one run, everything about them.
  record.appends = WordOf(step.appends, whole ? 1 : 0);
  record.partial = batch.partial->data();
  record.is_appended = whole ? 1 : 0;
  return batch.work->Add(*batch.stream, record, [](CudaStream&, const AttendRecord& r) -> absl::Status {
    const LayerGroup of(r.group);
    if (r.is_appended == 0) DT_RETURN_IF_ERROR(r.executor->Append(*r.batch, of, r.op_index, r.key_value));
    return r.executor->Attend(*r.batch, of, r.op_index, r.query);
  });
}

absl::Status CudaAttentionExecutor::PeerCrossing::Use(const exchange::Seam& seam, MicroBatchId id, MicroBatch& batch) {
  Step& step = steps_[id.value()];
  step.peer = std::get<exchange::BetweenGpus>(seam).peers.front();
  if (step.stream == nullptr) {
    DT_ASSIGN_OR_RETURN(step.copied, executor_.device_.CreateEvent());
    DT_ASSIGN_OR_RETURN(step.stream, executor_.device_.CreateCudaStream());
  }
  batch.work = &step.work;
  batch.stream = step.stream.get();
  // One micro-batch alone waits with its append; a thread block of that would hold up those of others.
  step.waits_apart = last_.has_value() && *last_ != id;
  last_ = id;
  DT_RETURN_IF_ERROR(executor_.stream_.Record(step.copied));  // blocks that were copied for the step
  return step.stream->Wait(step.copied);
}

absl::Status CudaAttentionExecutor::PeerCrossing::Begin(MicroBatchId id, MicroBatch& batch) {
  DT_RETURN_IF_ERROR(batch.work->Begin(*batch.stream));
  int64_t most_rows = 0;
  for (int g = 0; g < executor_.core_.table().group_count(); ++g) {
    int64_t rows = 0;
    for (const proto::ShardStep& item : executor_.core_.LayoutOf(id, LayerGroup(static_cast<uint16_t>(g))).items)
      rows += std::max(item.rows.q_count, item.rows.kv_count);
    most_rows = std::max(most_rows, rows);
  }
  if (most_rows > kMostGraphRows) DT_RETURN_IF_ERROR(batch.work->BeImmediate(*batch.stream));
  return steps_[id.value()].peer->BeginStep(*batch.stream, id, executor_.core_.StepOf(id));
}

// Waits for q, k and v with the append; o is stored into the peer's memory as it is computed. Of a prompt that the
// compute worker attends k and v are all that comes, and the number all that goes. A token shard to which the step
// appends nothing waits for q alone.
absl::StatusOr<transport::LentBytes> CudaAttentionExecutor::PeerCrossing::Run(MicroBatchId id, int op,
                                                                              std::span<const std::byte> payload,
                                                                              MicroBatch& batch) {
  const LayerGroup group = executor_.core_.table().op_group[op];
  const GroupStep& step = batch.groups[group.value()];
  AttendRecord record = RecordOf(op, payload.data(), batch);
  record.appends = WordOf(step.appends, 0);
  record.answer = steps_[id.value()].peer->peer_slot(id);
  record.end = steps_[id.value()].peer->End(id);
  record.waits_apart = steps_[id.value()].waits_apart || step.appends.empty() ? 1 : 0;
  if (!step.partials.empty()) {
    record.partials_there = step.partials_there;
    record.ml_there = step.ml_there;
  }
  const auto run = [](CudaStream& stream, const AttendRecord& r) -> absl::Status {
    const LayerGroup of(r.group);
    const auto number = static_cast<uint32_t>(r.op);
    if (r.waits_apart != 0) DT_RETURN_IF_ERROR(kernels::cuda::ExchangeAwait(stream, {r.end, number}));
    DT_RETURN_IF_ERROR(r.executor->Append(*r.batch, of, r.op_index, r.key_value, &r.end, r.op));
    DT_RETURN_IF_ERROR(r.executor->Attend(*r.batch, of, r.op_index, r.query, r.answer));
    return kernels::cuda::ExchangeSignal(stream, {r.end, number});
  };
  DT_RETURN_IF_ERROR(batch.work->Add(*batch.stream, record, run));
  return transport::LentBytes();  // no frame takes it
}

// Waits for q, k, v and gates, then appends, unless they did not come: then its blocks may be another sequence's.
absl::StatusOr<transport::LentBytes> CudaAttentionExecutor::PeerCrossing::RunState(MicroBatchId id, int op,
                                                                                   std::span<const std::byte> key_value,
                                                                                   MicroBatch& batch) {
  DT_RETURN_IF_ERROR(CheckTokensCome(id, op));
  const exchange::GpuExchange& peer = *steps_[id.value()].peer;
  const kernels::cuda::ExchangeEnd end = peer.End(id);
  const CudaStateExecutor::Payloads payloads{batch.payload.data(), key_value.data(), peer.peer_slot(id),
                                             &end.own->failure};
  DT_ASSIGN_OR_RETURN(const kernels::cuda::StateLaunch launch, executor_.states_->LaunchOf(id, op, payloads));
  std::vector<uint64_t> what = CudaStateExecutor::WordsOf(launch);
  const auto number = static_cast<uint32_t>(op);
  for (const uint64_t word : {kernels::cuda::StepWork::Word(end.peer), uint64_t{number}}) what.push_back(word);
  const auto run = [launch, end, number](CudaStream& stream) -> absl::Status {
    DT_RETURN_IF_ERROR(kernels::cuda::ExchangeAwait(stream, {end, number}));
    DT_RETURN_IF_ERROR(kernels::cuda::AppendStates(stream, launch));
    return kernels::cuda::ExchangeSignal(stream, {end, number});
  };
  DT_RETURN_IF_ERROR(batch.work->Add(*batch.stream, what, run));
  return transport::LentBytes();  // no frame takes it
}

absl::Status CudaAttentionExecutor::PeerCrossing::Synchronize() {
  for (Step& step : steps_)
    if (step.stream != nullptr) DT_RETURN_IF_ERROR(step.stream->SynchronizeStatus());
  return absl::OkStatus();
}

}  // namespace dovetail::attention
