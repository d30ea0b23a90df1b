#include "kernels/cuda/products/quant_pack.h"

#include <cmath>
#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "base/dtype.h"
#include "gtest/gtest.h"
#include "tests/kernels_cuda/quant_fixture.h"

namespace dovetail::kernels::cuda {
namespace {

using testing::kQuantFormats;
using testing::PackedOnHost;
using testing::QuantRowsOf;

TEST(QuantPackTest, EveryElementOfAStepHasASlotOfItsOwn) {
  for (int k = 0; k < kQuantKinds; ++k) {
    const QuantTraits traits = TraitsOf(static_cast<QuantKind>(k));
    std::set<int> codes, scales;
    for (int row = 0; row < kQuantTileRows; ++row) {
      for (int column = 0; column < kQuantStepColumns; ++column) {
        const QuantSlot slot = SlotOf(traits, row, column);
        ASSERT_LT(slot.byte, traits.code_bytes());
        codes.insert(slot.byte * 8 + slot.bit);
        if (traits.values > 0) scales.insert(ScaleSlotOf(traits, row, column));
      }
    }
    EXPECT_EQ(codes.size(), size_t{kQuantTileRows} * kQuantStepColumns);
    if (traits.values == 0) continue;
    EXPECT_EQ(scales.size(), size_t{kQuantTileRows} * kQuantStepColumns / traits.group);
    EXPECT_LT(*scales.rbegin() + 2 * (traits.values - 1), traits.scale_bytes() / 2);
  }
}

// What the products will see is what ggml's dequantiser gives, but for the rounding of scales.
TEST(QuantPackTest, PackedRowsMeanWhatTheFileMeans) {
  for (const RowFormat format : kQuantFormats) {
    const int64_t cols = Info(format).block_elements * 3, rows = 19;
    const auto file = QuantRowsOf(format, rows, cols, 7);
    const PackedOnHost packed(file.source());
    for (int64_t row = 0; row < rows; ++row) {
      std::vector<float> want(cols);
      DequantizeRow(format, file.row(row), cols, want.data());
      float top = 0;
      for (const float w : want) top = std::max(top, std::abs(w));
      const bool rounds = format == RowFormat::kQ4_K || format == RowFormat::kQ5_K || format == RowFormat::kQ6_K;
      for (int64_t k = 0; k < cols; ++k) {
        const double budget = rounds ? 0x1p-11 * (top + std::abs(want[k])) : 0x1p-22 * top;
        ASSERT_NEAR(packed.At(row, k), want[k], budget) << Info(format).name << " " << row << " " << k;
      }
    }
  }
}

TEST(QuantPackTest, ColumnsAndRowsBeyondTheMatrixAreZeros) {
  for (const RowFormat format : kQuantFormats) {
    const int64_t cols = Info(format).block_elements;
    const auto file = QuantRowsOf(format, 3, cols, 1);
    const PackedOnHost packed(file.source());
    const QuantTraits traits = TraitsOf(packed.kind());
    for (int row = 0; row < kQuantTileRows; ++row)
      for (int64_t k = row < 3 ? cols : 0; k < (cols + 127) / 128 * 128; ++k)
        ASSERT_EQ(packed.CodeAt(row, k), traits.zero) << Info(format).name;
  }
}

TEST(QuantPackTest, E4M3KeepsBytesAndScalesOfRows) {
  const int64_t cols = 136;
  std::vector<std::byte> bytes(3 * cols);
  std::mt19937_64 random(3);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  const std::byte* const rows[] = {bytes.data(), bytes.data() + cols, bytes.data() + 2 * cols};
  const float scales[] = {1, 0.5f, 3};
  const QuantBytes sizes = QuantBytesOf(QuantKind::kE4M3, 16, cols);
  EXPECT_EQ(sizes.scales, 0u);
  std::vector<std::byte> codes(sizes.codes);
  std::vector<float> factor(16, -1.0f);
  PackE4M3Tile(cols, rows, scales, {codes.data(), nullptr, factor.data()});
  EXPECT_EQ(std::vector<float>(factor.begin(), factor.begin() + 4), (std::vector<float>{1, 0.5f, 3, 0}));
  const QuantTraits traits = TraitsOf(QuantKind::kE4M3);
  for (int row = 0; row < 3; ++row) {
    for (int64_t k = 0; k < cols; ++k) {
      const QuantSlot slot = SlotOf(traits, row, static_cast<int>(k % 128));
      ASSERT_EQ(codes[k / 128 * traits.code_bytes() + slot.byte], rows[row][k]);
    }
  }
}

TEST(QuantPackTest, FourBitsTakeFourBitsAndAScale) {
  EXPECT_EQ(QuantBytesOf(QuantKind::kU4, 4096, 4096).total(), 4096u * 4096 * 9 / 16 + 4096 * 4);
  EXPECT_EQ(QuantBytesOf(QuantKind::kU8, 16, 128).codes, 2048u);
  EXPECT_EQ(QuantBytesOf(QuantKind::kU8, 17, 129).codes, 4u * 2048);  // whole tiles and steps
  EXPECT_FALSE(QuantKindOf(RowFormat::kBF16).has_value());
}

}  // namespace
}  // namespace dovetail::kernels::cuda
