#pragma once
#include <cstddef>
#include <memory>

#include "absl/status/status.h"
#include "kernels/cuda/runtime/cuda_device.h"

// Memory on a GPU that lasts from step to step and grows with the largest one.
// Units: bytes.
// Ownership: the caller's buffer; it must not outlive the device.
// Errors: kResourceExhausted: no memory, and the buffer is gone; kInternal: the device is lost.
// Threads: reactor-owned, as CudaDense.

namespace dovetail::compute {

// At least so many bytes, of which nothing is known. Where the buffer grows, the host waits for `stream`, whose work
// may use the old one.
absl::Status GrowMemory(kernels::cuda::CudaDevice& device, kernels::cuda::CudaStream& stream, size_t bytes,
                        std::unique_ptr<kernels::Buffer>& buffer);

// Likewise; what is new is zero once `stream` has come there. Rows of a KV block that hold no token may be read: they
// must be numbers.
absl::Status GrowZeroed(kernels::cuda::CudaDevice& device, kernels::cuda::CudaStream& stream, size_t bytes,
                        std::unique_ptr<kernels::Buffer>& buffer);

}  // namespace dovetail::compute
