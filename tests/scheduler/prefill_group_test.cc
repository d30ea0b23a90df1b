#include "scheduler/core/prefill_plan.h"
#include "tests/scheduler/small_cluster.h"

// One prompt on several compute workers: it reads as it would on one, whatever becomes of a rank.

namespace dovetail::scheduler {
namespace {

using ::testing::ElementsAre;

ClusterOptions GroupCluster(int compute_workers) {
  ClusterOptions options = SmallCluster(2);
  options.compute_workers = compute_workers;
  options.scheduler.max_model_len = 8192;
  options.scheduler.prefill_rank_tokens = 64;
  return options;
}

void ExpectUndisturbed(FakeCluster& cluster, RequestId id) {
  EXPECT_EQ(cluster.stream(id).error, "");
  EXPECT_EQ(cluster.stream(id).tokens, cluster.Undisturbed(cluster.request(id), 0));
}

TEST(CutPrefill, RanksThatSeeMoreTakeFewerTokens) {
  const PrefillCutOptions far{.most_tokens = 100000, .par_tokens = 1e12};
  EXPECT_THAT(CutPrefill(0, 1024, 4, far), ElementsAre(0, 256, 512, 768, 1024));
  const PrefillCutOptions near{.most_tokens = 100000, .par_tokens = 1024};
  EXPECT_THAT(CutPrefill(0, 8192, 2, near), ElementsAre(0, 5504, 8192));
  EXPECT_THAT(CutPrefill(100, 8192, 2, near), ElementsAre(100, 5568, 8192));
}

TEST(CutPrefill, NoRankTakesMoreThanItMayAndNoneIsEmpty) {
  for (const int ranks : {1, 2, 3, 7}) {
    for (const Position base : {0, 1, 63, 64, 1000}) {
      for (const Position tokens : {1, 63, 64, 65, 200, 1000, 7 * 512}) {
        for (const double par : {100.0, 1e9}) {
          const PrefillCutOptions options{.most_tokens = 512, .par_tokens = par};
          const auto cuts = CutPrefill(base, base + tokens, ranks, options);
          SCOPED_TRACE(::testing::PrintToString(cuts));
          ASSERT_GE(cuts.size(), 2u);
          ASSERT_LE(cuts.size(), static_cast<size_t>(ranks) + 1);
          EXPECT_EQ(cuts.front(), base);
          if (tokens <= Position{ranks} * 512 - 64 * ranks) {
            EXPECT_EQ(cuts.back(), base + tokens);
          }
          for (size_t i = 1; i < cuts.size(); ++i) {
            EXPECT_GT(cuts[i], cuts[i - 1]);
            EXPECT_LE(cuts[i] - cuts[i - 1], 512);
            EXPECT_TRUE(i + 1 == cuts.size() || cuts[i] % kSegmentTokens == 0);
          }
        }
      }
    }
  }
}

TEST(PrefillGroup, ALongPromptTakesAllComputeWorkersAndReadsTheSame) {
  absl::Duration alone;
  for (const int workers : {1, 2, 4}) {
    FakeCluster cluster(GroupCluster(workers));
    const RequestId id = cluster.Submit(Ask(4000, 20));
    cluster.RunUntilIdle();
    ExpectUndisturbed(cluster, id);
    ExpectClean(cluster);
    const absl::Duration first = cluster.stream(id).first_token - absl::UnixEpoch();
    if (workers == 1) alone = first;
    EXPECT_EQ(cluster.groups > 0, workers > 1);
    // What the fake's compute workers say crossed for each token of their steps.
    const SchedulerStats stats = cluster.core().stats();
    EXPECT_EQ(stats.prefix_asked_bytes, 4000 + 19) << workers;
    EXPECT_EQ(stats.prefix_gathered_bytes, 2 * (4000 + 19)) << workers;
    EXPECT_EQ(stats.prefix_state_bytes, 3 * (4000 + 19)) << workers;
    EXPECT_LT(first, alone / workers + absl::Milliseconds(8)) << workers;
  }
}

TEST(PrefillGroup, ThereAreAsManyRanksAsAreAskedFor) {
  for (const int ranks : {1, 2, 3}) {
    ClusterOptions options = GroupCluster(4);
    options.scheduler.prefill_ranks = ranks;
    FakeCluster cluster(options);
    int most = 0;
    cluster.on_action = [&](const Action& action) {
      if (const auto* run = std::get_if<RunStep>(&action)) most = std::max(most, run->plan.part.ranks);
    };
    const RequestId id = cluster.Submit(Ask(3000, 5));
    cluster.RunUntilIdle();
    EXPECT_EQ(most, ranks == 1 ? 0 : ranks);
    ExpectUndisturbed(cluster, id);
    ExpectClean(cluster);
  }
}

TEST(PrefillGroup, AShortPromptStaysOnOneComputeWorker) {
  ClusterOptions options = GroupCluster(4);
  options.scheduler.prefill_rank_tokens = 200;
  FakeCluster cluster(options);
  cluster.Submit(Ask(399, 5));
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.groups, 0);
  cluster.Submit(Ask(400, 5, "a", /*seed=*/8));
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.groups, 1);
  ExpectClean(cluster);
}

