#pragma once
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "transport/connector.h"

namespace dovetail::test {

// Connectors of one process, as UcxPorts are of several: peers come and go, and what a stranger or a former incarnation
// sends is dropped. Payloads are copied. Thread-safe; outlives its connectors.
class InprocHub {
 public:
  std::unique_ptr<transport::Connector> Create(NodeId node, Epoch epoch, const std::string& version = "inproc 1");

  // From now on frames between this node and all others are lost in silence, as on a cut network.
  void Cut(NodeId node);

 private:
  class Port;
  struct Frame {
    NodeId from;
    Epoch from_epoch;
    proto::FrameHeader header;
    std::vector<std::byte> payload;
  };
  struct Box {
    NodeId node;
    Epoch epoch;
    bool cut = false;
    bool woken = false;
    std::condition_variable changed;
    std::deque<Frame> frames;
    std::set<NodeId> peers;
  };

  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Box>> boxes_;  // by address
};

}  // namespace dovetail::test
