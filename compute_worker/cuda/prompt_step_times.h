#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "compute_worker/dense_backend.h"
#include "kernels/cuda/runtime/cuda_device.h"

namespace dovetail::compute {

// How long a GPU took for the parts of a step whose prompts it attended: marks in the stream of the step. What lies
// between them, op by op, is dense layers, waiting for rows of other ranks, attention, and waiting for answers. In a
// ring an op is attended in parts, between which it waits for more rows.
// Ownership: must not outlive the device.
// Errors: kInternal: the device is lost.
// Threads: thread-compatible.
class PromptStepTimes {
 public:
  // For so many ops.
  static absl::StatusOr<std::unique_ptr<PromptStepTimes>> Create(kernels::cuda::CudaDevice& device, int ops);

  // An op is attended in at most so many parts. May allocate; nothing below does.
  absl::Status Begin(kernels::cuda::CudaStream& stream, int parts = 1);
  absl::Status Leaves(int op, kernels::cuda::CudaStream& stream);    // q, k and v are made
  absl::Status Attends(int op, kernels::cuda::CudaStream& stream);   // a part, from here on
  absl::Status Attended(int op, kernels::cuda::CudaStream& stream);  // up to here
  // The answers are there. `linear`: what was attended were linear layers.
  absl::Status GoesOn(int op, kernels::cuda::CudaStream& stream, bool linear = false);
  absl::Status End(kernels::cuda::CudaStream& stream);

  absl::Status Await() const;  // until the step has run; blocks the host
  bool Ended() const;          // it has run, or the device is lost

  // Once the step has run. Nothing: it did not attend in any op, or the device is lost.
  std::optional<DenseBackend::GpuTimes> Sum() const;

 private:
  struct Part {
    kernels::cuda::CudaEvent attends, attended;
  };
  struct Op {
    kernels::cuda::CudaEvent left, goes_on;
    std::vector<Part> parts;
    size_t attended = 0;  // parts
    bool marked = false, linear = false;
  };
  explicit PromptStepTimes(kernels::cuda::CudaDevice& device) : device_(device) {}
  static bool Add(const Op& op, double& attended, double& waited);

  kernels::cuda::CudaDevice& device_;
  kernels::cuda::CudaEvent begun_, ended_;
  std::vector<Op> ops_;
};

}  // namespace dovetail::compute
