#pragma once
#include <array>
#include <cstddef>
#include <memory>
#include <span>

#include "base/status.h"
#include "kernels/cuda/runtime/cuda_device.h"
#include "proto/sequence_frames.h"

namespace dovetail::attention {

// K and V that a micro-batch is sent and that are only appended: of a move, or of a prompt that was attended elsewhere.
// They go into pinned memory at once, so the payload may be written anew, and no copy waits for a GPU that is busy.
// Ownership: must not outlive the device.
// Errors: kResourceExhausted: no memory; kInternal: the device is lost.
// Threads: reactor-owned.
class IncomingRows {
 public:
  explicit IncomingRows(kernels::cuda::CudaDevice& device) : device_(device) {}

  // Enqueues the copy to `to`, device memory. Where as many as proto::kMoveOpsAhead are under way, it waits for the
  // oldest.
  absl::Status Send(kernels::cuda::CudaStream& stream, std::byte* to, std::span<const std::byte> rows);
  // What uses the rows that were sent last is enqueued.
  absl::Status End(kernels::cuda::CudaStream& stream);
  // Whether the oldest that has not been told of is done, or there is none; it is told of then.
  absl::StatusOr<bool> TakeOldest();

 private:
  struct Rows {
    std::unique_ptr<kernels::Buffer> pinned;
    kernels::cuda::CudaEvent done;
  };
  kernels::cuda::CudaDevice& device_;
  std::array<Rows, proto::kMoveOpsAhead> rows_;
  size_t oldest_ = 0, under_way_ = 0;  // a ring
};

}  // namespace dovetail::attention
