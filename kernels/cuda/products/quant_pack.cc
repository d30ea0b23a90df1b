#include "kernels/cuda/products/quant_pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "base/dtype.h"

namespace dovetail::kernels::cuda {
namespace {

// The largest scale or offset of a row becomes at most this, so that f16 keeps all bits of those 2^24 times smaller,
// and none overflows, taken 16 times too large either (OffsetFactor).
constexpr int kTopExponent = 10;

uint8_t Fp4OfCode(uint8_t code) {
  for (int i = 0; i < 16; ++i)
    if (kFp4Zero + kFp4Doubled[i] == code) return static_cast<uint8_t>(i);
  return 0;
}

void PutCode(const QuantTraits& traits, QuantTile tile, int row, int64_t column, uint8_t code) {
  const QuantSlot slot = SlotOf(traits, row, static_cast<int>(column % kQuantStepColumns));
  std::byte& at = tile.codes[column / kQuantStepColumns * traits.code_bytes() + slot.byte];
  at = static_cast<std::byte>((static_cast<uint32_t>(at) & ~(((1u << traits.bits) - 1) << slot.bit)) |
                              static_cast<uint32_t>(code) << slot.bit);
}

void PutHalf(std::byte* at, float x) {
  const F16 half = ToF16(x);
  std::memcpy(at, &half, sizeof(half));
}

// What is in a file's row.
struct Row {
  std::vector<uint8_t> codes;
  std::vector<float> scales, offsets;
};

// f16(x / factor) for the scales of a row.
float FactorOf(const Row& row, bool offsets) {
  float top = 0;
  for (const float s : row.scales) top = std::max(top, std::abs(s));
  if (offsets)
    for (const float o : row.offsets) top = std::max(top, std::abs(o));
  if (!(top > 0) || !std::isfinite(top)) return 1;
  int exponent;
  std::frexp(top, &exponent);
  return std::ldexp(1.0f, std::clamp(exponent - kTopExponent, -126, 126));
}

void PackRow(QuantKind kind, const QuantTraits& traits, Row& row, int in_tile, int64_t cols, QuantTile tile) {
  const bool offsets = traits.values > 1;
  if (kind == QuantKind::kFp4) {
    for (uint8_t& code : row.codes) code = Fp4OfCode(code);
    for (float& scale : row.scales) scale *= 2;  // UnpackGroups counts in halves
  }
  const float factor = FactorOf(row, offsets);
  tile.factor[in_tile] = factor;
  for (int64_t k = 0; k < cols; ++k) PutCode(traits, tile, in_tile, k, row.codes[k]);
  for (int64_t group = 0; group < cols / traits.group; ++group) {
    const int64_t column = group * traits.group;
    std::byte* const at = tile.scales + column / kQuantStepColumns * traits.scale_bytes() +
                          2 * ScaleSlotOf(traits, in_tile, static_cast<int>(column % kQuantStepColumns));
    PutHalf(at, row.scales[group] / factor);
    if (offsets) PutHalf(at + 4, row.offsets[group] / factor * OffsetFactor(kind, in_tile));
  }
}

// Zeros, whatever the kind: codes of value 0, scales 0.
void Clear(QuantKind kind, int64_t cols, QuantTile tile) {
  const QuantTraits traits = TraitsOf(kind);
  const QuantBytes bytes = QuantBytesOf(kind, kQuantTileRows, cols);
  const int zero = traits.bits == 4 ? traits.zero * 0x11 : traits.zero;
  std::memset(tile.codes, zero, bytes.codes);
  if (bytes.scales > 0) std::memset(tile.scales, 0, bytes.scales);
  std::fill(tile.factor, tile.factor + kQuantTileRows, 0.0f);
}

}  // namespace

std::optional<QuantKind> QuantKindOf(RowFormat format) {
  switch (format) {
    case RowFormat::kQ4_0: return QuantKind::kU4;
    case RowFormat::kQ4_1:
    case RowFormat::kQ4_K: return QuantKind::kU4Offset;
    case RowFormat::kQ5_0:
    case RowFormat::kQ8_0: return QuantKind::kU8;
    case RowFormat::kQ5_1:
    case RowFormat::kQ5_K: return QuantKind::kU8Offset;
    case RowFormat::kQ6_K: return QuantKind::kU8Group16;
    case RowFormat::kMXFP4: return QuantKind::kFp4;
    case RowFormat::kF32:
    case RowFormat::kF16:
    case RowFormat::kBF16: break;
  }
  return std::nullopt;
}

const char* Name(QuantKind kind) {
  static constexpr const char* kNames[kQuantKinds] = {"u4", "u4-offset", "u8", "u8-offset", "u8-g16", "fp4", "e4m3"};
  return kNames[static_cast<int>(kind)];
}

QuantBytes QuantBytesOf(QuantKind kind, int64_t rows, int64_t cols) {
  const QuantTraits traits = TraitsOf(kind);
  const auto tiles = static_cast<size_t>((rows + kQuantTileRows - 1) / kQuantTileRows);
  const auto steps = static_cast<size_t>((cols + kQuantStepColumns - 1) / kQuantStepColumns);
  return {.codes = tiles * steps * traits.code_bytes(),
          .scales = tiles * steps * traits.scale_bytes(),
          .factors = tiles * kQuantTileRows * sizeof(float)};
}

void PackQuantTile(RowFormat format, int64_t cols, std::span<const std::byte* const> rows, QuantTile tile) {
  const std::optional<QuantKind> kind = QuantKindOf(format);
  DT_CHECK(kind.has_value() && rows.size() <= kQuantTileRows, Info(format).name, " ", rows.size());
  const QuantTraits traits = TraitsOf(*kind);
  Clear(*kind, cols, tile);
  Row row{std::vector<uint8_t>(cols), std::vector<float>(cols / 16), std::vector<float>(cols / 16)};
  for (size_t r = 0; r < rows.size(); ++r) {
    if (rows[r] == nullptr) continue;
    UnpackGroups(format, rows[r], cols, {row.codes.data(), row.scales.data(), row.offsets.data()});
    row.scales.resize(cols / traits.group);
    row.offsets.resize(cols / traits.group);
    PackRow(*kind, traits, row, static_cast<int>(r), cols, tile);
  }
}

void PackE4M3Tile(int64_t cols, std::span<const std::byte* const> rows, std::span<const float> scales, QuantTile tile) {
  DT_CHECK(rows.size() <= kQuantTileRows && rows.size() == scales.size(), rows.size(), " ", scales.size());
  Clear(QuantKind::kE4M3, cols, tile);
  const QuantTraits traits = TraitsOf(QuantKind::kE4M3);
  for (size_t r = 0; r < rows.size(); ++r) {
    if (rows[r] == nullptr) continue;
    tile.factor[r] = scales[r];
    for (int64_t k = 0; k < cols; ++k) PutCode(traits, tile, static_cast<int>(r), k, static_cast<uint8_t>(rows[r][k]));
  }
}

}  // namespace dovetail::kernels::cuda
