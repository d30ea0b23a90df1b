#pragma once
#include <vector>

#include "base/status.h"
#include "examples/spatio_temporal/report.h"

namespace dovetail::spatio_temporal {

// Every rank a thread of this process, over the in-process fabric. Blocks. The first error of any rank.
// Threads: thread-safe; starts one thread for each rank and joins all of them before it returns.
absl::StatusOr<std::vector<RankReport>> RunThreads(const RunOptions& options);

}  // namespace dovetail::spatio_temporal
