#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <variant>
#include <vector>

#include "scheduler/core/prefill_planner.h"
#include "tests/scheduler/small_cluster.h"

// Attention workers of unlike speed as tiers of one memory (--placement tiers).

namespace dovetail::scheduler {
namespace {

// Worker 0 is fast and holds `fast` blocks; worker 1 is slow and holds `slow`. Four blocks hold 64 tokens.
ClusterOptions TwoTiers(uint64_t fast, uint64_t slow) {
  ClusterOptions options = SmallCluster(2);
  options.scheduler.placement = PlacementPolicy::kTiers;
  options.kv_blocks = {fast, slow};
  options.rates = {40, 1};
  options.scheduler.enable_prefix_caching = false;  // which moves, too: cache_spill_test.cc
  return options;
}

// Moves from and to which worker, in order.
std::vector<std::pair<uint32_t, uint32_t>>& RecordMoves(FakeCluster& cluster,
                                                        std::vector<std::pair<uint32_t, uint32_t>>& moves) {
  cluster.on_action = [&moves](const Action& action) {
    if (const auto* move = std::get_if<MoveSequence>(&action))
      moves.emplace_back(move->worker.value(), move->to.value());
  };
  return moves;
}

TEST(Tiering, WhatIsFullIsLeftByTheNewestThatMovesToTheSlowTier) {
  FakeCluster cluster(TwoTiers(40, 400));  // 640 tokens
  std::vector<std::pair<uint32_t, uint32_t>> moves;
  RecordMoves(cluster, moves);
  cluster.Submit(Ask(200, 300));
  const RequestId newest = cluster.SubmitAt(cluster.at(absl::Milliseconds(1)), Ask(200, 300, "a", 8));
  cluster.RunUntilIdle();
  ASSERT_FALSE(moves.empty());
  EXPECT_EQ(moves.front(), std::pair(0u, 1u));
  EXPECT_EQ(cluster.core().stats().preemptions, 0u) << "nothing is computed twice";
  EXPECT_THAT(cluster.stream(newest).attention_workers.size(), 2u);
  ExpectUndisturbed(cluster);
}

TEST(Tiering, SequencesOfASlowTierStepApart) {
  for (const int micro_batches : {1, 2, 4}) {
    SCOPED_TRACE(micro_batches);
    ClusterOptions options = TwoTiers(80, 800);
    options.scheduler.micro_batches = micro_batches;
    FakeCluster cluster(options);
    int mixed = 0, fast = 0, slow = 0;
    cluster.on_action = [&](const Action& action) {
      const auto* run = std::get_if<RunStep>(&action);
      if (run == nullptr) return;
      bool any_fast = false, any_slow = false;
      for (const proto::StepEntry& entry : run->plan.entries) {
        const auto workers = AttentionWorkersOf(entry.placement);
        const bool is_slow = std::find(workers.begin(), workers.end(), WorkerId(1)) != workers.end();
        (is_slow ? any_slow : any_fast) = true;
      }
      mixed += any_fast && any_slow;
      fast += any_fast && !any_slow;
      slow += any_slow && !any_fast;
    };
    for (int i = 0; i < 6; ++i)
      cluster.SubmitAt(cluster.at(absl::Milliseconds(20 * i)),
                       Ask(200, 120 + 30 * i, "a", static_cast<uint64_t>(i + 1)));
    cluster.RunUntilIdle();
    EXPECT_EQ(mixed, 0);
    EXPECT_GT(fast, 0);
    EXPECT_GT(slow, 0);
    ExpectUndisturbed(cluster);
  }
}

TEST(Tiering, WithoutRoomElsewhereOrWithAnotherPolicyASequenceBeginsAgain) {
  for (const uint64_t slow : {4u, 400u}) {
    ClusterOptions options = TwoTiers(40, slow);
    if (slow == 400) options.scheduler.placement = PlacementPolicy::kRequest;
    FakeCluster cluster(options);
    std::vector<std::pair<uint32_t, uint32_t>> moves;
    RecordMoves(cluster, moves);
    for (int i = 0; i < 4; ++i) cluster.Submit(Ask(100, 300, "a", 1 + i));
    cluster.RunUntilIdle();
    EXPECT_TRUE(moves.empty());
    EXPECT_GT(cluster.core().stats().preemptions, 0u);
    ExpectUndisturbed(cluster);
  }
}

TEST(Tiering, SequencesComeBackWhenTheFastTierHasRoomToSpare) {
  FakeCluster cluster(TwoTiers(40, 400));
  std::vector<std::pair<uint32_t, uint32_t>> moves;
  RecordMoves(cluster, moves);
  cluster.Submit(Ask(500, 20));
  const RequestId second = cluster.SubmitAt(cluster.at(absl::Milliseconds(1)), Ask(300, 200, "a", 8));
  cluster.RunUntilIdle();
  EXPECT_THAT(moves, ::testing::ElementsAre(std::pair(1u, 0u)));
  EXPECT_EQ(cluster.stream(second).attention_workers.size(), 2u) << "it began on the slow tier";
  ExpectUndisturbed(cluster);
}

TEST(Tiering, NothingComesBackThatWouldHaveToLeaveSoonOrIsAboutToEnd) {
  for (const int tokens : {300, 60}) {
    FakeCluster cluster(TwoTiers(40, 400));
    std::vector<std::pair<uint32_t, uint32_t>> moves;
    RecordMoves(cluster, moves);
    cluster.Submit(Ask(500, 20));
    cluster.SubmitAt(cluster.at(absl::Milliseconds(1)),
                     Ask(tokens == 300 ? 580 : 300, tokens == 300 ? 40 : 60, "a", 8));
    cluster.RunUntilIdle();
    EXPECT_TRUE(moves.empty()) << tokens;
    ExpectUndisturbed(cluster);
  }
}

TEST(Tiering, ASequenceThatNoWorkerHoldsContinuesOnTheNext) {
  FakeCluster cluster(TwoTiers(40, 60));  // 640 and 960 tokens
  const RequestId id = cluster.Submit(Ask(900, 400));
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.core().LongestSequence(), 1600);
  EXPECT_EQ(cluster.stream(id).tokens.size(), 400u);
  EXPECT_EQ(cluster.stream(id).attention_workers.size(), 2u);
  ExpectUndisturbed(cluster);
}

// None of those that leave has enough tokens left to come back.
TEST(Tiering, NothingBeginsAgainAsLongAsTheSlowTierHasRoomAndTheOldestNeverLeaves) {
  ClusterOptions options = TwoTiers(40, 400);
  options.answer_delay_most = absl::Milliseconds(2);
  FakeCluster cluster(options);
  const RequestId first = cluster.Submit(Ask(200, 400));
  for (int i = 0; i < 40; ++i) cluster.SubmitAt(cluster.at(absl::Milliseconds(10 * i)), Ask(60, 63, "a", 10 + i));
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.core().stats().preemptions, 0u);
  EXPECT_THAT(cluster.stream(first).attention_workers.size(), 1u);
  ExpectUndisturbed(cluster);
}

