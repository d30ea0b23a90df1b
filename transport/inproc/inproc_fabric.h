#pragma once
#include <memory>
#include <vector>

#include "transport/doorbell.h"
#include "transport/fabric.h"

namespace dovetail::transport {

class InprocPort;

// The fabric of one process: a wait-free ring between each pair of nodes, no copies. Nodes may run on one thread or on
// several. All ports are created before any is used; the fabric outlives them.
// Threads: thread-compatible until all ports are created, and thread-safe afterwards. A port is reactor-owned.
class InprocFabric {
 public:
  InprocFabric();
  ~InprocFabric();

  // A port for a new node; ids count from 0. `doorbell` rings when a frame is there for it (null: no thread sleeps on
  // it); several nodes of one thread share one. It outlives the fabric. Once the port is destroyed, sends to it fail
  // with kUnavailable and what it did not read is dropped.
  std::unique_ptr<Port> CreatePort(Doorbell* doorbell);

 private:
  friend class InprocPort;
  struct Frame;
  struct Link;
  struct Node;
  Link* LinkBetween(NodeId from, NodeId to);

  std::vector<std::unique_ptr<Node>> nodes_;
  std::vector<std::vector<std::unique_ptr<Link>>> links_;  // [to][from]
};

}  // namespace dovetail::transport
