#include "transport/faulty/faulty_port.h"

#include <algorithm>
#include <utility>

namespace dovetail::transport {
namespace {

inline constexpr size_t kMaxLateFrames = kMaxFramesInFlight;  // to one peer

// Hands on what does not come from a peer that is cut off.
class Sieve final : public FrameHandler {
 public:
  Sieve(FrameHandler& handler, const absl::flat_hash_set<NodeId>& cut, int64_t& dropped)
      : handler_(handler), cut_(cut), dropped_(dropped) {}
  void OnFrame(const Delivery& delivery) override {
    if (cut_.contains(delivery.from)) {
      ++dropped_;
      return;
    }
    handler_.OnFrame(delivery);
  }

 private:
  FrameHandler& handler_;
  const absl::flat_hash_set<NodeId>& cut_;
  int64_t& dropped_;
};

}  // namespace

// The same number of draws for every frame, so that one kind of fault does not shift the others.
FaultyPort::Fate FaultyPort::Decide(NodeId to) {
  const bool drop = Chance(faults_.drop), duplicate = Chance(faults_.duplicate), delay = Chance(faults_.delay);
  if (cut_.contains(to) || drop) return Fate::kDrop;
  const auto waiting = std::find_if(late_.begin(), late_.end(), [&](const auto& peer) { return peer.first == to; });
  if (delay || (waiting != late_.end() && !waiting->second.empty())) return Fate::kDelay;
  return duplicate ? Fate::kDuplicate : Fate::kSend;
}

absl::Status FaultyPort::Hold(NodeId to, const proto::FrameHeader& header, bool tensor,
                              std::vector<std::byte> payload) {
  auto peer = std::find_if(late_.begin(), late_.end(), [&](const auto& entry) { return entry.first == to; });
  if (peer == late_.end()) peer = late_.insert(peer, {to, {}});
  if (peer->second.size() == kMaxLateFrames)
    return ResourceExhausted("node ", to.value(), ": ", kMaxLateFrames, " frames are late");
  const absl::Duration wait = faults_.delay_max * std::uniform_real_distribution<double>(0, 1)(random_);
  peer->second.push_back(Late{clock_.Now() + wait, header, tensor, std::move(payload)});
  ++delayed_;
  return absl::OkStatus();
}

absl::Status FaultyPort::SendMessage(NodeId to, const proto::FrameHeader& header, std::vector<std::byte> payload) {
  switch (Decide(to)) {
    case Fate::kDrop: ++dropped_; return absl::OkStatus();
    case Fate::kDelay: return Hold(to, header, false, std::move(payload));
    case Fate::kDuplicate:
      ++duplicated_;
      DT_RETURN_IF_ERROR(port_.SendMessage(to, header, payload));
      [[fallthrough]];
    case Fate::kSend: break;
  }
  return port_.SendMessage(to, header, std::move(payload));
}

absl::Status FaultyPort::SendTensor(NodeId to, const proto::FrameHeader& header, std::span<const std::byte> payload) {
  switch (Decide(to)) {
    case Fate::kDrop: ++dropped_; return absl::OkStatus();
    case Fate::kDelay: return Hold(to, header, true, {payload.begin(), payload.end()});
    case Fate::kDuplicate:
      ++duplicated_;
      DT_RETURN_IF_ERROR(port_.SendTensor(to, header, payload));
      [[fallthrough]];
    case Fate::kSend: break;
  }
  return port_.SendTensor(to, header, payload);
}

void FaultyPort::SendDue() {
  const absl::Time now = clock_.Now();
  for (auto& [to, frames] : late_) {
    while (!frames.empty() && frames.front().due <= now) {
      Late& late = frames.front();
      absl::Status sent;
      if (cut_.contains(to)) {
        ++dropped_;
      } else if (late.tensor) {
        sent = port_.SendTensor(to, late.header, late.payload);
        if (sent.ok()) copies_.push_back(std::move(late.payload));  // moving keeps the bytes where they are
      } else {
        sent = port_.SendMessage(to, late.header, late.payload);
      }
      if (absl::IsResourceExhausted(sent)) break;  // later
      if (!sent.ok()) ++dropped_;                  // the peer is gone
      frames.pop_front();
    }
  }
}

int FaultyPort::Poll(FrameHandler& handler, int max_frames) {
  SendDue();
  Sieve sieve(handler, cut_, dropped_);
  return port_.Poll(sieve, max_frames);
}

void FaultyPort::Forget() { copies_.clear(); }

}  // namespace dovetail::transport
