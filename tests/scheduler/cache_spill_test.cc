#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <variant>
#include <vector>

#include "tests/scheduler/small_cluster.h"

// Prefix caches of fast and slow attention workers as one (--placement tiers): what an ended sequence left on the fast
// one goes to the slow one, and comes up again for a sequence that begins with it.

namespace dovetail::scheduler {
namespace {

// Worker 0 is fast, the others are slow. Four blocks hold 64 tokens.
ClusterOptions Tiers(std::vector<uint64_t> kv_blocks) {
  ClusterOptions options = SmallCluster(static_cast<int>(kv_blocks.size()));
  options.scheduler.placement = PlacementPolicy::kTiers;
  options.kv_blocks = std::move(kv_blocks);
  options.rates = {40, 1};
  return options;
}

void DropCacheOf(FakeCluster& cluster, uint32_t worker) {
  for (int i = 0; i < 1000; ++i) cluster.worker(WorkerId(worker)).EvictSome(0);
}

// The conversation so far, and 40 tokens more.
GenerationRequest GoOnWith(FakeCluster& cluster, RequestId id, int max_tokens) {
  GenerationRequest next = Ask(40, max_tokens, cluster.request(id).tenant, 99);
  std::vector<TokenId> prompt = cluster.request(id).prompt;
  const std::vector<TokenId>& output = cluster.stream(id).tokens;
  prompt.insert(prompt.end(), output.begin(), output.end());
  prompt.insert(prompt.end(), next.prompt.begin(), next.prompt.end());
  next.prompt = std::move(prompt);
  return next;
}

TEST(CacheSpill, WhatTheFastTierDroppedComesUpFromTheSlowOne) {
  FakeCluster cluster(Tiers({400, 4000}));
  const RequestId first = cluster.Submit(Ask(300, 50));
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.core().stats().spilled_tokens, 320u) << "five blocks of 349 tokens";
  EXPECT_EQ(cluster.core().stats().prompt_tokens, 300u) << "a copy is no prompt";
  EXPECT_EQ(cluster.core().stats().preemptions, 0u);

  DropCacheOf(cluster, 0);
  const RequestId second = cluster.Submit(GoOnWith(cluster, first, 30));
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(second).cached_tokens, 320);
  EXPECT_EQ(cluster.core().stats().fetched_tokens, 320u);
  EXPECT_EQ(cluster.stream(second).attention_workers.back(), WorkerId(0)) << "it runs on the fast tier";
  ExpectUndisturbed(cluster);
}

TEST(CacheSpill, WhatTheFastTierStillHasIsNotFetched) {
  FakeCluster cluster(Tiers({400, 4000}));
  const RequestId first = cluster.Submit(Ask(300, 50));
  cluster.RunUntilIdle();
  const RequestId second = cluster.Submit(GoOnWith(cluster, first, 30));
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(second).cached_tokens, 320);
  EXPECT_EQ(cluster.core().stats().fetched_tokens, 0u);
  EXPECT_EQ(cluster.stream(second).attention_workers, std::vector<WorkerId>{WorkerId(0)});
  ExpectUndisturbed(cluster);
}

TEST(CacheSpill, OnlyWhatTheSlowTierLacksIsSent) {
  FakeCluster cluster(Tiers({400, 4000}));
  std::vector<Position> sent;
  cluster.on_action = [&](const Action& action) {
    if (const auto* move = std::get_if<MoveSequence>(&action)) sent.push_back(move->message.end - move->message.begin);
  };
  const RequestId first = cluster.Submit(Ask(300, 50));
  cluster.RunUntilIdle();
  cluster.Submit(GoOnWith(cluster, first, 100));
  cluster.RunUntilIdle();
  EXPECT_THAT(sent, testing::ElementsAre(320, 128));  // five blocks, then seven of 489 tokens
  ExpectUndisturbed(cluster);
}

TEST(CacheSpill, AConversationAlwaysGoesToTheSameSlowWorker) {
  FakeCluster cluster(Tiers({400, 4000, 4000, 4000}));
  std::vector<uint32_t> takers;
  cluster.on_action = [&](const Action& action) {
    if (const auto* move = std::get_if<MoveSequence>(&action)) takers.push_back(move->to.value());
  };
  RequestId last = cluster.Submit(Ask(300, 50));
  cluster.RunUntilIdle();
  for (int turn = 0; turn < 3; ++turn) {
    last = cluster.Submit(GoOnWith(cluster, last, 60));
    cluster.RunUntilIdle();
  }
  ASSERT_EQ(takers.size(), 4u);
  EXPECT_THAT(takers, testing::Each(takers.front()));
  ExpectUndisturbed(cluster);
}

// The copy of the first is under way when the second takes all the room that there is.
TEST(CacheSpill, GivesWayToWhatNeedsItsRoom) {
  ClusterOptions options = Tiers({40, 4000});
  options.answer_delay_most = absl::Milliseconds(20);
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    options.seed = seed;
    FakeCluster cluster(options);
    cluster.Submit(Ask(300, 5));
    for (int i = 0; i < 5; ++i)
      cluster.SubmitAt(cluster.at(absl::Milliseconds(10 + 9 * i)), Ask(550, 60, "a", static_cast<uint64_t>(10 + i)));
    cluster.RunUntilIdle();
    ExpectUndisturbed(cluster);
  }
}

