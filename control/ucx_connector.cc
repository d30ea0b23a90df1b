#include "control/ucx_connector.h"

#include <utility>

namespace dovetail::control {

absl::StatusOr<std::unique_ptr<UcxConnector>> UcxConnector::Create(const transport::ucx::UcxOptions& options) {
  DT_ASSIGN_OR_RETURN(auto port, transport::ucx::UcxPort::Create(options));
  return std::unique_ptr<UcxConnector>(new UcxConnector(std::move(port)));
}

// Versions were compared when the peer joined: the scheduler admits only its own.
absl::Status UcxConnector::AddPeer(NodeId node, Epoch epoch, const std::string& address) {
  return port_->AddPeer(node, address, transport::ucx::UcxPort::Version(), epoch);
}

void UcxConnector::RemovePeer(NodeId node) {
  if (const absl::Status status = port_->RemovePeer(node); !status.ok()) return;  // no peer: nothing to do
}

std::vector<transport::Connector::Failure> UcxConnector::TakeFailures() {
  std::vector<Failure> failures;
  for (const transport::ucx::PeerFailure& failure : port_->TakeFailures())
    failures.push_back({failure.node, failure.epoch, std::string(failure.status.message())});
  return failures;
}

std::vector<transport::Connector::Silence> UcxConnector::SilentPeers() const {
  std::vector<Silence> silent;
  for (const auto& peer : port_->SilentPeers()) silent.push_back({peer.node, peer.epoch, peer.length});
  return silent;
}

void UcxConnector::WaitTogether(transport::Connector& other, absl::Duration timeout) {
  auto* const ucx = dynamic_cast<UcxConnector*>(&other);
  if (ucx == nullptr) return Connector::WaitTogether(other, timeout);
  transport::ucx::UcxPort* const ports[] = {port_.get(), ucx->port_.get()};
  transport::ucx::UcxPort::WaitForAny(ports, timeout);
}

std::string UcxConnector::LanesTo(NodeId node) const {
  auto lane = port_->LaneOf(node);
  return lane.ok() ? *std::move(lane) : std::string();
}

}  // namespace dovetail::control
