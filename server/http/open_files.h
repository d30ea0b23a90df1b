#pragma once
#include <cstdint>
#include <string>

namespace dovetail::server {

// The descriptors that are kept back when connections are counted.
inline constexpr int kProbeConnections = 8;   // beyond the maximum, for probes
inline constexpr int kEndingConnections = 8;  // that make room for others and are not closed yet
inline constexpr int kOtherFiles = 32;        // what this process opens later: certificates, peers, gRPC's connections

struct OpenFiles {
  int64_t allowed = 0;  // RLIMIT_NOFILE, the soft limit
  int64_t in_use = 0;   // of this process
};
// Opens none where the kernel is 6.2 or later. All are taken to be in use where they cannot be counted.
// Threads: thread-safe; reads /proc.
OpenFiles CountOpenFiles();

struct ConnectionLimit {
  int64_t connections = 0;  // not positive: there is no descriptor for one
  std::string why;          // "at most 69 connections: 128 files may be open (ulimit -n), ..."
};
// `wanted`: --max-connections. `files.in_use` without the connections that there are.
// Threads: pure.
ConnectionLimit LimitConnections(int wanted, const OpenFiles& files);

}  // namespace dovetail::server
