#pragma once
#include <optional>
#include <string>
#include <vector>

#include "engine/host_limits.h"

namespace dovetail::cli {

// Which NUMA node each of a machine's attention workers on the CPU is bound to. Where there are as many workers as
// nodes, they take the nodes in turn: each reads K and V from its own node's memory. Fewer are not bound, since each
// needs the cores of several nodes.
// Threads: a value; pure functions.
class NumaPlaces {
 public:
  // `workers`: attention workers on the CPU.
  NumaPlaces(const engine::HostFacts& host, int workers);

  // Of worker `index` of 0..workers - 1; nothing: it is not bound.
  std::optional<int> NodeOf(int index) const;
  // At most `threads`: no more than the node's cores for each of the workers that share it.
  int ThreadsOn(int node, int threads) const;
  // For the log: what is bound, or what would help. Empty on a machine of one node, and without workers.
  std::string Text() const;

 private:
  std::vector<engine::NumaNode> nodes_;  // usable ones
  int workers_;
};

}  // namespace dovetail::cli
