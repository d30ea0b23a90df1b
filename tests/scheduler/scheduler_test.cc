#include "scheduler/core/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/scheduler/fake_cluster.h"

namespace dovetail::scheduler {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

ClusterOptions SmallCluster(int workers = 1) {
  ClusterOptions options;
  options.scheduler.attention = SmallTable();
  options.scheduler.max_num_batched_tokens = 256;
  options.kv_blocks.assign(workers, 100000);
  return options;
}

GenerationRequest Ask(int prompt, int max_tokens, const std::string& tenant = "a", uint64_t seed = 7) {
  GenerationRequest request;
  request.tenant = tenant;
  request.prompt = SomePrompt(prompt, seed);
  request.max_tokens = max_tokens;
  request.sampling.seed = seed;
  return request;
}

void ExpectClean(FakeCluster& cluster) {
  EXPECT_THAT(cluster.violations(), IsEmpty());
  EXPECT_EQ(cluster.sequences_held(), 0);
  EXPECT_EQ(cluster.steps_in_flight(), 0);
  const SchedulerStats stats = cluster.core().stats();
  EXPECT_EQ(stats.running_sequences, 0);
  EXPECT_EQ(stats.waiting_requests, 0);
  EXPECT_EQ(stats.paused_requests, 0);
  EXPECT_EQ(stats.kv_usage, 0);
}

TEST(ContinuousBatching, ARequestGetsTheTokensOfTheModel) {
  FakeCluster cluster(SmallCluster());
  const RequestId id = cluster.Submit(Ask(10, 5));
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(id).tokens, cluster.Undisturbed(cluster.request(id), 0));
  EXPECT_EQ(cluster.stream(id).tokens.size(), 5u);
  EXPECT_EQ(cluster.stream(id).reason, FinishReason::kLength);
  EXPECT_EQ(cluster.steps, 5u);
  ExpectClean(cluster);
}

TEST(ContinuousBatching, RequestsShareSteps) {
  FakeCluster cluster(SmallCluster());
  for (int i = 0; i < 20; ++i) cluster.Submit(Ask(10 + i, 8, "a", i + 1));
  cluster.RunUntilIdle();
  for (RequestId id : cluster.requests()) EXPECT_EQ(cluster.stream(id).tokens, cluster.Undisturbed(cluster.request(id), 0));
  EXPECT_EQ(cluster.most_sequences_in_step, 20);
  EXPECT_LT(cluster.steps, 14u);
  ExpectClean(cluster);
}

TEST(ContinuousBatching, ChoicesAreForkedAndDrawWithTheirOwnSeeds) {
  FakeCluster cluster(SmallCluster(2));
  GenerationRequest request = Ask(150, 70);
  request.choices = 4;
  const RequestId id = cluster.Submit(request);
  cluster.RunUntilIdle();
  for (int i = 0; i < 4; ++i) EXPECT_EQ(cluster.stream(id, i).tokens, cluster.Undisturbed(cluster.request(id), i));
  EXPECT_NE(cluster.stream(id, 0).tokens, cluster.stream(id, 1).tokens);
  ExpectClean(cluster);
}

}  // namespace
}  // namespace dovetail::scheduler
