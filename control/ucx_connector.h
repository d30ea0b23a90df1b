#pragma once
#include <memory>
#include <string>

#include "base/status.h"
#include "transport/connector.h"
#include "transport/ucx/ucx_port.h"

namespace dovetail::control {

// A UcxPort as a Connector.
// Errors: those of UcxPort.
// Threads: reactor-owned, except Wake(), which is thread-safe.
class UcxConnector final : public transport::Connector {
 public:
  static absl::StatusOr<std::unique_ptr<UcxConnector>> Create(const transport::ucx::UcxOptions& options);

  NodeId id() const override { return port_->id(); }
  absl::Status SendMessage(NodeId to, const proto::FrameHeader& header, std::vector<std::byte> payload) override {
    return port_->SendMessage(to, header, std::move(payload));
  }
  absl::Status SendTensor(NodeId to, const proto::FrameHeader& header, transport::LentBytes payload) override {
    return port_->SendTensor(to, header, std::move(payload));
  }
  int Poll(transport::FrameHandler& handler, int max_frames) override { return port_->Poll(handler, max_frames); }

  std::string address() const override { return port_->local_address(); }
  std::string version() const override { return "ucx " + transport::ucx::UcxPort::Version(); }
  std::string listening() const override { return port_->listening(); }
  absl::Status AddPeer(NodeId node, Epoch epoch, const std::string& address) override;
  void RemovePeer(NodeId node) override;
  std::vector<Failure> TakeFailures() override;
  bool Connected(NodeId node) const override { return port_->Connected(node); }
  std::vector<Silence> SilentPeers() const override;
  Bytes BytesTo(NodeId node) const override {
    const transport::ucx::LinkBytes bytes = port_->BytesTo(node);
    return {bytes.messages, bytes.tensors};
  }
  std::string LanesTo(NodeId node) const override;
  void Wait(absl::Duration timeout) override { port_->Wait(timeout); }
  void WaitTogether(transport::Connector& other, absl::Duration timeout) override;
  void Wake() override { port_->Ring(); }

 private:
  explicit UcxConnector(std::unique_ptr<transport::ucx::UcxPort> port) : port_(std::move(port)) {}
  const std::unique_ptr<transport::ucx::UcxPort> port_;
};

}  // namespace dovetail::control
