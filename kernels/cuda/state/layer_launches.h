#pragma once
#include "kernels/cuda/state/layer_args.h"

namespace dovetail::kernels::cuda {

// Each enqueues one kernel and returns a cudaError_t. The callers check the arguments (state/layer_ops.h).
// Threads: any host thread, one at a time per stream.
int LaunchStateInputs(const StateInputsLaunch* launch, void* stream);
int LaunchStateGates(const StateGatesLaunch* launch, void* stream);
int LaunchOutputGate(const OutputGateLaunch* launch, void* stream);

}  // namespace dovetail::kernels::cuda
