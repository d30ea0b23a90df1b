#include "compute_worker/layer_exchange.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/log.h"
#include "exchange/cuda/step_exchange.h"
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

absl::Status HostExchange::SendBegin(SendStepBegin& begin) { return SendMessage(port_, FrameType::kStepBegin, begin); }

absl::Status HostExchange::Send(MicroBatchId id, int op, FrameType type) {
  const LayerGroup group = core_.table().op_group[op];
  const std::vector<WorkerPart>& parts = core_.PartsOf(id);
  for (size_t p = 0; p < parts.size(); ++p) {
    const proto::StepLayout& layout = parts[p].layouts[group.value()];
    if (layout.items.empty() || (type == FrameType::kQuery && !layout.asks())) continue;
    DT_ASSIGN_OR_RETURN(transport::LentBytes payload, type == FrameType::kQuery
                                                          ? dense_.PackQuery(core_, id, static_cast<int>(p), op)
                                                          : dense_.PackKeyValue(core_, id, static_cast<int>(p), op));
    const auto header = MakeHeader(type, parts[p].epoch, core_.PlanOf(id).step, id, op, payload.size());
    DT_RETURN_IF_ERROR(UnlessUnreachable(port_.SendTensor(parts[p].node, header, std::move(payload))));
  }
  return absl::OkStatus();
}

absl::Status DeviceExchange::SendBegin(SendStepBegin& begin) {
  return SendMessage(port_, proto::kStepBeginOnDevice, begin);
}

std::optional<PartialArrived> DeviceExchange::Answer(MicroBatchId id, int op, int p) {
  const WorkerPart& part = core_.PartsOf(id)[p];
  const auto bytes = static_cast<size_t>(part.layouts[core_.table().op_group[op].value()].partial_bytes);
  return PartialArrived{part.node, part.epoch, core_.PlanOf(id).step, id, op, {gpus_[p]->own_slot(id), bytes}};
}

int DeviceExchange::Unanswered(MicroBatchId id, StepId step) const { return exchange::Unanswered(gpus_, id, step); }

void DeviceExchange::EndFailed(MicroBatchId id, StepId step) {
  for (GpuExchange* const gpu : gpus_) {
    if (const absl::Status status = gpu->EndFailed(id, step); !status.ok())
      LogError("exchange between GPUs: ", std::string(status.message()));
  }
}

LayerExchanges::LayerExchanges(const ComputeWorkerCore& core, DenseBackend& dense, transport::Port& port,
                               const exchange::GpuExchangeMeans& means)
    : core_(core),
      port_(port),
      device_only_(means.required),
      host_(core, dense, port),
      by_gpus_(core.options().micro_batches, DeviceExchange(core, port)) {
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

bool GpusMayExchange(const ComputeWorkerCore& core, MicroBatchId id,
                     const std::function<std::string_view(NodeId)>& gpu_of, RowSpread& spread) {
  const std::vector<WorkerPart>& parts = core.PartsOf(id);
  if (parts.size() > kernels::cuda::kMostExchangePeers) return false;
  std::array<std::string_view, kernels::cuda::kMostExchangePeers> gpus;
  for (size_t p = 0; p < parts.size(); ++p) {
    gpus[p] = gpu_of(parts[p].node);
    if (gpus[p].empty() || std::find(gpus.begin(), gpus.begin() + p, gpus[p]) != gpus.begin() + p) return false;
  }
  return SpreadRows(core, id, spread);
}

std::vector<GpuExchange*> LayerExchanges::GpusOf(MicroBatchId id) {
  const auto gpu_of = [this](NodeId node) -> std::string_view {
    const GpuExchange* const linked = party_->With(node);
    return linked != nullptr ? linked->peer_gpu() : std::string_view();
  };
  std::vector<GpuExchange*> gpus;
  if (!GpusMayExchange(core_, id, gpu_of, spread_)) return gpus;
  for (const WorkerPart& part : core_.PartsOf(id)) gpus.push_back(party_->With(part.node));
  return gpus;
}

absl::Status LayerExchanges::Choose(MicroBatchId id) {
  LayerExchange*& chosen = chosen_[id.value()];
  chosen = &host_;
  if (party_ == nullptr) return absl::OkStatus();
  if (core_.PlanOf(id).part.in_group()) {  // what a rank asks may have to wait for another one's tokens
    if (!device_only_) return absl::OkStatus();
    return FailedPrecondition(
        "--exchange device: the ranks of a prompt exchange through the hosts; use --prefill-ranks 1");
  }
  for (const WorkerPart& part : core_.PartsOf(id)) {
    if (!device_only_ || !party_->Refused(part.node)) continue;
    return FailedPrecondition("--exchange device: with attention worker ", part.worker.value(), " it is ",
                              party_->Describe(part.node));
  }
  std::vector<GpuExchange*> gpus = GpusOf(id);
  if (gpus.empty()) return absl::OkStatus();
  by_gpus_[id.value()].Use(std::move(gpus));
  chosen = &by_gpus_[id.value()];
  return absl::OkStatus();
}

}  // namespace dovetail::compute
