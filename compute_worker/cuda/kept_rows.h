#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/cuda/products/cuda_weights.h"
#include "model/checkpoint.h"

// Which of a file's weights a GPU keeps in 4 or 8 bits, and how its rows become tiles there.

namespace dovetail::compute {

// How a matrix would be kept; none for those that are not in 4 or 8 bits. `random`: as CudaModel::Load makes them, in 4
// bits with scales and offsets.
// Threads: pure.
std::optional<kernels::cuda::QuantKind> KeptKindOf(const model::TensorSource& source, bool random = false);

// One row of a file's matrix.
struct SourceRow {
  const model::TensorSource* source;
  int64_t row;
};
// Up to 16 rows that KeptKindOf says are kept, of one type and layout, as a tile.
// Threads: pure.
void PackRows(std::span<const SourceRow> rows, kernels::cuda::QuantTile out);

// The matrices of all experts of a layer, below each other: with `each` = 2 a gate and what it gates of one expert
// after the other, else one matrix of each. They are kept if all are, in one way, and kernels take them
// (FitsExpertCodes).
// Units:     bytes of device memory.
// Ownership: `sources` outlive it.
// Threads:   immutable.
class ExpertStack {
 public:
  ExpertStack(std::span<const model::TensorSource> sources, int each, bool random);

  bool is_kept() const { return kind_.has_value(); }
  // Some are in 4 or 8 bits in the file, but will not be on the GPU.
  bool is_dequantised() const { return !is_kept() && any_in_few_bits_; }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  uint64_t bytes() const;
  // Of the memory that many rows unpack them to (ExpertProduct); 0 if they are not kept.
  size_t scratch_bytes() const;
  kernels::cuda::CudaWeights::KeptRows kept_rows() const;
  // Tile `tile` of them, in the order that kept_rows() says.
  void PackTile(int64_t tile, kernels::cuda::QuantTile out) const;

 private:
  std::span<const model::TensorSource> sources_;
  int each_;
  bool any_in_few_bits_ = false;
  std::optional<kernels::cuda::QuantKind> kind_;
  int64_t rows_ = 0, cols_ = 0, n_ = 0;  // n: rows of one expert
};

// The stack that a weight belongs to, by its canonical name, and how many of an expert's matrices are in it; none for
// those of no expert.
struct ExpertStackName {
  std::string name;
  int each = 0;
};
std::optional<ExpertStackName> ExpertStackOf(const std::string& canonical, const model::ModelConfig& config);

}  // namespace dovetail::compute
