#include "transport/inproc/local_connector.h"

#include <algorithm>

namespace dovetail::transport {

std::pair<std::unique_ptr<LocalConnector>, std::unique_ptr<LocalConnector>> LocalConnector::Link(
    std::unique_ptr<Connector> one, std::unique_ptr<Connector> other) {
  const auto link = std::make_shared<LocalLink>(one->id(), other->id());
  std::unique_ptr<LocalConnector> first(new LocalConnector(std::move(one), link, 0));
  std::unique_ptr<LocalConnector> second(new LocalConnector(std::move(other), link, 1));
  return {std::move(first), std::move(second)};
}

LocalConnector::~LocalConnector() {
  own().gone = true;
  own().added = false;
  own().incoming.clear();
}

absl::Status LocalConnector::Push(LocalLink::Frame frame) {
  LocalLink::End& to = theirs();
  if (!own().added) return NotFound("node ", to.node.value(), " is no peer");
  if (to.gone) return absl::UnavailableError(absl::StrCat("node ", to.node.value(), " has left this process"));
  if (to.incoming.size() >= kMaxFramesInFlight)
    return ResourceExhausted("node ", to.node.value(), " has ", kMaxFramesInFlight, " unread frames from node ",
                             own().node.value());
  own().sent.messages += frame.message.size();
  own().sent.tensors += frame.tensor.size();
  to.incoming.push_back(std::move(frame));
  return absl::OkStatus();
}

absl::Status LocalConnector::SendMessage(NodeId to, const proto::FrameHeader& header, std::vector<std::byte> payload) {
  if (to != partner()) return inner_->SendMessage(to, header, std::move(payload));
  return Push({header, std::move(payload), {}});
}

absl::Status LocalConnector::SendTensor(NodeId to, const proto::FrameHeader& header, LentBytes payload) {
  if (to != partner()) return inner_->SendTensor(to, header, std::move(payload));
  return Push({header, {}, std::move(payload)});
}

// The partner's frames come first: they are there already, and others wait for what follows from them.
int LocalConnector::Poll(FrameHandler& handler, int max_frames) {
  int handled = 0;
  while (handled < max_frames && HasFrames()) {
    // Taken out before it is handled: the handler may send, or remove the peer.
    const LocalLink::Frame frame = std::move(own().incoming.front());
    own().incoming.pop_front();
    handler.OnFrame(Delivery{partner(), frame.header,
                             frame.message.empty() ? std::span<const std::byte>(frame.tensor) : frame.message});
    ++handled;
  }
  return handled + inner_->Poll(handler, std::max(1, max_frames - handled));
}

absl::Status LocalConnector::AddPeer(NodeId node, Epoch epoch, const std::string& address) {
  if (node != partner()) return inner_->AddPeer(node, epoch, address);
  if (own().added) return absl::AlreadyExistsError(absl::StrCat("node ", node.value(), " is a peer already"));
  own().added = true;
  return absl::OkStatus();
}

void LocalConnector::RemovePeer(NodeId node) {
  if (node != partner()) return inner_->RemovePeer(node);
  own().added = false;
  own().incoming.clear();
}

bool LocalConnector::Connected(NodeId node) const {
  if (node != partner()) return inner_->Connected(node);
  return own().added && theirs().added;
}

Connector::Bytes LocalConnector::BytesTo(NodeId node) const {
  if (node != partner()) return inner_->BytesTo(node);
  return own().added ? own().sent : Bytes{};
}

std::string LocalConnector::LanesTo(NodeId node) const {
  if (node != partner()) return inner_->LanesTo(node);
  return own().added ? "memory" : "";
}

void LocalConnector::Wait(absl::Duration timeout) { inner_->Wait(HasFrames() ? absl::ZeroDuration() : timeout); }

void LocalConnector::WaitTogether(Connector& other, absl::Duration timeout) {
  auto* const local = dynamic_cast<LocalConnector*>(&other);
  if (local == nullptr) return Connector::WaitTogether(other, timeout);
  inner_->WaitTogether(*local->inner_, HasFrames() || local->HasFrames() ? absl::ZeroDuration() : timeout);
}

}  // namespace dovetail::transport
