#pragma once
#include <memory>

#include "kernels/cuda/cuda_device.h"

namespace dovetail::kernels::cuda {

// The small ops and GEMM on a GPU. The structs of row_args.h say what each computes and which shapes its device
// pointers have.
//
// All: check, enqueue one kernel, return. kInvalidArgument, before anything runs, for null pointers, odd sizes or
// strides (elements are moved in pairs) and sizes outside the limits; kInternal if the device is lost. Thread-safe on
// different streams. Allocate nothing. Activations are in a wire type, sums in f32; a row's bits depend on that row
// only. Oracles: kernels/reference/; budgets in tests/kernels_cuda/.

inline constexpr int32_t kMaxOpRows = 65535;

// x += residual (rounded to x's type); out = x * rsqrt(mean(x^2) + eps) * weight.
absl::Status RmsNorm(CudaStream& stream, const RmsNormLaunch& args);
// out = activation(gate) * up.
absl::Status GatedActivation(CudaStream& stream, const ActivationLaunch& args);
// backend_abi.h's product of a gated MLP, as one kernel. False: not a shape, or not a GPU, that it is for, and nothing
// is enqueued; a product and GatedActivation do the same. A kernel that may still run must not write w.
absl::StatusOr<bool> GatedProduct(CudaStream& stream, const GatedProductCall& call);
// out[i] = table[ids[i]] * factor. The ids, and the tokens that they stand for, must lie in the table.
absl::Status Embed(CudaStream& stream, const EmbedLaunch& args);
absl::Status RopeTable(CudaStream& stream, const RopeTableLaunch& args);
// Per-head norms, rope, the append of k and v (or their rows as they are) and the rotated q, in one pass over q, k, v.
absl::Status KvAppend(CudaStream& stream, const KvAppendLaunch& args);
// The products' small companions: sums and scaled copies, and conversions between wire types. Counts are even.
absl::Status Combine(CudaStream& stream, const CombineLaunch& args);
absl::Status FillRandom(CudaStream& stream, const RandomLaunch& args);
absl::Status MergePartials(CudaStream& stream, const MergeLaunch& args);
// One token a row (sampling.h). params, seen, biases, allowed and out lie on the device; their ids must lie in the
// vocabulary. A draw is that of the CPU unless two scores lie closer than f32 rounds z.
absl::Status Sample(CudaStream& stream, const SampleLaunch& args);

// y = x w^T (+ y) through cuBLASLt. Movable through unique_ptr; must not outlive its device. Thread-safe on different
// streams only if those are ordered: calls share one workspace.
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

}  // namespace dovetail::kernels::cuda
