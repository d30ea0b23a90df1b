#pragma once
#include "kernels/cuda/state/state_pack_args.h"

namespace dovetail::kernels::cuda {

// Each enqueues one kernel and returns a cudaError_t. The callers check the arguments (state/state_pack.h).
// Threads: any host thread, one at a time per stream.
int LaunchStatePack(const StatePackLaunch* launch, void* stream);
int LaunchStateUnpack(const StatePackLaunch* launch, void* stream);

}  // namespace dovetail::kernels::cuda
