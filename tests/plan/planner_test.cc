#include "plan/planner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/plan/small_model.h"
#include "tests/plan/small_profile.h"

namespace dovetail::plan {
namespace {

using ::testing::HasSubstr;

// A step of 10 ms, one sequence at a time: a server makes 100 tokens a second.
PlanInput OneAtATime(int64_t most) {
  PlanInput input;
  input.work = SmallModel();
  DeviceProfile profile = SmallProfile();
  profile.products[0].points = {{1, 1e-30}};
  profile.steps = {.step_s = 10e-3};
  profile.attention = {{DType::kBF16, 64, 1, 1e30, 1e30}};
  profile.links = {{"shm", 0, 1e30}};
  input.devices = {{profile, most}};
  input.catalogue = {"test", "2026-11-26", {}};
  input.catalogue.Override("small", 2);
  input.max_num_seqs = 1;
  for (int i = 0; i < 40; ++i) input.requests.push_back({0.008 * i, 1, 1});  // 125 a second
  input.slo.ttft_s = 0.025;
  return input;
}

const LayoutPlan* Find(const Plan& plan, const std::string& name) {
  for (const LayoutPlan& one : plan.tried)
    if (one.layout.name == name) return &one;
  return nullptr;
}

TEST(Planner, TakesAsManyServersAsTheSloNeeds) {
  const auto plan = MakePlan(OneAtATime(3));
  ASSERT_TRUE(plan.ok()) << plan.status();
  const LayoutPlan* const one = Find(*plan, "compute.small:1");
  ASSERT_NE(one, nullptr);
  EXPECT_FALSE(one->meets);
  EXPECT_TRUE(one->outcome.stopped);
  ASSERT_TRUE(plan->best.has_value());
  const LayoutPlan& best = plan->tried[*plan->best];
  EXPECT_EQ(best.layout.name, "compute.small:2");
  EXPECT_EQ(best.usd_low, 4);
  EXPECT_EQ(best.outcome.good_share, 1);
  EXPECT_NEAR(best.outcome.ttft.p99, 0.010, 1e-9) << "62.5 a second and server, each 10 ms: none waits";
  // 40 tokens until 39 x 8 + 10 ms have passed.
  EXPECT_NEAR(best.outcome.throughput.output_tokens_s, 40 / 0.322, 0.7);
  EXPECT_NEAR(*best.low.output_usd, 4 / (best.outcome.throughput.output_tokens_s * 3600) * 1e6, 1e-6);
  EXPECT_EQ(best.binds, "overhead");
  EXPECT_EQ(Find(*plan, "compute.small:3"), nullptr) << "it costs more and was not tried";
  EXPECT_GE(plan->left_out, 1);
}

TEST(Planner, FindsTheLargestLoadThatMeetsTheSlo) {
  const auto plan = MakePlan(OneAtATime(2));
  ASSERT_TRUE(plan.ok()) << plan.status();
  const LayoutPlan& best = plan->tried[*plan->best];
  // Two servers take 200 a second, 1.6 times the load; a bit more meets it, since the run is short.
  EXPECT_GE(best.most_load, 1.5);
  EXPECT_LT(best.most_load, 2);
  EXPECT_NEAR(best.most_output_tokens_s, 200, 10);
}

TEST(Planner, KeepsToTheBudget) {
  PlanInput input = OneAtATime(3);
  input.budget = 3;
  const auto plan = MakePlan(input);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_FALSE(plan->best.has_value());
  EXPECT_EQ(plan->tried.size(), 1u) << "one device is all that it allows";
  EXPECT_GE(plan->over_budget, 2);
}

TEST(Planner, ChargesHostsWithEveryLayout) {
  PlanInput input = OneAtATime(2);
  input.catalogue.Override("host", 0.5);
  input.hosts = {{Role::kHost, "host", 2}};
  const auto plan = MakePlan(input);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->tried[*plan->best].usd_low, 5);
}

// On identical devices nothing is gained: the second device makes no token, so no price of it pays.
TEST(Planner, ASplitOverTheSameDevicesPaysAtNoPrice) {
  PlanInput input = OneAtATime(2);
  for (size_t i = 0; i < input.requests.size(); ++i) input.requests[i].at_s = 0.020 * static_cast<double>(i);
  const auto plan = MakePlan(input);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->tried[*plan->best].layout.name, "compute.small:1");
  ASSERT_TRUE(plan->best_split.has_value());
  EXPECT_EQ(plan->tried[*plan->best_split].layout.name, "compute.small:1,attention.small:1");
  ASSERT_TRUE(plan->break_even.has_value());
  EXPECT_NEAR(plan->break_even->ratio_low, 0, 0.1);
  EXPECT_EQ(plan->break_even->prices_low, 1);
}

// Where the weights leave no room, memory next to the device makes the difference.
TEST(Planner, SaysThatWeightsDoNotFit) {
  PlanInput input = OneAtATime(1);
  input.devices[0].profile.memory_gb = 1e-9;
  const auto plan = MakePlan(input);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_THAT(plan->tried[0].impossible, HasSubstr("GB of weights do not fit"));
  EXPECT_FALSE(plan->best.has_value());
}

TEST(Planner, RoomForKvBinds) {
  PlanInput input = OneAtATime(1);
  input.max_num_seqs = 64;
  input.slo = {};
  input.requests.assign(64, {0, 100, 60});
  const double weights = 2500 * 2, block = 64 * 256, blocks = 20;  // 160 tokens take 6 blocks
  input.devices[0].profile.memory_gb = (weights + blocks * block) / 0.9e9;
  const auto plan = MakePlan(input);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->tried[0].binds, "KV capacity");
}

TEST(Planner, PredictsGivenLayoutsWholly) {
  PlanInput input = OneAtATime(1);
  input.only = {*ParseMachines("compute.small:1"), *ParseMachines("compute.small:1,attention.small:2")};
  const auto plan = MakePlan(input);
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_EQ(plan->tried.size(), 2u);
  for (const LayoutPlan& one : plan->tried) {
    EXPECT_FALSE(one.outcome.stopped) << one.layout.name;
    EXPECT_GT(one.outcome.ttft.p99, 0.025) << "misses the SLO, and says by how much";
  }
  input.only = {*ParseMachines("compute.large:1")};
  input.catalogue.Override("large", 1);
  EXPECT_THAT(std::string(MakePlan(input).status().message()), HasSubstr("large has no profile"));
}

TEST(Planner, ASloIsAShareOfRequests) {
  Slo slo{.ttft_s = 0.1, .tpot_s = 0.01, .e2el_s = {}};
  EXPECT_TRUE(slo.Holds({.finished = true, .ttft_s = 0.1, .latency_s = 0.2, .output = 11}));
  EXPECT_FALSE(slo.Holds({.finished = true, .ttft_s = 0.101, .latency_s = 0.2, .output = 11}));
  EXPECT_FALSE(slo.Holds({.finished = true, .ttft_s = 0.1, .latency_s = 0.3, .output = 11}));
  EXPECT_TRUE(slo.Holds({.finished = true, .ttft_s = 0.1, .latency_s = 0.1, .output = 1}));
}

}  // namespace
}  // namespace dovetail::plan
