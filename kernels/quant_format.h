#pragma once
#include <cstddef>
#include <cstdint>

namespace dovetail::kernels {

// How one row of a weight matrix lies in a model file. The quantised ones are ggml's blocks (ggml-common.h at d99724f),
// little-endian, scales in f16, no padding; model/ maps its file types onto these. Nothing is checked; every bit
// pattern is defined.
// Threads: plain values and pure functions.
enum class RowFormat : uint8_t { kF32, kF16, kBF16, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ4_K, kQ5_K, kQ6_K, kMXFP4 };
inline constexpr int kRowFormats = 12;

struct RowFormatInfo {
  const char* name;
  int block_elements;  // a row is a whole number of blocks
  int block_bytes;
};
const RowFormatInfo& Info(RowFormat format);

// Bytes of one row of `cols` elements; cols must be a multiple of the block.
int64_t RowBytes(RowFormat format, int64_t cols);

#pragma pack(push, 1)
struct BlockQ4_0 {
  uint16_t d;
  uint8_t qs[16];
};  // (q - 8) d
struct BlockQ4_1 {
  uint16_t d, m;
  uint8_t qs[16];
};  // q d + m
struct BlockQ5_0 {
  uint16_t d;
  uint32_t qh;
  uint8_t qs[16];
};  // (q - 16) d, bit e of qh tops element e
struct BlockQ5_1 {
  uint16_t d, m;
  uint32_t qh;
  uint8_t qs[16];
};  // q d + m
struct BlockQ8_0 {
  uint16_t d;
  int8_t qs[32];
};  // q d
struct BlockQ4_K {
  uint16_t d, dmin;
  uint8_t scales[12], qs[128];
};  // 8 groups of 32: d sc q - dmin mn
struct BlockQ5_K {
  uint16_t d, dmin;
  uint8_t scales[12], qh[32], qs[128];
};  // the same with a fifth bit
struct BlockQ6_K {
  uint8_t ql[128], qh[64];
  int8_t scales[16];
  uint16_t d;
};  // 16 groups of 16: d sc (q - 32)
struct BlockMXFP4 {
  uint8_t e;
  uint8_t qs[16];
};  // kFp4Doubled[q] 2^(e - 128), the OCP microscaling format: E2M1 elements, an E8M0 scale
#pragma pack(pop)
static_assert(sizeof(BlockQ4_0) == 18 && sizeof(BlockQ4_1) == 20 && sizeof(BlockQ5_0) == 22 && sizeof(BlockQ5_1) == 24);
static_assert(sizeof(BlockQ8_0) == 34 && sizeof(BlockQ4_K) == 144 && sizeof(BlockQ5_K) == 176 &&
              sizeof(BlockQ6_K) == 210 && sizeof(BlockMXFP4) == 17);

// Twice the value of each E2M1 code.
inline constexpr int8_t kFp4Doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
// What GroupedRow::codes of MXFP4 count from: code = kFp4Zero + kFp4Doubled[..].
inline constexpr int kFp4Zero = 16;

// The elements of one quantised row in groups that share a scale, whatever the format: element e of the row is
//   scale[e / group] * code[e] + offset[e / group].
// group is 16 for Q6_K, else 32. codes are unsigned: 0..15 for the 4-bit formats, else 0..255.
// For the formats symmetric about a zero code (Q4_0: 8; Q5_0, Q8_0, Q6_K: moved to 128; MXFP4: 16),
// offset is -zero * scale and need not be stored.
struct GroupedRow {
  uint8_t* codes;  // [cols]
  float* scale;    // [cols / group]
  float* offset;   // [cols / group]
};
void UnpackGroups(RowFormat format, const std::byte* row, int64_t cols, GroupedRow out);

// One row as f32, to the bit what ggml's dequantiser gives.
void DequantizeRow(RowFormat format, const std::byte* row, int64_t cols, float* out);

}  // namespace dovetail::kernels
