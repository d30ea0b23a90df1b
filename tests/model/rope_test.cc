#include "model/rope.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace dovetail::model {
namespace {

using ::testing::Each;
using ::testing::FloatEq;

RopeSpec Spec(RopeKind kind, int rotary_dims = 64) {
  RopeSpec spec;
  spec.kind = kind;
  spec.theta = 500000.0;
  spec.rotary_dims = rotary_dims;
  spec.max_positions = 8192;
  spec.original_max_positions = 1024;
  return spec;
}

// theta^(-2i/r) in double.
double Plain(const RopeSpec& spec, size_t i) {
  return std::pow(spec.theta, -2.0 * static_cast<double>(i) / spec.rotary_dims);
}

// Every frequency within 2e-6 of the formula evaluated in double.
template <typename Formula>
void ExpectFrequencies(const RopeTable& table, const RopeSpec& spec, const Formula& formula) {
  ASSERT_EQ(table.inv_freq.size(), static_cast<size_t>(spec.rotary_dims / 2));
  for (size_t i = 0; i < table.inv_freq.size(); ++i) {
    const double expected = formula(i);
    EXPECT_NEAR(table.inv_freq[i] / expected, 1.0, 2e-6) << "pair " << i;
  }
}

TEST(Rope, DefaultIsAPowerOfTheta) {
  const RopeSpec spec = Spec(RopeKind::kDefault);
  const RopeTable table = MakeRopeTable(spec, 10);
  EXPECT_EQ(table.inv_freq[0], 1.0f);
  EXPECT_EQ(table.multiplier, 1.0f);
  ExpectFrequencies(table, spec, [&](size_t i) { return Plain(spec, i); });
}

TEST(Rope, DivisorsOfTheFileComeFirst) {
  RopeSpec spec = Spec(RopeKind::kDefault, 8);
  spec.divisors = {1, 2, 4, 8};
  ExpectFrequencies(MakeRopeTable(spec, 0), spec, [&](size_t i) { return Plain(spec, i) / spec.divisors[i]; });
}

TEST(Rope, LinearDividesByTheFactor) {
  RopeSpec spec = Spec(RopeKind::kLinear);
  spec.factor = 8;
  ExpectFrequencies(MakeRopeTable(spec, 0), spec, [&](size_t i) { return Plain(spec, i) / 8; });
}

TEST(Rope, DynamicRaisesThetaBeyondTheModelsPositions) {
  RopeSpec spec = Spec(RopeKind::kDynamic, 16);
  spec.max_positions = 64;
  spec.factor = 2;
  for (const int64_t n : {0, 24, 64}) {
    ExpectFrequencies(MakeRopeTable(spec, n), spec, [&](size_t i) { return Plain(spec, i); });
  }
  for (const int64_t n : {77, 1000}) {
    const double theta = spec.theta * std::pow(2.0 * static_cast<double>(n) / 64 - 1, 16.0 / 14.0);
    ExpectFrequencies(MakeRopeTable(spec, n), spec,
                      [&](size_t i) { return std::pow(theta, -2.0 * static_cast<double>(i) / 16); });
  }
}

TEST(Rope, Llama3KeepsShortWavesDividesLongOnesAndBlendsBetween) {
  RopeSpec spec = Spec(RopeKind::kLlama3);
  spec.factor = 8;
  spec.low_freq_factor = 1;
  spec.high_freq_factor = 4;
  int kept = 0, blended = 0, divided = 0;
  ExpectFrequencies(MakeRopeTable(spec, 0), spec, [&](size_t i) {
    const double f = Plain(spec, i), wave = 2 * std::numbers::pi / f;
    if (wave < 1024.0 / 4) return ++kept, f;
    if (wave > 1024.0 / 1) return ++divided, f / 8;
    const double s = (1024 / wave - 1) / (4 - 1);
    return ++blended, f * ((1 - s) / 8 + s);
  });
  EXPECT_GT(kept, 0);
  EXPECT_GT(blended, 0);
  EXPECT_GT(divided, 0);
}

TEST(Rope, YarnRampsBetweenWholeDimensions) {
  RopeSpec spec = Spec(RopeKind::kYarn);
  spec.factor = 4;
  spec.attention_factor = YarnMscale(4);
  for (const bool truncate : {true, false}) {
    spec.truncate = truncate;
    const auto dimension = [&](double b) {
      return 64 * std::log(1024 / (2 * std::numbers::pi * b)) / (2 * std::log(spec.theta));
    };
    const double low = truncate ? std::floor(dimension(32)) : dimension(32);
    const double high = truncate ? std::ceil(dimension(1)) : dimension(1);
    ASSERT_GT(low, 0);
    ASSERT_LT(high, 63);
    const RopeTable table = MakeRopeTable(spec, 0);
    ExpectFrequencies(table, spec, [&](size_t i) {
      const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0), f = Plain(spec, i);
      return f * (1 - ramp) + f / 4 * ramp;
    });
    EXPECT_FLOAT_EQ(table.multiplier, static_cast<float>(0.1 * std::log(4.0) + 1));
  }
}

