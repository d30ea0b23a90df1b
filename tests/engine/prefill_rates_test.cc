#include "engine/measurements/prefill_rates.h"

#include <gtest/gtest.h>

// Rates are found again in the times that they make.

namespace dovetail::engine {
namespace {

std::vector<PromptSample> StepsOf(double dense_s, double linear_s, double flop_s, double asked_s) {
  std::vector<PromptSample> samples;
  for (int i = 0; i < 4; ++i) {
    PromptSample sample{.tokens = 512, .here_flops = 1e9 * (i + 1), .asked_flops = 5e8 * i};
    sample.dense_s = dense_s * sample.tokens;
    sample.prompt_s = linear_s * sample.tokens + flop_s * sample.here_flops;
    sample.attention_s = asked_s * sample.asked_flops;
    samples.push_back(sample);
  }
  return samples;
}

TEST(PrefillRates, TimesOfAttentionAreDividedIntoTokensAndFlops) {
  const auto rates = FitRates(StepsOf(1e-3, 2e-4, 1e-9, 4e-9));
  ASSERT_TRUE(rates.ok()) << rates.status();
  EXPECT_NEAR(rates->dense_tokens_per_s, 1 / 1.2e-3, 1e-3);
  EXPECT_NEAR(rates->attention_flops_per_s / 1e9, 1, 1e-6);
  EXPECT_NEAR(rates->attention_worker_flops_per_s / 1e9, 0.25, 1e-6);
}

TEST(PrefillRates, NoRateIsNegative) {
  // Later steps took less time, as noise has it.
  std::vector<PromptSample> samples = StepsOf(1e-3, 0, 1e-9, 0);
  samples[0].prompt_s = 9;
  const auto rates = FitRates(samples);
  ASSERT_TRUE(rates.ok()) << rates.status();
  EXPECT_GT(rates->dense_tokens_per_s, 0);
  EXPECT_GE(rates->attention_flops_per_s, 0);
  EXPECT_EQ(rates->attention_worker_flops_per_s, 0) << "it took no time";
}

TEST(PrefillRates, AModelWithoutSoftmaxHasNoRateOfAttention) {
  std::vector<PromptSample> samples = StepsOf(1e-3, 1e-3, 0, 0);
  for (PromptSample& sample : samples) sample.here_flops = sample.asked_flops = 0;
  const auto rates = FitRates(samples);
  ASSERT_TRUE(rates.ok()) << rates.status();
  EXPECT_NEAR(rates->dense_tokens_per_s, 500, 1e-6);
  EXPECT_EQ(rates->attention_flops_per_s, 0);
}

TEST(PrefillRates, WithoutTimesThereAreNone) { EXPECT_FALSE(FitRates({}).ok()); }

}  // namespace
}  // namespace dovetail::engine
