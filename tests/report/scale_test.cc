#include "report/scale.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace dovetail::report {
namespace {

using ::testing::DoubleNear;
using ::testing::Pointwise;

MATCHER(IsNear, "") { return std::abs(std::get<0>(arg) - std::get<1>(arg)) < 1e-9 * (1 + std::abs(std::get<1>(arg))); }

void ExpectTicks(const Scale& scale, const std::vector<double>& ticks) {
  EXPECT_THAT(scale.ticks(), Pointwise(IsNear(), ticks));
}

TEST(Scales, BeginAtZeroAndHaveRoundTicks) {
  const Scale scale = Scale::Of({12, 43}, false);
  ExpectTicks(scale, {0, 10, 20, 30, 40, 50});
  EXPECT_THAT(scale.At(0), DoubleNear(0, 1e-12));
  EXPECT_THAT(scale.At(25), DoubleNear(0.5, 1e-12));
  EXPECT_THAT(scale.At(50), DoubleNear(1, 1e-12));
  ExpectTicks(Scale::Of({0.3, 0.7}, false), {0, 0.2, 0.4, 0.6, 0.8});
  ExpectTicks(Scale::Of({-3, 9}, false), {-5, 0, 5, 10});
}

TEST(Scales, LogarithmicOnesHaveTicksAtOneTwoAndFive) {
  const Scale scale = Scale::Of({3, 70}, true);
  ExpectTicks(scale, {2, 5, 10, 20, 50, 100});
  EXPECT_THAT(scale.At(2), DoubleNear(0, 1e-12));
  EXPECT_THAT(scale.At(std::sqrt(200)), DoubleNear(0.5, 1e-12));
  EXPECT_THAT(scale.At(100), DoubleNear(1, 1e-12));
  EXPECT_FALSE(scale.Holds(0));
  ExpectTicks(Scale::Of({1, 5000}, true), {1, 10, 100, 1000});
}

TEST(Scales, OneValueAndNoneStillMakeAnAxis) {
  ExpectTicks(Scale::Of({}, false), {0, 0.2, 0.4, 0.6, 0.8, 1});
  ExpectTicks(Scale::Of({0}, false), {0, 0.2, 0.4, 0.6, 0.8, 1});
  ExpectTicks(Scale::Of({7}, true), {5, 10});
  ExpectTicks(Scale::Of({10}, true), {10, 20});
  ExpectTicks(Scale::Of({NAN, INFINITY, 4}, false), {0, 1, 2, 3, 4});
  EXPECT_EQ(Scale::Of({NAN, -1, 0}, true).ticks().size(), 4u) << "1, 2, 5, 10";
}

TEST(Scales, ValuesFarApartLeaveFiniteAxes) {
  for (const bool logarithmic : {false, true}) {
    const Scale scale = Scale::Of({1e-300, 1e300}, logarithmic);
    EXPECT_LT(scale.ticks().size(), 20u);
    EXPECT_TRUE(std::isfinite(scale.At(1e300)));
  }
}

TEST(Numbers, AreWrittenForPeople) {
  EXPECT_EQ(Short(0), "0");
  EXPECT_EQ(Short(0.42), "0.42");
  EXPECT_EQ(Short(0.4), "0.4");
  EXPECT_EQ(Short(9.999), "10");
  EXPECT_EQ(Short(123.4), "123");
  EXPECT_EQ(Short(999.9), "1,000");
  EXPECT_EQ(Short(12345), "12,300");
  EXPECT_EQ(Short(-1234567), "-1,230,000");
  EXPECT_EQ(Short(3e-6), "3e-06");
  EXPECT_EQ(Short(-0.25), "-0.25");
  EXPECT_EQ(Short(NAN), "-");
  EXPECT_EQ(Short(INFINITY), "-");
}

}  // namespace
}  // namespace dovetail::report
