#include "server/cli/numa_places.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/numa_binding.h"

namespace dovetail::cli {

NumaPlaces::NumaPlaces(const engine::HostFacts& host, int workers)
    : nodes_(engine::UsableNodes(host)), workers_(workers) {}

std::optional<int> NumaPlaces::NodeOf(int index) const {
  const auto nodes = static_cast<int>(nodes_.size());
  if (nodes < 2 || workers_ < nodes) return std::nullopt;
  return nodes_[static_cast<size_t>(index % nodes)].number;
}

int NumaPlaces::ThreadsOn(int node, int threads) const {
  const auto nodes = static_cast<int>(nodes_.size());
  for (int i = 0; i < nodes; ++i) {
    const engine::NumaNode& one = nodes_[static_cast<size_t>(i)];
    if (one.number != node) continue;
    const int sharers = workers_ / nodes + (i < workers_ % nodes ? 1 : 0);
    return std::clamp(one.cores / std::max(1, sharers), 1, threads);
  }
  return threads;
}

std::string NumaPlaces::Text() const {
  if (nodes_.size() < 2 || workers_ == 0) return "";
  if (!NodeOf(0).has_value())
    return absl::StrCat("this machine has ", nodes_.size(), " NUMA nodes, and attention on the CPU has ", workers_,
                        workers_ == 1 ? " worker, which reads" : " workers, which read",
                        " from all of them: --attention-workers ", nodes_.size(),
                        " gives each node one that reads its own memory");
  return absl::StrCat(
      "attention workers on the CPU are bound to the NUMA nodes ",
      absl::StrJoin(nodes_, ", ",
                    [](std::string* out, const engine::NumaNode& node) { absl::StrAppend(out, node.number); }),
      workers_ > static_cast<int>(nodes_.size()) ? ", in turn" : "");
}

}  // namespace dovetail::cli
