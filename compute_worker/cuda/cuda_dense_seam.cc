// How q, k, v of CudaDense leave for attention workers.
#include <algorithm>

#include "base/log.h"
#include "compute_worker/cuda/cuda_dense.h"
#include "kernels/cuda/exchange/cuda_exchange.h"

namespace dovetail::compute {
namespace {

constexpr size_t kElement = 2;  // bytes of the wire types of a GPU

}  // namespace

// Payloads are whole rows of the step's tensors then, on one GPU all of them.
absl::Status CudaDense::FindRows(const ComputeWorkerCore& core, MicroBatchId id) {
  const size_t gpus = stay_on_device_ ? 1 : micro_batches_[id.value()].exchanges.size();
  if (const size_t parts = core.PartsOf(id).size(); parts != gpus)
    return Internal("a step of ", parts, " attention workers cannot stay on ", gpus, " GPUs");
  if (!SpreadRows(core, id, spread_)) return Internal("a step of divided sequences cannot stay on GPUs");
  return absl::OkStatus();
}

void CudaDense::FillFan(const MicroBatch& batch, std::byte* fan, std::byte* rows) const {
  exchange::FillFan(batch.exchanges, IdOf(batch), spread_.part_rows,
                    *reinterpret_cast<kernels::cuda::ExchangeFan*>(fan));
  auto* row = reinterpret_cast<kernels::cuda::ExchangeRow*>(rows);
  for (const RowSpread::Row& from : spread_.rows) *row++ = {from.part, from.row};
}

void CudaDense::SendToPeers(int op, int64_t k_width, const MicroBatch& batch,
                            kernels::cuda::KvAppendLaunch& out) const {
  out.signal_op = op;
  out.fan = batch.fan;
  out.fan_rows = batch.fan_rows;
  if (batch.fan != nullptr) return;
  const exchange::GpuExchange& peer = *batch.only();
  std::byte* const slot = peer.peer_slot(IdOf(batch));
  out.q_out = slot;
  out.k_out = slot + peer.key_value_at();
  out.v_out = slot + peer.key_value_at() + batch.rows * k_width * kElement;
  out.exchange = peer.End(IdOf(batch));
}

absl::Status CudaDense::AwaitPeers(int op, const MicroBatch& batch) {
  const auto number = static_cast<uint32_t>(op);
  if (batch.fan == nullptr)
    return kernels::cuda::ExchangeAwait(batch.stream(), {batch.only()->End(IdOf(batch)), number});
  const proto::SoftmaxSpec& spec = table_.softmax(table_.op_group[op]);
  DT_RETURN_IF_ERROR(kernels::cuda::ExchangeAwaitAll(batch.stream(), {batch.fan, number}));
  return kernels::cuda::ExchangeGather(
      batch.stream(), {batch.fan, batch.fan_rows, batch.lane->attended->data(),
                       static_cast<int64_t>(spec.query_heads) * spec.value_dim * static_cast<int64_t>(kElement),
                       static_cast<int32_t>(batch.rows)});
}

// In an order that does not depend on the step: the work is the same then.
absl::Status CudaDense::FetchStatus(MicroBatch& batch) {
  std::vector<exchange::GpuExchange*> peers = batch.exchanges;
  std::sort(peers.begin(), peers.end());
  for (exchange::GpuExchange* const peer : peers) {
    const MicroBatchId id = IdOf(batch);
    const auto fetch = [peer, id](kernels::cuda::CudaStream& stream) { return peer->FetchStatus(stream, id); };
    DT_RETURN_IF_ERROR(Enqueue(batch, {kernels::cuda::StepWork::Word(peer->End(id).own), 0}, fetch));
  }
  return absl::OkStatus();
}

TurnChoice::Load CudaDense::LoadWith(const MicroBatch& batch) const {
  TurnChoice::Load load{1, batch.rows};
  for (const MicroBatch& other : micro_batches_) {
    if (&other == &batch || other.lane == batch.lane || !other.timed) continue;
    const absl::StatusOr<bool> done = other.ended.Done();
    if (!done.ok() || *done) continue;
    ++load.steps;
    load.rows += other.rows;
  }
  return load;
}

// Launches of an immediate step come as the host makes them: nobody waits for it meanwhile.
absl::Status CudaDense::BeginExchange(MicroBatch& batch, StepId step) {
  batch.load = LoadWith(batch);
  batch.takes_turns = !batch.work->immediate() && turns_.Takes(batch.load);
  auto* const turn = batch.takes_turns ? reinterpret_cast<kernels::cuda::ExchangeTurn*>(turn_->data()) : nullptr;
  for (exchange::GpuExchange* const peer : batch.exchanges)
    DT_RETURN_IF_ERROR(peer->BeginStep(batch.stream(), IdOf(batch), step, turn));
  return absl::OkStatus();
}

absl::Status CudaDense::EndTurn(MicroBatch& batch) {
  kernels::cuda::ExchangeGiveTurnLaunch give;
  give.fan = batch.fan;
  if (batch.fan == nullptr) give.own = batch.only()->End(IdOf(batch)).own;
  return Enqueue(batch, {kernels::cuda::StepWork::Word(turn_->data()), 0},
                 [give](kernels::cuda::CudaStream& stream) { return kernels::cuda::ExchangeGiveTurn(stream, give); });
}

void CudaDense::NoteTurns(const MicroBatch& batch) {
  if (!batch.timed) return;
  const absl::StatusOr<float> all = batch.ended.MillisecondsSince(batch.begun);
  if (all.ok()) turns_.Note(batch.load, batch.takes_turns, *all);
}

// Steps of several micro-batches that exchange layers by themselves run beside each other: what one waits for does not
// hold up another.
CudaDense::Lane* CudaDense::LaneFor(MicroBatchId id) {
  // Experts have one scratch, products of weights in few bits another.
  if (id.value() == 0 || hybrid_ != nullptr || model_.keeps()) return &shared_;
  std::unique_ptr<Lane>& own = own_lanes_[id.value()];
  if (own == nullptr && !no_more_lanes_) {
    own = std::make_unique<Lane>();
    auto stream = model_.device().CreateCudaStream();
    absl::Status made = stream.status();
    if (made.ok()) {
      own->own_stream = *std::move(stream);
      made = AllocateLane(*own, *own->own_stream, /*micro_batches=*/1);
    }
    if (!made.ok()) {
      LogInfo("steps of several micro-batches take turns on the GPU: ", std::string(made.message()));
      own.reset();
      no_more_lanes_ = true;
    }
  }
  return own != nullptr ? own.get() : &shared_;
}

absl::Status CudaDense::UseExchange(MicroBatchId id, std::span<exchange::GpuExchange* const> exchanges) {
  MicroBatch& batch = micro_batches_[id.value()];
  batch.exchanges.assign(exchanges.begin(), exchanges.end());
  Lane* const lane = !exchanges.empty() ? LaneFor(id) : &shared_;
  // Kernels of a step that failed there may still read what the next step writes here.
  if (batch.lane != lane) DT_RETURN_IF_ERROR(batch.lane->stream->SynchronizeStatus());
  batch.lane = lane;
  if (stay_on_device_) return exchanges.empty() ? absl::OkStatus() : Internal("the peer is in this process");
  batch.work = !exchanges.empty() ? &model_.device().WorkerStep(id.value()) : nullptr;
  return absl::OkStatus();
}

absl::Status CudaDense::CopyToWire(int op, MicroBatch& batch) {
  const proto::SoftmaxSpec& spec = table_.softmax(table_.op_group[op]);
  const size_t query = batch.rows * spec.query_heads * spec.key_dim * kElement;
  const size_t key = batch.rows * spec.kv_heads * spec.key_dim * kElement;
  const size_t value = batch.rows * spec.kv_heads * spec.value_dim * kElement;
  DT_RETURN_IF_ERROR(batch.stream().Copy(batch.wire->query(), batch.query->data(), query));
  DT_RETURN_IF_ERROR(batch.stream().Copy(batch.wire->key(op), batch.key_value->data(), key));
  DT_RETURN_IF_ERROR(batch.stream().Copy(batch.wire->value(op), batch.key_value->data() + key, value));
  if (spec.gates > 0)
    DT_RETURN_IF_ERROR(batch.stream().Copy(batch.wire->gates(op),
                                           batch.key_value->data() + CudaHybrid::GatesAt(spec, batch.rows),
                                           CudaHybrid::GateBytes(spec, batch.rows)));
  batch.copied = false;
  return absl::OkStatus();
}

absl::Status CudaDense::AwaitWire(MicroBatch& batch) {
  if (batch.copied) return absl::OkStatus();
  DT_RETURN_IF_ERROR(batch.stream().SynchronizeStatus());
  batch.copied = true;
  return absl::OkStatus();
}

absl::StatusOr<transport::LentBytes> CudaDense::PackQuery(const ComputeWorkerCore& core, MicroBatchId id, int p,
                                                          int op) {
  MicroBatch& batch = micro_batches_[id.value()];
  const LayerGroup group = table_.op_group[op];
  if (stay_on_device_) {
    const size_t bytes = core.PartsOf(id)[p].layouts[group.value()].query_bytes;
    return transport::LentBytes(std::span<const std::byte>(batch.query->data(), bytes));
  }
  DT_RETURN_IF_ERROR(AwaitWire(batch));
  return batch.wire->PackQuery(core.PartsOf(id), p, group);
}

absl::StatusOr<transport::LentBytes> CudaDense::PackKeyValue(const ComputeWorkerCore& core, MicroBatchId id, int p,
                                                             int op) {
  MicroBatch& batch = micro_batches_[id.value()];
  const LayerGroup group = table_.op_group[op];
  if (stay_on_device_) {
    const size_t bytes = core.PartsOf(id)[p].layouts[group.value()].key_value_bytes;
    return transport::LentBytes(std::span<const std::byte>(batch.key_value->data(), bytes));
  }
  DT_RETURN_IF_ERROR(AwaitWire(batch));
  return batch.wire->PackKeyValue(core.PartsOf(id), p, op);
}

}  // namespace dovetail::compute
