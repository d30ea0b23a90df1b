#include "kernels/packed_weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "kernels/thread_pool.h"
#include "tests/kernels/gemm_matrices.h"
#include "tests/support/test_data.h"

namespace dovetail::kernels {
namespace {

using test::RawMatrix;

struct Vector {
  RowFormat format;
  const char* file;
};
const Vector kVectors[] = {{RowFormat::kF16, "f16"},   {RowFormat::kBF16, "bf16"},  {RowFormat::kQ4_0, "q4_0"},
                           {RowFormat::kQ4_1, "q4_1"}, {RowFormat::kQ5_0, "q5_0"},  {RowFormat::kQ5_1, "q5_1"},
                           {RowFormat::kQ8_0, "q8_0"}, {RowFormat::kQ4_K, "q4_K"},  {RowFormat::kQ5_K, "q5_K"},
                           {RowFormat::kQ6_K, "q6_K"}, {RowFormat::kMXFP4, "mxfp4"}};

TEST(QuantFormat, DequantizesToTheBitWhatGgmlDequantizes) {
  DOVETAIL_DATA_OR_SKIP(const auto folder, "quant-vectors");
  for (const Vector& vector : kVectors) {
    const std::string blocks = ::dovetail::test::ReadFile(folder / (std::string(vector.file) + ".bin"));
    const std::string expected = ::dovetail::test::ReadFile(folder / (std::string(vector.file) + ".deq.f32"));
    constexpr int64_t kElements = 8 * 512;
    ASSERT_EQ(blocks.size(), static_cast<size_t>(RowBytes(vector.format, kElements))) << vector.file;
    std::vector<float> out(kElements);
    DequantizeRow(vector.format, reinterpret_cast<const std::byte*>(blocks.data()), kElements, out.data());
    EXPECT_EQ(std::memcmp(out.data(), expected.data(), expected.size()), 0) << vector.file;
  }
}

TEST(QuantFormat, GroupsSayTheSameAsTheDequantiser) {
  for (int f = static_cast<int>(RowFormat::kQ4_0); f < kRowFormats; ++f) {
    const auto format = static_cast<RowFormat>(f);
    const RawMatrix matrix(format, 1, 512, 5);
    const int group = format == RowFormat::kQ6_K ? 16 : 32;
    std::vector<uint8_t> codes(512);
    std::vector<float> scale(512 / group), offset(512 / group), dense(512);
    UnpackGroups(format, matrix.source().row_at(0), 512, {codes.data(), scale.data(), offset.data()});
    DequantizeRow(format, matrix.source().row_at(0), 512, dense.data());
    for (int e = 0; e < 512; ++e) {
      EXPECT_NEAR(scale[e / group] * codes[e] + offset[e / group], dense[e], 1e-4) << Info(format).name << " " << e;
    }
  }
}

TEST(PackWeights, PacksTheSameBytesOnOneThreadAndOnThree) {
  const RawMatrix matrix(RowFormat::kQ4_1, 200, 96, 5);
  ThreadPool pool({.threads = 3});
  const PackedWeights a = PackWeights(PackedFormat::kU4Affine, matrix.source(), nullptr).value();
  const PackedWeights b = PackWeights(PackedFormat::kU4Affine, matrix.source(), &pool).value();
  ASSERT_EQ(a.size_bytes(), b.size_bytes());
  EXPECT_EQ(std::memcmp(a.view().data, b.view().data, a.size_bytes()), 0);
}

TEST(PackWeights, TakesNoMoreMemoryThanTheFileForFourAndEightBitRows) {
  const RawMatrix q4(RowFormat::kQ4_1, 64, 512, 5), q8(RowFormat::kQ8_0, 64, 512, 5),
      fp4(RowFormat::kMXFP4, 64, 512, 5);
  EXPECT_EQ(PackWeights(PackedFormat::kFp4, fp4.source(), nullptr)->size_bytes(),
            static_cast<size_t>(64 * RowBytes(RowFormat::kMXFP4, 512)));
  EXPECT_EQ(PackWeights(PackedFormat::kU4Affine, q4.source(), nullptr)->size_bytes(),
            static_cast<size_t>(64 * RowBytes(RowFormat::kQ4_1, 512)));
  EXPECT_EQ(PackWeights(PackedFormat::kU8Symmetric, q8.source(), nullptr)->size_bytes(),
            static_cast<size_t>(64 * RowBytes(RowFormat::kQ8_0, 512)));
}

TEST(PackWeights, RefusesRowsItWouldHaveToRoundAgain) {
  const RawMatrix matrix(RowFormat::kQ4_0, 16, 64, 5);
  const absl::Status status = PackWeights(PackedFormat::kU4Affine, matrix.source(), nullptr).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(std::string(status.message()), "Q4_0 rows cannot be packed as u4-affine: only f32, bf16 or u4-symmetric");
}

TEST(PackWeights, RefusesRowsThatAreNoWholeNumberOfBlocks) {
  const auto nothing = [](int64_t) -> const std::byte* { return nullptr; };
  const absl::Status status =
      PackWeights(PackedFormat::kU4AffineF32, {RowFormat::kQ4_K, 16, 288, nothing}, nullptr).status();
  EXPECT_EQ(std::string(status.message()), "Q4_K rows of 288 elements are no whole number of blocks of 256");
  EXPECT_FALSE(PackWeights(PackedFormat::kF32, {RowFormat::kF32, -1, 8, nothing}, nullptr).ok());
}

TEST(EmbedRows, GathersAndDequantizesTheRowsAsked) {
  const RawMatrix table(RowFormat::kQ8_0, 40, 64, 9);
  const std::vector<int32_t> ids = {39, 0, 7, 7};
  std::vector<float> y(4 * 70, -1.0f);
  ASSERT_TRUE(EmbedRows(table.source(), ids, y.data(), 70).ok());
  for (size_t i = 0; i < ids.size(); ++i) {
    std::vector<float> row(64);
    DequantizeRow(RowFormat::kQ8_0, table.source().row_at(ids[i]), 64, row.data());
    EXPECT_EQ(std::vector<float>(y.begin() + i * 70, y.begin() + i * 70 + 64), row);
    EXPECT_EQ(y[i * 70 + 64], -1.0f);
  }
}

TEST(EmbedRows, RefusesATokenOutsideTheVocabularyBeforeItWrites) {
  const RawMatrix table(RowFormat::kF32, 4, 8, 9);
  std::vector<float> y(16, -1.0f);
  EXPECT_EQ(std::string(EmbedRows(table.source(), std::vector<int32_t>{1, 4}, y.data(), 8).message()),
            "token id 4 at position 1 is outside the vocabulary 0..3");
  EXPECT_FALSE(EmbedRows(table.source(), std::vector<int32_t>{-1}, y.data(), 8).ok());
  EXPECT_THAT(y, testing::Each(-1.0f));
}

}  // namespace
}  // namespace dovetail::kernels
