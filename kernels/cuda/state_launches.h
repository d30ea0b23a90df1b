#pragma once
#include "kernels/cuda/state_args.h"

namespace dovetail::kernels::cuda {

// Each enqueues one kernel and returns a cudaError_t.
// Any host thread, one at a time per stream. Arguments are checked by the callers (cuda_state.h).
int LaunchStateAppend(const StateLaunch* launch, void* stream);
int LaunchStateDecode(const StateLaunch* launch, void* stream);
int LaunchStateChunkPrepare(const StateLaunch* launch, void* stream);
int LaunchStateChunks(const StateLaunch* launch, void* stream);

}  // namespace dovetail::kernels::cuda
