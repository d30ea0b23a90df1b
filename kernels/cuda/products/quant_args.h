#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/sampling/sampling_args.h"
#include "kernels/cuda/wire_type.h"

namespace dovetail::kernels::cuda {

// Weights that stay in 4 or 8 bits on a GPU, as the products of few rows read them (quant_gemm.cuh).
//
//   w[row][k] = factor[row] * (scale[row][k / group] * (code - zero) + offset[row][k / group])
//
// Rows come in tiles of 16 and columns in steps of 128, padded with codes of value 0. A tile's steps follow each other,
// so that one warp reads ahead in one direction. In a step lane 4 g + t of a warp has the 16-byte chunks of rows g and
// g + 8, in the order in which mma.m16n8k16 takes them as A: QuantSlot says where an element lies.
// Threads: plain values and pure functions.
enum class QuantKind : int32_t {
  kU4 = 0,         // zero 8: Q4_0
  kU4Offset = 1,   // Q4_1, Q4_K
  kU8 = 2,         // zero 128: Q5_0, Q8_0
  kU8Offset = 3,   // Q5_1, Q5_K
  kU8Group16 = 4,  // zero 128: Q6_K
  kFp4 = 5,        // E2M1: MXFP4
  kE4M3 = 6        // no scales of groups: FP8
};
inline constexpr int kQuantKinds = 7;

inline constexpr int kQuantTileRows = 16;
inline constexpr int kQuantStepColumns = 128;

struct QuantTraits {
  int bits;    // of a code
  int group;   // columns that share a scale; kE4M3: 32, without scales
  int zero;    // the code of value 0; of kU4Offset and kU8Offset 0
  int values;  // f16 numbers a group and row: 0, 1 (scale) or 2 (scale, offset)

  constexpr int code_bytes() const { return kQuantTileRows * kQuantStepColumns * bits / 8; }  // of a tile's step
  constexpr int scale_bytes() const { return kQuantTileRows * (kQuantStepColumns / group) * values * 2; }
};

constexpr QuantTraits TraitsOf(QuantKind kind) {
  switch (kind) {
    case QuantKind::kU4: return {4, 32, 8, 1};
    case QuantKind::kU4Offset: return {4, 32, 0, 2};
    case QuantKind::kU8: return {8, 32, 128, 1};
    case QuantKind::kU8Offset: return {8, 32, 0, 2};
    case QuantKind::kU8Group16: return {8, 16, 128, 1};
    case QuantKind::kFp4: return {4, 32, 0, 1};
    case QuantKind::kE4M3: return {8, 32, 0, 0};
  }
  return {};
}

// Where the code of element (row, column) lies in a tile's step: the byte, and the bit in it.
struct QuantSlot {
  int byte, bit;
};
constexpr QuantSlot SlotOf(const QuantTraits& traits, int row, int column) {
  const int g = row % 8, high = row / 8;
  if (traits.bits == 4) {  // chunks of 64 columns; a word has four columns of both rows
    const int t = column % 32 / 8, word = 2 * (column % 64 / 32) + column % 8 / 4, e = column % 4;
    const int nibble = high + 2 * (e / 2) + 4 * (e % 2);
    return {column / 64 * 512 + (4 * g + t) * 16 + word * 4 + nibble / 2, nibble % 2 * 4};
  }
  // chunks of 32 columns; a word has four columns of one row
  const bool fine = traits.group == 16;
  const int t = fine ? column % 16 / 4 : column % 32 / 8, step = fine ? column % 32 / 16 : column % 8 / 4;
  const int e = column % 4, byte = e / 2 + 2 * (e % 2);
  return {column / 32 * 512 + (4 * g + t) * 16 + (2 * step + high) * 4 + byte, 0};
}
// Where its group's scale lies among the f16 numbers of a tile's step; its offset two further.
constexpr int ScaleSlotOf(const QuantTraits& traits, int row, int column) {
  const int groups = kQuantStepColumns / traits.group;
  return ((row % 8) * groups + column / traits.group) * 2 * traits.values + row / 8;
}
// Rows 8 to 15 of a tile have 4-bit codes in the upper halves of bytes, and are taken 16 times too large until the end:
// so are the offsets of kU4Offset stored.
constexpr float OffsetFactor(QuantKind kind, int row) {
  return kind == QuantKind::kU4Offset && row % kQuantTileRows >= 8 ? 16.0f : 1.0f;
}

// Device memory; sizes in quant_pack.h.
struct QuantMatrix {
  const void* codes = nullptr;    // [tiles][steps][code bytes], 16-byte aligned
  const void* scales = nullptr;   // [tiles][steps][scale bytes], 16-byte aligned; null for kE4M3
  const float* factor = nullptr;  // [tiles * 16]
  int32_t rows = 0, cols = 0;
  QuantKind kind = QuantKind::kU4;
  // 0: tiles have the matrix's rows in order. Else the rows are matrices of so many rows each, a multiple of 16, and
  // the i-th tile of one has rows 8 i to 8 i + 7 of its first half, then the same rows of its second: what an
  // activation joins is multiplied by one lane. Only the products of experts and QuantUnpackLaunch know such tiles.
  int32_t halves_of = 0;

  constexpr int32_t tiles() const { return (rows + kQuantTileRows - 1) / kQuantTileRows; }
  constexpr int32_t steps() const { return (cols + kQuantStepColumns - 1) / kQuantStepColumns; }
  // The row of the matrix that a tile's row is.
  constexpr int32_t RowOf(int32_t tile, int32_t in_tile) const {
    if (halves_of == 0) return tile * kQuantTileRows + in_tile;
    const int32_t each = halves_of / kQuantTileRows, half = in_tile / (kQuantTileRows / 2);
    return tile / each * halves_of + half * (halves_of / 2) + tile % each * (kQuantTileRows / 2) + in_tile % 8;
  }
};

// y = x w^T (+ bias) (+ y), as GemmCall, for few rows: all weights are read once for each 16 of them. A row's bits
// depend on that row and on how many rows there are, up to 16.
struct QuantGemmLaunch {
  QuantMatrix w;
  const void* x = nullptr;     // [m][cols], rows 16-byte aligned; cols a multiple of 8
  void* y = nullptr;           // [m][rows]
  const void* bias = nullptr;  // [rows] in the type of y, or null
  int64_t x_stride = 0, y_stride = 0;
  int32_t m = 0;
  WireType type = WireType::kBF16;  // of x: 16 bits
  int32_t y_is_f32 = 0, accumulate = 0;
};

// Rows [first, first + count) in 16 bits; with halves_of whole matrices.
struct QuantUnpackLaunch {
  QuantMatrix w;
  void* out = nullptr;     // [count][out_stride], 16-byte aligned
  int64_t out_stride = 0;  // elements, a multiple of 8, >= cols
  int32_t first = 0, count = 0;
  WireType type = WireType::kBF16;
};

// out[i] = w[ids[i]] * factor, as EmbedLaunch. cols a multiple of 8.
struct QuantEmbedLaunch {
  QuantMatrix w;
  const int32_t* ids = nullptr;  // -1 - i: the token of drawn[i]
  const SampleOutput* drawn = nullptr;
  void* out = nullptr;  // [rows][cols], 16-byte aligned
  WireType out_type = WireType::kBF16;
  float factor = 1;
  int32_t rows = 0;
};

}  // namespace dovetail::kernels::cuda
