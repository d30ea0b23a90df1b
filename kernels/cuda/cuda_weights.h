#pragma once
#include <memory>
#include <span>

#include "absl/functional/function_ref.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/packed_weights.h"

namespace dovetail::kernels::cuda {

// The weights W of y = x W^T on a GPU: [rows][cols] in bf16 or f16, row by row, as GEMM and embeddings read them.
// Quantised file formats are dequantised once, when they are loaded. Movable; must not outlive its device.
class CudaWeights {
 public:
  CudaWeights() = default;  // empty

  // kInvalidArgument for negative sizes, cols that are no whole number of blocks, or another type than bf16 and f16;
  // kResourceExhausted, naming what was asked for, if the memory is not there. Blocks until the copy is done; calls
  // source.row_at from several threads.
  static absl::StatusOr<CudaWeights> Load(CudaDevice& device, const RowSource& source, WireType type);
  // Room, not filled. Errors as above.
  static absl::StatusOr<CudaWeights> Allocate(CudaDevice& device, int64_t rows, int64_t cols, WireType type);

  const void* data() const { return memory_ != nullptr ? memory_->data() : nullptr; }
  void* mutable_data() { return memory_ != nullptr ? memory_->data() : nullptr; }
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

// Fills weights, piece by piece: host threads produce rows in f32 and round them while the piece before travels.
// Thread-compatible; must not outlive its device.
class CudaWeightLoader {
 public:
  // kResourceExhausted.
  static absl::StatusOr<std::unique_ptr<CudaWeightLoader>> Create(CudaDevice& device);

  // read(row, count, out) gives rows [row, row + count) of the source, [count][cols]; called from several threads.
  using ReadRows = absl::FunctionRef<void(int64_t row, int64_t count, std::span<float> out)>;
  // Rows [first, first + count) of `weights` from rows [0, count) of the source. Blocks until they are there.
  absl::Status Fill(CudaWeights& weights, int64_t first, int64_t count, ReadRows read);

 private:
  // Where rows wait for their copy: two halves, so that one is filled while the other travels.
  struct Staging {
    std::unique_ptr<Buffer> memory;
    CudaEvent copied;
    bool used = false;
  };
  explicit CudaWeightLoader(std::unique_ptr<CudaStream> stream) : stream_(std::move(stream)) {}

  std::unique_ptr<CudaStream> stream_;
  Staging staging_[2];
};

}  // namespace dovetail::kernels::cuda
