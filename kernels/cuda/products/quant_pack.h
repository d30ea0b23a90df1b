#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "kernels/cuda/products/quant_args.h"
#include "kernels/quant_format.h"

namespace dovetail::kernels::cuda {

// Rows of a model file in the order of quant_args.h. On the host.
// Threads: pure.

// How a GPU keeps rows of a file's format; none for those of 16 and 32 bits.
std::optional<QuantKind> QuantKindOf(RowFormat format);
const char* Name(QuantKind kind);

// Device memory of a matrix.
struct QuantBytes {
  size_t codes = 0, scales = 0, factors = 0;
  size_t total() const { return codes + scales + factors; }
};
QuantBytes QuantBytesOf(QuantKind kind, int64_t rows, int64_t cols);

// Where one tile is written: a tile's share of QuantBytesOf(kind, 16, cols), every byte of it.
struct QuantTile {
  std::byte* codes;
  std::byte* scales;
  float* factor;  // [16]
};
// Up to 16 rows of `cols` elements, a whole number of blocks; a null one is zeros. Codes are the file's. Scales are
// rounded to f16 with the row's power of two in `factor`: exact for Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, and for MXFP4 where a
// row's scales lie within 2^24 of each other; else 2^-12 off, of the scale or of the row's largest offset.
void PackQuantTile(RowFormat format, int64_t cols, std::span<const std::byte* const> rows, QuantTile tile);
// The same of E4M3 bytes with a scale a row.
void PackE4M3Tile(int64_t cols, std::span<const std::byte* const> rows, std::span<const float> scales, QuantTile tile);

}  // namespace dovetail::kernels::cuda
