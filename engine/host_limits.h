#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace dovetail::engine {

// Plain values.
// Threads: thread-compatible.
struct NumaNode {
  int number = 0;
  int cores = 0;              // of those that this process may run on
  uint64_t memory_bytes = 0;  // of the node, used or not
  std::vector<int> core_numbers = {};
};
struct HostFacts {
  int cores = 0;                          // that this process may run on
  std::vector<NumaNode> nodes;            // empty: the system names none
  std::optional<uint64_t> memlock_bytes;  // how much memory this process may lock; nothing: no limit
};
struct HostNeeds {
  int threads = 0;     // that compute at the same time
  bool on_cpu = true;  // K and V, or weights, lie in the host's memory
  bool rdma = false;   // memory is registered with an RDMA device
};

// Units:   `nodes` is the folder with node0, node1, .. of sysfs.
// Errors:  none; what cannot be read is left out.
// Threads: thread-safe; blocks on files.
HostFacts ReadHostFacts(const std::filesystem::path& nodes = "/sys/devices/system/node");

// What makes workers slower than their host looks, or will fail later, a line each with what would help. Empty: nothing
// was found.
// Errors:  none.
// Threads: pure.
std::vector<std::string> WhatIsShort(const HostFacts& host, const HostNeeds& needs);

// Logs a warning for each line of this host.
// Errors:  none.
// Threads: thread-safe; blocks on files.
void WarnOfWhatIsShort(const HostNeeds& needs);

}  // namespace dovetail::engine