TEST(PrefillGroup, LongPromptsShareTheComputeWorkersAndShortRequestsGoOn) {
  FakeCluster cluster(GroupCluster(4));
  const RequestId chat = cluster.Submit(Ask(20, 400, "chat"));
  const RequestId first = cluster.SubmitAt(cluster.at(absl::Milliseconds(3)), Ask(6000, 4, "a", 1));
  const RequestId second = cluster.SubmitAt(cluster.at(absl::Milliseconds(3)), Ask(6000, 4, "b", 2));
  while (!cluster.finished(first) || !cluster.finished(second)) ASSERT_TRUE(cluster.RunOne());
  // A step of one token takes a millisecond and a bit: none of them waited for a prompt.
  const double steps = absl::ToDoubleMilliseconds(cluster.now() - absl::UnixEpoch()) / 1.1;
  EXPECT_GT(cluster.stream(chat).tokens.size(), 0.8 * steps);
  cluster.RunUntilIdle();
  for (const RequestId id : {chat, first, second}) ExpectUndisturbed(cluster, id);
  EXPECT_GT(cluster.groups, 4);
  ExpectClean(cluster);
}

TEST(PrefillGroup, WhatTheClientAsksOfThePromptComesFromAllRanks) {
  FakeCluster cluster(GroupCluster(3));
  GenerationRequest request = Ask(1500, 12);
  request.prompt_logprobs = 2;
  request.logits_last = 900;
  request.sampling.repetition_penalty = 1.3f;
  request.min_tokens = 6;
  request.stop_token_ids = {1, 2, 3, 4, 5};
  const RequestId id = cluster.Submit(request);
  cluster.RunUntilIdle();
  ExpectUndisturbed(cluster, id);
  const Stream& stream = cluster.stream(id);
  ASSERT_EQ(stream.prompt_logprobs.size(), 1499u);
  for (size_t i = 1; i < 1500; ++i) ASSERT_EQ(stream.prompt_logprobs[i - 1].chosen.token, request.prompt[i]);
  ASSERT_EQ(stream.prompt_logits.size(), 1800u);
  for (int i = 0; i < 900; ++i) ASSERT_EQ(stream.prompt_logits[2 * i], static_cast<float>(600 + i));
  EXPECT_GT(cluster.groups, 0);
  ExpectClean(cluster);
}

TEST(PrefillGroup, TheVectorOfAPromptComesFromAllRanks) {
  for (const requests::Pooling pooling :
       {requests::Pooling::kMean, requests::Pooling::kLast, requests::Pooling::kCls}) {
    FakeCluster cluster(GroupCluster(3));
    GenerationRequest request = Ask(1500, 0);
    request.pooling = pooling;
    const RequestId id = cluster.Submit(request);
    cluster.FailRank(1, proto::StepStatus::kWorkerUnreachable);
    cluster.RunUntilIdle();
    ExactSums expected;
    const Position begin = pooling == requests::Pooling::kLast ? 1499 : 0;
    const Position end = pooling == requests::Pooling::kCls ? 1 : 1500;
    for (Position at = begin; at < end; ++at) expected.Add(HiddenState(at, request.prompt[at]));
    EXPECT_EQ(cluster.stream(id).pooled, expected.Mean(end - begin));
    EXPECT_EQ(cluster.stream(id).reason, FinishReason::kLength);
    EXPECT_GT(cluster.groups, 0);
    ExpectClean(cluster);
  }
}

