#include "engine/numa_binding.h"

#include <linux/mempolicy.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>

#include "absl/strings/str_join.h"
#include "base/log.h"

namespace dovetail::engine {
namespace {

constexpr size_t kMostNodes = 1024;  // that Linux has
constexpr size_t kNodesInAWord = 8 * sizeof(unsigned long);

// Also of threads that are started later. The C library has no call for it.
bool PreferMemoryOf(int node) {
  std::array<unsigned long, kMostNodes / kNodesInAWord> nodes{};
  nodes[static_cast<size_t>(node) / kNodesInAWord] |= 1ul << (static_cast<size_t>(node) % kNodesInAWord);
  return syscall(SYS_set_mempolicy, MPOL_PREFERRED, nodes.data(), kMostNodes + 1) == 0;
}

}  // namespace

std::vector<NumaNode> UsableNodes(const HostFacts& host) {
  std::vector<NumaNode> nodes;
  std::copy_if(host.nodes.begin(), host.nodes.end(), std::back_inserter(nodes),
               [](const NumaNode& node) { return node.cores > 0 && node.memory_bytes > 0; });
  return nodes;
}

absl::Status BindToNumaNode(const std::string& flag, int number, const HostFacts& host) {
  const std::vector<NumaNode> usable = UsableNodes(host);
  const auto node =
      std::find_if(usable.begin(), usable.end(), [number](const NumaNode& one) { return one.number == number; });
  const auto name = [](std::string* out, const NumaNode& one) { absl::StrAppend(out, one.number); };
  if (node == usable.end() || static_cast<size_t>(number) >= kMostNodes)
    return InvalidArgument(flag, ": ", number,
                           " is no NUMA node with memory and with cores that this process may use; ",
                           usable.empty() ? "this system names none: leave the flag out"
                                          : absl::StrCat("those are ", absl::StrJoin(usable, ", ", name)));
  cpu_set_t cores;
  CPU_ZERO(&cores);
  for (const int core : node->core_numbers) CPU_SET(static_cast<size_t>(core), &cores);
  if (sched_setaffinity(0, sizeof(cores), &cores) != 0)
    return FailedPrecondition(flag, ": this process cannot be bound to the cores of NUMA node ", number, ": ",
                              std::strerror(errno));
  if (!PreferMemoryOf(number))
    LogWarning(flag, ": this system does not let a process choose its memory (", std::strerror(errno),
               "; in a container that takes CAP_SYS_NICE): K and V come from node ", number,
               " where its own cores touch them first");
  return absl::OkStatus();
}

}  // namespace dovetail::engine
