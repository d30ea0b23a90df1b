#pragma once
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/scheduler/fake_cluster.h"

// A fake cluster, a request for it, and what must be true when it has come to rest.

namespace dovetail::scheduler {

inline ClusterOptions SmallCluster(int workers = 1) {
  ClusterOptions options;
  options.scheduler.attention = SmallTable();
  options.scheduler.max_num_batched_tokens = 256;
  options.kv_blocks.assign(workers, 100000);
  return options;
}

inline GenerationRequest Ask(int prompt, int max_tokens, const std::string& tenant = "a", uint64_t seed = 7) {
  GenerationRequest request;
  request.tenant = tenant;
  request.prompt = SomePrompt(prompt, seed);
  request.max_tokens = max_tokens;
  request.sampling.seed = seed;
  return request;
}

inline void ExpectClean(FakeCluster& cluster) {
  EXPECT_THAT(cluster.violations(), testing::IsEmpty());
  EXPECT_EQ(cluster.sequences_held(), 0);
  EXPECT_EQ(cluster.steps_in_flight(), 0);
  const SchedulerStats stats = cluster.core().stats();
  EXPECT_EQ(stats.running_sequences, 0);
  EXPECT_EQ(stats.waiting_requests, 0);
  EXPECT_EQ(stats.paused_requests, 0);
  EXPECT_EQ(stats.kv_usage, 0);
}

// All requests have the tokens that nothing but themselves leads to.
inline void ExpectUndisturbed(FakeCluster& cluster) {
  for (const RequestId id : cluster.requests()) {
    const GenerationRequest& request = cluster.request(id);
    for (int choice = 0; choice < request.choices; ++choice) {
      EXPECT_EQ(cluster.stream(id, choice).error, "");
      EXPECT_TRUE(cluster.stream(id, choice).finished);
      EXPECT_EQ(cluster.stream(id, choice).tokens, cluster.Undisturbed(request, choice)) << id.value();
    }
  }
  ExpectClean(cluster);
}

}  // namespace dovetail::scheduler
