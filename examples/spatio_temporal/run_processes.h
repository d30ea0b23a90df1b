#pragma once
#include <vector>

#include "base/status.h"
#include "examples/spatio_temporal/report.h"

namespace dovetail::spatio_temporal {

// Every rank a process of its own, over UCX: starts them (this binary with --as-rank), tells them of each other through
// pipes, and collects their reports. Prints a line "rank R is process PID" for each and "running" once all have begun.
// When one fails, the others have a few seconds to say why they end; then they are killed. Blocks. The error names all
// ranks that failed. Ranks end with this process.
// Threads: the main thread only.
absl::StatusOr<std::vector<RankReport>> RunProcesses(const RunOptions& options);

// What such a process does; its exit status. Talks to stdin and stdout, lines of JSON.
// Threads: the main thread only.
int RunAsRank(int rank);

}  // namespace dovetail::spatio_temporal
