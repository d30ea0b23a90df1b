#include "exchange/exchange_party.h"

#include <utility>

#include "base/log.h"

namespace dovetail::exchange {

void ExchangeParty::End(NodeId node, const absl::Status& why) {
  LogWarning("exchange with node ", node.value(), " goes through the hosts: ", std::string(why.message()));
  Lose(node);
}

void ExchangeParty::Lose(NodeId node) {
  const auto it = peers_.find(node);
  if (it == peers_.end()) return;
  if (it->second.exchange != nullptr) {
    if (const absl::Status status = it->second.exchange->GiveUp(); !status.ok())
      LogError("exchange with node ", node.value(), ": ", std::string(status.message()));
    retired_.push_back(std::move(it->second.exchange));
  }
  peers_.erase(it);
}

void ExchangeParty::Offer(NodeId node, Epoch epoch, const ExchangeRoom& room, std::vector<Frame>& out) {
  Lose(node);
  if (!means_) return;
  auto made = GpuExchange::Create(means_, room);
  if (!made.ok()) return End(node, made.status());
  out.push_back({node, epoch, proto::kLinkOffer, (*made)->offer()});
  peers_[node] = {epoch, *std::move(made), false, false};
}

void ExchangeParty::Answer(NodeId from, Epoch epoch, std::string_view offer, std::vector<Frame>& out) {
  Lose(from);
  absl::Status status;
  if (!means_) status = FailedPrecondition("this worker has no GPU, or was started with --exchange host");
  std::unique_ptr<GpuExchange> exchange;
  if (status.ok()) {
    const auto room = GpuExchange::RoomOf(offer);
    auto made = room.ok() ? GpuExchange::Create(means_, *room) : room.status();
    status = made.status();
    if (status.ok()) exchange = *std::move(made);
    if (status.ok()) status = exchange->Accept(offer);
  }
  if (!status.ok()) {
    out.push_back({from, epoch, proto::kLinkAnswer, proto::kLinkRefused + std::string(status.message())});
    return End(from, status);
  }
  out.push_back({from, epoch, proto::kLinkAnswer, proto::kLinkAccepted + exchange->offer()});
  peers_[from] = {epoch, std::move(exchange), true, false};
}

void ExchangeParty::OnFrame(NodeId from, Epoch epoch, proto::FrameType type, std::string_view bytes,
                            std::vector<Frame>& out) {
  if (type == proto::kLinkOffer) return Answer(from, epoch, bytes, out);
  const auto it = peers_.find(from);
  if (it == peers_.end() || it->second.epoch != epoch) return;
  if (type == proto::kLinkThere) return it->second.exchange->PeerIsThere();
  if (it->second.accepted || bytes.empty()) return;
  if (bytes.front() != proto::kLinkAccepted)
    return End(from, FailedPrecondition(std::string(bytes.substr(1))));
  it->second.accepted = true;
  if (const absl::Status status = it->second.exchange->Accept(bytes.substr(1)); !status.ok()) End(from, status);
}

bool ExchangeParty::Progress(std::vector<Frame>& out) {
  bool making = false;
  std::vector<std::pair<NodeId, absl::Status>> failed;
  for (auto& [node, peer] : peers_) {
    if (!peer.accepted || peer.exchange->there()) continue;
    making = true;
    const absl::StatusOr<bool> there = peer.exchange->Progress();
    if (!there.ok()) failed.emplace_back(node, there.status());
    if (!there.ok() || !*there || peer.told) continue;
    peer.told = true;
    out.push_back({node, peer.epoch, proto::kLinkThere, {}});
    LogInfo("exchange with node ", node.value(), ": the GPUs exchange layers by themselves (cuda_ipc)");
  }
  for (const auto& [node, status] : failed) End(node, status);
  return making;
}

GpuExchange* ExchangeParty::With(NodeId node) const {
  const auto it = peers_.find(node);
  return it != peers_.end() && it->second.exchange->there() ? it->second.exchange.get() : nullptr;
}

}  // namespace dovetail::exchange