TEST(Tiering, AMoveThatFailsCostsABeginningButNoToken) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    ClusterOptions options = TwoTiers(60, 400);
    options.moves_fail = 0.5;
    options.answer_delay_most = absl::Milliseconds(3);
    options.seed = seed;
    FakeCluster cluster(options);
    for (int i = 0; i < 8; ++i) cluster.SubmitAt(cluster.at(absl::Milliseconds(5 * i)), Ask(100, 200, "a", 1 + i));
    cluster.RunUntilIdle();
    ExpectUndisturbed(cluster);
  }
}

TEST(Tiering, ANewSlowWorkerTakesNothingFromAFastOne) {
  ClusterOptions options = TwoTiers(4000, 4000);
  FakeCluster cluster(options);
  std::vector<std::pair<uint32_t, uint32_t>> moves;
  RecordMoves(cluster, moves);
  cluster.Post(cluster.now(), AttentionWorkerDraining{WorkerId(1), cluster.worker(WorkerId(1)).epoch()});
  for (int i = 0; i < 100; ++i) cluster.Submit(Ask(20, 200, "a", 1 + i));
  cluster.Post(cluster.at(absl::Milliseconds(40)),
               AttentionWorkerJoined{WorkerId(1), Epoch(cluster.worker(WorkerId(1)).epoch().value() + 1), 4000, 1});
  cluster.RunUntilIdle();
  EXPECT_TRUE(moves.empty());
  ExpectUndisturbed(cluster);
}

}  // namespace
}  // namespace dovetail::scheduler
