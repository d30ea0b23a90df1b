#include "kernels/moe.h"

#include <cmath>

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
  const auto routed = RouteRows({0, 2, -2}, {.selection_bias = bias, .score = RouterScore::kSigmoid,
                                             .renormalise = false, .scale = 2, .experts = 3, .chosen = 2});
  EXPECT_THAT(routed.expert, ElementsAre(2, 1));
  EXPECT_NEAR(routed.weight[0], 2 / (1 + std::exp(2.0)), 1e-6);
  EXPECT_NEAR(routed.weight[1], 2 / (1 + std::exp(-2.0)), 1e-6);
}

TEST_F(Experts, OfEqualScoresTheLowerNumberIsChosen) {
  EXPECT_THAT(RouteRows({1, 1, 1, 1}, {.experts = 4, .chosen = 3}).expert, ElementsAre(0, 1, 2));
}

TEST_F(Experts, TheSoftmaxOfTheChosenOnesSumsToOne) {
  const auto routed =
      RouteRows({1, 2, 3, 4}, {.score = RouterScore::kSoftmaxOfChosen, .experts = 4, .chosen = 2});
  EXPECT_THAT(routed.expert, ElementsAre(3, 2));
  EXPECT_NEAR(routed.weight[0], 1 / (1 + std::exp(-1.0)), 1e-6);
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
  const StepDecayArgs decay{.x = x.data(), .bias = bias.data(), .factor = factor.data(), .rows = 1, .heads = 2,
                            .width = 1, .stride = 2, .out = out.data()};
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