TEST(PrefillGroup, IsRepeatedOnceTheGrammarOfItsLastRankIsCompiled) {
  FakeCluster cluster(GroupCluster(3));
  cluster.compiles_grammar = [&](const proto::StepEntry& entry) {
    return entry.sampling.follows_grammar && cluster.now() < cluster.at(absl::Milliseconds(300));
  };
  GenerationRequest request = Ask(1500, 12);
  request.sampling.follows_grammar = true;
  request.sampling.grammar = {"ra", {1}};
  const RequestId id = cluster.Submit(request);
  cluster.RunUntilIdle();
  ExpectUndisturbed(cluster, id);
  EXPECT_GT(cluster.groups, 0);
  ExpectClean(cluster);
}

TEST(PrefillGroup, ChoicesAreForkedFromAPromptThatAGroupPrefilled) {
  FakeCluster cluster(GroupCluster(3));
  GenerationRequest request = Ask(1000, 10);
  request.choices = 3;
  const RequestId id = cluster.Submit(request);
  cluster.RunUntilIdle();
  for (int choice = 0; choice < 3; ++choice)
    EXPECT_EQ(cluster.stream(id, choice).tokens, cluster.Undisturbed(request, choice));
  EXPECT_GT(cluster.groups, 0);
  ExpectClean(cluster);
}

class FailedRank : public ::testing::TestWithParam<std::tuple<int, proto::StepStatus>> {};

TEST_P(FailedRank, TheGroupIsRepeatedAndTheOthersAreWithdrawn) {
  const auto& [rank, status] = GetParam();
  FakeCluster cluster(GroupCluster(3));
  cluster.FailRank(rank, status);
  const RequestId id = cluster.Submit(Ask(1500, 12));
  cluster.RunUntilIdle();
  if (status == proto::StepStatus::kWorkerFailed) {  // as it ends any step
    EXPECT_EQ(cluster.stream(id).error_code, absl::StatusCode::kUnavailable);
  } else {
    ExpectUndisturbed(cluster, id);
  }
  EXPECT_EQ(cluster.withdrawn, 2 - rank);
  ExpectClean(cluster);
}

INSTANTIATE_TEST_SUITE_P(
    Ways, FailedRank,
    ::testing::Combine(::testing::Values(0, 1, 2),
                       ::testing::Values(proto::StepStatus::kOutOfMemory, proto::StepStatus::kWorkerFailed,
                                         proto::StepStatus::kDamaged, proto::StepStatus::kForgotten)));

class LostRank : public ::testing::TestWithParam<int> {};

TEST_P(LostRank, TheSurvivorsRepeatTheGroup) {
  FakeCluster cluster(GroupCluster(3));
  const RequestId id = cluster.Submit(Ask(3000, 12));
  while (cluster.groups < 2) ASSERT_TRUE(cluster.RunOne());
  const int before = cluster.groups;
  cluster.Post(cluster.now() + absl::Microseconds(100),
               ComputeWorkerLost{WorkerId(100 + static_cast<uint32_t>(GetParam()))});
  cluster.RunUntilIdle();
  ExpectUndisturbed(cluster, id);
  EXPECT_GT(cluster.groups, before + 1) << "the two that are left go on together";
  ExpectClean(cluster);
}

INSTANTIATE_TEST_SUITE_P(Ranks, LostRank, ::testing::Values(0, 1, 2));

TEST(PrefillGroup, ARankWithoutAResultInTimeIsDismissed) {
  ClusterOptions options = GroupCluster(3);
  options.scheduler.step_timeout = absl::Milliseconds(300);
  FakeCluster cluster(options);
  const RequestId id = cluster.Submit(Ask(1500, 12));
  cluster.LoseNextResults(1);
  cluster.RunUntilIdle();
  EXPECT_THAT(cluster.dismissed, ElementsAre(WorkerId(100))) << "the others only waited for it";
  ExpectUndisturbed(cluster, id);
  ExpectClean(cluster);
}

// Each rank waits for all others: which of them is at fault shows once they are withdrawn.
void ExpectTheHungRankIsDismissed(proto::PrefixExchange exchange) {
  for (const int hung : {0, 1, 2}) {
    ClusterOptions options = GroupCluster(3);
    options.scheduler.step_timeout = absl::Milliseconds(300);
    options.scheduler.attention = SmallTable(/*ops=*/2, /*kv_heads=*/3);
    options.scheduler.prefill_exchange = exchange;
    FakeCluster cluster(options);
    const RequestId id = cluster.Submit(Ask(1500, 12));
    cluster.HangRank(hung);
    cluster.RunUntilIdle();
    EXPECT_THAT(cluster.dismissed, ElementsAre(WorkerId(100 + static_cast<uint32_t>(hung))));
    ExpectUndisturbed(cluster, id);
    ExpectClean(cluster);
  }
}

