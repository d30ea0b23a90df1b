#pragma once
#include "kernels/cuda/sampling/sampling_args.h"

namespace dovetail::kernels::cuda {

// Each enqueues one kernel and returns a cudaError_t. The callers check the arguments (sampling/sample.h).
// Threads: any host thread, one at a time per stream.
int LaunchSample(const SampleLaunch* launch, void* stream);

}  // namespace dovetail::kernels::cuda
