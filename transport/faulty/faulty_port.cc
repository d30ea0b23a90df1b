#include "transport/faulty/faulty_port.h"

#include <algorithm>
#include <utility>

namespace dovetail::transport {
namespace {

inline constexpr size_t kMaxLateFrames = kMaxFramesInFlight;  // to one peer
// Of tensors, to one peer: as many as it can have unread, and as many again that it has read and not answered.
inline constexpr size_t kMaxCopies = 2 * kMaxFramesInFlight;

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

absl::Duration FaultyPort::SomeDelay() {
  return faults_.delay_max * std::uniform_real_distribution<double>(0, 1)(random_);
}

bool FaultyPort::Holding(NodeId to) const {
  const auto peer = std::find_if(late_.begin(), late_.end(), [&](const auto& entry) { return entry.first == to; });
  return peer != late_.end() && !peer->second.empty();
}

// The same number of draws for every frame, so that one kind of fault does not shift the others.
FaultyPort::Fate FaultyPort::Decide(NodeId to) {
  const bool drop = Chance(faults_.drop), duplicate = Chance(faults_.duplicate), delay = Chance(faults_.delay);
  if (cut_.contains(to) || drop) return Fate::kDrop;
  if (delay || Holding(to)) return Fate::kDelay;
  return duplicate ? Fate::kDuplicate : Fate::kSend;
}

absl::Status FaultyPort::Hold(NodeId to, const proto::FrameHeader& header, bool tensor,
                              std::vector<std::byte> payload) {
  auto peer = std::find_if(late_.begin(), late_.end(), [&](const auto& entry) { return entry.first == to; });
  if (peer == late_.end()) peer = late_.insert(peer, {to, {}});
  if (peer->second.size() == kMaxLateFrames)
    return ResourceExhausted("node ", to.value(), ": ", kMaxLateFrames, " frames are late");
  peer->second.push_back(Late{clock_.Now() + SomeDelay(), to, header, tensor, std::move(payload)});
  ++delayed_;
  return absl::OkStatus();
}

void FaultyPort::Echo(NodeId to, const proto::FrameHeader& header, bool tensor, std::span<const std::byte> payload) {
  if (!Chance(faults_.echo) || echoes_.size() == kMaxLateFrames) return;
  echoes_.push_back(Late{clock_.Now() + SomeDelay(), to, header, tensor, {payload.begin(), payload.end()}});
}

absl::Status FaultyPort::SendMessage(NodeId to, const proto::FrameHeader& header, std::vector<std::byte> payload) {
  Echo(to, header, false, payload);
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

absl::Status FaultyPort::SendTensor(NodeId to, const proto::FrameHeader& header, LentBytes payload) {
  Echo(to, header, true, payload);
  std::vector<std::byte> copy(payload.begin(), payload.end());
  if (Chance(faults_.swap) && header.digest != 0) {
    std::rotate(copy.begin(), copy.begin() + static_cast<std::ptrdiff_t>(copy.size() / 2), copy.end());
    ++swapped_;
  }
  switch (Decide(to)) {
    case Fate::kDrop: ++dropped_; return absl::OkStatus();
    case Fate::kDelay: return Hold(to, header, true, std::move(copy));
    case Fate::kDuplicate:
      ++duplicated_;
      DT_RETURN_IF_ERROR(SendCopy(to, header, copy));
      [[fallthrough]];
    case Fate::kSend: break;
  }
  return SendCopy(to, header, std::move(copy));
}

absl::Status FaultyPort::SendCopy(NodeId to, const proto::FrameHeader& header, std::vector<std::byte> payload) {
  auto copy = std::make_shared<const std::vector<std::byte>>(std::move(payload));
  DT_RETURN_IF_ERROR(port_.SendTensor(to, header, Lend(copy, copy->size())));
  std::deque<Copy>& copies = copies_[to];
  if (copies.size() == kMaxCopies) copies.pop_front();
  copies.push_back(std::move(copy));
  return absl::OkStatus();
}

absl::Status FaultyPort::SendLate(Late& late) {
  if (cut_.contains(late.to)) {
    ++dropped_;
    return absl::OkStatus();
  }
  if (!late.tensor) return port_.SendMessage(late.to, late.header, late.payload);
  return SendCopy(late.to, late.header, late.payload);
}

void FaultyPort::SendDue() {
  const absl::Time now = clock_.Now();
  for (auto& [to, frames] : late_) {
    while (!frames.empty() && frames.front().due <= now) {
      const absl::Status sent = SendLate(frames.front());
      if (absl::IsResourceExhausted(sent)) break;  // later
      if (!sent.ok()) ++dropped_;                  // the peer is gone
      frames.pop_front();
    }
  }
  for (size_t i = 0; i < echoes_.size();) {
    if (echoes_[i].due > now || Holding(echoes_[i].to) || absl::IsResourceExhausted(SendLate(echoes_[i]))) {
      ++i;
      continue;
    }
    ++echoed_;
    echoes_.erase(echoes_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

absl::Time FaultyPort::NextDue() const {
  absl::Time next = absl::InfiniteFuture();
  for (const auto& [to, frames] : late_)
    if (!frames.empty()) next = std::min(next, frames.front().due);
  for (const Late& late : echoes_) next = std::min(next, late.due);
  return next;
}

int FaultyPort::Poll(FrameHandler& handler, int max_frames) {
  SendDue();
  Sieve sieve(handler, cut_, dropped_);
  return port_.Poll(sieve, max_frames);
}

}  // namespace dovetail::transport
