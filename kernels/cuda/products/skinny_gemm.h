#pragma once
#include "kernels/cuda/attention/attention_args.h"
#include "kernels/cuda/backend_abi.h"

namespace dovetail::kernels::cuda {

// Products of at most 8 rows, y = x w^T (+ bias) (+ y), which take as long as their weights take to be read. These are
// on their way before kernels that were enqueued earlier have ended: none may write w (GemmCall::w_is_new). Bits do not
// depend on timing, nor on the other rows of x.
// Threads: any host thread, one at a time per stream.

// Whether the kernel computes this: rows of w and x in multiples of 64 elements and on 16-byte boundaries, x in shared
// memory, and a GPU for which the kernel has code (compute capability 9.0).
bool IsSkinnyGemm(const GemmCall& call, const DeviceLimits& device);
// Enqueues what IsSkinnyGemm accepts. cudaError_t as int.
int LaunchSkinnyGemm(const GemmCall& call, const DeviceLimits& device, void* stream);

}  // namespace dovetail::kernels::cuda
