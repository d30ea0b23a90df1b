#include "kernels/sampling.h"

#include <cmath>
#include <map>

#include "gmock/gmock.h"
#include "kernels/reference/sampling.h"
#include "tests/kernels/oracle.h"

namespace dovetail::kernels::testing {
namespace {

using ::testing::HasSubstr;

class SamplingTest : public ::testing::TestWithParam<Isa> {
 protected:
  const OpsTable& table() const { return SelectOps(GetParam()); }

  absl::StatusOr<SampleResult> Sample(std::span<const float> logits, const SamplingParams& params,
                                      int64_t position = 7) {
    scratch_ = std::make_unique<Scratch>(SamplingScratchBytes(static_cast<int64_t>(logits.size())));
    return SampleRow(table(), logits, params, position, scratch_->span());
  }
  int32_t Token(std::span<const float> logits, const SamplingParams& params, int64_t position = 7) {
    const auto result = Sample(logits, params, position);
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? result->token : -1;
  }
  std::string Error(std::span<const float> logits, const SamplingParams& params) {
    return std::string(Sample(logits, params).status().message());
  }

 private:
  std::unique_ptr<Scratch> scratch_;
};

INSTANTIATE_TEST_SUITE_P(Isas, SamplingTest, ::testing::ValuesIn(TestableIsas()),
                         [](const auto& info) { return std::string(Name(info.param)); });

std::vector<float> Logits(int n, uint64_t seed, float spread = 4) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, spread);
  std::vector<float> x(n);
  for (float& v : x) v = normal(random);
  return x;
}

TEST_P(SamplingTest, GreedyTakesTheLargestAndTheLowestIdOnTies) {
  std::vector<float> x(1000, -3.0f);
  x[100] = x[17] = x[900] = 2.5f;
  EXPECT_EQ(Token(x, {.temperature = 0}), 17);
  x[999] = 2.75f;
  EXPECT_EQ(Token(x, {.temperature = 0}), 999);
  for (int n = 1; n < 70; ++n) {
    std::vector<float> y(n, -1.0f);
    y[n - 1] = -0.5f;
    EXPECT_EQ(Token(y, {.temperature = 0}), n - 1);
  }
}

TEST_P(SamplingTest, AgreesWithTheReferenceForEveryKindOfParameter) {
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    const int n = std::vector<int>{5, 64, 65, 300, 4097}[random() % 5];
    const auto logits = Logits(n, seed, random() % 2 ? 4.0f : 1.0f);
    SamplingParams p{.temperature = std::vector<float>{0, 0.3f, 1, 1.7f}[random() % 4], .seed = seed * 7919};
    p.top_k = std::vector<int>{0, 0, 1, 5, 50, 100000}[random() % 6];
    p.top_p = std::vector<float>{1, 1, 0.1f, 0.5f, 0.95f}[random() % 5];
    p.min_p = std::vector<float>{0, 0, 0.05f, 0.3f, 1}[random() % 5];
    std::vector<TokenCount> seen;
    if (random() % 2 == 0) {
      p.repetition_penalty = 1.3f;
      p.presence_penalty = 0.5f;
      p.frequency_penalty = -0.25f;
      for (int32_t id = 0; id < n; id += 3) seen.push_back({id, static_cast<int32_t>(random() % 4)});
    }
    std::vector<TokenBias> bias;
    if (random() % 2 == 0) bias = {{static_cast<int32_t>(random() % n), 3.0f}, {0, -100.0f}};
    std::vector<int32_t> allowed, banned;
    if (random() % 4 == 0) {
      for (int32_t id = 1; id < n; id += 2) allowed.push_back(id);
    }
    if (random() % 3 == 0) banned = {static_cast<int32_t>(2 * (random() % (n / 2)))};
    p.seen = seen;
    p.logit_bias = bias;
    p.allowed = allowed;
    p.banned = banned;
    for (int64_t position = 0; position < 5; ++position) {
      EXPECT_EQ(Token(logits, p, position), reference::Sample(logits, p, position));
    }
  }
}

TEST_P(SamplingTest, DrawsFromTheWholeRowAreTheExactArgmaxOfTheNoise) {
  const auto logits = Logits(49152, 3, 2);
  for (int64_t position = 0; position < 50; ++position) {
    const SamplingParams p{.temperature = 1.5f, .seed = 99};
    ASSERT_EQ(Token(logits, p, position), reference::Sample(logits, p, position)) << position;
  }
}

