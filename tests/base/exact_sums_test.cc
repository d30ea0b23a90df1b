#include "base/exact_sums.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace dovetail {
namespace {

using testing::ElementsAre;

std::vector<std::vector<float>> SomeRows(int rows, size_t size, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::vector<float>> all(static_cast<size_t>(rows), std::vector<float>(size));
  for (auto& row : all)
    for (float& value : row)
      value = static_cast<float>(
          std::ldexp(static_cast<double>(random() % 2001) - 1000, static_cast<int>(random() % 40) - 25));
  return all;
}

TEST(ExactSums, AreTheSameBitsInAnyOrderAndInAnyParts) {
  const auto rows = SomeRows(1000, 7, /*seed=*/1);
  ExactSums whole;
  for (const auto& row : rows) ASSERT_TRUE(whole.Add(row));
  for (const size_t chunk : {size_t{1}, size_t{3}, size_t{64}, size_t{999}}) {
    std::vector<ExactSums> parts;
    for (size_t begin = 0; begin < rows.size(); begin += chunk) {
      ExactSums& part = parts.emplace_back();
      for (size_t i = begin; i < std::min(rows.size(), begin + chunk); ++i) ASSERT_TRUE(part.Add(rows[i]));
    }
    ExactSums joined;
    for (size_t i = parts.size(); i-- > 0;) ASSERT_TRUE(joined.AddWords(parts[i].words()));
    EXPECT_THAT(std::vector(joined.words().begin(), joined.words().end()),
                testing::ElementsAreArray(whole.words().begin(), whole.words().end()))
        << "in parts of " << chunk;
  }
}

TEST(ExactSums, AreTheSumsOfRealNumbers) {
  const auto rows = SomeRows(333, 5, /*seed=*/2);
  ExactSums sums;
  std::vector<long double> expected(5);
  for (const auto& row : rows) {
    ASSERT_TRUE(sums.Add(row));
    for (size_t i = 0; i < row.size(); ++i) expected[i] += row[i];
  }
  const std::vector<float> mean = sums.Mean(333);
  for (size_t i = 0; i < mean.size(); ++i) EXPECT_EQ(mean[i], static_cast<float>(expected[i] / 333)) << i;
}

TEST(ExactSums, LargeValuesDoNotSwallowSmallOnes) {
  ExactSums sums;
  for (const float value : {1e11f, 0x1p-41f, -1e11f, 3.0f, -0.0f}) ASSERT_TRUE(sums.Add({{value}}));
  EXPECT_THAT(sums.Mean(1), ElementsAre(3.0f));
  ASSERT_TRUE(sums.Add({{-3.0f}}));
  EXPECT_THAT(sums.Mean(1), ElementsAre(0x1p-41f));
}

TEST(ExactSums, ValuesBelowTheFinestStepAreCutTowardsZero) {
  ExactSums sums;
  ASSERT_TRUE(sums.Add({{0x1.8p-64f, -0x1.8p-64f, std::numeric_limits<float>::denorm_min(), 0x1p-70f}}));
  EXPECT_THAT(sums.Mean(1), ElementsAre(0x1p-64f, -0x1p-64f, 0.0f, 0.0f));
}

TEST(ExactSums, WhatCannotBeAddedChangesNothing) {
  ExactSums sums;
  ASSERT_TRUE(sums.Add({{1.0f, 2.0f}}));
  for (const float bad : {NAN, INFINITY, -INFINITY, 0x1p40f, -0x1p41f}) EXPECT_FALSE(sums.Add({{1.0f, bad}})) << bad;
  EXPECT_FALSE(sums.Add({{1.0f}}));
  EXPECT_FALSE(sums.AddWords({}));
  const std::vector<uint64_t> odd(3), longer(6);
  EXPECT_FALSE(sums.AddWords(odd));
  EXPECT_FALSE(sums.AddWords(longer));
  EXPECT_THAT(sums.Mean(1), ElementsAre(1.0f, 2.0f));
}

TEST(ExactSums, TheMostRowsOfTheLargestValuesFit) {
  ExactSums sums;
  const float largest = std::nextafter(0x1p40f, 0.0f);
  ASSERT_TRUE(sums.Add({{largest, -largest}}));
  for (int64_t rows = 1; rows < ExactSums::kMostRows; rows *= 2) {
    const std::vector<uint64_t> words(sums.words().begin(), sums.words().end());
    ASSERT_TRUE(sums.AddWords(words));
  }
  EXPECT_THAT(sums.Mean(ExactSums::kMostRows), ElementsAre(largest, -largest));
}

}  // namespace
}  // namespace dovetail
