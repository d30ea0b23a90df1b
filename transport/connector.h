#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/ids.h"
#include "base/status.h"
#include "transport/fabric.h"

namespace dovetail::transport {

// A Port whose peers come and go while it runs: what a node of a cluster of processes is given.
// Threads: reactor-owned, except Wake(), which is thread-safe.
class Connector : public Port {
 public:
  // How peers reach this port, opaque; travels over the control plane only. version() names the library and its
  // version: ports of different versions must not be connected.
  virtual std::string address() const = 0;
  virtual std::string version() const = 0;
  // What this port listens on, as operators know it: "tcp 10.0.0.5:7200", "shared memory".
  virtual std::string listening() const { return "this process"; }

  // Connects to a peer's incarnation. Frames to and from it may flow at once. kAlreadyExists: the node is a peer.
  // kInvalidArgument, kUnavailable: the address cannot be used, or only over a lane that was not asked for; the message
  // names the remedy.
  virtual absl::Status AddPeer(NodeId node, Epoch epoch, const std::string& address) = 0;

  // Closes the connection by force; what it still sends is dropped. Unknown nodes are ignored. Does not block on the
  // peer.
  virtual void RemovePeer(NodeId node) = 0;

  // Peers that cannot be reached any more since the last call, each once. They stay peers until removed.
  struct Failure {
    NodeId node;
    Epoch epoch;
    std::string why;
  };
  virtual std::vector<Failure> TakeFailures() = 0;

  // True once both sides have added each other and frames pass. False if the node is not a peer.
  virtual bool Connected(NodeId node) const = 0;

  // Peers from which nothing came for longer than peers are silent, while this port was polled. Such a peer is stopped,
  // cut off, or too busy to poll its own port; it may speak again.
  struct Silence {
    NodeId node;
    Epoch epoch;
    absl::Duration length;
  };
  virtual std::vector<Silence> SilentPeers() const = 0;

  // Payloads sent to the peer. Nothing: no such peer.
  struct Bytes {
    uint64_t messages = 0;
    uint64_t tensors = 0;
  };
  virtual Bytes BytesTo(NodeId node) const = 0;

  // What carries frames to the peer, as operators know it: "shm", "tcp/eth0". Empty: no such peer.
  virtual std::string LanesTo(NodeId node) const = 0;

  // Returns when a frame may be there, a peer has connected or failed, Wake() was called since the last Wait()
  // returned, or after `timeout`.
  virtual void Wait(absl::Duration timeout) = 0;
  // As Wait(), for this connector and another one that the same thread polls. A connector that does not know how to
  // wait for the other one returns after a millisecond at most.
  virtual void WaitTogether(Connector&, absl::Duration timeout) { Wait(std::min(timeout, absl::Milliseconds(1))); }
  virtual void Wake() = 0;
};

}  // namespace dovetail::transport
