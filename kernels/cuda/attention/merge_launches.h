#pragma once
#include "kernels/cuda/attention/merge_args.h"

namespace dovetail::kernels::cuda {

// Each enqueues one kernel and returns a cudaError_t. The callers check the arguments (attention/merge_partials.h).
// Threads: any host thread, one at a time per stream.
int LaunchMerge(const MergeLaunch* launch, void* stream);

}  // namespace dovetail::kernels::cuda
