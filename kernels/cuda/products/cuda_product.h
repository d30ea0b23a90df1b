#pragma once
#include <memory>

#include "kernels/cuda/products/cuda_gemm.h"
#include "kernels/cuda/products/cuda_weights.h"
#include "kernels/cuda/rows/row_ops.h"

namespace dovetail::kernels::cuda {

// y = x W^T (+ bias) (+ y) whatever W is kept in: 16 bits through cuBLASLt; 4 or 8 bits by kernels that read the codes
// for up to kMostKeptRows rows, and beyond by unpacking some rows of W at a time, which cuBLASLt then finds in the L2.
// Must not outlive its device.
// Threads: thread-safe on different streams only if those are ordered: calls share memory.
class CudaProduct {
 public:
  // Measured on an H200 (bench/results/2026-11-22-cuda-quantised.md): for more rows unpacking is faster.
  static constexpr int64_t kMostKeptRows = 64;
  static constexpr size_t kScratchBytes = size_t{32} << 20;

  // In how many parts (GemmCall::parts) a product of few columns and so many rows, whose sum a norm then makes, takes
  // least; 1: at once. cuBLASLt cuts such products along k, too, and adds the parts by a kernel of its own, where the
  // norm reads and writes x anyway. Measured on an H200 (ADR 32); up to 8 rows skinny_gemm.h needs none, and with 65 to
  // 128 cuBLASLt's own way is faster.
  static constexpr int kMostParts = 2;
  static constexpr int64_t kMostPartRows = 256;
  static constexpr int PartsFor(int64_t rows) {
    const bool has_few_tiles = (rows > 8 && rows <= 64) || (rows > 128 && rows <= kMostPartRows);
    return has_few_tiles ? kMostParts : 1;
  }

  // kFailedPrecondition, with what to install, if cuBLASLt is not there; kResourceExhausted without memory.
  // `keeps`: whether any weights are in 4 or 8 bits. `in_order`: every sum is made in one order, whatever the number of
  // rows (GemmCall::in_order); not with weights that are kept: kInvalidArgument.
  static absl::StatusOr<std::unique_ptr<CudaProduct>> Create(CudaDevice& device, bool keeps, bool in_order = false);

  bool in_order() const { return in_order_; }

  // call.w, n, k and w_stride are the weights'; n and k must be as they are. Errors and first calls as CudaGemm::Run.
  absl::Status Run(CudaStream& stream, const CudaWeights& weights, const GemmCall& call);
  // The same with codes that are unpacked whatever the number of rows; for measuring, too.
  absl::Status RunUnpacked(CudaStream& stream, const QuantMatrix& w, WireType type, const GemmCall& call);

 private:
  CudaProduct(std::unique_ptr<CudaGemm> gemm, std::unique_ptr<Buffer> scratch, bool in_order)
      : gemm_(std::move(gemm)), scratch_(std::move(scratch)), in_order_(in_order) {}
  absl::Status RunKept(CudaStream& stream, const QuantMatrix& w, WireType type, const GemmCall& call);

  std::unique_ptr<CudaGemm> gemm_;
  std::unique_ptr<Buffer> scratch_;  // null if nothing is kept
  const bool in_order_;
};

// Embed (row_ops.h) from a table kept in any way; args.table and table_type are not read.
// Threads: thread-safe on different streams.
absl::Status EmbedFrom(CudaStream& stream, const CudaWeights& table, const EmbedLaunch& args);

}  // namespace dovetail::kernels::cuda
