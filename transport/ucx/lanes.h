#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

// Lanes are the transports that may carry data between two nodes. What is asked for is what is used: UCX by itself
// falls back silently.
// Threads: pure.

namespace dovetail::transport::ucx {

enum class Lanes {
  kShm,  // shared memory: one host, one PID namespace
  kTcp,
  kRc,   // RDMA, reliable connections
  kAny,  // whatever UCX thinks best
};

// "shm", "tcp", "rc", "any". kUnimplemented for "cuda_ipc", kInvalidArgument else.
absl::StatusOr<Lanes> ParseLanes(std::string_view text);
std::string_view NameOf(Lanes lanes);

// UCX's TLS setting that leaves it nothing else. Shared memory is posix alone: its segments have no name once they are
// open, so that not even a killed process leaves one behind, as sysv's could.
std::string_view UcxTransports(Lanes lanes);

// The transports, as "posix/memory" or "tcp/eth0", that a text of ucp_ep_print_info names; one for each lane, without
// repeats.
std::vector<std::string> TransportsIn(std::string_view endpoint_info);

// OK if every transport belongs to `lanes` and there is one at all; otherwise kFailedPrecondition, saying what UCX
// chose.
absl::Status CheckLanes(Lanes lanes, const std::vector<std::string>& transports);

}  // namespace dovetail::transport::ucx