TEST(Rope, LongRopeSwitchesItsDivisorsWhereTheOriginalContextEnds) {
  RopeSpec spec = Spec(RopeKind::kLongRope, 16);
  spec.original_max_positions = 64;
  for (int i = 0; i < 8; ++i) {
    spec.short_factor.push_back(1.0f + 0.05f * static_cast<float>(i));
    spec.long_factor.push_back(1.0f + 0.5f * static_cast<float>(i));
  }
  spec.attention_factor = LongRopeMultiplier(4, 64);
  for (const int64_t n : {24, 64, 65, 77}) {
    const RopeTable table = MakeRopeTable(spec, n);
    ExpectFrequencies(table, spec,
                      [&](size_t i) { return Plain(spec, i) / (n > 64 ? spec.long_factor : spec.short_factor)[i]; });
    EXPECT_FLOAT_EQ(table.multiplier, static_cast<float>(std::sqrt(1 + std::log(4.0) / std::log(64.0))));
  }
}

TEST(Rope, CosAndSinAreTakenOfAnF32AngleAndMultiplied) {
  RopeTable table{.inv_freq = {1.0f, 0.1f}, .multiplier = 2.0f};
  float cos[2], sin[2];
  RopeCosSin(table, 100001, cos, sin);
  const float angle = 100001.0f * 0.1f;  // rounded to f32
  EXPECT_FLOAT_EQ(cos[1], 2.0f * std::cos(angle));
  EXPECT_FLOAT_EQ(sin[1], 2.0f * std::sin(angle));
  RopeCosSin(table, 0, cos, sin);
  EXPECT_THAT(cos, Each(FloatEq(2.0f)));
  EXPECT_THAT(sin, Each(FloatEq(0.0f)));
}

TEST(RopeLength, OnlyDynamicAndLongRopeLookAtIt) {
  for (const RopeKind kind : {RopeKind::kDefault, RopeKind::kLinear, RopeKind::kLlama3, RopeKind::kYarn}) {
    const RopeSpec spec = Spec(kind);
    EXPECT_EQ(RopeVariant(spec, 1 << 20), 0);
    EXPECT_EQ(MakeRopeTable(spec, 1).inv_freq, MakeRopeTable(spec, 1 << 20).inv_freq);
  }
  RopeSpec dynamic = Spec(RopeKind::kDynamic);
  dynamic.factor = 2;
  EXPECT_EQ(RopeVariant(dynamic, 100), RopeVariant(dynamic, 8192));
  EXPECT_NE(RopeVariant(dynamic, 8193), RopeVariant(dynamic, 8194));
  const RopeSpec longrope = Spec(RopeKind::kLongRope);
  EXPECT_EQ(RopeVariant(longrope, 1024), 0);
  EXPECT_EQ(RopeVariant(longrope, 1025), RopeVariant(longrope, 8000));
}

TEST(RopeLength, IsThePromptsOrTheModels) {
  RopeSpec spec = Spec(RopeKind::kDynamic);
  spec.factor = 2;
  EXPECT_EQ(RopeLength(spec, RopeLengthRule::kPrompt, 77), 77);
  EXPECT_EQ(RopeLength(spec, RopeLengthRule::kModelMaximum, 77), 16384);
  EXPECT_EQ(RopeLength(Spec(RopeKind::kLongRope), RopeLengthRule::kModelMaximum, 77), 8192);
}

}  // namespace
}  // namespace dovetail::model
