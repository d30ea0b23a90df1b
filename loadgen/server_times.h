#pragma once
#include <cstdint>
#include <string_view>

#include "base/status.h"
#include "http_client/http_client.h"
#include "loadgen/server_info.h"

// Where a server says that the time of its requests went, by the histograms that vLLM and Dovetail have at /metrics.

namespace dovetail::loadgen {

// Of all requests that the server has ended since it began: seconds, summed.
struct ServerTimes {
  double queue_s = 0;    // waiting for a place
  double prefill_s = 0;  // from there to the first token
  double decode_s = 0;   // from there to the end
  int64_t requests = 0;

  // What came after `before`. kUnavailable: a sum is smaller than it was, as after a restart of the server.
  absl::StatusOr<ServerTimes> Since(const ServerTimes& before) const;
};

// Of a page of Prometheus text. Several engines or models are added up. kUnavailable names the histogram that is not
// there.
// Threads: pure.
absl::StatusOr<ServerTimes> ParseServerTimes(std::string_view metrics);

// Asks the server for /metrics and waits for the answer. kUnavailable where it has none, or none with these histograms.
// Threads: the client's thread only; blocks.
absl::StatusOr<ServerTimes> AskForServerTimes(http_client::HttpClient& client, const Headers& headers);

}  // namespace dovetail::loadgen
