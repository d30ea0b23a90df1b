#pragma once
#include "base/status.h"
#include "server/cli/bench_serve_flags.h"

namespace dovetail::cli {

// `dovetail bench serve`: asks a server of the OpenAI API as `vllm bench serve` does, prints what it measured and
// saves it where --save-result says. The first SIGINT or SIGTERM ends the load, and what came until then is reported;
// the second ends the process. An error where nothing could be measured: no server, no data, no request that succeeded.
// Threads: the main thread only.
absl::Status RunBenchServe(const BenchServeFlags& flags);

}  // namespace dovetail::cli
