#include "scheduler/core/placer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "scheduler/core/replacement_wait.h"
#include "scheduler/core/request_checks.h"
#include "tests/scheduler/core_parts.h"

// Where sequences may lie, what they remember of workers that refused them, and what is taken at all; without a
// scheduler.

namespace dovetail::scheduler {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class PlacerTest : public ::testing::Test {
 protected:
  PlacerTest() {
    parts_.AddAttentionWorker(0, 4);
    parts_.AddAttentionWorker(1, 8);
  }
  const KvBudget& budget() const { return parts_.accounts.budget(); }

  CoreParts parts_;
  Placer placer_{parts_.options, parts_.accounts.budget(), /*turn=*/0};
};

TEST_F(PlacerTest, ASequenceLiesWhereMostIsFreeAndItFits) {
  Sequence& sequence = parts_.AddRequest(Ask(100, 10));
  ASSERT_EQ(placer_.NextPolicy(sequence), PlacementPolicy::kRequest);
  const auto placement = placer_.Place(sequence, PlacementPolicy::kRequest);
  ASSERT_TRUE(placement.has_value());
  EXPECT_EQ(placement->front().worker, WorkerId(1));
  Sequence& large = parts_.AddRequest(Ask(600, 10));
  EXPECT_EQ(placer_.NextPolicy(large), std::nullopt) << "ten blocks fit on no worker";
  EXPECT_EQ(placer_.LongestSequence(), 512);
  EXPECT_FALSE(placer_.FitsNowhere(512));
  EXPECT_TRUE(placer_.FitsNowhere(513));
}

TEST_F(PlacerTest, ARequestMayNameItsWorker) {
  GenerationRequest request = Ask(100, 10);
  request.only_attention_worker = WorkerId(0);
  Sequence& sequence = parts_.AddRequest(std::move(request));
  EXPECT_EQ(placer_.OnlyAttentionWorker(sequence), 0);
  EXPECT_EQ(placer_.Place(sequence, PlacementPolicy::kRequest)->front().worker, WorkerId(0));
  EXPECT_FALSE(placer_.FitsElsewhere(sequence));
  parts_.accounts.budget().Drain(WorkerId(0));
  EXPECT_EQ(placer_.OnlyAttentionWorker(sequence), std::nullopt) << "it is not usable";
}

TEST_F(PlacerTest, AWorkerThatHadNoRoomIsLeftOutUntilSomethingIsGivenBackThere) {
  Sequence& other = parts_.AddRequest(Ask(64, 10));
  parts_.MakeReady(other, /*worker=*/1);
  Sequence& sequence = parts_.AddRequest(Ask(64, 10));
  Refusal* const refusal = sequence.refusals.By(WorkerId(1), budget());
  refusal->freed = budget().workers()[1].freed;
  EXPECT_TRUE(sequence.refusals.HadNoRoomOn(1, budget()));
  EXPECT_EQ(placer_.Place(sequence, PlacementPolicy::kRequest)->front().worker, WorkerId(0));
  EXPECT_THAT(placer_.TakersOf(sequence), ElementsAre(0));
  parts_.accounts.Return(other);
  EXPECT_FALSE(sequence.refusals.HadNoRoomOn(1, budget()));
  EXPECT_EQ(placer_.Place(sequence, PlacementPolicy::kRequest)->front().worker, WorkerId(1));
}

TEST_F(PlacerTest, AWorkerThatDamagedItIsTheLastThatTakesIt) {
  Sequence& sequence = parts_.AddRequest(Ask(64, 10));
  sequence.refusals.By(WorkerId(1), budget())->damaged = true;
  EXPECT_TRUE(sequence.refusals.Include(1, budget()));
  EXPECT_FALSE(sequence.refusals.HadNoRoomOn(1, budget()));
  EXPECT_THAT(placer_.TakersOf(sequence), ElementsAre(0, 1));
  Sequence& large = parts_.AddRequest(Ask(400, 10));
  large.refusals.By(WorkerId(1), budget())->damaged = true;
  EXPECT_FALSE(placer_.FitsElsewhere(large));
  EXPECT_EQ(placer_.Place(large, PlacementPolicy::kRequest)->front().worker, WorkerId(1)) << "nothing else holds it";
}

TEST_F(PlacerTest, ARefusalIsForgottenWithTheIncarnationOfTheWorker) {
  Sequence& sequence = parts_.AddRequest(Ask(64, 10));
  sequence.refusals.By(WorkerId(1), budget())->alone = true;
  EXPECT_TRUE(sequence.refusals.HadNoRoomOn(1, budget()));
  parts_.accounts.budget().Join(WorkerId(1), Epoch(2), 8);
  EXPECT_FALSE(sequence.refusals.HadNoRoomOn(1, budget()));
  EXPECT_FALSE(sequence.refusals.By(WorkerId(1), budget())->alone);
  EXPECT_EQ(sequence.refusals.By(WorkerId(9), budget()), nullptr) << "it is not there";
}

TEST(Tiers, BeginWhereAWorkerIsLessThanHalfAsFast) {
  KvBudget budget(SmallOptions().attention, 256);
  const double rates[] = {100, 4000, 60, 3000, 1, 99};
  for (uint32_t i = 0; i < 6; ++i) budget.Join(WorkerId(i), Epoch(1), 10, rates[i]);
  EXPECT_THAT(TiersOf(budget.workers()), ElementsAre(1, 0, 1, 0, 2, 1));
  budget.Lose(WorkerId(1));
  EXPECT_THAT(TiersOf(budget.workers()), ElementsAre(1, 0, 1, 0, 2, 1)) << "of a lost one it is 0";
  std::vector<uint32_t> hits(6, 0);
  hits[5] = 3;
  EXPECT_EQ(FastestTierFirst(budget.workers(), hits).front(), 3) << "a prefix that lies on a slow one is not worth it";
  EXPECT_EQ(FastestTierFirst(budget.workers(), hits)[1], 5) << "within a tier it is";
}

class TiersTest : public ::testing::Test {
 protected:
  static SchedulerOptions Options() {
    SchedulerOptions options = SmallOptions();
    options.placement = PlacementPolicy::kTiers;
    return options;
  }
  TiersTest() {
    parts_.accounts.budget().Join(WorkerId(0), Epoch(1), 4, /*rate=*/1);
    parts_.accounts.budget().Join(WorkerId(1), Epoch(1), 8, /*rate=*/1);
    parts_.accounts.budget().Join(WorkerId(2), Epoch(1), 6, /*rate=*/10);
  }
  // Worker and first token of each shard.
  std::vector<std::pair<uint32_t, Position>> Shards(const std::optional<proto::Placement>& placement) {
    std::vector<std::pair<uint32_t, Position>> shards;
    if (placement.has_value()) {
      EXPECT_TRUE(proto::Validate(*placement, parts_.options.attention).ok());
      for (const proto::Shard& shard : *placement) shards.emplace_back(shard.worker.value(), shard.tokens.begin);
    }
    return shards;
  }

