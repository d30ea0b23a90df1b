#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/scheduler/small_cluster.h"

// Sequences that move between attention workers with their KV: away from one that drains, towards one that joins.

namespace dovetail::scheduler {
namespace {

proto::AttentionTable Table() {
  proto::SoftmaxSpec full{.query_heads = 8, .kv_heads = 4, .key_dim = 8, .value_dim = 8, .scale = 1};
  proto::SoftmaxSpec windowed = full;
  windowed.window = 100;
  return *proto::AttentionTable::Build({full, windowed});
}

ClusterOptions Options(PlacementPolicy placement, int workers) {
  ClusterOptions options;
  options.scheduler.max_num_seqs = 16;
  options.scheduler.max_num_batched_tokens = 256;
  options.scheduler.max_model_len = 1024;
  options.scheduler.placement = placement;
  options.scheduler.token_shard_tokens = 64;
  options.scheduler.micro_batches = 2;
  options.scheduler.attention = Table();
  options.kv_blocks.assign(workers, 2000);
  options.answer_delay_most = absl::Microseconds(300);
  return options;
}

GenerationRequest Request(int salt, int prompt, int max_tokens) {
  GenerationRequest request;
  request.tenant = "t";
  for (int i = 0; i < prompt; ++i) request.prompt.push_back((salt * 7 + i * i) % 50);
  request.max_tokens = max_tokens;
  return request;
}

Epoch After(Epoch epoch) { return Epoch(epoch.value() + 1); }
absl::Time At(int ms) { return absl::UnixEpoch() + absl::Milliseconds(ms); }

class Moving : public testing::TestWithParam<PlacementPolicy> {};

TEST_P(Moving, ADrainingWorkerIsEmptySoonAndNothingIsComputedTwice) {
  FakeCluster cluster(Options(GetParam(), 3));
  for (int i = 0; i < 8; ++i) cluster.SubmitAt(At(i), Request(i, 40 + 90 * i % 400, 300));
  cluster.Post(At(60), AttentionWorkerDraining{WorkerId(1), cluster.worker(WorkerId(1)).epoch()});
  cluster.RunUntil(At(59));
  ASSERT_GT(cluster.worker(WorkerId(1)).sequences(), 0u);
  cluster.RunUntil(At(120));
  EXPECT_TRUE(cluster.core().HoldsNothing(WorkerId(1))) << "long before the streams end";
  EXPECT_EQ(cluster.worker(WorkerId(1)).sequences(), 0u);
  EXPECT_GT(cluster.core().stats().running_sequences, 4);
  EXPECT_GT(cluster.core().stats().moves, 0u);
  EXPECT_EQ(cluster.core().stats().preemptions, 0u);
  cluster.RunUntilIdle();
  ExpectUndisturbed(cluster);
}

TEST_P(Moving, TheLastWorkersTakeEverythingOneAfterTheOther) {
  FakeCluster cluster(Options(GetParam(), 4));
  for (int i = 0; i < 6; ++i) cluster.SubmitAt(At(i), Request(i, 200, 400));
  for (uint32_t worker = 0; worker < 3; ++worker)
    cluster.Post(At(60 + 40 * static_cast<int>(worker)),
                 AttentionWorkerDraining{WorkerId(worker), cluster.worker(WorkerId(worker)).epoch()});
  cluster.RunUntil(At(220));
  for (uint32_t worker = 0; worker < 3; ++worker) EXPECT_TRUE(cluster.core().HoldsNothing(WorkerId(worker)));
  EXPECT_EQ(cluster.core().stats().preemptions, 0u);
  cluster.RunUntilIdle();
  ExpectUndisturbed(cluster);
}

TEST_P(Moving, ForkedChoicesMoveAsWell) {
  FakeCluster cluster(Options(GetParam(), 2));
  GenerationRequest request = Request(1, 150, 200);
  request.choices = 4;
  cluster.SubmitAt(At(0), request);
  cluster.Post(At(40), AttentionWorkerDraining{WorkerId(0), cluster.worker(WorkerId(0)).epoch()});
  cluster.RunUntil(At(100));
  EXPECT_TRUE(cluster.core().HoldsNothing(WorkerId(0)));
  cluster.RunUntilIdle();
  ExpectUndisturbed(cluster);
}

TEST_P(Moving, WhatCannotMoveBeginsAnew) {
  ClusterOptions options = Options(GetParam(), 3);
  options.moves_fail = 0.7;
  FakeCluster cluster(options);
  for (int i = 0; i < 8; ++i) cluster.SubmitAt(At(i), Request(i, 100, 200));
  cluster.Post(At(50), AttentionWorkerDraining{WorkerId(1), cluster.worker(WorkerId(1)).epoch()});
  cluster.RunUntilIdle();
  EXPECT_GT(cluster.core().stats().preemptions, 0u);
  ExpectUndisturbed(cluster);
}

TEST_P(Moving, CancelledPausedAndLostWhileTheyMove) {
  for (int round = 0; round < 20; ++round) {
    ClusterOptions options = Options(GetParam(), 4);
    options.answer_delay_most = absl::Milliseconds(3);
    options.seed = static_cast<uint64_t>(round) + 1;
    FakeCluster cluster(options);
    std::vector<RequestId> ids;
    for (int i = 0; i < 6; ++i) ids.push_back(cluster.SubmitAt(At(0), Request(i, 150, 150)));
    cluster.Post(At(40), AttentionWorkerDraining{WorkerId(0), cluster.worker(WorkerId(0)).epoch()});
    const auto soon = At(40) + absl::Microseconds(200 * round);
    cluster.Post(soon, RequestPaused{ids[1]});
    cluster.Post(soon + absl::Milliseconds(20), RequestResumed{ids[1]});
    const uint32_t gone = 1 + static_cast<uint32_t>(round % 3);
    cluster.Post(soon, AttentionWorkerJoined{WorkerId(gone), After(cluster.worker(WorkerId(gone)).epoch()), 2000});
    cluster.RunUntilIdle();
    ExpectUndisturbed(cluster);
  }
}

// Nothing else happens that would have the scheduler look at it again.
TEST_P(Moving, ALoneRequestThatWasBeingOpenedOnAWorkerThatDrainsBeginsElsewhere) {
  for (uint32_t draining = 0; draining < 3; ++draining) {
    ClusterOptions options = Options(GetParam(), 3);
    options.answer_delay_most = absl::Milliseconds(20);
    FakeCluster cluster(options);
    cluster.SubmitAt(At(0), Request(1, 150, 20));
    cluster.RunUntil(At(0));
    cluster.Post(At(0), AttentionWorkerDraining{WorkerId(draining), cluster.worker(WorkerId(draining)).epoch()});
    cluster.RunUntilIdle();
    ExpectUndisturbed(cluster);
  }
}

INSTANTIATE_TEST_SUITE_P(Placements, Moving,
                         testing::Values(PlacementPolicy::kRequest, PlacementPolicy::kHeads, PlacementPolicy::kTokens,
                                         PlacementPolicy::kMixed, PlacementPolicy::kTiers));

TEST(Balance, ANewWorkerTakesSequencesFromTheOthers) {
  ClusterOptions options = Options(PlacementPolicy::kRequest, 2);
  FakeCluster cluster(options);
  cluster.Post(At(0), AttentionWorkerDraining{WorkerId(1), cluster.worker(WorkerId(1)).epoch()});
  for (int i = 0; i < 8; ++i) cluster.SubmitAt(At(1), Request(i, 100, 300));
  cluster.RunUntil(At(50));
  ASSERT_EQ(cluster.worker(WorkerId(0)).sequences(), 8u);
  cluster.Post(At(51), AttentionWorkerJoined{WorkerId(1), After(cluster.worker(WorkerId(1)).epoch()), 2000});
  cluster.RunUntil(At(100));
  EXPECT_EQ(cluster.worker(WorkerId(0)).sequences(), 4u);
  EXPECT_EQ(cluster.worker(WorkerId(1)).sequences(), 4u);
  EXPECT_EQ(cluster.core().stats().preemptions, 0u);
  cluster.RunUntilIdle();
  ExpectUndisturbed(cluster);
}

}  // namespace
}  // namespace dovetail::scheduler