TEST_P(SamplingTest, TopPOverALargeFlatRowKeepsTheReferencesSet) {
  for (const float spread : {0.01f, 0.5f, 2.0f, 6.0f}) {
    const auto logits = Logits(20000, 31, spread);
    for (const float top_p : {0.01f, 0.3f, 0.9f, 0.999f}) {
      for (int64_t position = 0; position < 3; ++position) {
        const SamplingParams p{.top_p = top_p, .seed = 77};
        ASSERT_EQ(Token(logits, p, position), reference::Sample(logits, p, position)) << spread << " " << top_p;
      }
    }
  }
}

TEST_P(SamplingTest, TheVectorNoiseIsTheExactNoiseToItsMargin) {
  const int n = 100000;
  const std::vector<float> zero(n, 0.0f);
  std::vector<float> scores(n);
  const float top = table().gumbel_scores(zero.data(), n, 0x1234567890abcdefu, (uint64_t{5} << 32) + 9, scores.data());
  double worst = 0, max = -1e9, sum = 0;
  for (int i = 0; i < n; ++i) {
    const double exact = GumbelNoise(0x1234567890abcdefu, (int64_t{5} << 32) + 9, i);
    worst = std::max(worst, std::abs(scores[i] - exact));
    max = std::max(max, exact);
    sum += exact;
  }
  EXPECT_LE(worst, 1e-5);  // the margin of the second look is 1e-4
  EXPECT_NEAR(top, max, 1e-5);
  EXPECT_NEAR(sum / n, 0.5772156649, 0.015);  // the mean of the Gumbel distribution, 3.7 sigma
}

TEST(Philox, MatchesThePublishedTestVector) {
  // Random123's known answer for counter 0, key 0: the first word is 0x6627e8d5.
  const double v = (0x6627e8d5u + 0.5) * 0x1p-32;
  EXPECT_EQ(GumbelNoise(0, 0, 0), -std::log(-std::log1p(-v)));
  const double second = (0xe169c58du + 0.5) * 0x1p-32;
  EXPECT_EQ(GumbelNoise(0, 0, 16), -std::log(-std::log1p(-second)));
}

// Chi-square of `draws` draws at successive positions against the expected probabilities.
double ChiSquare(const std::map<int32_t, int>& counts, const reference::Distribution& d, int draws) {
  double mass = 0, chi = 0;
  for (const int32_t id : d.kept) mass += std::exp(d.z[id]);
  for (const int32_t id : d.kept) {
    const double expected = draws * std::exp(d.z[id]) / mass;
    const auto it = counts.find(id);
    const double got = it == counts.end() ? 0 : it->second;
    chi += (got - expected) * (got - expected) / expected;
  }
  return chi;
}

TEST_P(SamplingTest, DrawsFollowTheDistribution) {
  const auto logits = Logits(20, 5, 1);
  for (const SamplingParams& p :
       {SamplingParams{.temperature = 1, .seed = 1}, SamplingParams{.temperature = 0.7f, .top_p = 0.9f, .seed = 2},
        SamplingParams{.temperature = 1.3f, .top_k = 8, .seed = 3}, SamplingParams{.min_p = 0.1f, .seed = 4}}) {
    std::map<int32_t, int> counts;
    const int draws = 20000;
    for (int position = 0; position < draws; ++position) ++counts[Token(logits, p, position)];
    const reference::Distribution d = reference::Process(logits, p);
    for (const auto& [id, count] : counts) EXPECT_THAT(d.kept, ::testing::Contains(id));
    const double freedom = static_cast<double>(d.kept.size()) - 1;
    // Mean freedom, variance 2 freedom; seeds are fixed, four sigma leave no room for luck.
    EXPECT_LE(ChiSquare(counts, d, draws), freedom + 4 * std::sqrt(2 * freedom)) << p.seed;
  }
}

TEST_P(SamplingTest, ADrawDependsOnSeedAndPositionOnly) {
  const auto logits = Logits(300, 8, 1);
  const SamplingParams p{.seed = 42};
  EXPECT_EQ(Token(logits, p, 3), Token(logits, p, 3));
  std::map<int32_t, int> by_position, by_seed;
  for (int i = 0; i < 50; ++i) {
    ++by_position[Token(logits, p, i)];
    ++by_seed[Token(logits, {.seed = static_cast<uint64_t>(i)}, 3)];
  }
  EXPECT_GT(by_position.size(), 20u);
  EXPECT_GT(by_seed.size(), 20u);
}

