#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "control/messages.h"

namespace dovetail::control {

// What a role does with its membership. One object is one incarnation.
// Threads: reactor-owned, except Configure(): another thread calls it before the loop uses the node.
class WorkerNode {
 public:
  virtual ~WorkerNode() = default;
  // Allocates for the model; blocks. Called once, before anything else, on another thread while the loop does not use
  // the node.
  virtual absl::StatusOr<Ready> Configure(const Configuration& configuration) = 0;
  virtual void AddPeer(const Peer& peer) = 0;     // after the connector knows it
  virtual void RemovePeer(const Peer& peer) = 0;  // before the connector forgets it
  virtual int Poll() = 0;                         // frames handled
  // Peers whose part of a step is overdue. Asked when Poll() found nothing.
  virtual std::vector<NodeId> Overdue() { return {}; }
  virtual Heartbeat Status() const = 0;
  // Not kOk: this process cannot go on, for this reason. Asked after each Poll().
  virtual absl::Status Health() const { return absl::OkStatus(); }
  // How layers cross to this peer: as Link::exchange.
  virtual std::string ExchangeWith(NodeId) const { return {}; }
};

}  // namespace dovetail::control
