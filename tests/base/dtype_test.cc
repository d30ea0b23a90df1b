#include "base/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace dovetail {
namespace {

TEST(DType, Bf16RoundsToNearestEven) {
  EXPECT_EQ(ToBF16(1.0f).bits, 0x3f80);
  EXPECT_EQ(ToBF16(1.00390625f).bits, 0x3f80);  // half way, stays on the even side
  EXPECT_EQ(ToBF16(1.01171875f).bits, 0x3f82);  // half way, goes up to the even side
  EXPECT_EQ(ToBF16(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_TRUE(std::isnan(ToFloat(ToBF16(std::nanf("")))));
}

TEST(DType, F16KeepsSubnormalsAndOverflowsToInfinity) {
  EXPECT_EQ(ToFloat(F16{0x0001}), std::ldexp(1.0f, -24));
  EXPECT_EQ(ToF16(65504.0f).bits, 0x7bff);
  EXPECT_EQ(ToF16(65520.0f).bits, 0x7c00);
}

TEST(DType, EveryBf16SurvivesARoundTrip) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = ToFloat(BF16{static_cast<uint16_t>(bits)});
    if (std::isnan(value)) continue;
    ASSERT_EQ(ToBF16(value).bits, bits);
  }
}

}  // namespace
}  // namespace dovetail
