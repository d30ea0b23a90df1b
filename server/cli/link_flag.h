#pragma once
#include <string>
#include <vector>

#include "base/status.h"

namespace dovetail::cli {

// Threads: plain values and pure functions.
struct LinkRate {
  std::string name;
  double bytes_per_s = 0, latency_s = 0;  // one way
};

// nvlink, rdma-400g and ethernet-25g.
const std::vector<LinkRate>& KnownLinks();

// One of them, or bandwidth and latency as 12.5GB/s:10us. kInvalidArgument names `flag`.
absl::StatusOr<LinkRate> ParseLink(const std::string& flag, const std::string& text);

}  // namespace dovetail::cli
