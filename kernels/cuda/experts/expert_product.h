#pragma once
#include <memory>

#include "kernels/cuda/experts/expert_args.h"
#include "kernels/cuda/products/cuda_weights.h"
#include "kernels/cuda/runtime/cuda_device.h"

namespace dovetail::kernels::cuda {

// Products with experts (ExpertGemmLaunch) whatever their weights are kept in: 16 bits (MultiplyExperts); or 4 and 8
// bits, whose codes few rows read, and which are unpacked for many, some experts at a time, into memory that all layers
// share.
// Ownership: must not outlive its device.
// Threads: thread-safe on different streams only if those are ordered: calls share memory.
class ExpertProduct {
 public:
  // Below so many rows of an expert, where experts have about as many, codes are read once for each 16 of them; with
  // more it takes less to unpack them. Measured on an H200 (bench/results/2026-11-29-cuda-quant-experts.md).
  static constexpr int64_t kMostCodeRows = 80;
  // The most memory that unpacked weights take: it holds enough experts to occupy a GPU, and is small against the
  // weights. Units: bytes.
  static constexpr size_t kMostScratchBytes = size_t{256} << 20;
  // What a product of such experts needs: room for all of them, or for as many as there is memory.
  // Units: bytes.
  static size_t ScratchBytes(int64_t experts, int64_t n, int64_t k);

  // `scratch_bytes`: the most that any product needs, 0 if all weights have 16 bits. kResourceExhausted.
  static absl::StatusOr<std::unique_ptr<ExpertProduct>> Create(CudaDevice& device, size_t scratch_bytes);

  // call.w is the weights'. `rows`: of x, before each chose its experts; a tile has no more.
  // Errors: those of MultiplyExperts and MultiplyExpertCodes; kInvalidArgument if weights are kept in parts, or there
  // is no memory to unpack them.
  absl::Status Run(CudaStream& stream, const CudaWeights& weights, const ExpertGemmLaunch& call, int64_t rows);

 private:
  explicit ExpertProduct(std::unique_ptr<Buffer> scratch) : scratch_(std::move(scratch)) {}
  absl::Status RunUnpacked(CudaStream& stream, const QuantMatrix& codes, ExpertGemmLaunch call);

  std::unique_ptr<Buffer> scratch_;  // null if nothing is kept
};

}  // namespace dovetail::kernels::cuda
