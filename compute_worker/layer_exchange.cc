#include "compute_worker/layer_exchange.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "proto/link_frames.h"

namespace dovetail::compute {

using exchange::ExchangeParty;
using exchange::GpuExchange;
using proto::FrameType;
using proto::MakeHeader;

namespace {

// A peer that cannot be reached is about to be declared lost, which ends the step by LoseAttentionWorker. Failing it
// here would blame the request.
absl::Status UnlessUnreachable(const absl::Status& sent) {
  return absl::IsUnavailable(sent) || absl::IsNotFound(sent) ? absl::OkStatus() : sent;
}

absl::Status SendMessage(transport::Port& port, FrameType type, const SendStepBegin& begin) {
  std::vector<std::byte> message;
  proto::Encode(begin.message, message);
  const auto header = MakeHeader(type, begin.epoch, begin.step, begin.micro_batch, 0, message.size());
  return UnlessUnreachable(port.SendMessage(begin.to, header, std::move(message)));
}

}  // namespace

absl::Status HostExchange::SendBegin(SendStepBegin& begin) {
  return SendMessage(port_, FrameType::kStepBegin, begin);
}

absl::Status HostExchange::Send(MicroBatchId id, int op, FrameType type) {
  const LayerGroup group = core_.table().op_group[op];
  const std::vector<WorkerPart>& parts = core_.PartsOf(id);
  for (size_t p = 0; p < parts.size(); ++p) {
    const proto::StepLayout& layout = parts[p].layouts[group.value()];
    if (layout.items.empty() || (type == FrameType::kQuery && layout.query_bytes == 0)) continue;
    DT_ASSIGN_OR_RETURN(const std::span<const std::byte> payload,
                        type == FrameType::kQuery ? dense_.PackQuery(core_, id, static_cast<int>(p), op)
                                                  : dense_.PackKeyValue(core_, id, static_cast<int>(p), op));
    const auto header = MakeHeader(type, parts[p].epoch, core_.PlanOf(id).step, id, op, payload.size());
    DT_RETURN_IF_ERROR(UnlessUnreachable(port_.SendTensor(parts[p].node, header, payload)));
  }
  return absl::OkStatus();
}

absl::Status DeviceExchange::SendBegin(SendStepBegin& begin) {
  return SendMessage(port_, proto::kStepBeginOnDevice, begin);
}

std::optional<PartialArrived> DeviceExchange::Answer(MicroBatchId id, int op) {
  const WorkerPart& part = core_.PartsOf(id)[0];
  const auto bytes = static_cast<size_t>(part.layouts[core_.table().op_group[op].value()].partial_bytes);
  return PartialArrived{part.node, part.epoch, core_.PlanOf(id).step, id, op, {gpu_.own_slot(id), bytes}};
}

void DeviceExchange::EndFailed(MicroBatchId id, StepId step) {
  if (const absl::Status status = gpu_.EndFailed(id, step); !status.ok())
    LogError("exchange between GPUs: ", std::string(status.message()));
}

LayerExchanges::LayerExchanges(const ComputeWorkerCore& core, DenseBackend& dense, transport::Port& port,
                               const exchange::GpuExchangeMeans& means)
    : core_(core), port_(port), device_only_(means.required), host_(core, dense, port) {
  chosen_.assign(core.options().micro_batches, &host_);
  if (!means.on_cpu) party_ = std::make_unique<ExchangeParty>(means);
}

absl::Status LayerExchanges::SupportsDevice(const proto::AttentionTable& table) {
  if (table.has_linear()) return FailedPrecondition("the model has linear states, which cross through the hosts");
  return absl::OkStatus();
}

void LayerExchanges::AddPeer(const AttentionWorkerAddress& address) {
  if (party_ == nullptr) return;
  peers_.push_back(address);
  std::vector<ExchangeParty::Frame> out;
  if (const absl::Status supported = SupportsDevice(core_.table()); !supported.ok()) {
    party_->Decline(address.node, supported);
  } else {
    const ComputeWorkerOptions& options = core_.options();
    party_->Offer(address.node, address.epoch,
                  exchange::ExchangeRoom::Of(core_.table(), options.micro_batches, options.max_step_tokens), out);
  }
  Send(out);
}

void LayerExchanges::LosePeer(WorkerId worker, Epoch epoch) {
  std::erase_if(peers_, [&](const AttentionWorkerAddress& peer) {
    if (peer.worker != worker || peer.epoch != epoch) return false;
    party_->Lose(peer.node);
    return true;
  });
}

void LayerExchanges::Send(std::vector<ExchangeParty::Frame>& frames) {
  for (ExchangeParty::Frame& frame : frames) {
    const auto* const bytes = reinterpret_cast<const std::byte*>(frame.bytes.data());
    std::vector<std::byte> message(bytes, bytes + frame.bytes.size());
    const auto header = MakeHeader(frame.type, frame.epoch, StepId(), MicroBatchId(), 0, message.size());
    if (const absl::Status sent = UnlessUnreachable(port_.SendMessage(frame.to, header, std::move(message)));
        !sent.ok())
      LogError("compute worker: ", std::string(sent.message()));
  }
}

void LayerExchanges::OnFrame(const transport::Delivery& delivery) {
  if (party_ == nullptr) return;
  std::vector<ExchangeParty::Frame> out;
  const std::string_view bytes(reinterpret_cast<const char*>(delivery.payload.data()), delivery.payload.size());
  party_->OnFrame(delivery.from, Epoch(delivery.header.epoch), delivery.header.type, bytes, out);
  Send(out);
}

bool LayerExchanges::Progress() {
  if (party_ == nullptr) return false;
  std::vector<ExchangeParty::Frame> out;
  const bool making = party_->Progress(out);
  Send(out);
  return making;
}

std::string LayerExchanges::With(NodeId node) const { return party_ == nullptr ? "" : party_->Describe(node); }

// Whole sequences of one attention worker, in order.
bool LayerExchanges::LiesWhole(MicroBatchId id) const {
  const std::vector<WorkerPart>& parts = core_.PartsOf(id);
  if (parts.size() != 1) return false;
  const size_t entries = core_.PlanOf(id).entries.size();
  for (int g = 0; g < core_.table().group_count(); ++g) {
    const auto& items = parts[0].layouts[g].items;
    const int kv_heads = core_.table().softmax(LayerGroup(static_cast<uint16_t>(g))).kv_heads;
    bool whole = items.size() == entries;
    for (const proto::ShardStep& item : items)
      whole = whole && item.finished() && item.kv_heads.size() == kv_heads && item.rows.q_count > 0;
    if (!whole) return false;
  }
  return true;
}

absl::Status LayerExchanges::Choose(MicroBatchId id) {
  LayerExchange*& chosen = chosen_[id.value()];
  chosen = &host_;
  if (party_ == nullptr) return absl::OkStatus();
  for (const WorkerPart& part : core_.PartsOf(id)) {
    if (!device_only_ || !party_->Refused(part.node)) continue;
    return FailedPrecondition("--exchange device: with attention worker ", part.worker.value(), " it is ",
                              party_->Describe(part.node));
  }
  GpuExchange* const gpu = LiesWhole(id) ? party_->With(core_.PartsOf(id)[0].node) : nullptr;
  if (gpu == nullptr) return absl::OkStatus();
  std::unique_ptr<DeviceExchange>& made = by_gpus_[gpu];
  if (made == nullptr) made = std::make_unique<DeviceExchange>(core_, port_, *gpu);
  chosen = made.get();
  return absl::OkStatus();
}

}  // namespace dovetail::compute
