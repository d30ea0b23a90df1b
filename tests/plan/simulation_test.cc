#include "plan/simulation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/plan/small_model.h"
#include "tests/plan/small_profile.h"

namespace dovetail::plan {
namespace {

using ::testing::HasSubstr;

// A step takes 10 ms, whatever is in it, and with `attention` 10 ms more of the attention worker for each 64 tokens
// that decodes read: 2 ops x 64 x 256 bytes.
DeviceProfile TenMilliseconds(bool attention = true) {
  DeviceProfile profile = SmallProfile();
  profile.products[0].points = {{1, 1e-30}};
  profile.steps = {.step_s = 10e-3};
  profile.attention = {{DType::kBF16, 64, 1, attention ? 2 * 64 * 256 / 10e-3 : 1e30, 1e30}};
  return profile;
}

SimulatedCluster Cluster(int micro_batches = 1, uint64_t kv_blocks = 10000) {
  SimulatedCluster cluster;
  cluster.kv_blocks = kv_blocks;
  cluster.options.max_num_seqs = 8;
  cluster.options.max_num_batched_tokens = 512;
  cluster.options.max_model_len = 4096;
  cluster.options.micro_batches = micro_batches;
  cluster.options.enable_prefix_caching = false;
  cluster.options.attention = SmallModel().attention;
  return cluster;
}

StepModel Steps(bool split, bool attention) {
  const DeviceProfile profile = TenMilliseconds(attention);
  std::optional<OtherDevice> other;
  if (split) other = OtherDevice{profile, {"none", 0, 1e30}};
  return *StepModel::Create(SmallModel(), profile, other);
}

TEST(Simulation, ARequestTakesItsSteps) {
  const std::vector<SimulatedRequest> requests = {{0.5, 20, 3}};
  const auto result = Simulate(Steps(false, false), Cluster(), requests);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->steps, 3u);
  EXPECT_NEAR(result->requests[0].ttft_s, 0.010, 1e-9);
  EXPECT_NEAR(result->requests[0].latency_s, 0.030, 1e-9);
  EXPECT_NEAR(result->requests[0].tpot_s(), 0.010, 1e-9);
  EXPECT_EQ(result->requests[0].output, 3);
  EXPECT_NEAR(result->seconds(), 0.030, 1e-9);
  EXPECT_NEAR(result->parts.overhead_s, 0.030, 1e-9);
}

TEST(Simulation, ARequestThatComesDuringAStepWaitsForTheNext) {
  const std::vector<SimulatedRequest> requests = {{0, 20, 3}, {0.004, 20, 2}};
  const auto result = Simulate(Steps(false, false), Cluster(), requests);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_NEAR(result->requests[1].ttft_s, 0.016, 1e-9);
  EXPECT_NEAR(result->requests[1].latency_s, 0.026, 1e-9);
  EXPECT_NEAR(result->requests[0].latency_s, 0.030, 1e-9) << "they share steps";
  EXPECT_EQ(result->steps, 3u);
}

TEST(Simulation, LongPromptsTakeTheSchedulersChunks) {
  const std::vector<SimulatedRequest> requests = {{0, 1200, 1}};
  const auto result = Simulate(Steps(false, false), Cluster(), requests);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->steps, 3u) << "1200 tokens in steps of 512";
}

// With sequences of 20 tokens on average: alone a step takes 10 ms and 20 x 3.1 ms of attention, one after the other.
// Two micro-batches keep the attention worker busy for 2 x 31 ms, and the dense half hides behind it.
TEST(Simulation, MicroBatchesOverlapTheHalvesOfASplitLayout) {
  const std::vector<SimulatedRequest> requests(20, {0, 1, 40});
  SimulatedCluster cluster = Cluster(1);
  cluster.options.max_num_seqs = 20;
  const auto alone = Simulate(Steps(true, true), cluster, requests);
  cluster.options.micro_batches = 2;
  const auto two = Simulate(Steps(true, true), cluster, requests);
  ASSERT_TRUE(alone.ok() && two.ok()) << alone.status() << two.status();
  const double attention_s = 20 * (20.5 / 64) * 0.010;  // of a token of all 20 sequences
  EXPECT_NEAR(alone->requests[0].tpot_s(), 0.010 + attention_s, 0.005);
  EXPECT_NEAR(two->requests[0].tpot_s(), attention_s, 0.005);
  EXPECT_GT(two->attention_busy, 0.95);
  EXPECT_LE(two->attention_busy, 1 + 1e-9) << "a device does one thing at a time";
}

TEST(Simulation, RequestsWaitForRoom) {
  // A sequence of 200 tokens takes 4 blocks of 64 tokens in 2 ops.
  const std::vector<SimulatedRequest> requests(4, {0, 190, 10});
  const auto little = Simulate(Steps(false, false), Cluster(1, 10), requests);
  const auto enough = Simulate(Steps(false, false), Cluster(1, 1000), requests);
  ASSERT_TRUE(little.ok() && enough.ok()) << little.status() << enough.status();
  EXPECT_GT(little->seconds(), 2 * enough->seconds());
  EXPECT_GE(little->most_kv_usage, 0.8);
  EXPECT_LE(enough->most_kv_usage, 0.1);
  EXPECT_EQ(enough->waiting_for_kv, 0);
}

TEST(Simulation, WhatFitsNowhereIsAnErrorAndNoZero) {
  const std::vector<SimulatedRequest> requests = {{0, 1000, 10}};
  const auto result = Simulate(Steps(false, false), Cluster(1, 10), requests);
  EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("a request of 1000 and 10 tokens cannot be served"));
  EXPECT_EQ(Simulate(Steps(false, false), Cluster(), {}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(Simulation, StopsWhereItIsHopeless) {
  const std::vector<SimulatedRequest> requests = {{0, 1, 1}, {1, 1, 1}, {2, 1, 1}};
  int asked = 0;
  const auto result =
      Simulate(Steps(false, false), Cluster(), requests, [&](const RequestTimes&) { return ++asked == 2; });
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(result->stopped);
  EXPECT_TRUE(result->requests[1].finished);
  EXPECT_FALSE(result->requests[2].finished);
}

TEST(Simulation, IsTheSameEveryTime) {
  std::vector<SimulatedRequest> requests;
  for (int i = 0; i < 50; ++i) requests.push_back({0.003 * i, 1 + 37 * i % 300, 1 + 11 * i % 40});
  const auto a = Simulate(Steps(true, true), Cluster(2), requests),
             b = Simulate(Steps(true, true), Cluster(2), requests);
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_EQ(a->steps, b->steps);
  for (size_t i = 0; i < requests.size(); ++i) EXPECT_EQ(a->requests[i].latency_s, b->requests[i].latency_s) << i;
}

}  // namespace
}  // namespace dovetail::plan
