#include "scheduler/replay.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace dovetail::scheduler {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

const ReplayWorkers kWorkers{.attention = {WorkerId(1), WorkerId(2), WorkerId(3)},
                             .compute = {WorkerId(11), WorkerId(12)}};

std::shared_ptr<const GenerationRequest> Ask(uint64_t id, int choices = 1) {
  auto request = std::make_shared<GenerationRequest>();
  request->id = RequestId(id);
  request->tenant = "a";
  request->prompt = {1, 2, 3};
  request->choices = choices;
  request->max_tokens = 10;
  request->sampling.seed = 5;
  request->sampling.logprobs = 3;
  return request;
}

GenerationUpdate End(RequestId id, std::vector<TokenId> tokens, WorkerId attention, WorkerId compute,
                     FinishReason reason = FinishReason::kLength) {
  GenerationUpdate update{.request = id};
  update.tokens.assign(tokens.begin(), tokens.end());
  update.choice_finished = update.request_finished = true;
  update.reason = reason;
  update.attention_workers = {attention};
  update.compute_workers = {compute};
  return update;
}

// A cluster in which each worker adds its own fault to all tokens.
class Faulty {
 public:
  explicit Faulty(int one_in = 1) : replay(one_in) {}

  std::vector<TokenId> TokensOn(WorkerId attention, WorkerId compute) {
    const TokenId off = attention_off[attention] + compute_off[compute];
    return {20 + off, 21 + off, 22 + off};
  }
  void RunOriginal(uint64_t id, WorkerId attention, WorkerId compute) {
    replay.Arrived(Ask(id));
    replay.Take(End(RequestId(id), TokensOn(attention, compute), attention, compute));
  }
  // Runs what the replay asks for until it asks for nothing; returns where.
  std::vector<std::pair<int, int>> RunReplays() {
    std::vector<std::pair<int, int>> ran;
    while (const auto request = replay.Next(kWorkers)) {
      EXPECT_TRUE(Replay::Is(request->id));
      const WorkerId attention = *request->only_attention_worker, compute = *request->only_compute_worker;
      ran.emplace_back(attention.value(), compute.value());
      replay.Take(End(request->id, TokensOn(attention, compute), attention, compute));
    }
    return ran;
  }

  Replay replay;
  std::map<WorkerId, TokenId> attention_off, compute_off;
};

TEST(Replay, RunsOnceOnOtherWorkersWhereTheTokensAreTheSame) {
  Faulty cluster;
  cluster.RunOriginal(1, WorkerId(1), WorkerId(11));
  EXPECT_THAT(cluster.RunReplays(), ElementsAre(std::pair(2, 12)));
  EXPECT_EQ(cluster.replay.stats().same, 1u);
  EXPECT_EQ(cluster.replay.stats().different, 0u);
  EXPECT_THAT(cluster.replay.TakeFindings(), IsEmpty());
}

TEST(Replay, AsksForTheTokensAloneAndNothingFromTheCache) {
  Replay replay(1);
  replay.Arrived(Ask(1, /*choices=*/2));
  GenerationUpdate first = End(RequestId(1), {7, 8}, WorkerId(1), WorkerId(11));
  first.request_finished = false;
  replay.Take(first);
  GenerationUpdate second = End(RequestId(1), {7, 8, 9, 9}, WorkerId(1), WorkerId(11));
  second.choice = 1;
  replay.Take(second);
  const auto request = replay.Next(kWorkers);
  ASSERT_NE(request, nullptr);
  EXPECT_EQ(request->max_tokens, 4) << "as long as the longest choice";
  EXPECT_EQ(request->choices, 2);
  EXPECT_EQ(request->sampling.seed, 5u);
  EXPECT_EQ(request->sampling.logprobs, -1);
  EXPECT_FALSE(request->use_prefix_cache);
  EXPECT_NE(request->tenant, "a");
  EXPECT_EQ(replay.Next(kWorkers), nullptr) << "one at a time";
}

TEST(Replay, NamesAnAttentionWorkerThatDiffers) {
  Faulty cluster;
  cluster.attention_off[WorkerId(3)] = 1;
  cluster.RunOriginal(1, WorkerId(3), WorkerId(11));
  EXPECT_THAT(cluster.RunReplays(),
              ElementsAre(std::pair(1, 12), std::pair(1, 11), std::pair(2, 11), std::pair(3, 11)));
  EXPECT_EQ(cluster.replay.stats().different, 1u);
  const auto findings = cluster.replay.TakeFindings();
  ASSERT_THAT(findings, SizeIs(1));
  EXPECT_THAT(findings[0], HasSubstr("request 1, choice 0: output token 0 was 21 and is 20"));
  EXPECT_THAT(findings[0], HasSubstr("attention worker 3 gives other tokens than 1, 2"));
}

