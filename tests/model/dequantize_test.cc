#include "model/formats/dequantize.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "model/formats/ggml_types.h"
#include "nlohmann/json.hpp"
#include "tests/support/test_data.h"

namespace dovetail::model {
namespace {

std::vector<float> Floats(const std::string& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
  return values;
}

// Bits, so that NaN equals itself and -0 differs from 0.
std::vector<uint32_t> Bits(const std::vector<float>& values) {
  std::vector<uint32_t> bits(values.size());
  std::memcpy(bits.data(), values.data(), values.size() * sizeof(float));
  return bits;
}

TEST(Dequantize, GivesTheVeryBitsOfGgmlForEveryTypeThatIsRead) {
  DOVETAIL_DATA_OR_SKIP(const auto folder, "quant-vectors");
  const auto index = nlohmann::json::parse(test::ReadFile(folder / "index.json"));
  const int64_t elements = index["rows"].get<int64_t>() * index["cols"].get<int64_t>();
  int checked = 0;
  for (const auto& entry : index["types"]) {
    const auto type = GgmlTypeFromId(entry["id"].get<uint32_t>());
    if (!type) continue;  // a type that is refused at load
    const std::string name = entry["name"];
    EXPECT_EQ(BlockElements(*type), entry["block"].get<int64_t>()) << name;
    EXPECT_EQ(BlockBytes(*type), entry["type_size"].get<int64_t>()) << name;
    EXPECT_EQ(RowBytes(*type, index["cols"].get<int64_t>()), entry["row_bytes"].get<int64_t>()) << name;

    const std::string blocks = test::ReadFile(folder / (name + ".bin"));
    std::vector<float> values(static_cast<size_t>(elements));
    Dequantize(*type, reinterpret_cast<const std::byte*>(blocks.data()), elements, values.data());
    EXPECT_EQ(Bits(values), Bits(Floats(test::ReadFile(folder / (name + ".deq.f32"))))) << name;
    ++checked;
  }
  EXPECT_EQ(checked, 11) << "every readable type but F32 has vectors";
}

TEST(Dequantize, ReadsAQ4_0BlockByHand) {
  std::array<std::byte, 18> block{};
  block[1] = std::byte{0x40};  // d = 2.0 in f16
  block[2] = std::byte{0xf1};  // element 0 = 1, element 16 = 15
  float out[32];
  Dequantize(GgmlType::kQ4_0, block.data(), 32, out);
  EXPECT_EQ(out[0], (1 - 8) * 2.0f);
  EXPECT_EQ(out[16], (15 - 8) * 2.0f);
  EXPECT_EQ(out[1], -16.0f);
}

TEST(Dequantize, TakesBlocksAtAnyAddress) {
  std::array<std::byte, 1 + 2 * 4> bytes{};
  const float values[2] = {1.5f, -3.25f};
  std::memcpy(bytes.data() + 1, values, sizeof(values));
  float out[2];
  Dequantize(GgmlType::kF32, bytes.data() + 1, 2, out);
  EXPECT_EQ(out[0], 1.5f);
  EXPECT_EQ(out[1], -3.25f);
}

TEST(Dequantize, PassesAnInfiniteScaleOn) {
  std::array<std::byte, 34> block{};
  block[1] = std::byte{0x7c};  // d = +inf
  block[2] = std::byte{1};
  float out[32];
  Dequantize(GgmlType::kQ8_0, block.data(), 32, out);
  EXPECT_EQ(out[0], std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(out[1]));
}

TEST(GgmlTypes, NamesTheTypesThatItCannotRead) {
  EXPECT_EQ(GgmlTypeFromId(16), std::nullopt);
  EXPECT_EQ(GgmlTypeName(16), "IQ2_XXS");
  EXPECT_EQ(GgmlTypeName(12), "Q4_K");
  EXPECT_EQ(GgmlTypeName(4000), "type 4000");
}

}  // namespace
}  // namespace dovetail::model
