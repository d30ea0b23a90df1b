#pragma once
#include <cstdint>
#include <string>

namespace dovetail {

// A process, as another one on the same host finds it. One that waits for a processor is as silent as one that was
// stopped; the kernel knows which of the two it is.
//
// Threads: thread-compatible; a value. The functions are thread-safe; they read /proc and do not wait.
struct HostProcess {
  // The host, and the namespaces of processes and networks in it: only where all are equal does the number mean the
  // same process, and no cable lie between the two. Empty: not known.
  std::string host;
  uint32_t pid = 0;
  uint64_t started = 0;  // clock ticks after the host's start; tells it from a later process of this number

  bool operator==(const HostProcess&) const = default;
};

// The calling process. `host` is empty where /proc does not tell.
HostProcess ThisProcess();

// Whether that process is on this host, lives and was not stopped (SIGSTOP, a debugger). False also where this cannot
// be told, and of the calling process, which proves nothing about its threads.
bool RunsHere(const HostProcess& process);

}  // namespace dovetail
