#include "compute_worker/cuda/step_memory.h"

#include "base/status.h"

namespace dovetail::compute {
namespace {

bool Holds(const std::unique_ptr<kernels::Buffer>& buffer, size_t bytes) {
  return bytes == 0 || (buffer != nullptr && buffer->size_bytes() >= bytes);
}

}  // namespace

absl::Status GrowMemory(kernels::cuda::CudaDevice& device, kernels::cuda::CudaStream& stream, size_t bytes,
                        std::unique_ptr<kernels::Buffer>& buffer) {
  if (Holds(buffer, bytes)) return absl::OkStatus();
  DT_RETURN_IF_ERROR(stream.SynchronizeStatus());
  buffer.reset();
  DT_ASSIGN_OR_RETURN(buffer, device.Allocate(bytes));
  return absl::OkStatus();
}

absl::Status GrowZeroed(kernels::cuda::CudaDevice& device, kernels::cuda::CudaStream& stream, size_t bytes,
                        std::unique_ptr<kernels::Buffer>& buffer) {
  if (Holds(buffer, bytes)) return absl::OkStatus();
  DT_RETURN_IF_ERROR(GrowMemory(device, stream, bytes, buffer));
  return stream.Fill(buffer->data(), 0, bytes);
}

}  // namespace dovetail::compute
