#pragma once
#include "kernels/cuda/rows/append_args.h"

namespace dovetail::kernels::cuda {

// Each enqueues one kernel and returns a cudaError_t. The callers check the arguments (rows/row_ops.h).
// Threads: any host thread, one at a time per stream.
int LaunchKvAppend(const KvAppendLaunch* launch, void* stream);
int LaunchRopeTable(const RopeTableLaunch* launch, void* stream);
int LaunchJoinKeys(const JoinKeysLaunch* launch, void* stream);

}  // namespace dovetail::kernels::cuda
