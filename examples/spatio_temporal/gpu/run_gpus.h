#pragma once
#include <vector>

#include "base/status.h"
#include "examples/spatio_temporal/report.h"

namespace dovetail::spatio_temporal {

// Every rank is a thread of this process and has a GPU of options.devices, which reach each other's memory.
// A GPU may be named more than once. Blocks. The first error of any rank.
// A pair's time is that of its work on the GPU. Seconds in exchange are those in which the stream that computes stood
// still for what others send.
// Errors: kNotFound, kFailedPrecondition: no such GPU, no library for it, or two that do not reach each other.
// Threads: thread-safe; starts one thread for each rank and joins all of them before it returns.
absl::StatusOr<std::vector<RankReport>> RunGpus(const RunOptions& options);

}  // namespace dovetail::spatio_temporal