TEST(Replay, NamesAComputeWorkerThatDiffers) {
  Faulty cluster;
  cluster.compute_off[WorkerId(12)] = 1;
  cluster.RunOriginal(1, WorkerId(1), WorkerId(12));
  cluster.RunReplays();
  const auto findings = cluster.replay.TakeFindings();
  ASSERT_THAT(findings, SizeIs(1));
  EXPECT_THAT(findings[0], HasSubstr("compute worker"));
  EXPECT_THAT(findings[0], HasSubstr("one of them is wrong")) << "two workers: no majority";
}

TEST(Replay, SaysWhereItRanWhenTheFaultDidNotLast) {
  Faulty cluster;
  cluster.attention_off[WorkerId(2)] = 1;
  cluster.RunOriginal(1, WorkerId(2), WorkerId(11));
  cluster.attention_off.clear();
  cluster.RunReplays();
  const auto findings = cluster.replay.TakeFindings();
  ASSERT_THAT(findings, SizeIs(1));
  EXPECT_THAT(findings[0], HasSubstr("it ran on attention workers 2 and compute workers 11"));
  EXPECT_THAT(findings[0], HasSubstr("at that time"));
}

TEST(Replay, TakesOneInSoManyAndNoneThatFailed) {
  Faulty cluster(/*one_in=*/3);
  for (uint64_t id = 1; id <= 9; ++id) cluster.RunOriginal(id, WorkerId(1), WorkerId(11));
  EXPECT_THAT(cluster.RunReplays(), SizeIs(3));

  Replay replay(1);
  replay.Arrived(Ask(1));
  replay.Take(End(RequestId(1), {1}, WorkerId(1), WorkerId(11), FinishReason::kCancelled));
  EXPECT_EQ(replay.Next(kWorkers), nullptr);
  EXPECT_FALSE(replay.due());
}

TEST(Replay, ComesAgainWhereItGaveWay) {
  Faulty cluster;
  cluster.RunOriginal(1, WorkerId(1), WorkerId(11));
  const auto first = cluster.replay.Next(kWorkers);
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(cluster.replay.running(), first->id);
  cluster.replay.Take(End(first->id, {20}, WorkerId(2), WorkerId(12), FinishReason::kCancelled));
  EXPECT_TRUE(cluster.replay.due());
  EXPECT_THAT(cluster.RunReplays(), ElementsAre(std::pair(2, 12)));
  EXPECT_EQ(cluster.replay.stats().same, 1u);
}

TEST(Replay, IsUnclearWhereItNeverEnds) {
  Faulty cluster;
  cluster.RunOriginal(1, WorkerId(1), WorkerId(11));
  int runs = 0;
  for (; const auto request = cluster.replay.Next(kWorkers); ++runs)
    cluster.replay.Take(End(request->id, {}, WorkerId(2), WorkerId(12), FinishReason::kCancelled));
  EXPECT_EQ(runs, Replay::kMostRetries + 1);
  EXPECT_EQ(cluster.replay.stats().unclear, 1u);
}

TEST(Replay, IsUnclearWhereItFails) {
  Faulty cluster;
  cluster.RunOriginal(1, WorkerId(1), WorkerId(11));
  const auto request = cluster.replay.Next(kWorkers);
  cluster.replay.Take(End(request->id, {}, WorkerId(2), WorkerId(12), FinishReason::kError));
  EXPECT_FALSE(cluster.replay.due());
  EXPECT_EQ(cluster.replay.stats().unclear, 1u);
}

TEST(Replay, HoldsABoundedNumberOfRequests) {
  Replay replay(1);
  for (uint64_t id = 1; id <= 1000; ++id) {
    replay.Arrived(Ask(id));
    replay.Take(End(RequestId(id), {1}, WorkerId(1), WorkerId(11)));
  }
  size_t replays = 0;
  for (; const auto request = replay.Next(kWorkers); ++replays)
    replay.Take(End(request->id, {1}, *request->only_attention_worker, *request->only_compute_worker));
  EXPECT_EQ(replays, Replay::kMostTracked);
}

}  // namespace
}  // namespace dovetail::scheduler
