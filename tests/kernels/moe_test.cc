#include "kernels/moe.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/state_gates.h"
#include "kernels/thread_pool.h"
#include "tests/kernels/oracle.h"

namespace dovetail::kernels::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::FloatNear;

class Experts : public ::testing::Test {
 protected:
  struct Routed {
    std::vector<int32_t> expert;
    std::vector<float> weight;
  };
  Routed RouteRows(const std::vector<float>& logits, RouteArgs args) {
    Routed out;
    args.logits = logits.data();
    args.rows = static_cast<int64_t>(logits.size()) / args.experts;
    out.expert.resize(args.rows * args.chosen);
    out.weight.resize(args.rows * args.chosen);
    args.expert = out.expert.data();
    args.weight = out.weight.data();
    EXPECT_TRUE(Route(context_, args).ok());
    return out;
  }

  ThreadPool pool_{{.threads = 2}};
  const OpContext context_{&pool_, &SelectOps(Isa::kAvx2)};
};

TEST_F(Experts, TheLargestScoresAreChosenAndWeighTheirShare) {
  const auto routed = RouteRows({0, std::log(3.0f), std::log(2.0f), -5}, {.experts = 4, .chosen = 2});
  EXPECT_THAT(routed.expert, ElementsAre(1, 2));
  EXPECT_THAT(routed.weight, ElementsAre(FloatNear(0.6f, 1e-6f), FloatNear(0.4f, 1e-6f)));
}

TEST_F(Experts, SharesOfAllExpertsStayWhenTheyAreNotRenormalised) {
  const auto routed = RouteRows({0, std::log(3.0f)}, {.renormalise = false, .experts = 2, .chosen = 1});
  EXPECT_THAT(routed.weight, ElementsAre(FloatNear(0.75f, 1e-6f)));
}

TEST_F(Experts, ABiasChoosesButDoesNotWeigh) {
  const float bias[] = {0, 0, 10};
  const auto routed = RouteRows({0, 2, -2}, {.selection_bias = bias,
                                             .score = RouterScore::kSigmoid,
                                             .renormalise = false,
                                             .scale = 2,
                                             .experts = 3,
                                             .chosen = 2});
  EXPECT_THAT(routed.expert, ElementsAre(2, 1));
  EXPECT_NEAR(routed.weight[0], 2 / (1 + std::exp(2.0)), 1e-6);
  EXPECT_NEAR(routed.weight[1], 2 / (1 + std::exp(-2.0)), 1e-6);
}

TEST_F(Experts, OfEqualScoresTheLowerNumberIsChosen) {
  EXPECT_THAT(RouteRows({1, 1, 1, 1}, {.experts = 4, .chosen = 3}).expert, ElementsAre(0, 1, 2));
}

TEST_F(Experts, TheSoftmaxOfTheChosenOnesSumsToOne) {
  const auto routed = RouteRows({1, 2, 3, 4}, {.score = RouterScore::kSoftmaxOfChosen, .experts = 4, .chosen = 2});
  EXPECT_THAT(routed.expert, ElementsAre(3, 2));
  EXPECT_NEAR(routed.weight[0], 1 / (1 + std::exp(-1.0)), 1e-6);
}

// Everything in double, by sorting: groups by their two best scores, then experts of the best groups.
std::vector<std::pair<int, double>> ReferenceRoute(const float* logits, const std::vector<float>& bias,
                                                   const RouteArgs& args) {
  const int size = args.experts / args.groups;
  std::vector<double> scores(args.experts), choice(args.experts), group(args.groups);
  for (int e = 0; e < args.experts; ++e) {
    scores[e] = 1 / (1 + std::exp(-static_cast<double>(logits[e])));
    choice[e] = scores[e] + bias[e];
  }
  for (int g = 0; g < args.groups; ++g) {
    std::vector<double> own(choice.begin() + g * size, choice.begin() + (g + 1) * size);
    std::sort(own.rbegin(), own.rend());
    group[g] = own[0] + own[1];
  }
  const auto sorted = [](const std::vector<double>& values) {
    std::vector<int> order(values.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return values[a] > values[b]; });
    return order;
  };
  const std::vector<int> groups = sorted(group);
  const std::vector<int> chosen_groups(groups.begin(), groups.begin() + args.chosen_groups);
  std::vector<std::pair<int, double>> out;
  for (const int e : sorted(choice)) {
    const bool in = std::count(chosen_groups.begin(), chosen_groups.end(), e / size) > 0;
    if (in && static_cast<int>(out.size()) < args.chosen) out.emplace_back(e, scores[e]);
  }
  double total = 0;
  for (const auto& [e, weight] : out) total += weight;
  for (auto& [e, weight] : out) weight *= args.scale / (args.renormalise ? total : 1);
  return out;
}

