#pragma once
#include "base/status.h"
#include "kernels/thread_pool.h"

namespace dovetail::engine {

// Bytes per second at which all threads of the pool together read memory (256 MiB, far more than any cache, best of
// five passes): what bounds the decoding of one sequence, which reads every weight once per token. Blocks for about 0.2
// s. kResourceExhausted without the memory.
absl::StatusOr<double> MeasureReadRate(kernels::ThreadPool& pool);

}  // namespace dovetail::engine
