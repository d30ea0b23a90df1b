// How q, k, v of CudaDense leave for attention workers.
#include "base/log.h"
#include "compute_worker/cuda/cuda_dense.h"

namespace dovetail::compute {
namespace {

constexpr size_t kElement = 2;  // bytes of the wire types of a GPU

}  // namespace

// Payloads are whole tensors then: one worker, entries in order.
absl::Status CudaDense::CheckWhole(const ComputeWorkerCore& core, MicroBatchId id) const {
  const std::vector<WorkerPart>& parts = core.PartsOf(id);
  const size_t entries = core.PlanOf(id).entries.size();
  if (parts.size() != 1) return Internal("a step of ", parts.size(), " attention workers cannot stay on one GPU");
  for (int g = 0; g < table_.group_count(); ++g) {
    const auto& items = parts[0].layouts[g].items;
    const int kv_heads = table_.softmax(LayerGroup(static_cast<uint16_t>(g))).kv_heads;
    bool whole = items.size() == entries;
    for (const proto::ShardStep& item : items) whole = whole && item.finished() && item.kv_heads.size() == kv_heads;
    if (!whole) return Internal("a step of divided sequences cannot stay on one GPU");
  }
  return absl::OkStatus();
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

absl::Status CudaDense::UseExchange(MicroBatchId id, exchange::GpuExchange* exchange) {
  MicroBatch& batch = micro_batches_[id.value()];
  batch.exchange = exchange;
  batch.lane = exchange != nullptr ? LaneFor(id) : &shared_;
  if (stay_on_device_) return exchange == nullptr ? absl::OkStatus() : Internal("the peer is in this process");
  batch.work = exchange != nullptr ? &model_.device().WorkerStep(id.value()) : nullptr;
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

absl::StatusOr<std::span<const std::byte>> CudaDense::PackQuery(const ComputeWorkerCore& core, MicroBatchId id, int p,
                                                                int op) {
  MicroBatch& batch = micro_batches_[id.value()];
  const LayerGroup group = table_.op_group[op];
  if (stay_on_device_) {
    const size_t bytes = core.PartsOf(id)[p].layouts[group.value()].query_bytes;
    return std::span<const std::byte>(batch.query->data(), bytes);
  }
  DT_RETURN_IF_ERROR(AwaitWire(batch));
  return batch.wire->PackQuery(core.PartsOf(id), p, group);
}

absl::StatusOr<std::span<const std::byte>> CudaDense::PackKeyValue(const ComputeWorkerCore& core, MicroBatchId id,
                                                                   int p, int op) {
  MicroBatch& batch = micro_batches_[id.value()];
  const LayerGroup group = table_.op_group[op];
  if (stay_on_device_) {
    const size_t bytes = core.PartsOf(id)[p].layouts[group.value()].key_value_bytes;
    return std::span<const std::byte>(batch.key_value->data(), bytes);
  }
  DT_RETURN_IF_ERROR(AwaitWire(batch));
  return batch.wire->PackKeyValue(core.PartsOf(id), p, op);
}

}  // namespace dovetail::compute
