#include "base/statistics.h"

#include <gtest/gtest.h>

namespace dovetail {
namespace {

TEST(Statistics, PercentilesLieBetweenTheNearestRanks) {
  const std::vector<double> values = {40, 10, 30, 20};
  EXPECT_DOUBLE_EQ(Percentile(values, 0), 10);
  EXPECT_DOUBLE_EQ(Percentile(values, 50), 25);
  EXPECT_DOUBLE_EQ(Percentile(values, 90), 37);
  EXPECT_DOUBLE_EQ(Percentile(values, 100), 40);
  EXPECT_DOUBLE_EQ(Percentile({7}, 99), 7);
  EXPECT_DOUBLE_EQ(Percentile({}, 50), 0);
}

TEST(Statistics, ASummaryHasMedianExtremesAndSpread) {
  const Summary summary = Summarize({100, 90, 120});
  EXPECT_DOUBLE_EQ(summary.median, 100);
  EXPECT_DOUBLE_EQ(summary.min, 90);
  EXPECT_DOUBLE_EQ(summary.max, 120);
  EXPECT_EQ(summary.count, 3);
  EXPECT_DOUBLE_EQ(summary.spread(), 0.3);
  EXPECT_EQ(Summarize({}).count, 0);
  EXPECT_DOUBLE_EQ(Summarize({}).spread(), 0);
}

TEST(Statistics, TheMeanOfNothingIsZero) {
  EXPECT_DOUBLE_EQ(Mean({1, 2, 6}), 3);
  EXPECT_DOUBLE_EQ(Mean({}), 0);
}

TEST(Statistics, TheStandardDeviationIsThatOfAPopulation) {
  EXPECT_DOUBLE_EQ(StandardDeviation({2, 4, 4, 4, 5, 5, 7, 9}), 2);
  EXPECT_DOUBLE_EQ(StandardDeviation({3}), 0);
  EXPECT_DOUBLE_EQ(StandardDeviation({}), 0);
}

}  // namespace
}  // namespace dovetail
