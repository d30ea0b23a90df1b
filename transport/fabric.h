#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "proto/frame.h"
#include "transport/lent_bytes.h"

// How nodes exchange frames. A process is a node = core + device + Port + clock; only the constructors of fabrics
// differ between one process, several and the simulator.

namespace dovetail::transport {

// One frame as its receiver sees it. `payload` of a message is valid during the handler. `payload` of a tensor lies in
// the sender's registered memory (or a copy of it) and stays as it is until the receiver has answered it, which is when
// the sender may reuse it.
struct Delivery {
  NodeId from;
  proto::FrameHeader header;
  std::span<const std::byte> payload;
};

// Receives the frames of a port.
// Threads: called on the thread that polls the port.
class FrameHandler {
 public:
  virtual ~FrameHandler() = default;
  virtual void OnFrame(const Delivery& delivery) = 0;
};

// A node's attachment to a fabric. Frames between two nodes arrive in the order they were sent; none is lost or
// repeated unless the fabric is a faulty one.
// Threads: reactor-owned.
class Port {
 public:
  virtual ~Port() = default;
  virtual NodeId id() const = 0;

  // Sends an encoded message; takes the bytes. kNotFound: no such node. kUnavailable: it has left. kResourceExhausted:
  // the peer has kMaxFramesInFlight frames of ours unread (nothing was sent). Does not block.
  virtual absl::Status SendMessage(NodeId to, const proto::FrameHeader& header, std::vector<std::byte> payload) = 0;

  // Sends memory that stays unchanged until the frame is answered. A port that reads it later holds `payload.owner`
  // until then. Errors as above. Does not allocate, lock or block.
  virtual absl::Status SendTensor(NodeId to, const proto::FrameHeader& header, LentBytes payload) = 0;

  // Hands at most `max_frames` received frames to the handler, round-robin over the peers. Returns how many. Does not
  // block.
  virtual int Poll(FrameHandler& handler, int max_frames) = 0;
};

inline constexpr int kMaxFramesInFlight = 1024;  // between two nodes, one way

}  // namespace dovetail::transport
