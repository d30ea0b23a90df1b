#include "kernels/quant_format.h"

#include <array>
#include <cstring>
#include <type_traits>

#include "base/check.h"
#include "base/dtype.h"

namespace dovetail::kernels {
namespace {

constexpr std::array<RowFormatInfo, kRowFormats> kInfo = {{
    {"F32", 1, 4},
    {"F16", 1, 2},
    {"BF16", 1, 2},
    {"Q4_0", 32, 18},
    {"Q4_1", 32, 20},
    {"Q5_0", 32, 22},
    {"Q5_1", 32, 24},
    {"Q8_0", 32, 34},
    {"Q4_K", 256, 144},
    {"Q5_K", 256, 176},
    {"Q6_K", 256, 210},
    {"MXFP4", 32, 17},
}};

float F(uint16_t half) { return ToFloat(F16{half}); }

// Codes, and per group a scale and an offset, of one block. Each format is one overload; rows are
// loops over blocks.
struct Group {
  float scale, offset;
};

void UnpackNibbles(const uint8_t* qs, uint8_t* codes) {
  for (int j = 0; j < 16; ++j) {
    codes[j] = qs[j] & 15;
    codes[j + 16] = qs[j] >> 4;
  }
}

void AddFifthBit(uint32_t qh, uint8_t* codes) {
  for (int e = 0; e < 32; ++e) codes[e] |= static_cast<uint8_t>((qh >> e & 1) << 4);
}

void Unpack(const BlockQ4_0& b, uint8_t* codes, Group* g) {
  UnpackNibbles(b.qs, codes);
  g[0] = {F(b.d), -8 * F(b.d)};
}

void Unpack(const BlockQ4_1& b, uint8_t* codes, Group* g) {
  UnpackNibbles(b.qs, codes);
  g[0] = {F(b.d), F(b.m)};
}

void Unpack(const BlockQ5_0& b, uint8_t* codes, Group* g) {
  UnpackNibbles(b.qs, codes);
  AddFifthBit(b.qh, codes);
  for (int e = 0; e < 32; ++e) codes[e] += 128 - 16;
  g[0] = {F(b.d), -128 * F(b.d)};
}

void Unpack(const BlockQ5_1& b, uint8_t* codes, Group* g) {
  UnpackNibbles(b.qs, codes);
  AddFifthBit(b.qh, codes);
  g[0] = {F(b.d), F(b.m)};
}

void Unpack(const BlockQ8_0& b, uint8_t* codes, Group* g) {
  for (int e = 0; e < 32; ++e) codes[e] = static_cast<uint8_t>(b.qs[e] + 128);
  g[0] = {F(b.d), -128 * F(b.d)};
}

// The eight 6-bit (scale, min) pairs that Q4_K and Q5_K squeeze into 12 bytes.
Group ScaleMinK(int j, const uint8_t* s, float d, float dmin) {
  const int scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6 << 4);
  const int min = j < 4 ? s[j + 4] & 63 : (s[j + 4] >> 4) | (s[j] >> 6 << 4);
  return {d * scale, -(dmin * min)};
}

void Unpack(const BlockQ4_K& b, uint8_t* codes, Group* g) {
  for (int chunk = 0; chunk < 4; ++chunk) {
    for (int l = 0; l < 32; ++l) {
      codes[64 * chunk + l] = b.qs[32 * chunk + l] & 15;
      codes[64 * chunk + 32 + l] = b.qs[32 * chunk + l] >> 4;
    }
  }
  for (int j = 0; j < 8; ++j) g[j] = ScaleMinK(j, b.scales, F(b.d), F(b.dmin));
}

void Unpack(const BlockQ5_K& b, uint8_t* codes, Group* g) {
  for (int s = 0; s < 8; ++s) {
    for (int l = 0; l < 32; ++l) {
      const uint8_t byte = b.qs[32 * (s / 2) + l];
      codes[32 * s + l] = static_cast<uint8_t>((s % 2 ? byte >> 4 : byte & 15) + 16 * (b.qh[l] >> s & 1));
    }
    g[s] = ScaleMinK(s, b.scales, F(b.d), F(b.dmin));
  }
}

void Unpack(const BlockQ6_K& b, uint8_t* codes, Group* g) {
  for (int half = 0; half < 2; ++half) {
    for (int k = 0; k < 4; ++k) {
      for (int l = 0; l < 32; ++l) {
        const uint8_t byte = b.ql[64 * half + 32 * (k & 1) + l];
        const int low = k < 2 ? byte & 15 : byte >> 4;
        const int high = b.qh[32 * half + l] >> (2 * k) & 3;
        codes[128 * half + 32 * k + l] = static_cast<uint8_t>((low | high << 4) - 32 + 128);
      }
    }
  }
  for (int j = 0; j < 16; ++j) {
    const float scale = F(b.d) * b.scales[j];
    g[j] = {scale, -128 * scale};
  }
}

// 2^(e - 128), exact down to the smallest denormals.
float ScaleMX(uint8_t e) {
  const uint32_t bits = e >= 2 ? static_cast<uint32_t>(e - 1) << 23 : uint32_t{0x200000} << e;
  float scale;
  std::memcpy(&scale, &bits, sizeof(scale));
  return scale;
}

void Unpack(const BlockMXFP4& b, uint8_t* codes, Group* g) {
  UnpackNibbles(b.qs, codes);
  for (int e = 0; e < 32; ++e) codes[e] = static_cast<uint8_t>(kFp4Zero + kFp4Doubled[codes[e]]);
  const float scale = ScaleMX(b.e);
  g[0] = {scale, -kFp4Zero * scale};
}

template <typename Block>
constexpr int kElements = sizeof(Block) < 100 ? 32 : 256;
template <typename Block>
constexpr int kGroups = std::is_same_v<Block, BlockQ6_K> ? 16 : kElements<Block> / 32;

// Calls visit(block, index) for each block of a row; blocks in files are not aligned.
template <typename Block, typename Visit>
void ForEachBlock(const std::byte* row, int64_t cols, Visit visit) {
  for (int64_t i = 0; i < cols / kElements<Block>; ++i) {
    Block block;
    std::memcpy(&block, row + i * sizeof(Block), sizeof(Block));
    visit(block, i);
  }
}

template <typename Block>
void UnpackRow(const std::byte* row, int64_t cols, GroupedRow out) {
  ForEachBlock<Block>(row, cols, [&](const Block& block, int64_t i) {
    Group groups[kGroups<Block>];
    Unpack(block, out.codes + i * kElements<Block>, groups);
    for (int g = 0; g < kGroups<Block>; ++g) {
      out.scale[i * kGroups<Block> + g] = groups[g].scale;
      out.offset[i * kGroups<Block> + g] = groups[g].offset;
    }
  });
}

// ggml multiplies by the signed code where the format is symmetric, and adds the minimum where it
// is not: the roundings must be the same.
template <typename Block>
void DequantizeBlocks(const std::byte* row, int64_t cols, float* out) {
  constexpr bool mx = std::is_same_v<Block, BlockMXFP4>;
  constexpr bool symmetric = std::is_same_v<Block, BlockQ4_0> || std::is_same_v<Block, BlockQ5_0> ||
                             std::is_same_v<Block, BlockQ8_0> || std::is_same_v<Block, BlockQ6_K> || mx;
  constexpr int zero = std::is_same_v<Block, BlockQ4_0> ? 8 : mx ? kFp4Zero : 128;
  constexpr int group = kElements<Block> / kGroups<Block>;
  ForEachBlock<Block>(row, cols, [&](const Block& block, int64_t i) {
    uint8_t codes[kElements<Block>];
    Group groups[kGroups<Block>];
    Unpack(block, codes, groups);
    float* y = out + i * kElements<Block>;
    for (int e = 0; e < kElements<Block>; ++e) {
      const Group& g = groups[e / group];
      y[e] =
          symmetric ? g.scale * static_cast<float>(codes[e] - zero) : g.scale * static_cast<float>(codes[e]) + g.offset;
    }
  });
}

}  // namespace

