#pragma once
#include <memory>

#include "kernels/cuda/cuda_device.h"
#include "kernels/packed_weights.h"

namespace dovetail::kernels::cuda {

// The weights W of y = x W^T on a GPU: [rows][cols] in bf16 or f16, row by row, as GEMM and embeddings read them.
// Quantised file formats are dequantised once, when they are loaded. Immutable, movable; must not outlive its device.
class CudaWeights {
 public:
  CudaWeights() = default;  // empty

  // kInvalidArgument for negative sizes, cols that are no whole number of blocks, or another type than bf16 and f16;
  // kResourceExhausted, naming what was asked for, if the memory is not there. Blocks until the copy is done; calls
  // source.row_at from this thread only.
  static absl::StatusOr<CudaWeights> Load(CudaDevice& device, const RowSource& source, WireType type);

  const void* data() const { return memory_ != nullptr ? memory_->data() : nullptr; }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  WireType type() const { return type_; }
  size_t size_bytes() const { return memory_ != nullptr ? memory_->size_bytes() : 0; }

 private:
  std::unique_ptr<Buffer> memory_;
  int64_t rows_ = 0;
  int64_t cols_ = 0;
  WireType type_ = WireType::kBF16;
};

}  // namespace dovetail::kernels::cuda
