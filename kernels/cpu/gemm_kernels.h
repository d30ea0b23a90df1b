#pragma once
#include <cstddef>
#include <cstdint>

// What the GEMM driver (kernels/gemm.cc) and the micro-kernels of each ISA share. The files compiled for a wider ISA
// include nothing that has inline functions, whose copies the linker could pick for the whole program: here are plain
// structs and function pointers, and what has a body is always inlined.
// Threads: plain values and reentrant functions.

namespace dovetail::kernels {

inline constexpr int kTileRows = 16;         // out features of a packed tile
inline constexpr int kActivationGroup = 32;  // activations that share a scale

enum class PackedFormat : uint8_t {
  kF32,
  kBF16,
  kU4Symmetric,     // Q4_0: 4-bit codes about 8, scale f16
  kU4Affine,        // Q4_1: 4-bit codes, scale and offset f16
  kU4AffineF32,     // Q4_K: 4-bit codes, scale and offset f32 (products of two file values, not exact
                    // in f16)
  kU8Symmetric,     // Q8_0, Q5_0: 8-bit codes about 128, scale f16
  kU8Affine,        // Q5_1: 8-bit codes, scale and offset f16
  kU8AffineF32,     // Q5_K: 8-bit codes, scale and offset f32
  kU8SymmetricG16,  // Q6_K: 8-bit codes about 128, scale f32 per 16 columns
  kFp4,             // MXFP4: E2M1 codes, the scale is an exponent (below 2^-126: 0)
};
inline constexpr int kPackedFormats = 10;

struct PackedTraits {
  int code_bits;    // 4 or 8; 0 for the float formats
  int group;        // columns that share a scale
  int scale_bytes;  // 1 (the exponent of an f32), 2 (f16) or 4 (f32)
  bool affine;      // has offsets; else symmetric about code 1 << zero_shift
  int zero_shift = 0;
  bool table = false;  // 4-bit codes stand for 16 + kFp4Doubled[code]
};
constexpr PackedTraits kPackedTraits[kPackedFormats] = {
    {0, 1, 0, false},     {0, 2, 0, false}, {4, 32, 2, false, 3}, {4, 32, 2, true},     {4, 32, 4, true},
    {8, 32, 2, false, 7}, {8, 32, 2, true}, {8, 32, 4, true},     {8, 16, 4, false, 7}, {4, 32, 1, false, 4, true},
};
// The unsigned codes of a table, about 1 << 4.
#define DT_FP4_CODES 16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4
constexpr bool IsQuantized(PackedFormat format) { return kPackedTraits[static_cast<int>(format)].code_bits != 0; }

struct PackedView {
  PackedFormat format = PackedFormat::kF32;
  int64_t rows = 0, cols = 0;
  size_t tile_bytes = 0;
  size_t scales_at = 0, offsets_at = 0;  // byte offsets inside a tile
  const std::byte* data = nullptr;
};

inline constexpr int kPanelRows = 8;  // rows of x that go through a tile together

// How finely activations are rounded before they meet quantised or bf16 weights.
enum class ActivationBits : uint8_t {
  k8,   // one plane of bytes; bf16, whose mantissa has 8 bits
  k16,  // two planes of bytes; f32. Twice the multiplications, 1/256 of the rounding error or less
};
inline constexpr int kActivationWidths = 2;

// Eight rows of x, 32 columns, quantised: x = scale * code, where code is the byte of the only
// plane, or 256 times that of the first plus that of the second. Rows lie side by side, so that a
// micro-kernel reaches all of them from one pointer. Only the rows that exist are ever written or
// read.
template <int kPlanes>
struct alignas(32) ActivationGroup {
  int8_t codes[kPlanes][kPanelRows][kActivationGroup];
  float scale[kPanelRows];                // max|x| / kLargestCode
  float scaled_sum[kPanelRows];           // scale * sum of codes
  int32_t negative_sum[kPanelRows];       // -sum of codes
  int32_t negative_sum16[2][kPanelRows];  // the same of the first and the second 16
};
// Sets the sums of a row's codes, of the first 16 and the second. A row with NaN has codes of -2^31: their sums wrap,
// and its scale is NaN.
template <int kPlanes>
__attribute__((always_inline)) inline void SetSums(int32_t first, int32_t second, int row,
                                                   ActivationGroup<kPlanes>& out) {
  const uint32_t a = static_cast<uint32_t>(first), b = static_cast<uint32_t>(second);
  out.scaled_sum[row] = out.scale[row] * static_cast<float>(static_cast<int32_t>(a + b));
  out.negative_sum[row] = static_cast<int32_t>(0 - (a + b));
  out.negative_sum16[0][row] = static_cast<int32_t>(0 - a);
  out.negative_sum16[1][row] = static_cast<int32_t>(0 - b);
}

// 127 * 256: the first plane then never exceeds 127, whatever the second rounds to.
template <int kPlanes>
inline constexpr float kLargestCode = kPlanes == 1 ? 127.0f : 32512.0f;

// bf16 numbers whose sum is an f32, to the bit: the first has its upper 8 bits, the others 8 more each.
inline constexpr int kSplitPieces = 3;
inline constexpr int kSplitRows = 16;     // rows of x that go through a tile of AMX together
inline constexpr int kSplitColumns = 32;  // columns of a step

// The rows of x in the forms the formats need; a form that no format needs is null.
struct GemmRows {
  const float* f32 = nullptr;  // [rows], row stride f32_stride
  int64_t f32_stride = 0;
  ActivationGroup<1>* quantized = nullptr;  // [panels of 8 rows][groups]
  ActivationGroup<2>* precise = nullptr;    // the same
  // The same, but of each row's 32 codes of 16 bits the even columns' lie where the first plane does, and the odd ones'
  // where the second does.
  ActivationGroup<2>* joined = nullptr;
  int64_t groups = 0;
  uint16_t* bf16 = nullptr;  // [panels of 8 rows][pairs of columns][8][2], an odd last column is paired with 0
  int64_t pairs = 0;
  // [panels of 16 rows][blocks of 32 columns][pieces][16][32], columns that do not exist are 0
  uint16_t* split = nullptr;
  int64_t split_blocks = 0;

