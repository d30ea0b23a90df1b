#pragma once
#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "base/ids.h"
#include "base/status.h"

namespace dovetail::compute {

// Memory of a worker's device that ranks in other processes of its machine read by themselves: they get a name of it in
// place of bytes. Each worker offers some of its own to each peer. A peer that has opened and read that says so, and
// only then is anything named to it.
// Source:  docs/adr/0086-named-memory-between-ranks.md
// Threads: reactor-owned; where nothing else is said nothing blocks.
class RankMemory {
 public:
  virtual ~RankMemory() = default;

  // What a peer is to read, opaque. Errors: why there is nothing to offer.
  virtual absl::StatusOr<std::string> Offer() = 0;
  // Reads what a peer offered, which takes milliseconds, and gives the answer. Error: why it cannot be read, for the
  // peer.
  virtual absl::StatusOr<std::string> Answer(NodeId peer, std::string_view offer) = 0;
  // kFailedPrecondition: that is not what the offered memory holds, so the peer has read something else.
  virtual absl::Status Check(std::string_view answer) const = 0;
  // What is given to other ranks in steps that begin from here on may lie where this peer reads it; or may not.
  virtual void SetReaches(WorkerId peer, bool reaches) = 0;

  // For a peer that reaches them; empty: they lie in host memory.
  virtual std::string NameOf(std::span<const std::byte> given) const = 0;
  // What a peer named; stays as it is until it was answered. kInvalidArgument: that is no name. kInternal: it cannot be
  // opened.
  virtual absl::StatusOr<std::span<const std::byte>> Open(NodeId peer, std::string_view name) = 0;
  // Closes what it named, which frees the memory of a process that has ended. Waits for copies from it.
  virtual void Lose(NodeId peer) = 0;
};

}  // namespace dovetail::compute
