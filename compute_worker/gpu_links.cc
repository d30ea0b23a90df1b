#include "compute_worker/gpu_links.h"

#include <utility>

#include "base/log.h"
#include "compute_worker/step_frames.h"
#include "proto/link_frames.h"

namespace dovetail::compute {

using exchange::ExchangeParty;

GpuLinks::GpuLinks(const ComputeWorkerCore& core, transport::Port& port, const exchange::GpuExchangeMeans& means)
    : core_(core), port_(port) {
  if (!means.on_cpu) party_ = std::make_unique<ExchangeParty>(means);
}

absl::Status GpuLinks::Supports(const proto::AttentionTable& table) {
  for (int g = 0; g < table.group_count(); ++g) {
    const proto::LinearSpec* const spec = table.linear(LayerGroup(static_cast<uint16_t>(g)));
    if (spec == nullptr || (spec->key_dim % 2 == 0 && spec->value_dim % 2 == 0)) continue;
    return FailedPrecondition("the model has linear states of ", spec->key_dim, " x ", spec->value_dim,
                              ", whose rows GPUs do not copy by themselves: both have to be even");
  }
  return absl::OkStatus();
}

void GpuLinks::AddPeer(const AttentionWorkerAddress& address) {
  if (party_ == nullptr) return;
  peers_.push_back(address);
  std::vector<ExchangeParty::Frame> out;
  if (const absl::Status supported = Supports(core_.table()); !supported.ok()) {
    party_->Decline(address.node, supported);
  } else {
    const ComputeWorkerOptions& options = core_.options();
    party_->Offer(address.node, address.epoch,
                  exchange::ExchangeRoom::Of(core_.table(), options.micro_batches, options.max_step_tokens), out);
  }
  Send(out);
}

void GpuLinks::LosePeer(WorkerId worker, Epoch epoch) {
  std::erase_if(peers_, [&](const AttentionWorkerAddress& peer) {
    if (peer.worker != worker || peer.epoch != epoch) return false;
    party_->Lose(peer.node);
    return true;
  });
}

void GpuLinks::TellLinked(ComputeWorkerCore& core) const {
  for (const AttentionWorkerAddress& peer : peers_) core.SetLinked(peer.node, With(peer.node) != nullptr);
}

void GpuLinks::Send(std::vector<ExchangeParty::Frame>& frames) {
  for (ExchangeParty::Frame& frame : frames) {
    const auto* const bytes = reinterpret_cast<const std::byte*>(frame.bytes.data());
    std::vector<std::byte> message(bytes, bytes + frame.bytes.size());
    const auto header = proto::MakeHeader(frame.type, frame.epoch, StepId(), MicroBatchId(), 0, message.size());
    if (const absl::Status sent = UnlessUnreachable(port_.SendMessage(frame.to, header, std::move(message)));
        !sent.ok())
      LogError("compute worker: ", std::string(sent.message()));
  }
}

void GpuLinks::OnFrame(const transport::Delivery& delivery) {
  if (party_ == nullptr) return;
  std::vector<ExchangeParty::Frame> out;
  const std::string_view bytes(reinterpret_cast<const char*>(delivery.payload.data()), delivery.payload.size());
  party_->OnFrame(delivery.from, Epoch(delivery.header.epoch), delivery.header.type, bytes, out);
  Send(out);
}

bool GpuLinks::Progress() {
  if (party_ == nullptr) return false;
  std::vector<ExchangeParty::Frame> out;
  const bool making = party_->Progress(out);
  Send(out);
  return making;
}

}  // namespace dovetail::compute
