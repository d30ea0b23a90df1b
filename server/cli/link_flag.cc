#include "server/cli/link_flag.h"

#include <cmath>
#include <cstdio>

namespace dovetail::cli {

const std::vector<LinkRate>& KnownLinks() {
  static const std::vector<LinkRate> links = {
      {"nvlink", 450e9, 2e-6}, {"rdma-400g", 50e9, 5e-6}, {"ethernet-25g", 3.125e9, 30e-6}};
  return links;
}

absl::StatusOr<LinkRate> ParseLink(const std::string& flag, const std::string& text) {
  for (const LinkRate& link : KnownLinks())
    if (link.name == text) return link;
  double gigabytes = 0, microseconds = 0;
  int used = 0;
  if (std::sscanf(text.c_str(), "%lfGB/s:%lfus%n", &gigabytes, &microseconds, &used) != 2 ||
      static_cast<size_t>(used) != text.size() || !std::isfinite(gigabytes) || gigabytes <= 0 ||
      !std::isfinite(microseconds) || microseconds < 0)
    return InvalidArgument(flag, ": '", text,
                           "' is none of nvlink, rdma-400g and ethernet-25g; or write bandwidth and latency, as "
                           "12.5GB/s:10us");
  return LinkRate{text, gigabytes * 1e9, microseconds * 1e-6};
}

}  // namespace dovetail::cli
