#pragma once
#include <memory>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "kernels/cuda/products/quant_pack.h"
#include "kernels/cuda/runtime/cuda_device.h"
#include "kernels/packed_weights.h"

namespace dovetail::kernels::cuda {

// The weights W of y = x W^T on a GPU: [rows][cols] in bf16 or f16, row by row, as GEMM and embeddings read them, or in
// the 4 or 8 bits of the file they come from (quant_args.h), as cuda_product.h multiplies them. Movable.
// Ownership: must not outlive its device.
// Threads: immutable once loaded.
class CudaWeights {
 public:
  // Rows that follow each other and are kept in the same way.
  struct Kept {
    int64_t first = 0;
    QuantMatrix matrix;
  };
  struct KeptRows {
    QuantKind kind;
    int64_t rows;
    int32_t halves_of = 0;  // as QuantMatrix has it
  };

  CudaWeights() = default;  // empty

  // Quantised file formats are dequantised once. kInvalidArgument for negative sizes, cols that are no whole number of
  // blocks, or another type than bf16 and f16; kResourceExhausted, naming what was asked for, if the memory is not
  // there. Blocks until the copy is done; calls source.row_at from several threads.
  static absl::StatusOr<CudaWeights> Load(CudaDevice& device, const RowSource& source, WireType type);
  // The same, kept as the file has them. kInvalidArgument also for formats of 16 and 32 bits.
  static absl::StatusOr<CudaWeights> Keep(CudaDevice& device, const RowSource& source, WireType type);
  // Room, not filled. Errors as above. `type` is that of the activations.
  static absl::StatusOr<CudaWeights> Allocate(CudaDevice& device, int64_t rows, int64_t cols, WireType type);
  static absl::StatusOr<CudaWeights> AllocateKept(CudaDevice& device, std::span<const KeptRows> parts, int64_t cols,
                                                  WireType type);

  const void* data() const { return memory_ != nullptr ? memory_->data() : nullptr; }  // in 16 bits; else null
  void* mutable_data() { return memory_ != nullptr ? memory_->data() : nullptr; }
  bool is_kept() const { return !kept_.empty(); }
  const std::vector<Kept>& kept() const { return kept_; }  // in ascending order, all rows
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  WireType type() const { return type_; }
  size_t size_bytes() const;

 private:
  std::unique_ptr<Buffer> memory_;
  std::vector<std::unique_ptr<Buffer>> kept_memory_;
  std::vector<Kept> kept_;
  int64_t rows_ = 0;
  int64_t cols_ = 0;
  WireType type_ = WireType::kBF16;
};

// Fills weights, piece by piece: host threads produce rows in f32 and round them while the piece before travels.
// Ownership: must not outlive its device.
// Threads: thread-compatible.
class CudaWeightLoader {
 public:
  // kResourceExhausted.
  static absl::StatusOr<std::unique_ptr<CudaWeightLoader>> Create(CudaDevice& device);

  // read(row, count, out) gives rows [row, row + count) of the source, [count][cols]; called from several threads.
  using ReadRows = absl::FunctionRef<void(int64_t row, int64_t count, std::span<float> out)>;
  // Rows [first, first + count) of `weights` from rows [0, count) of the source. Blocks until they are there.
  absl::Status Fill(CudaWeights& weights, int64_t first, int64_t count, ReadRows read);

  // pack(tile, out) writes tile `tile` of the part; called from several threads.
  using PackTile = absl::FunctionRef<void(int64_t tile, QuantTile out)>;
  // All of weights.kept()[part]. Blocks until it is there.
  absl::Status FillKept(CudaWeights& weights, size_t part, PackTile pack);

 private:
  // Where rows wait for their copy: two halves, so that one is filled while the other travels.
  struct Staging {
    std::unique_ptr<Buffer> memory;
    CudaEvent copied;
    bool used = false;
  };
  // The half of the staging memory whose turn it is, once its copy has left it.
  absl::StatusOr<Staging*> Take();

  explicit CudaWeightLoader(std::unique_ptr<CudaStream> stream) : stream_(std::move(stream)) {}

  std::unique_ptr<CudaStream> stream_;
  Staging staging_[2];
  int turn_ = 0;
};

}  // namespace dovetail::kernels::cuda