TEST_P(SamplingTest, LogprobsAreThoseOfTheRawLogits) {
  auto logits = Logits(5000, 12);
  logits[77] = logits[78] = 30;  // a tie at the top
  const std::vector<int32_t> banned = {77, 78};
  const auto result = Sample(logits, {.temperature = 0, .banned = banned, .logprobs = 5});
  ASSERT_TRUE(result.ok()) << result.status();
  const auto expected = reference::Logprobs(logits);
  const double budget = Budget("sampling.logprobs", "f32");
  ASSERT_EQ(result->top.size(), 5u);
  EXPECT_EQ(result->top[0].token, 77);
  EXPECT_EQ(result->top[1].token, 78);
  EXPECT_EQ(result->top[2].token, result->token);
  EXPECT_EQ(result->chosen.rank, 3);
  EXPECT_NEAR(result->chosen.logprob, expected[result->token], budget);
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_NEAR(result->top[i].logprob, expected[result->top[i].token], budget);
    EXPECT_EQ(result->top[i].rank, static_cast<int>(i) + 1);
    if (i > 0) {
      EXPECT_LE(result->top[i].logprob, result->top[i - 1].logprob);
    }
  }
  Scratch scratch(SamplingScratchBytes(5000));
  const auto prompt = RowLogprobs(table(), logits, 78, 2, scratch.span());
  ASSERT_TRUE(prompt.ok());
  EXPECT_EQ(prompt->chosen.rank, 2);  // both of the tie are at least as likely
  EXPECT_NEAR(prompt->chosen.logprob, expected[78], budget);
}

TEST_P(SamplingTest, ASmallVocabularyGivesAllItsLogprobs) {
  const auto logits = Logits(3, 1);
  const auto result = Sample(logits, {.temperature = 0, .logprobs = 20});
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->top.size(), 3u);
}

TEST_P(SamplingTest, ATinyTemperatureWithHugeLogitsTakesTheLargest) {
  std::vector<float> logits(100, -1e30f);
  logits[40] = 3e30f;
  EXPECT_EQ(Token(logits, {.temperature = 2e-5f, .seed = 1}), 40);
  EXPECT_EQ(Token(logits, {.temperature = 2e-5f, .top_k = 3, .top_p = 0.5f, .seed = 1}), 40);
}

TEST_P(SamplingTest, FlatLogitsAreNoProblemForTopP) {
  const std::vector<float> logits(65536, 1.0f);
  const SamplingParams p{.top_p = 0.25f, .seed = 5};
  for (int position = 0; position < 4; ++position) EXPECT_LT(Token(logits, p, position), 65536 / 4 + 2);
}

TEST_P(SamplingTest, BadLogitsAndParametersGiveAnErrorThatSaysWhich) {
  auto logits = Logits(200, 1);
  for (const int at : {0, 63, 130, 199}) {
    auto bad = logits;
    bad[at] = NAN;
    EXPECT_THAT(Error(bad, {.temperature = 0}), HasSubstr("a logit is not a number")) << at;
    bad[at] = INFINITY;
    EXPECT_THAT(Error(bad, {.temperature = 1}), HasSubstr("a logit is infinite")) << at;
    bad[at] = -INFINITY;
    EXPECT_EQ(Error(bad, {.temperature = 1}), "");
  }
  const std::vector<int32_t> outside = {200}, all_banned = {5};
  const std::vector<TokenBias> infinite = {{3, INFINITY}};
  EXPECT_THAT(Error(logits, {.allowed = outside}), HasSubstr("allowed_token_ids: token id 200 is outside 0..199"));
  EXPECT_THAT(Error(logits, {.allowed = all_banned, .banned = all_banned}), HasSubstr("leave no token to choose"));
  EXPECT_THAT(Error(logits, {.logit_bias = infinite}), HasSubstr("logit_bias"));
  EXPECT_THAT(Error(logits, {.temperature = -1}), HasSubstr("temperature: -1"));
  EXPECT_THAT(Error(logits, {.temperature = NAN}), HasSubstr("temperature"));
  EXPECT_THAT(Error(logits, {.top_p = 0}), HasSubstr("top_p: 0 is outside (0, 1]"));
  EXPECT_THAT(Error(logits, {.min_p = 1.5f}), HasSubstr("min_p"));
  EXPECT_THAT(Error(logits, {.repetition_penalty = 0}), HasSubstr("repetition_penalty"));
  EXPECT_THAT(Error(logits, {.logprobs = 5000}), HasSubstr("logprobs: 5000"));
  EXPECT_THAT(Error({}, {}), HasSubstr("a row of 0 logits"));
}

}  // namespace
}  // namespace dovetail::kernels::testing