TEST_F(Experts, OfGroupsTheBestAreLookedAtAsADoubleReferenceDoes) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal(0, 1.5f);
  int elsewhere = 0;  // rows whose experts would be others without groups
  for (const RouteArgs& shape : {RouteArgs{.experts = 16, .chosen = 3, .groups = 4, .chosen_groups = 2},
                                 RouteArgs{.experts = 256, .chosen = 8, .groups = 8, .chosen_groups = 4},
                                 RouteArgs{.experts = 512, .chosen = 22, .groups = 16, .chosen_groups = 3},
                                 RouteArgs{.experts = 12, .chosen = 4, .groups = 6, .chosen_groups = 2},
                                 RouteArgs{.experts = 1024, .chosen = 1, .groups = 512, .chosen_groups = 1}}) {
    for (const bool renormalise : {true, false}) {
      RouteArgs args = shape;
      args.score = RouterScore::kSigmoid;
      args.renormalise = renormalise;
      args.scale = 2.5f;
      const int rows = 50;
      std::vector<float> logits(rows * args.experts), bias(args.experts);
      for (float& x : logits) x = normal(random);
      for (float& x : bias) x = 0.2f * normal(random);
      args.selection_bias = bias.data();
      const Routed found = RouteRows(logits, args);
      RouteArgs whole = args;
      whole.groups = whole.chosen_groups = 1;
      const Routed without = RouteRows(logits, whole);
      for (int row = 0; row < rows; ++row) {
        const auto expected = ReferenceRoute(logits.data() + row * args.experts, bias, args);
        ASSERT_EQ(expected.size(), static_cast<size_t>(args.chosen));
        bool same = true;
        for (int s = 0; s < args.chosen; ++s) {
          const int at = row * args.chosen + s;
          ASSERT_EQ(found.expert[at], expected[s].first) << args.experts << " experts, row " << row << ", place " << s;
          ASSERT_NEAR(found.weight[at], expected[s].second, 1e-6 * std::max(1.0, expected[s].second));
          same &= found.expert[at] == without.expert[at];
        }
        elsewhere += !same;
      }
    }
  }
  EXPECT_GT(elsewhere, 250);  // of 500
}

TEST_F(Experts, AGroupIsItsTwoBestExpertsAndOfEqualGroupsTheLowerIsTaken) {
  const RouterScore plain = RouterScore::kSoftmaxOfChosen;  // logits choose
  // The best expert of all, 5, lies in a group whose second one is poor.
  EXPECT_THAT(RouteRows({3, 3, 0, 4, -9, 5}, {.score = plain, .experts = 6, .chosen = 2, .groups = 3}).expert,
              ElementsAre(0, 1));
  EXPECT_THAT(RouteRows({1, 2, 2, 1, 0, 3}, {.score = plain, .experts = 6, .chosen = 2, .groups = 3}).expert,
              ElementsAre(1, 0));
  EXPECT_THAT(RouteRows({NAN, 9, 1, 1, 0, 0}, {.score = plain, .experts = 6, .chosen = 2, .groups = 3}).expert,
              ElementsAre(2, 3));  // with a NaN a group comes last
}

TEST_F(Experts, GroupsThatCannotBeAreRefused) {
  const auto error = [&](RouteArgs args) {
    args.rows = 1;
    return std::string(Route(context_, args).message());
  };
  EXPECT_EQ(error({.experts = 16, .chosen = 2, .groups = 3}), "router: 2 experts from 1 of 3 groups of 16 experts");
  EXPECT_EQ(error({.experts = 16, .chosen = 2, .groups = 16}), "router: 2 experts from 1 of 16 groups of 16 experts");
  EXPECT_EQ(error({.experts = 16, .chosen = 5, .groups = 4}), "router: 5 experts from 1 of 4 groups of 16 experts");
  EXPECT_EQ(error({.experts = 16, .chosen = 2, .groups = 4, .chosen_groups = 5}),
            "router: 2 experts from 5 of 4 groups of 16 experts");
}

TEST_F(Experts, OutputsAreSummedWithTheirWeights) {
  const std::vector<float> parts = {1, 2, 10, 20, 100, 200};
  const std::vector<int32_t> slot = {2, 0, 1, 1};
  const std::vector<float> weight = {0.5f, 2, 1, 1};
  std::vector<float> out = {1000, 1000, 0, 0};
  ASSERT_TRUE(CombineExperts(context_, {parts.data(), slot.data(), weight.data(), 2, 2, 2, 0.5f, out.data()}).ok());
  EXPECT_THAT(out, ElementsAre(1026, 1052, 10, 20));
}

TEST_F(Experts, MoreExpertsThanThereAreIsRefused) {
  EXPECT_EQ(Route(context_, {.rows = 1, .experts = 4, .chosen = 5}).message(),
            "router: 5 of 4 experts for 1 rows; at most 1024 experts are supported");
}

TEST_F(Experts, GatesOfAStateAreItsDecaysAndRates) {
  const std::vector<float> x = {0.5f, -3}, bias = {0, 1}, factor = {-2, -4};
  std::vector<float> out(4);
  const StepDecayArgs decay{.x = x.data(),
                            .bias = bias.data(),
                            .factor = factor.data(),
                            .rows = 1,
                            .heads = 2,
                            .width = 1,
                            .stride = 2,
                            .out = out.data()};
  ASSERT_TRUE(StepDecay(context_, decay).ok());
  ASSERT_TRUE(SigmoidRate(context_, {x.data(), 2, 1, 2, 2, 1, out.data()}).ok());
  EXPECT_NEAR(out[0], -2 * std::log1p(std::exp(0.5)), 1e-6);
  EXPECT_NEAR(out[2], -4 * std::log1p(std::exp(-2.0)), 1e-6);
  EXPECT_NEAR(out[1], 2 / (1 + std::exp(-0.5)), 1e-6);
  EXPECT_NEAR(out[3], 2 / (1 + std::exp(3.0)), 1e-6);
  StepDecayArgs limited = decay;
  limited.low = 0.5f;
  limited.rate = true;  // Mamba-2: the step size itself
  ASSERT_TRUE(StepDecay(context_, limited).ok());
  EXPECT_NEAR(out[3], 0.5, 1e-6);
  EXPECT_NEAR(out[2], -2, 1e-6);
}

}  // namespace
}  // namespace dovetail::kernels::testing
