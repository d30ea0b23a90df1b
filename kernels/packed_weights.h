#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/functional/function_ref.h"
#include "kernels/aligned_buffer.h"
#include "kernels/cpu/gemm_kernels.h"
#include "kernels/quant_format.h"

namespace dovetail::kernels {

class ThreadPool;

// The weights W of y = x W^T, W [rows = out features, cols = in features], rearranged once at load time into the order
// in which the kernels stream them. Movable.
//
// Rows are in tiles of 16 (the last one padded with zeros), a tile is contiguous. kF32: [col][16].
// kBF16: [col / 2][16][2], cols padded to even. The direct formats keep a file's own codes, so
// nothing is rounded a second time: per group of 32 columns (16 for kU8SymmetricG16) the codes as
// [4 columns][16 rows] bytes, 4-bit ones with the group's even steps in the low and its odd steps
// in the high nibbles; behind all codes of the tile the scales [group][16], and where the format is
// affine the offsets [group][16].
// Threads: immutable once packed.
class PackedWeights {
 public:
  PackedWeights() = default;  // empty: rows() == cols() == 0
  // Only a shape: of weights that lie elsewhere. No op takes it.
  static PackedWeights ShapeOf(int64_t rows, int64_t cols) {
    PackedWeights weights;
    weights.view_.rows = rows;
    weights.view_.cols = cols;
    return weights;
  }

  PackedFormat format() const { return view_.format; }
  int64_t rows() const { return view_.rows; }
  int64_t cols() const { return view_.cols; }
  int64_t tiles() const { return (rows() + kTileRows - 1) / kTileRows; }
  size_t tile_bytes() const { return view_.tile_bytes; }
  size_t size_bytes() const { return static_cast<size_t>(tiles()) * view_.tile_bytes; }
  const PackedView& view() const { return view_; }  // valid as long as this object, also after a move of it

 private:
  friend absl::StatusOr<PackedWeights> PackWeights(PackedFormat, const struct RowSource&, ThreadPool*);
  PackedView view_;
  AlignedBuffer memory_;
};

// Where the rows come from. `row_at(r)` gives the raw bytes of out feature r (RowBytes(format,
// cols) of them, any alignment), so that a permuted, sliced or fused matrix is only another
// function. It is called from several threads at once, and not after PackWeights has returned.
struct RowSource {
  RowFormat format;
  int64_t rows;
  int64_t cols;
  absl::FunctionRef<const std::byte*(int64_t row)> row_at;
};

const char* Name(PackedFormat format);

// The packed format that keeps the codes of a quantised row format as they are; kF32 for kF32 and
// kF16 (f16 in f32 is exact), kBF16 for kBF16.
PackedFormat DirectFormat(RowFormat format);

// Any row format packs into kF32 (exact) and kBF16 (rounded to nearest even); a quantised packed
// format takes only the row formats whose DirectFormat it is. `pool` may be null. kInvalidArgument
// for another combination, negative sizes or cols that are no whole number of blocks;
// kResourceExhausted if the memory is not there. Blocks; allocates.
// Threads: thread-safe; runs on the caller and the pool, returns when done.
absl::StatusOr<PackedWeights> PackWeights(PackedFormat format, const RowSource& source, ThreadPool* pool);

// Rows of W as f32: y[i] = W[ids[i]], for token embeddings. Reads the raw rows (usually the mapped
// file): a tied head is then held once packed, and the file's pages serve the few rows a step
// needs, so no table is kept twice in memory. Bit-equal to ggml's dequantiser. y [ids.size(), cols]
// with row stride y_stride. kInvalidArgument for an id outside 0..rows-1, before anything is
// written.
// Threads: reentrant; runs on the caller.
absl::Status EmbedRows(const RowSource& table, std::span<const int32_t> ids, float* y, int64_t y_stride);

}  // namespace dovetail::kernels
