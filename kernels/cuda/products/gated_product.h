#pragma once
#include "kernels/cuda/attention/attention_args.h"
#include "kernels/cuda/backend_abi.h"

namespace dovetail::kernels::cuda {

// y = act(x g^T) * (x u^T), where w holds the n rows of g and then those of u: the first half of a gated MLP as one
// kernel. What the two products give is rounded once only, in y. Bits do not depend on timing.
//
// Enqueues it, or kProductRefused: m below 65 or above 256, which are not bound by arithmetic or take several rounds; k
// below 64; x, w and y not on 16-byte boundaries with n, k and strides in multiples of 8 elements; n that no tile
// divides well among the multiprocessors; a GPU for which the kernel has no code (other than compute capability 9.0). w
// is read before kernels that were enqueued earlier have ended: none may write it. Else cudaError_t as int.
// Threads: thread-safe.
int LaunchGatedProduct(const GatedProductCall* call, const DeviceLimits* device, void* stream);

}  // namespace dovetail::kernels::cuda