  template <int kPlanes>
  __attribute__((always_inline)) ActivationGroup<kPlanes>* QuantizedPanel(int64_t row) const {
    if constexpr (kPlanes == 1) {
      return quantized + row / kPanelRows * groups;
    } else {
      return precise + row / kPanelRows * groups;
    }
  }
  __attribute__((always_inline)) ActivationGroup<2>* JoinedPanel(int64_t row) const {
    return joined + row / kPanelRows * groups;
  }
  __attribute__((always_inline)) uint16_t* BF16Panel(int64_t row) const {
    return bf16 + row / kPanelRows * pairs * kPanelRows * 2;
  }
  __attribute__((always_inline)) uint16_t* SplitPanel(int64_t row) const {
    return split + row / kSplitRows * split_blocks * kSplitPieces * kSplitRows * kSplitColumns;
  }
};

struct GemmTarget {
  float* y = nullptr;
  int64_t y_stride = 0;
  const float* bias = nullptr;  // [out features] or null
  bool accumulate = false;      // y += instead of y =
};

inline constexpr int64_t kRowBlock = 256;  // rows of x that stay in L2 while the tiles pass

// y rows [row_begin, row_end), of one block of kRowBlock, x tiles [tile_begin, tile_end). Every output is one chain
// over ascending columns that depends on nothing but its x row and W.
using GemmBlockFn = void (*)(const GemmRows& x, const PackedView& w, const GemmTarget& out, int64_t row_begin,
                             int64_t row_end, int64_t tile_begin, int64_t tile_end);
// Fills rows [row_begin, row_end) of one converted form from x.f32.
using PrepareRowsFn = void (*)(const GemmRows& x, int64_t cols, int64_t row_begin, int64_t row_end);

struct GemmKernels {
  GemmBlockFn block[kActivationWidths][kPackedFormats];  // kF32 has one for both
  PrepareRowsFn quantize_rows[kActivationWidths];
  PrepareRowsFn round_rows_to_bf16;
  PrepareRowsFn join_rows = nullptr;   // if not null, codes of more than 4 bits meet activations of 16 bits joined
  PrepareRowsFn split_rows = nullptr;  // if not null, bf16 weights meet x in pieces where activations have 16 bits
};

// Each quantised format's entry, which is Of<format>::kBlock.
template <template <PackedFormat> class Of>
__attribute__((always_inline)) inline void SetQuantized(GemmBlockFn (&block)[kPackedFormats]) {
  using enum PackedFormat;
  block[static_cast<int>(kU4Symmetric)] = Of<kU4Symmetric>::kBlock;
  block[static_cast<int>(kU4Affine)] = Of<kU4Affine>::kBlock;
  block[static_cast<int>(kU4AffineF32)] = Of<kU4AffineF32>::kBlock;
  block[static_cast<int>(kU8Symmetric)] = Of<kU8Symmetric>::kBlock;
  block[static_cast<int>(kU8Affine)] = Of<kU8Affine>::kBlock;
  block[static_cast<int>(kU8AffineF32)] = Of<kU8AffineF32>::kBlock;
  block[static_cast<int>(kU8SymmetricG16)] = Of<kU8SymmetricG16>::kBlock;
  block[static_cast<int>(kFp4)] = Of<kFp4>::kBlock;
}

// Below this the inverse of a group's scale would overflow: the whole group counts as zero.
template <int kPlanes>
inline constexpr float kSmallestActivation = kPlanes == 1 ? 1e-35f : 1e-33f;

// One namespace an ISA, one file a family.
namespace avx2 {
void GemmF32(const GemmRows&, const PackedView&, const GemmTarget&, int64_t, int64_t, int64_t, int64_t);
void GemmBF16(const GemmRows&, const PackedView&, const GemmTarget&, int64_t, int64_t, int64_t, int64_t);
void GemmRoundedBF16(const GemmRows&, const PackedView&, const GemmTarget&, int64_t, int64_t, int64_t, int64_t);
void QuantizeRows(const GemmRows& x, int64_t cols, int64_t row_begin, int64_t row_end);
void QuantizeRowsPrecisely(const GemmRows& x, int64_t cols, int64_t row_begin, int64_t row_end);
void QuantizeRowsJoined(const GemmRows& x, int64_t cols, int64_t row_begin, int64_t row_end);
void RoundRowsToBF16(const GemmRows& x, int64_t cols, int64_t row_begin, int64_t row_end);
GemmKernels GemmTable();
}  // namespace avx2
namespace avx512 {
void GemmF32(const GemmRows&, const PackedView&, const GemmTarget&, int64_t, int64_t, int64_t, int64_t);
void GemmBF16(const GemmRows&, const PackedView&, const GemmTarget&, int64_t, int64_t, int64_t, int64_t);
void GemmRoundedBF16(const GemmRows&, const PackedView&, const GemmTarget&, int64_t, int64_t, int64_t, int64_t);
void QuantizeRows(const GemmRows& x, int64_t cols, int64_t row_begin, int64_t row_end);
void QuantizeRowsPrecisely(const GemmRows& x, int64_t cols, int64_t row_begin, int64_t row_end);
void RoundRowsToBF16(const GemmRows& x, int64_t cols, int64_t row_begin, int64_t row_end);
GemmKernels GemmTable();
}  // namespace avx512
namespace amx {
void GemmSplitBF16(const GemmRows&, const PackedView&, const GemmTarget&, int64_t, int64_t, int64_t, int64_t);
void SplitRows(const GemmRows& x, int64_t cols, int64_t row_begin, int64_t row_end);
GemmKernels GemmTable();  // the kernels of AVX-512 where AMX gains nothing
}  // namespace amx

}  // namespace dovetail::kernels