TEST(PrefillGroup, OfRanksThatSwitchHeadsTheOneThatHangsIsDismissed) {
  ExpectTheHungRankIsDismissed(proto::PrefixExchange::kSwitch);
}

TEST(PrefillGroup, OfRanksThatAskEachOtherTheOneThatHangsIsDismissed) {
  ExpectTheHungRankIsDismissed(proto::PrefixExchange::kPassQ);
}

// As many ranks as KV heads, whatever was asked for.
TEST(PrefillGroup, OfRanksThatSwitchHeadsThereAreAsManyAsKvHeads) {
  ClusterOptions options = GroupCluster(4);
  options.scheduler.attention = SmallTable(/*ops=*/2, /*kv_heads=*/2);
  options.scheduler.prefill_exchange = proto::PrefixExchange::kSwitch;
  options.scheduler.prefill_ranks = 4;
  FakeCluster cluster(options);
  int most = 0;
  cluster.on_action = [&](const Action& action) {
    if (const auto* run = std::get_if<RunStep>(&action)) most = std::max(most, run->plan.part.ranks);
  };
  const RequestId id = cluster.Submit(Ask(3000, 12));
  cluster.RunUntilIdle();
  EXPECT_EQ(most, 2);
  ExpectUndisturbed(cluster, id);
  ExpectClean(cluster);
}

TEST(PrefillGroup, ACancelledPromptIsWithdrawnAtOnce) {
  FakeCluster cluster(GroupCluster(3));
  const RequestId id = cluster.Submit(Ask(4000, 12));
  while (cluster.groups < 2) ASSERT_TRUE(cluster.RunOne());
  int withdrawn = 0;
  cluster.on_action = [&](const Action& action) { withdrawn += std::holds_alternative<WithdrawStep>(action); };
  cluster.Post(cluster.now(), RequestCancelled{id});
  cluster.RunUntilIdle();
  EXPECT_EQ(withdrawn, 3);
  EXPECT_EQ(cluster.groups, 2);
  ExpectClean(cluster);
}

TEST(PrefillGroup, ALostAttentionWorkerRestartsThePrompt) {
  FakeCluster cluster(GroupCluster(3));
  const RequestId id = cluster.Submit(Ask(3000, 12));
  while (cluster.groups < 2) ASSERT_TRUE(cluster.RunOne());
  for (const uint32_t worker : {0u, 1u}) cluster.Post(cluster.now(), AttentionWorkerLost{WorkerId(worker), Epoch(1)});
  for (const uint32_t worker : {0u, 1u})
    cluster.Post(cluster.now() + absl::Milliseconds(5),
                 AttentionWorkerJoined{.worker = WorkerId(worker), .epoch = Epoch(2), .kv_blocks = 100000});
  cluster.RunUntilIdle();
  ExpectUndisturbed(cluster, id);
  ExpectClean(cluster);
}

// Layers with windows keep what the largest step brings: a group has as many ranks as there is room for.
TEST(PrefillGroup, HasAsManyRanksAsItsWindowsHaveRoomFor) {
  for (const auto& [blocks, ranks] : {std::pair<uint64_t, int>{400, 4}, {127, 2}, {107, 0}}) {
    ClusterOptions options = GroupCluster(4);
    options.scheduler.attention = SmallTable(/*ops=*/1, /*kv_heads=*/1, /*windowed=*/4);
    options.kv_blocks = {blocks};
    options.scheduler.prefill_rank_tokens = 256;
    FakeCluster cluster(options);
    int most = 0;  // of the first group, which is full; later ones are smaller, for which more ranks have room
    cluster.on_action = [&](const Action& action) {
      const auto* run = std::get_if<RunStep>(&action);
      if (run != nullptr && run->plan.part.base == 0) most = std::max(most, run->plan.part.ranks);
    };
    const RequestId id = cluster.Submit(Ask(3840, 12));
    cluster.RunUntilIdle();
    EXPECT_EQ(most, ranks) << blocks;
    ExpectUndisturbed(cluster, id);
    ExpectClean(cluster);
  }
}

}  // namespace
}  // namespace dovetail::scheduler
