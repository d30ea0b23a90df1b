#include "tests/cluster/inproc_hub.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace dovetail::test {

class InprocHub::Port final : public transport::Connector {
 public:
  Port(InprocHub& hub, std::shared_ptr<Box> box, std::string address, std::string version)
      : hub_(hub), box_(std::move(box)), address_(std::move(address)), version_(std::move(version)) {}
  ~Port() override {
    std::lock_guard<std::mutex> lock(hub_.mutex_);
    hub_.boxes_.erase(address_);
  }

  NodeId id() const override { return box_->node; }
  std::string address() const override { return address_; }
  std::string version() const override { return version_; }

  absl::Status AddPeer(NodeId node, Epoch epoch, const std::string& address) override {
    if (peers_.contains(node)) return absl::AlreadyExistsError("the node is a peer");
    peers_[node] = {epoch, address};
    std::lock_guard<std::mutex> lock(hub_.mutex_);
    box_->peers.insert(node);
    return absl::OkStatus();
  }
  void RemovePeer(NodeId node) override {
    peers_.erase(node);
    std::lock_guard<std::mutex> lock(hub_.mutex_);
    box_->peers.erase(node);
  }
  bool Connected(NodeId node) const override {
    const auto peer = peers_.find(node);
    if (peer == peers_.end()) return false;
    std::lock_guard<std::mutex> lock(hub_.mutex_);
    const auto box = hub_.boxes_.find(peer->second.second);
    return box != hub_.boxes_.end() && box->second->peers.contains(box_->node);
  }
  std::vector<Silence> SilentPeers() const override { return {}; }
  Bytes BytesTo(NodeId node) const override {
    const auto sent = sent_.find(node);
    return sent == sent_.end() ? Bytes{} : sent->second;
  }
  std::vector<Failure> TakeFailures() override { return {}; }
  std::string LanesTo(NodeId node) const override { return peers_.contains(node) ? "memory" : ""; }

  absl::Status SendMessage(NodeId to, const proto::FrameHeader& header, std::vector<std::byte> payload) override {
    sent_[to].messages += payload.size();
    return Send(to, header, std::move(payload));
  }
  absl::Status SendTensor(NodeId to, const proto::FrameHeader& header, transport::LentBytes payload) override {
    // A node may end, or grow its buffers, before the frame has left: see transport/lent_bytes.h.
    DT_CHECK(payload.empty() || payload.owner != nullptr);
    sent_[to].tensors += payload.size();
    return Send(to, header, std::vector<std::byte>(payload.begin(), payload.end()));
  }
  absl::Status Send(NodeId to, const proto::FrameHeader& header, std::vector<std::byte> payload) {
    const auto peer = peers_.find(to);
    if (peer == peers_.end()) return NotFound("node ", to.value(), " is no peer");
    std::lock_guard<std::mutex> lock(hub_.mutex_);
    const auto box = hub_.boxes_.find(peer->second.second);
    if (box == hub_.boxes_.end()) return absl::UnavailableError("the peer is gone");
    if (box->second->cut || box_->cut) return absl::OkStatus();
    box->second->frames.push_back({box_->node, box_->epoch, header, std::move(payload)});
    box->second->changed.notify_all();
    return absl::OkStatus();
  }

  int Poll(transport::FrameHandler& handler, int max_frames) override {
    for (int handled = 0; handled < max_frames; ++handled) {
      Frame frame;
      {
        std::lock_guard<std::mutex> lock(hub_.mutex_);
        if (box_->frames.empty()) return handled;
        frame = std::move(box_->frames.front());
        box_->frames.pop_front();
      }
      const auto peer = peers_.find(frame.from);
      if (peer == peers_.end() || peer->second.first != frame.from_epoch) continue;
      held_.push_back(std::move(frame));
      if (held_.size() > kHeld) held_.pop_front();
      const Frame& kept = held_.back();
      handler.OnFrame({kept.from, kept.header, kept.payload});
    }
    return max_frames;
  }

  void Wait(absl::Duration timeout) override {
    std::unique_lock<std::mutex> lock(hub_.mutex_);
    box_->changed.wait_for(lock, absl::ToChronoMicroseconds(timeout),
                           [&] { return box_->woken || !box_->frames.empty(); });
    box_->woken = false;
  }
  void Wake() override {
    std::lock_guard<std::mutex> lock(hub_.mutex_);
    box_->woken = true;
    box_->changed.notify_all();
  }

 private:
  // A tensor stays as it is until it has been answered: longer than any step of the tests.
  static constexpr size_t kHeld = 4096;

  InprocHub& hub_;
  const std::shared_ptr<Box> box_;
  const std::string address_, version_;
  std::map<NodeId, std::pair<Epoch, std::string>> peers_;
  std::map<NodeId, Bytes> sent_;
  std::deque<Frame> held_;
};

std::unique_ptr<transport::Connector> InprocHub::Create(NodeId node, Epoch epoch, const std::string& version) {
  auto box = std::make_shared<Box>();
  box->node = node;
  box->epoch = epoch;
  const std::string address = absl::StrCat("inproc:", node.value(), ":", epoch.value());
  {
    std::lock_guard<std::mutex> lock(mutex_);
    boxes_[address] = box;
  }
  return std::make_unique<Port>(*this, std::move(box), address, version);
}

void InprocHub::Cut(NodeId node) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [address, box] : boxes_)
    if (box->node == node) box->cut = true;
}

}  // namespace dovetail::test
