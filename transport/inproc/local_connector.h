#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transport/connector.h"

namespace dovetail::transport {

// What two nodes of one process and one event loop have between them: frames go through memory, without a copy, and a
// payload may be an address that only this process knows.
// Threads: reactor-owned.
// Ownership: its two connectors share it.
class LocalLink {
 public:
  LocalLink(NodeId one, NodeId other) : ends_{End{.node = one}, End{.node = other}} {}

 private:
  friend class LocalConnector;
  struct Frame {
    proto::FrameHeader header;
    std::vector<std::byte> message;  // owned, for messages
    LentBytes tensor;                // the sender's memory, for tensors
  };
  struct End {
    NodeId node;
    bool added = false;  // the other one is a peer of it
    bool gone = false;   // its connector was destroyed
    std::deque<Frame> incoming;
    Connector::Bytes sent;
  };
  End ends_[2];
};

// A Connector whose frames to and from one peer go through a LocalLink. All else goes through the connector that it
// wraps.
// Errors: those of Connector. More than kMaxFramesInFlight unread frames are kResourceExhausted on the link, too.
// Threads: as Connector. Both connectors of a link belong to one event loop.
class LocalConnector final : public Connector {
 public:
  // The two ends of a link between `one` and `other`.
  static std::pair<std::unique_ptr<LocalConnector>, std::unique_ptr<LocalConnector>> Link(
      std::unique_ptr<Connector> one, std::unique_ptr<Connector> other);
  ~LocalConnector() override;

  NodeId id() const override { return inner_->id(); }
  absl::Status SendMessage(NodeId to, const proto::FrameHeader& header, std::vector<std::byte> payload) override;
  absl::Status SendTensor(NodeId to, const proto::FrameHeader& header, LentBytes payload) override;
  int Poll(FrameHandler& handler, int max_frames) override;

  std::string address() const override { return inner_->address(); }
  std::string version() const override { return inner_->version(); }
  std::string listening() const override { return inner_->listening(); }
  absl::Status AddPeer(NodeId node, Epoch epoch, const std::string& address) override;
  void RemovePeer(NodeId node) override;
  std::vector<Failure> TakeFailures() override { return inner_->TakeFailures(); }
  bool Connected(NodeId node) const override;
  std::vector<Silence> SilentPeers() const override { return inner_->SilentPeers(); }
  Bytes BytesTo(NodeId node) const override;
  std::string LanesTo(NodeId node) const override;
  void Wait(absl::Duration timeout) override;
  void WaitTogether(Connector& other, absl::Duration timeout) override;
  void Wake() override { inner_->Wake(); }

  NodeId partner() const { return theirs().node; }

 private:
  LocalConnector(std::unique_ptr<Connector> inner, std::shared_ptr<LocalLink> link, int side)
      : inner_(std::move(inner)), link_(std::move(link)), side_(side) {}
  LocalLink::End& own() const { return link_->ends_[side_]; }
  LocalLink::End& theirs() const { return link_->ends_[1 - side_]; }
  bool HasFrames() const { return own().added && !own().incoming.empty(); }
  absl::Status Push(LocalLink::Frame frame);

  const std::unique_ptr<Connector> inner_;
  const std::shared_ptr<LocalLink> link_;
  const int side_;
};

}  // namespace dovetail::transport
