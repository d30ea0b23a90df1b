#include "transport/inproc/inproc_fabric.h"

#include <atomic>
#include <utility>

#include "transport/inproc/spsc_ring.h"

namespace dovetail::transport {

struct InprocFabric::Frame {
  proto::FrameHeader header;
  std::vector<std::byte> message;     // owned, for messages
  std::span<const std::byte> tensor;  // the sender's memory, for tensors
};

struct InprocFabric::Link {
  SpscRing<Frame> ring{kMaxFramesInFlight};
};

struct InprocFabric::Node {
  Doorbell* doorbell = nullptr;
  std::atomic<bool> gone{false};
};

class InprocPort final : public Port {
 public:
  InprocPort(InprocFabric& fabric, NodeId id) : fabric_(fabric), id_(id) {}
  ~InprocPort() override { fabric_.nodes_[id_.value()]->gone.store(true, std::memory_order_release); }

  NodeId id() const override { return id_; }

  absl::Status SendMessage(NodeId to, const proto::FrameHeader& header, std::vector<std::byte> payload) override {
    return Push(to, InprocFabric::Frame{header, std::move(payload), {}});
  }

  absl::Status SendTensor(NodeId to, const proto::FrameHeader& header, LentBytes payload) override {
    return Push(to, InprocFabric::Frame{header, {}, payload});
  }

  int Poll(FrameHandler& handler, int max_frames) override {
    auto& incoming = fabric_.links_[id_.value()];
    int handled = 0;
    size_t quiet = 0;  // peers in a row that had nothing
    while (handled < max_frames && quiet < incoming.size()) {
      const size_t from = next_peer_;
      next_peer_ = (next_peer_ + 1) % incoming.size();
      InprocFabric::Frame* frame = incoming[from]->ring.Front();
      if (frame == nullptr) {
        ++quiet;
        continue;
      }
      quiet = 0;
      // Taken out before it is handled: the handler may send, and the peer may refill the ring meanwhile.
      const InprocFabric::Frame taken = std::move(*frame);
      incoming[from]->ring.Pop();
      handler.OnFrame(Delivery{NodeId(static_cast<uint32_t>(from)), taken.header,
                               taken.message.empty() ? taken.tensor : std::span<const std::byte>(taken.message)});
      ++handled;
    }
    return handled;
  }

 private:
  absl::Status Push(NodeId to, InprocFabric::Frame&& frame) {
    InprocFabric::Link* link = fabric_.LinkBetween(id_, to);
    if (link == nullptr) return NotFound("node ", to.value(), " is not on this fabric");
    InprocFabric::Node& peer = *fabric_.nodes_[to.value()];
    if (peer.gone.load(std::memory_order_acquire))
      return absl::UnavailableError(absl::StrCat("node ", to.value(), " has left this fabric"));
    if (!link->ring.TryPush(std::move(frame)))
      return ResourceExhausted("node ", to.value(), " has ", kMaxFramesInFlight, " unread frames from node ",
                               id_.value());
    if (peer.doorbell != nullptr) peer.doorbell->Ring();
    return absl::OkStatus();
  }

  InprocFabric& fabric_;
  const NodeId id_;
  size_t next_peer_ = 0;  // whose frame is handed over next
};

InprocFabric::InprocFabric() = default;
InprocFabric::~InprocFabric() = default;

std::unique_ptr<Port> InprocFabric::CreatePort(Doorbell* doorbell) {
  const NodeId id(static_cast<uint32_t>(nodes_.size()));
  nodes_.push_back(std::make_unique<Node>());
  nodes_.back()->doorbell = doorbell;
  for (auto& incoming : links_) incoming.push_back(std::make_unique<Link>());
  links_.emplace_back();
  for (size_t from = 0; from < nodes_.size(); ++from) links_.back().push_back(std::make_unique<Link>());
  return std::make_unique<InprocPort>(*this, id);
}

InprocFabric::Link* InprocFabric::LinkBetween(NodeId from, NodeId to) {
  if (to.value() >= links_.size()) return nullptr;
  return links_[to.value()][from.value()].get();
}

}  // namespace dovetail::transport
