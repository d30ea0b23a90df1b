#include "compute_worker/rank_reach.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "proto/rank_frames.h"

namespace dovetail::compute {
namespace {

std::string_view TextOf(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

void RankReach::Add(const ComputeWorkerAddress& address) {
  const auto known = peers_.find(address.worker);
  if (known != peers_.end()) Lose(address.worker, known->second.address.epoch);
  Offer(peers_[address.worker] = Peer{.address = address});
}

void RankReach::Lose(WorkerId worker, Epoch epoch) {
  const auto found = peers_.find(worker);
  if (found == peers_.end() || found->second.address.epoch != epoch) return;
  if (memory_ != nullptr) {
    memory_->SetReaches(worker, false);
    memory_->Lose(found->second.address.node);
  }
  peers_.erase(found);
}

RankReach::Peer* RankReach::Find(NodeId node) {
  const auto found =
      std::find_if(peers_.begin(), peers_.end(), [&](const auto& peer) { return peer.second.address.node == node; });
  return found == peers_.end() ? nullptr : &found->second;
}

void RankReach::Offer(Peer& peer) {
  if (memory_ == nullptr) return;
  const absl::StatusOr<std::string> offer = memory_->Offer();
  peer.reaches = offer.status();
  if (offer.ok()) links_.SendText(peer.address.worker, proto::kMemoryOffer, *offer);
}

void RankReach::OnFrame(const transport::Delivery& delivery) {
  Peer* const peer = Find(delivery.from);  // what comes too early is sent again: see OnOffer
  if (peer == nullptr || delivery.payload.empty()) return;
  const std::string_view text = TextOf(delivery.payload);
  return delivery.header.type == proto::kMemoryOffer ? OnOffer(*peer, text) : OnAnswer(*peer, text);
}

// A peer that offers knows this worker by now, which it may not have done when this one offered.
void RankReach::OnOffer(Peer& peer, std::string_view offer) {
  const absl::StatusOr<std::string> read =
      memory_ == nullptr ? FailedPrecondition("it computes on a CPU, without a prompt scratch, or with --exchange host")
                         : memory_->Answer(peer.address.node, offer);
  links_.SendText(peer.address.worker, proto::kMemoryAnswer,
                  read.ok() ? absl::StrCat(std::string(1, proto::kMemoryRead), *read)
                            : absl::StrCat(std::string(1, proto::kMemoryNotRead), read.status().message()));
  if (!peer.answered) Offer(peer);
}

void RankReach::OnAnswer(Peer& peer, std::string_view answer) {
  if (memory_ == nullptr) return;
  const bool again = std::exchange(peer.answered, true);
  peer.reaches = answer[0] == proto::kMemoryRead ? memory_->Check(answer.substr(1))
                                                 : FailedPrecondition(std::string(answer.substr(1)));
  if (!again && !peer.reaches.ok())
    LogWarning("compute worker ", peer.address.worker.value(),
               " does not read this one's GPU: what they give each other goes through the host (",
               std::string(peer.reaches.message()), ")");
  memory_->SetReaches(peer.address.worker, peer.reaches.ok());
  links_.SetReaches(peer.address.worker, peer.reaches.ok());
}

std::string RankReach::Describe(NodeId node) const {
  if (memory_ == nullptr) return "";
  for (const auto& [worker, peer] : peers_) {
    if (peer.address.node != node) continue;
    if (!peer.reaches.ok()) return absl::StrCat("host: ", peer.reaches.message());
    return peer.answered ? "device" : "host: it has not answered yet";
  }
  return "";
}

}  // namespace dovetail::compute