TEST(CacheSpill, NothingIsCopiedWithoutACacheOrWithAnotherPolicyOrForAShortSequence) {
  for (const std::string off : {"cache", "policy", "short", "request", "flag"}) {
    ClusterOptions options = Tiers({400, 4000});
    if (off == "cache") options.scheduler.enable_prefix_caching = false;
    if (off == "flag") options.scheduler.spill_prefixes = false;
    if (off == "policy") options.scheduler.placement = PlacementPolicy::kRequest;
    FakeCluster cluster(options);
    GenerationRequest request = Ask(off == "short" ? 60 : 300, 50);
    if (off == "request") request.use_prefix_cache = false;
    cluster.Submit(std::move(request));
    cluster.RunUntilIdle();
    EXPECT_EQ(cluster.core().stats().spilled_tokens, 0u) << off;
    EXPECT_EQ(cluster.core().stats().moves, 0u) << off;
    ExpectUndisturbed(cluster);
  }
}

TEST(CacheSpill, AnotherTenantFindsNothing) {
  FakeCluster cluster(Tiers({400, 4000}));
  const RequestId first = cluster.Submit(Ask(300, 50, "a"));
  cluster.RunUntilIdle();
  DropCacheOf(cluster, 0);
  GenerationRequest other = GoOnWith(cluster, first, 30);
  other.tenant = "b";
  const RequestId second = cluster.Submit(std::move(other));
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(second).cached_tokens, 0);
  ExpectUndisturbed(cluster);
}

// Computing a token takes 10 us here, and moving 300 of them a second.
TEST(CacheSpill, WhatIsComputedFasterThanItMovesIsComputed) {
  ClusterOptions options = Tiers({400, 4000});
  options.reports_work = true;
  options.scheduler.max_num_batched_tokens = 1024;
  options.answer_delay_most = absl::Seconds(1);
  FakeCluster cluster(options);
  RequestId last = cluster.Submit(Ask(900, 50));
  cluster.RunUntilIdle();
  ASSERT_GT(cluster.core().stats().spilled_tokens, 0u);
  DropCacheOf(cluster, 0);
  cluster.Submit(GoOnWith(cluster, last, 30));
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.core().stats().fetched_tokens, 0u);
  ExpectUndisturbed(cluster);
}

// Conversations over a fast worker that is too small for them, with all that may go wrong.
TEST(CacheSpill, NoTokenDiffersWhateverHappens) {
  uint64_t spilled = 0, fetched = 0;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    ClusterOptions options = Tiers({60, 2000, 2000});
    options.seed = seed;
    options.scheduler.micro_batches = 1 + static_cast<int>(seed % 3);
    options.scheduler.attention = SmallTable(/*ops=*/2, /*kv_heads=*/2, /*windowed=*/static_cast<int>(seed % 2));
    options.kv_blocks = {seed % 2 == 0 ? 60u : 90u, 2000, 2000};
    options.answer_delay_most = absl::Milliseconds(seed % 5);
    options.evict = seed % 4 == 0 ? 0.3 : 0;
    options.moves_fail = seed % 3 == 0 ? 0.3 : 0;
    options.damage = seed % 7 == 0 ? 0.02 : 0;
    FakeCluster cluster(options);
    std::vector<RequestId> last;
    for (int i = 0; i < 6; ++i)
      last.push_back(cluster.SubmitAt(cluster.at(absl::Milliseconds(7 * i)),
                                      Ask(150 + 20 * i, 40, i % 2 == 0 ? "a" : "b", static_cast<uint64_t>(i + 1))));
    for (int turn = 0; turn < 3; ++turn) {
      if (seed % 5 == 1) {
        const WorkerId lost(static_cast<uint32_t>(seed / 5 % 3));
        FakeAttentionWorker& worker = cluster.worker(lost);
        cluster.Post(cluster.now() + absl::Milliseconds(5), AttentionWorkerLost{lost, worker.epoch()});
        cluster.Post(cluster.now() + absl::Milliseconds(9),
                     AttentionWorkerJoined{lost, Epoch(worker.epoch().value() + 1), worker.capacity(),
                                           lost == WorkerId(0) ? 40.0 : 1.0});
      }
      cluster.RunUntilIdle();
      for (size_t i = 0; i < last.size(); ++i)
        last[i] = cluster.SubmitAt(cluster.now() + absl::Milliseconds(11 * i), GoOnWith(cluster, last[i], 30));
    }
    cluster.RunUntilIdle();
    ExpectUndisturbed(cluster);
    spilled += cluster.core().stats().spilled_tokens;
    fetched += cluster.core().stats().fetched_tokens;
  }
  EXPECT_GT(spilled, 10000u);
  EXPECT_GT(fetched, 3000u);
}

}  // namespace
}  // namespace dovetail::scheduler
