#pragma once
#include <string>

#include "base/status.h"

// Over which of its interfaces this host meets the others of a cluster.
//
// Errors:  kUnavailable if a name cannot be resolved or no route leads to an address: it may be there later.
// Threads: thread-safe. Blocks while a name is resolved.
// Source:  Linux: getifaddrs(3), /sys/class/net.

namespace dovetail::transport::ucx {

struct NetworkRoute {
  bool loopback = false;  // it does not leave this host
  std::string interface;  // "eth0"; empty: every interface, of a wildcard address
  std::string address;    // of this host there: "10.0.0.5"
};

// The way from this host to `address`, HOST:PORT: of a worker, to its scheduler. An address of this host itself leads
// over the interface that has it.
absl::StatusOr<NetworkRoute> RouteTo(const std::string& address);

// Where a socket that listens at `address`, HOST:PORT, is reached: of a scheduler.
absl::StatusOr<NetworkRoute> RouteAt(const std::string& address);

// UCX's names of an interface and of the RDMA ports of the same adapter: "eth0" or "eth0,mlx5_0:1".
std::string DevicesOf(const std::string& interface);

// Whether one of these devices, comma-separated and as UCX names them, reaches other hosts. Devices that are not there
// reach none.
bool LeaveTheHost(const std::string& devices);

}  // namespace dovetail::transport::ucx
