#pragma once
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/host_limits.h"

namespace dovetail::engine {

// From now on this thread, and threads and processes that it starts, run on those cores of a NUMA node that this
// process may run on, and get their memory from the node while it has some. Where the system does not let a process
// choose its memory, a warning is logged: memory then comes from the node whose core touches it first. Errors:
// kInvalidArgument names `flag` and the nodes that would do: `host` has no node of this number, or it has no
//          core for this process, or no memory. kFailedPrecondition: the cores cannot be chosen.
// Threads: binds the calling thread; another that runs already stays as it is.
// Source:  set_mempolicy(2), sched_setaffinity(2).
absl::Status BindToNumaNode(const std::string& flag, int number, const HostFacts& host);

// Those with memory and with cores that this process may run on, ascending.
// Threads: pure.
std::vector<NumaNode> UsableNodes(const HostFacts& host);

}  // namespace dovetail::engine