  CoreParts parts_{Options()};
  Placer placer_{parts_.options, parts_.accounts.budget(), /*turn=*/0};
};

TEST_F(TiersTest, ASequenceLiesWholeOnTheFastestWorkerThatHasRoom) {
  EXPECT_THAT(Shards(placer_.Place(parts_.AddRequest(Ask(100, 10)), PlacementPolicy::kTiers)),
              ElementsAre(std::pair(2u, 0)));
  EXPECT_THAT(Shards(placer_.Place(parts_.AddRequest(Ask(450, 10)), PlacementPolicy::kTiers)),
              ElementsAre(std::pair(1u, 0)))
      << "it is too long for the fastest";
  parts_.MakeReady(parts_.AddRequest(Ask(300, 10)), /*worker=*/2);
  EXPECT_THAT(Shards(placer_.Place(parts_.AddRequest(Ask(100, 10)), PlacementPolicy::kTiers)),
              ElementsAre(std::pair(1u, 0)))
      << "the fastest has no room now";
}

TEST_F(TiersTest, WhatNoWorkerHoldsBeginsOnTheFastestAndContinuesOnOthers) {
  EXPECT_EQ(placer_.LongestSequence(), 18 * 64);
  Sequence& large = parts_.AddRequest(Ask(800, 10));
  EXPECT_EQ(placer_.NextPolicy(large), PlacementPolicy::kTiers);
  EXPECT_THAT(Shards(placer_.Place(large, PlacementPolicy::kTiers)),
              ElementsAre(std::pair(2u, 0), std::pair(1u, 6 * 64), std::pair(0u, 14 * 64)));
  parts_.MakeReady(parts_.AddRequest(Ask(200, 10)), /*worker=*/2);
  EXPECT_THAT(Shards(placer_.Place(large, PlacementPolicy::kTiers)),
              ElementsAre(std::pair(2u, 0), std::pair(1u, 2 * 64), std::pair(0u, 10 * 64)))
      << "what is free now";
  GenerationRequest named = Ask(800, 10);
  named.only_attention_worker = WorkerId(2);
  EXPECT_EQ(placer_.NextPolicy(parts_.AddRequest(std::move(named))), std::nullopt);
}

TEST_F(TiersTest, StatesOfLinearLayersDoNotContinue) {
  proto::LinearSpec state;
  state.heads = 2;
  state.key_dim = state.value_dim = 16;
  proto::LinearConstants decays;
  decays.log_decay.assign(2, -0.1f);
  const auto table =
      *proto::AttentionTable::Build({state, SmallOptions().attention.softmax(LayerGroup(0))}, {decays, {}});
  const proto::Placement placement =
      ContinueTokens(table, parts_.accounts.budget().workers(), {2, 0, 1}, {384, 0, 128});
  EXPECT_TRUE(proto::Validate(placement, table).ok());
  ASSERT_EQ(placement.size(), 3u);
  EXPECT_EQ(placement[0].worker, WorkerId(2));
  EXPECT_TRUE(placement[0].tokens.whole());
  EXPECT_EQ(placement[1].worker, WorkerId(2));
  EXPECT_EQ(placement[1].tokens.end, 384);
  EXPECT_EQ(placement[2].worker, WorkerId(1)) << "the other holds nothing";
}

TEST(ReplacementWait, WhatFittedBeforeALossMayFitAgainForAWhile) {
  const absl::Time start = absl::UnixEpoch();
  ReplacementWait wait;
  EXPECT_FALSE(wait.MayFitAgain(1, start));
  wait.NoteLoss(/*longest=*/512, start);
  wait.NoteLoss(/*longest=*/256, start + absl::Seconds(1));
  EXPECT_TRUE(wait.MayFitAgain(512, start + absl::Seconds(2)));
  EXPECT_FALSE(wait.MayFitAgain(513, start + absl::Seconds(2)));
  EXPECT_FALSE(wait.MayFitAgain(1, start + absl::Seconds(11)));
  wait.NoteLoss(/*longest=*/64, start + absl::Seconds(30));
  EXPECT_FALSE(wait.MayFitAgain(65, start + absl::Seconds(31))) << "the first loss is long ago";
}

TEST(ReplacementWait, ItsTimeRunsFromTheFirstWaitSinceItLastRan) {
  CoreParts parts;
  const absl::Time start = absl::UnixEpoch();
  Sequence& sequence = parts.AddRequest(Ask(64, 10));
  ReplacementWait wait;
  wait.Add(sequence, start);
  EXPECT_THAT(wait.TakeAll(), ElementsAre(&sequence));
  EXPECT_EQ(wait.NextDeadline(), absl::InfiniteFuture());
  wait.Add(sequence, start + absl::Seconds(4));
  wait.Add(sequence, start + absl::Seconds(5));
  EXPECT_EQ(wait.NextDeadline(), start + absl::Seconds(10));
  EXPECT_THAT(wait.Expired(start + absl::Seconds(9)), IsEmpty());
  EXPECT_THAT(wait.Expired(start + absl::Seconds(10)), ElementsAre(&sequence));
  wait.Remove(sequence);
  EXPECT_THAT(wait.waiting(), IsEmpty());
}

TEST(RequestChecks, NameTheFieldAndTheLimit) {
  const SchedulerOptions options = SmallOptions();  // max_model_len 2048
  const auto error = [&](auto change) {
    GenerationRequest request = Ask(10, 4);
    change(request);
    const absl::Status status = CheckRequest(request, options);
    EXPECT_TRUE(absl::IsInvalidArgument(status));
    return std::string(status.message());
  };
  EXPECT_TRUE(CheckRequest(Ask(2047, 4), options).ok());
  EXPECT_THAT(error([](auto& request) { request.prompt.clear(); }), HasSubstr("prompt: has no token"));
  EXPECT_THAT(error([](auto& request) { request.prompt.resize(2048); }), HasSubstr("takes 2047"));
  EXPECT_THAT(error([](auto& request) { request.choices = 0; }), HasSubstr("n: 0"));
  EXPECT_THAT(error([](auto& request) { request.max_tokens = -1; }), HasSubstr("max_tokens: -1"));
  EXPECT_THAT(error([](auto& request) { request.logits_last = 11; }), HasSubstr("0..10"));
  EXPECT_THAT(error([](auto& request) { request.sampling.logit_bias.resize(proto::kMaxLogitBias + 1); }),
              HasSubstr("logit_bias"));
  EXPECT_THAT(error([](auto& request) { request.sampling.follows_grammar = true; }), HasSubstr("grammar: has no"));
}

}  // namespace
}  // namespace dovetail::scheduler
