#include "exchange/exchange_party.h"

#include <utility>

#include "base/log.h"

namespace dovetail::exchange {

namespace {

constexpr size_t kMostReasonBytes = 300;

// For a log and a status, also what another process says: one line of ASCII, not too long.
std::string InOneLine(std::string_view said) {
  std::string line(said.substr(0, kMostReasonBytes));
  for (char& c : line)
    if (c < 0x20 || c > 0x7e) c = ' ';
  return line;
}

}  // namespace

void ExchangeParty::End(NodeId node, const absl::Status& why, bool on_cpu) {
  Reason reason{InOneLine(std::string(why.message())), on_cpu};
  LogInfo("exchange with node ", node.value(), " goes through the hosts: ", reason.why);
  Lose(node);
  through_hosts_[node] = std::move(reason);
}

void ExchangeParty::Lose(NodeId node) {
  through_hosts_.erase(node);
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
  if (!means_) return End(node, FailedPrecondition(means_.why_not), means_.on_cpu);
  auto made = GpuExchange::Create(means_, room);
  if (!made.ok()) return End(node, made.status());
  out.push_back({node, epoch, proto::kLinkOffer, (*made)->offer()});
  peers_[node] = {epoch, *std::move(made), false, false};
}

void ExchangeParty::Answer(NodeId from, Epoch epoch, std::string_view offer, std::vector<Frame>& out) {
  Lose(from);
  absl::Status status;
  if (!means_) status = FailedPrecondition(means_.why_not);
  std::unique_ptr<GpuExchange> exchange;
  if (status.ok()) {
    const auto room = GpuExchange::RoomOf(offer);
    auto made = room.ok() ? GpuExchange::Create(means_, *room) : room.status();
    status = made.status();
    if (status.ok()) exchange = *std::move(made);
    if (status.ok()) status = exchange->Accept(offer);
  }
  if (!status.ok()) {
    const bool on_cpu = means_.on_cpu;
    out.push_back({from, epoch, proto::kLinkAnswer,
                   (on_cpu ? proto::kLinkOnCpu : proto::kLinkRefused) + std::string(status.message())});
    return End(from, status, on_cpu);
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
    return End(from, FailedPrecondition(std::string(bytes.substr(1))), bytes.front() == proto::kLinkOnCpu);
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

std::string ExchangeParty::Describe(NodeId node) const {
  if (With(node) != nullptr) return "device";
  if (peers_.contains(node)) return "host: a link between the GPUs is being made";
  const auto it = through_hosts_.find(node);
  return it == through_hosts_.end() ? "" : "host: " + it->second.why;
}

bool ExchangeParty::Refused(NodeId node) const {
  const auto it = through_hosts_.find(node);
  return it != through_hosts_.end() && !it->second.on_cpu;
}

}  // namespace dovetail::exchange
