#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/clock.h"
#include "base/status.h"
#include "http_client/http_client.h"
#include "loadgen/openai.h"
#include "loadgen/request.h"

namespace dovetail::loadgen {

// Sending requests at their times, and reading all answers.
struct LoadOptions {
  int64_t max_concurrency = 0;                      // requests under way at once; 0: any number. Others wait, in order.
  absl::Duration request_timeout = absl::Hours(6);  // from its start to its end
  double probe_rate = 0;  // small requests per second at equal gaps, next to the load and beyond max_concurrency
  std::function<PlannedRequest(int64_t index)> make_probe;
  LocalTokenCounter* tokenizer = nullptr;  // for answers without usage; may be null; outlives the run
  // Called about once a second, and at the end.
  std::function<void(int64_t ended, int64_t failed, int64_t under_way)> progress;
  // Becomes true when the rest is not to be sent and what is under way is to be given up. Looked at every 50 ms.
  const std::atomic<bool>* stop = nullptr;
};

struct LoadResult {
  std::vector<RequestRecord> records;  // in the order of the requests; those that were never begun are left out
  std::vector<RequestRecord> probes;
  double duration_s = 0;  // from the start to the last end of a request that is no probe
  int64_t not_sent = 0;   // stopped before their turn
  bool stopped = false;
};

// Sends `requests[i]` at `times_s[i]` (ascending, from now) and waits for all answers. Blocks. What the processor of
// the calling thread does late is recorded as lateness. Requests end in any way that a server may choose; none of that
// ends the run. `clock` gives the times of records, real timers the moments of sending.
// Threads: the calling thread runs the client's loop, and no other thread takes part; `stop` may be set by any thread.
LoadResult RunLoad(http_client::HttpClient& client, const ApiOptions& api, const std::vector<PlannedRequest>& requests,
                   const std::vector<double>& times_s, const LoadOptions& options, Clock& clock);

}  // namespace dovetail::loadgen