const RowFormatInfo& Info(RowFormat format) {
  DT_CHECK(static_cast<int>(format) < kRowFormats, static_cast<int>(format));
  return kInfo[static_cast<int>(format)];
}

int64_t RowBytes(RowFormat format, int64_t cols) {
  const RowFormatInfo& info = Info(format);
  DT_CHECK(cols % info.block_elements == 0, info.name, " ", cols);
  return cols / info.block_elements * info.block_bytes;
}

void UnpackGroups(RowFormat format, const std::byte* row, int64_t cols, GroupedRow out) {
  switch (format) {
    case RowFormat::kQ4_0: return UnpackRow<BlockQ4_0>(row, cols, out);
    case RowFormat::kQ4_1: return UnpackRow<BlockQ4_1>(row, cols, out);
    case RowFormat::kQ5_0: return UnpackRow<BlockQ5_0>(row, cols, out);
    case RowFormat::kQ5_1: return UnpackRow<BlockQ5_1>(row, cols, out);
    case RowFormat::kQ8_0: return UnpackRow<BlockQ8_0>(row, cols, out);
    case RowFormat::kQ4_K: return UnpackRow<BlockQ4_K>(row, cols, out);
    case RowFormat::kQ5_K: return UnpackRow<BlockQ5_K>(row, cols, out);
    case RowFormat::kQ6_K: return UnpackRow<BlockQ6_K>(row, cols, out);
    case RowFormat::kMXFP4: return UnpackRow<BlockMXFP4>(row, cols, out);
    case RowFormat::kF32:
    case RowFormat::kF16:
    case RowFormat::kBF16: break;
  }
  DT_CHECK(false, Info(format).name, " has no groups");
}

void DequantizeRow(RowFormat format, const std::byte* row, int64_t cols, float* out) {
  switch (format) {
    case RowFormat::kF32: std::memcpy(out, row, cols * sizeof(float)); return;
    case RowFormat::kF16:
      for (int64_t i = 0; i < cols; ++i) {
        F16 x;
        std::memcpy(&x, row + 2 * i, 2);
        out[i] = ToFloat(x);
      }
      return;
    case RowFormat::kBF16:
      for (int64_t i = 0; i < cols; ++i) {
        BF16 x;
        std::memcpy(&x, row + 2 * i, 2);
        out[i] = ToFloat(x);
      }
      return;
    case RowFormat::kQ4_0: return DequantizeBlocks<BlockQ4_0>(row, cols, out);
    case RowFormat::kQ4_1: return DequantizeBlocks<BlockQ4_1>(row, cols, out);
    case RowFormat::kQ5_0: return DequantizeBlocks<BlockQ5_0>(row, cols, out);
    case RowFormat::kQ5_1: return DequantizeBlocks<BlockQ5_1>(row, cols, out);
    case RowFormat::kQ8_0: return DequantizeBlocks<BlockQ8_0>(row, cols, out);
    case RowFormat::kQ4_K: return DequantizeBlocks<BlockQ4_K>(row, cols, out);
    case RowFormat::kQ5_K: return DequantizeBlocks<BlockQ5_K>(row, cols, out);
    case RowFormat::kQ6_K: return DequantizeBlocks<BlockQ6_K>(row, cols, out);
    case RowFormat::kMXFP4: return DequantizeBlocks<BlockMXFP4>(row, cols, out);
  }
}

}  // namespace dovetail::kernels
