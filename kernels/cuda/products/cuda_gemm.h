#pragma once
#include <memory>

#include "kernels/cuda/runtime/cuda_device.h"

namespace dovetail::kernels::cuda {

// y = x w^T (+ y) through cuBLASLt. Movable through unique_ptr; must not outlive its device.
// Threads: thread-safe on different streams only if those are ordered: calls share one workspace.
class CudaGemm {
 public:
  static constexpr size_t kDefaultWorkspaceBytes = size_t{32} << 20;

  // kFailedPrecondition, with what to install, if cuBLASLt is not there; kResourceExhausted without memory for the
  // workspace.
  static absl::StatusOr<std::unique_ptr<CudaGemm>> Create(CudaDevice& device,
                                                          size_t workspace_bytes = kDefaultWorkspaceBytes);
  ~CudaGemm();
  CudaGemm(const CudaGemm&) = delete;
  CudaGemm& operator=(const CudaGemm&) = delete;

  // The first call of a shape chooses its algorithm on the host, so shapes should be run once before they are
  // captured.
  absl::Status Run(CudaStream& stream, const GemmCall& call);

 private:
  CudaGemm(CudaDevice& device, void* handle) : device_(device), handle_(handle) {}
  CudaDevice& device_;
  void* handle_;
};

// backend_abi.h's product of a gated MLP, as one kernel. False: not a shape, or not a GPU, that it is for, and nothing
// is enqueued; a product and GatedActivation do the same. A kernel that may still run must not write w.
// Threads: thread-safe on different streams.
absl::StatusOr<bool> GatedProduct(CudaStream& stream, const GatedProductCall& call);

}  // namespace dovetail::kernels::cuda
