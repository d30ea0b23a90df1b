#pragma once
#include "kernels/cuda/state/state_args.h"

namespace dovetail::kernels::cuda {

// Each enqueues one kernel and returns a cudaError_t. Arguments are checked by the callers (cuda_state.h).
// Threads: any host thread, one at a time per stream.
int LaunchStateAppend(const StateLaunch* launch, void* stream);
int LaunchStateDecode(const StateLaunch* launch, void* stream);
int LaunchStateChunkPrepare(const StateLaunch* launch, void* stream);
int LaunchStateChunkPrepareVector(const StateLaunch* launch, void* stream);  // called by the one above
int LaunchStateChunks(const StateLaunch* launch, void* stream);
int LaunchStateChunksDirect(const StateLaunch* launch, void* stream);  // called by the one above

}  // namespace dovetail::kernels::cuda
