#include "scheduler/core/prefill_planner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "scheduler/core/prefill_groups.h"
#include "tests/scheduler/core_parts.h"

// How many ranks and which exchange are chosen, from rates that were learnt.

namespace dovetail::scheduler {
namespace {

using proto::PrefixExchange;
using ::testing::ElementsAre;

TEST(RateEstimator, OneOddMeasurementChangesNothing) {
  RateEstimator rate;
  EXPECT_FALSE(rate.usual().has_value());
  for (int i = 0; i < 6; ++i) rate.Note(100, 200);
  rate.Note(100, 90000);
  EXPECT_EQ(rate.usual(), 2);
  rate.Note(1, 0);
  rate.Note(0, 1);
  rate.Note(1, std::numeric_limits<double>::infinity());
  EXPECT_EQ(rate.measurements(), 7u);
}

TEST(RateEstimator, AMeasurementCountsAsMuchAsItsWork) {
  RateEstimator rate;
  for (int i = 0; i < 5; ++i) rate.Note(1, 50);
  rate.Note(100, 200);
  EXPECT_EQ(rate.usual(), 2);
}

TEST(RateEstimator, ARateThatHasChangedIsFollowed) {
  RateEstimator rate;
  for (int i = 0; i < 100; ++i) rate.Note(10, 10);
  rate.Note(10, 14);
  EXPECT_EQ(rate.now(), 1) << "not so different that it is believed at once";
  rate.Note(10, 30);
  EXPECT_EQ(rate.now(), 3);
  EXPECT_EQ(rate.usual(), 1);
  rate.Note(10, 10);
  EXPECT_EQ(rate.now(), 1);
  for (int i = 0; i < 8; ++i) rate.Note(10, 30);
  EXPECT_EQ(rate.usual(), 3);
  EXPECT_EQ(rate.measurements(), RateEstimator::kKept);
}

proto::AttentionTable OneOp() {
  return *proto::AttentionTable::Build(
      {proto::SoftmaxSpec{.query_heads = 4, .kv_heads = 2, .key_dim = 16, .value_dim = 16, .scale = 1}});
}

class PrefillPlannerTest : public testing::Test {
 protected:
  static constexpr WorkerId kAttention{1};

  static std::vector<FreeRank> Free(int count) {
    std::vector<FreeRank> free;
    for (int i = 0; i < count; ++i) free.push_back({WorkerId(static_cast<uint32_t>(10 + i)), {}});
    return free;
  }
  static PromptToPlan Prompt(Position tokens, Position ctx_len = 0) {
    static const std::vector<WorkerId> kWhere = {kAttention};
    return {ctx_len, ctx_len + tokens, kWhere};
  }
  // Seconds for 1000 tokens, for 1e6 FLOP here and there, and for 1e6 bytes.
  void Learn(PrefillPlanner& planner, double tokens_s, double here_s, double asked_s, double byte_s, int workers = 2) {
    proto::StepResult result;
    result.work = {.tokens = 1000, .step_tokens = 1000, .here_flops = 1e6, .asked_flops = 1e6, .scratch_blocks = 10000};
    result.prefix.asked_bytes = 1000000;
    result.timings = {.dense_us = static_cast<int64_t>(tokens_s * 1e6),
                      .attention_wait_us = static_cast<int64_t>((asked_s + byte_s) * 1e6),
                      .attention_us = static_cast<int64_t>(asked_s * 1e6),
                      .prompt_us = static_cast<int64_t>(here_s * 1e6)};
    for (int i = 0; i < workers; ++i)
      planner.Learn(WorkerId(static_cast<uint32_t>(10 + i)), {{kAttention}}, result, /*follows_a_rank=*/false);
  }

  const proto::AttentionTable table_ = OneOp();
  const PrefillPlannerOptions options_{.exchange = std::nullopt, .max_step_tokens = 512, .rank_tokens = 128};
};

TEST_F(PrefillPlannerTest, WithoutRatesAllRanksAreTakenAndAskForWhatTheyMiss) {
  const PrefillPlanner planner(table_, options_);
  const PrefillChoice choice = planner.Choose(Prompt(3072), Free(3), 3);
  EXPECT_EQ(choice.ranks(), 3);
  EXPECT_EQ(choice.cuts.back(), 1536);
  EXPECT_EQ(choice.forecast.exchange, PrefixExchange::kAsk);
  EXPECT_EQ(choice.forecast.predicted_s, 0);
  EXPECT_EQ(choice.forecast.tokens, 1536);
}

TEST_F(PrefillPlannerTest, RatesAreLearntFromSteps) {
  PrefillPlanner planner(table_, options_);
  Learn(planner, 2, 0.5, 0.25, 0.125);
  EXPECT_DOUBLE_EQ(*planner.compute_rates().token_s, 2e-3);
  EXPECT_DOUBLE_EQ(*planner.compute_rates().flop_s, 0.5e-6);
  EXPECT_DOUBLE_EQ(*planner.plane_rates().flop_s, 0.25e-6);
  EXPECT_DOUBLE_EQ(*planner.plane_rates().byte_s, 0.125e-6);
}

TEST_F(PrefillPlannerTest, ARankThatWaitedForOthersSaysNothingAboutTheLink) {
  PrefillPlanner planner(table_, options_);
  proto::StepResult result;
  result.work = {.tokens = 1000, .step_tokens = 1000};
  result.prefix.asked_bytes = 1000;
  result.timings = {.dense_us = 100, .attention_wait_us = 5000};
  planner.Learn(WorkerId(10), {{kAttention}}, result, /*follows_a_rank=*/true);
  EXPECT_FALSE(planner.plane_rates().byte_s.has_value());
  planner.Learn(WorkerId(10), {{kAttention}}, result, /*follows_a_rank=*/false);
  EXPECT_DOUBLE_EQ(*planner.plane_rates().byte_s, 5e-6);
}

// On one GPU, and between linked ones, prompts are attended where the blocks are.
TEST_F(PrefillPlannerTest, OfAWorkerThatAttendsNothingTheRatesOfAttentionWorkersDo) {
  PrefillPlanner planner(table_, options_);
  proto::StepResult result;
  result.work = {.tokens = 1000, .step_tokens = 1000, .asked_flops = 1e6};
  result.timings = {.dense_us = 1'000'000, .attention_wait_us = 500'000, .attention_us = 500'000};
  planner.Learn(WorkerId(10), {{kAttention}}, result, /*follows_a_rank=*/false);
  // 4 heads of 2 x (16 + 16), half a microsecond each.
  EXPECT_DOUBLE_EQ(planner.SecondsAlone(WorkerId(10), 0, 1000, /*in_pair=*/false), 1 + 1000 * 500 * 256 * 0.5e-6);
  const PrefillForecast forecast = planner.ChooseExchange(Prompt(100, 900), Free(1)[0], 100);
  EXPECT_DOUBLE_EQ(forecast.predicted_s, 0.1 + (901 + 1000) * 50 * 256 * 0.5e-6);
  EXPECT_EQ(forecast.bound, PrefillBound::kPlane);
}

// The compute worker has memory to attend prompts of other attention workers, but never did.
TEST_F(PrefillPlannerTest, APromptThatLiesInAPairIsAttendedThere) {
  PrefillPlanner planner(table_, options_);
  proto::StepResult result;
  result.work = {.tokens = 1000, .step_tokens = 1000, .asked_flops = 1e6, .scratch_blocks = 10000};
  result.timings = {.dense_us = 1'000'000, .attention_wait_us = 500'000, .attention_us = 500'000};
  planner.Learn(WorkerId(10), {{kAttention}}, result, /*follows_a_rank=*/false);
  EXPECT_EQ(planner.SecondsAlone(WorkerId(10), 0, 1000, /*in_pair=*/false), 0) << "not known";
  EXPECT_DOUBLE_EQ(planner.SecondsAlone(WorkerId(10), 0, 1000, /*in_pair=*/true), 1 + 1000 * 500 * 256 * 0.5e-6);
  PromptToPlan prompt = Prompt(100, 900);
  EXPECT_EQ(planner.ChooseExchange(prompt, Free(1)[0], 100).predicted_s, 0);
  prompt.pair = WorkerId(11);
  EXPECT_EQ(planner.ChooseExchange(prompt, Free(1)[0], 100).predicted_s, 0) << "another worker's";
  prompt.pair = WorkerId(10);
  const PrefillForecast forecast = planner.ChooseExchange(prompt, Free(1)[0], 100);
  EXPECT_DOUBLE_EQ(forecast.predicted_s, 0.1 + (901 + 1000) * 50 * 256 * 0.5e-6);
  EXPECT_EQ(forecast.exchange, PrefixExchange::kAsk);
  EXPECT_EQ(planner.HeldAfter(prompt, Free(1)[0], {900, 900, 1000}, forecast.exchange), HeldTokens());
}

TEST_F(PrefillPlannerTest, RanksGoWhereTheyMakeItFaster) {
  PrefillPlanner planner(table_, options_);
  Learn(planner, 1, 0.0001, 0.0001, 0.0001);
  const PrefillChoice two = planner.Choose(Prompt(1024), Free(2), 2);
  EXPECT_EQ(two.ranks(), 2);
  EXPECT_NEAR(two.forecast.predicted_s, 0.512, 0.1) << "dense layers of half of the tokens";
  EXPECT_NEAR(two.forecast.next_best_s, two.forecast.predicted_s, 0.1) << "the other exchange";
  EXPECT_EQ(two.forecast.bound, PrefillBound::kDense);
  EXPECT_EQ(planner.Choose(Prompt(200), Free(2), 2).ranks(), 1) << "less than two ranks must have";
}

// Workers that share their cores: each is as fast as measured, but not both at a time.
TEST_F(PrefillPlannerTest, AWayThatTookLongerThanPredictedIsNotTakenAgain) {
  PrefillPlanner planner(table_, options_);
  Learn(planner, 1, 0.0001, 0.0001, 0.0001);
  for (int i = 0; i < 4; ++i) {
    PrefillChoice choice = planner.Choose(Prompt(1024), Free(2), 2);
    if (choice.ranks() == 1) break;
    choice.forecast.measured_s = 1.2;
    planner.LearnTime(choice.forecast);
  }
  const PrefillChoice alone = planner.Choose(Prompt(1024), Free(2), 2);
  EXPECT_EQ(alone.ranks(), 1);
  EXPECT_NEAR(alone.forecast.predicted_s, 0.512, 0.1) << "a step of 512 tokens";
  const auto measured = [&](PrefixExchange exchange) { return planner.times()[proto::IndexOf({exchange})].measured_s; };
  EXPECT_NEAR(measured(PrefixExchange::kAsk) + measured(PrefixExchange::kGather), 2.4, 1e-9)
      << "each exchange was tried once";
}

// As many parts of prompts later as it takes for the correction to fade.
TEST_F(PrefillPlannerTest, AWayThatWasNotTakenForLongIsTriedAgain) {
  PrefillPlanner planner(table_, options_);
  Learn(planner, 1, 0.0001, 0.0001, 0.0001);
  for (int taken = 0, part = 0; part < 200; ++part) {
    PrefillChoice choice = planner.Choose(Prompt(1024), Free(2), 2);
    taken += choice.ranks() - 1;
    choice.forecast.measured_s = choice.ranks() == 1 ? 0.512 : 1.5;
    planner.LearnTime(choice.forecast);
    if (part == 10) {
      EXPECT_EQ(taken, 2) << "by either exchange once";
    }
    if (part == 199) {
      EXPECT_GT(taken, 2);
      EXPECT_LT(taken, 40);
    }
  }
}

TEST_F(PrefillPlannerTest, ASlowWorkerHasFewerTokens) {
  PrefillPlanner planner(table_, options_);
  Learn(planner, 1, 0.0001, 0.0001, 0.0001, /*workers=*/3);
  EXPECT_THAT(planner.Choose(Prompt(4000), Free(2), 2).cuts, ElementsAre(0, 512, 1024));
  Learn(planner, 2, 0.0001, 0.0001, 0.0001, /*workers=*/1);
  EXPECT_THAT(planner.Choose(Prompt(4600), Free(2), 2).cuts, ElementsAre(0, 256, 768));
  EXPECT_THAT(planner.Choose(Prompt(600), Free(2), 2).cuts, ElementsAre(0, 192, 600));
  const PrefillChoice two_of_three = planner.Choose(Prompt(4000), Free(3), 2);
  EXPECT_THAT(two_of_three.free_rank, ElementsAre(1, 2)) << "the fast ones";
}

// Where 256 earlier tokens cost as much as the dense layers, the first of two ranks has 648 of 1000 tokens for equal
// times, and a step has 512: the group takes the 1.929 s of the second rank. Two groups take half of what all of it
// takes, 1.477 s, and what crosses.
TEST_F(PrefillPlannerTest, OneMoreGroupIsTakenWhereAStepIsTooSmallForFairParts) {
  const PrefillPlannerOptions options{
      .exchange = PrefixExchange::kGather, .choose_ranks = false, .max_step_tokens = 512, .rank_tokens = 64};
  PrefillPlanner planner(table_, options);
  constexpr double kPairs = 1.0 / 256 / 256 * 1e3;  // seconds of 1e6 FLOP: 256 of them for a pair of tokens
  Learn(planner, 1, kPairs, 0.0001, 0.00001);
  const PrefillChoice first = planner.Choose(Prompt(1000), Free(2), 2);
  EXPECT_EQ(first.cuts.back(), 512);
  const PrefillChoice second = planner.Choose(Prompt(488, 512), Free(2), 2);
  EXPECT_EQ(second.cuts.back(), 1000);
  EXPECT_NEAR(first.forecast.predicted_s + second.forecast.predicted_s, 1.477, 0.1);
  EXPECT_EQ(planner.Choose(Prompt(700), Free(2), 2).cuts.back(), 700) << "448 tokens and 252 are fair parts";
  // Streams that can bear less shorten the steps of ranks (--prefill-itl-budget), and so what binds.
  PromptToPlan shortened = Prompt(500);
  shortened.most_tokens = 256;
  PrefillPlanner with_streams(table_, options);
  Learn(with_streams, 1, 2 * kPairs, 0.0001, 0.00001);
  const PrefillChoice half = with_streams.Choose(shortened, Free(2), 2);
  EXPECT_EQ(half.cuts.back(), 256);
  EXPECT_LE(half.cuts[1] - half.cuts[0], 256 - 64);
}

TEST_F(PrefillPlannerTest, NoMoreGroupsAreTakenThanNeededWhereFullStepsAreFair) {
  PrefillPlanner planner(
      table_, {.exchange = PrefixExchange::kGather, .choose_ranks = false, .max_step_tokens = 512, .rank_tokens = 128});
  Learn(planner, 1, 0.000001, 0.000001, 0.000001);
  EXPECT_THAT(planner.Choose(Prompt(1000), Free(2), 2).cuts, ElementsAre(0, 512, 1000));
  EXPECT_EQ(planner.Choose(Prompt(8192), Free(2), 2).cuts.back(), 1024);
}

TEST_F(PrefillPlannerTest, TheFasterOnesAttend) {
  PrefillPlanner slow_plane(table_, options_);
  Learn(slow_plane, 0.001, 0.01, 1, 0.0001);
  const PrefillChoice gathers = slow_plane.Choose(Prompt(1024, 4096), Free(2), 2);
  EXPECT_EQ(gathers.forecast.exchange, PrefixExchange::kGather);
  EXPECT_EQ(gathers.forecast.bound, PrefillBound::kAttention);
  PrefillPlanner fast_plane(table_, options_);
  Learn(fast_plane, 0.001, 1, 0.01, 0.0001);
  const PrefillChoice asks = fast_plane.Choose(Prompt(1024, 4096), Free(2), 2);
  EXPECT_EQ(asks.forecast.exchange, PrefixExchange::kAsk);
  EXPECT_GT(asks.forecast.next_best_s, asks.forecast.predicted_s);
}

// Of workers 10, 11, ..., which are linked, and may give each other K and V of softmax layers.
class DirectPlannerTest : public PrefillPlannerTest {
 protected:
  void LearnGiving(PrefillPlanner& planner, int workers, bool rows, bool states = false) {
    Learn(planner, 0.001, 0.01, 1, 0.001, workers);
    proto::StepResult result;
    result.work = {.tokens = 1000, .step_tokens = 1000, .scratch_blocks = 10000};
    result.work.gives_rows = rows;
    result.work.gives_states = states;
    result.timings.dense_us = 1000;
    for (int i = 0; i < workers; ++i) {
      planner.Learn(WorkerId(static_cast<uint32_t>(10 + i)), {}, result, false);
      for (int other = 0; other < i; ++other)
        planner.Link(WorkerId(static_cast<uint32_t>(10 + i)), WorkerId(static_cast<uint32_t>(10 + other)), true);
    }
  }
  PrefixExchange Chosen(const PrefillPlanner& planner, int ranks = 2) {
    const PrefillChoice choice = planner.Choose(Prompt(1024, 512), Free(ranks), ranks);
    EXPECT_EQ(choice.ranks(), ranks);
    return choice.forecast.exchange;
  }
  static constexpr int kMebi = 1 << 20;
};

TEST_F(DirectPlannerTest, RanksGatherFromEachOtherWhereTheAttentionWorkersLinkIsSlower) {
  PrefillPlanner planner(table_, options_);
  LearnGiving(planner, 2, /*rows=*/true);
  EXPECT_EQ(Chosen(planner), PrefixExchange::kGatherDirect);
  const PrefillForecast alone = planner.ChooseExchange(Prompt(512, 4096), {WorkerId(10), {}}, 512);
  EXPECT_EQ(alone.exchange, PrefixExchange::kGather) << "there is no other rank";
}

TEST_F(DirectPlannerTest, OnlyRanksThatReachEachOtherDo) {
  PrefillPlanner planner(table_, options_);
  LearnGiving(planner, 3, /*rows=*/true);
  EXPECT_EQ(Chosen(planner, 3), PrefixExchange::kGatherDirect);
  planner.Link(WorkerId(12), WorkerId(10), false);
  EXPECT_EQ(Chosen(planner, 3), PrefixExchange::kGather);
  planner.Link(WorkerId(10), WorkerId(12), true);
  EXPECT_EQ(Chosen(planner, 3), PrefixExchange::kGatherDirect);
  planner.ForgetComputeWorker(WorkerId(12));
  LearnGiving(planner, 2, /*rows=*/true);
  EXPECT_EQ(Chosen(planner, 2), PrefixExchange::kGatherDirect);
  EXPECT_EQ(Chosen(planner, 3), PrefixExchange::kGather) << "a worker of this number that joins is linked anew";
}

TEST_F(DirectPlannerTest, OnlyRanksThatHaveSaidThatTheyGiveRowsDo) {
  PrefillPlanner planner(table_, options_);
  LearnGiving(planner, 2, /*rows=*/false);
  EXPECT_EQ(Chosen(planner), PrefixExchange::kGather);
  LearnGiving(planner, 1, /*rows=*/true);
  EXPECT_EQ(Chosen(planner), PrefixExchange::kGather) << "one of two";
}

// Of 512 tokens a rank, whose 8 segments need 16 blocks of an op. With all earlier tokens of the group they do not fit.
TEST_F(DirectPlannerTest, KAndVGoRoundWhereARankHasRoomForItsOwnOnly) {
  PrefillPlannerOptions two_ranks = options_;
  two_ranks.choose_ranks = false;
  PrefillPlanner planner(table_, two_ranks);
  LearnGiving(planner, 2, /*rows=*/true);
  proto::StepResult result;
  result.work = {.tokens = 1000, .step_tokens = 1000, .scratch_blocks = 20, .gives_rows = true};
  result.timings.dense_us = 1000;
  const auto learn = [&] {
    for (const uint32_t worker : {10, 11}) planner.Learn(WorkerId(worker), {}, result, false);
    return Chosen(planner);
  };
  EXPECT_NE(learn(), PrefixExchange::kRing) << "they have not said that they may";
  result.work.passes_on_rows = true;
  EXPECT_EQ(learn(), PrefixExchange::kRing);
  result.work.scratch_blocks = 10000;
  EXPECT_EQ(learn(), PrefixExchange::kGatherDirect);
}

// The last of two ranks with 512 tokens each attends to three of four pairs otherwise, here to half of them.
TEST_F(DirectPlannerTest, RanksExchangeTokensForHeadsWhereAttentionIsMostOfIt) {
  PrefillPlanner planner(table_, options_);
  LearnGiving(planner, 3, /*rows=*/true);
  proto::StepResult result;
  result.work = {.tokens = 1000, .step_tokens = 1000, .scratch_blocks = 10000, .gives_rows = true};
  result.timings.dense_us = 1000;
  const auto choose = [&](int ranks) {
    for (const uint32_t worker : {10, 11, 12}) planner.Learn(WorkerId(worker), {}, result, false);
    return planner.Choose(Prompt(1024), Free(ranks), ranks);
  };
  EXPECT_NE(choose(2).forecast.exchange, PrefixExchange::kSwitch) << "they have not said that they may";
  result.work.switches_heads = true;
  const PrefillChoice choice = choose(2);
  EXPECT_EQ(choice.forecast.exchange, PrefixExchange::kSwitch);
  EXPECT_THAT(choice.cuts, ElementsAre(0, 512, 1024)) << "whatever their tokens see";
  EXPECT_NE(choose(3).forecast.exchange, PrefixExchange::kSwitch) << "there are two KV heads";
}

// With a switch of softmax layers, the ranks of a chain would work one after the other.
TEST_F(PrefillPlannerTest, LinearLayersAreSwitchedWhereEachRankHasAHead) {
  const proto::SoftmaxSpec softmax{.query_heads = 4, .kv_heads = 4, .key_dim = 16, .value_dim = 16, .scale = 1};
  const proto::LinearSpec linear{.heads = 2, .key_dim = 16, .value_dim = 16, .token_decay = true};
  const auto hybrid = *proto::AttentionTable::Build({softmax, linear}, std::vector<proto::LinearConstants>(2));
  PrefillPlannerOptions options = options_;
  options.exchange = PrefixExchange::kSwitch;
  options.linear = proto::LinearExchange::kSwitch;
  options.choose_ranks = false;
  const PrefillPlanner planner(hybrid, options);
  const auto way = [](const PrefillPlanner& of, int ranks) { return of.Choose(Prompt(1024), Free(ranks), ranks); };
  const proto::PrefillWay heads{PrefixExchange::kSwitch, proto::LinearExchange::kSwitch};
  EXPECT_EQ(way(planner, 2).forecast.way(), heads);
  const proto::PrefillWay chain{PrefixExchange::kSwitch, proto::LinearExchange::kChain};
  EXPECT_EQ(way(planner, 3).forecast.way(), chain) << "there are two heads";
  const auto only_linear = *proto::AttentionTable::Build({linear}, std::vector<proto::LinearConstants>(1));
  EXPECT_EQ(way(PrefillPlanner(only_linear, options), 2).forecast.way(), heads);
  options.linear = proto::LinearExchange::kChain;
  EXPECT_EQ(way(PrefillPlanner(hybrid, options), 2).forecast.way(), chain) << "as it is told";
}

// The first one attends to least for itself, and for the other one to all it has.
TEST_F(DirectPlannerTest, RanksThatAskEachOtherHaveEqualPartsAndKeepNothing) {
  PrefillPlannerOptions asked = options_;
  asked.exchange = PrefixExchange::kPassQ;
  asked.choose_ranks = false;
  PrefillPlanner planner(table_, asked);
  LearnGiving(planner, 2, /*rows=*/true);
  const PrefillChoice choice = planner.Choose(Prompt(1024), Free(2), 2);
  EXPECT_EQ(choice.forecast.exchange, PrefixExchange::kPassQ);
  EXPECT_GT(choice.forecast.predicted_s, 0);
  EXPECT_THAT(choice.cuts, ElementsAre(0, 512, 1024));
  EXPECT_TRUE(planner.HeldAfter(Prompt(1024), Free(2)[0], choice.tokens(0), PrefixExchange::kPassQ).empty());
}

TEST_F(DirectPlannerTest, TheRateOfALinkIsLearntFromItsSenderAndASlowOneIsNotTaken) {
  PrefillPlanner planner(table_, options_);
  LearnGiving(planner, 2, /*rows=*/true);
  proto::StepResult result;
  result.work = {.tokens = 1000, .step_tokens = 1000, .scratch_blocks = 10000, .gives_rows = true};
  result.timings.dense_us = 1000;
  result.transfers = {{WorkerId(11), kMebi, 40 * kMebi}, {WorkerId(99), kMebi, 1}};
  planner.Learn(WorkerId(10), {}, result, false);
  EXPECT_DOUBLE_EQ(*planner.link_byte_s(), 40e-6) << "worker 99 is not known";
  EXPECT_EQ(Chosen(planner), PrefixExchange::kGather);
  planner.ForgetComputeWorker(WorkerId(11));
  EXPECT_FALSE(planner.link_byte_s().has_value());
}

// The last of four ranks gets more than crosses in its time, but from three others.
TEST_F(DirectPlannerTest, ALinkIsOfTwoRanksAndCarriesWhatOneOfThemGives) {
  PrefillPlanner planner(
      table_,
      {.exchange = PrefixExchange::kGatherDirect, .choose_ranks = false, .max_step_tokens = 512, .rank_tokens = 64});
  LearnGiving(planner, 4, /*rows=*/true);
  const PrefillChoice before = planner.Choose(Prompt(1024), Free(4), 4);
  ASSERT_EQ(before.ranks(), 4);
  const proto::SoftmaxSpec& spec = table_.views[0];
  const auto row_bytes = static_cast<int64_t>(spec.kv_heads * (spec.key_dim + spec.value_dim) * SizeOf(spec.kv));
  const double bytes = static_cast<double>(before.cuts[3] * row_bytes);
  proto::StepResult result;
  result.work = {.tokens = 1000, .step_tokens = 1000, .scratch_blocks = 10000, .gives_rows = true};
  result.timings.dense_us = 1000;
  const auto at_link_rate = [&](double byte_s) {
    for (const uint32_t from : {10, 11, 12}) {
      result.transfers.clear();
      for (uint32_t to = from + 1; to <= 13; ++to)
        result.transfers.push_back({WorkerId(to), kMebi, static_cast<int64_t>(kMebi * byte_s * 1e6)});
      for (int again = 0; again < 20; ++again) planner.Learn(WorkerId(from), {}, result, false);
    }
    return planner.Choose(Prompt(1024), Free(4), 4);
  };
  const PrefillChoice fair = at_link_rate(1.3 * before.forecast.predicted_s / bytes);
  EXPECT_EQ(fair.cuts, before.cuts);
  EXPECT_EQ(fair.forecast.bound, PrefillBound::kAttention);
  EXPECT_NEAR(fair.forecast.predicted_s, before.forecast.predicted_s, 0.01 * before.forecast.predicted_s);
  EXPECT_EQ(at_link_rate(4 * before.forecast.predicted_s / bytes).forecast.bound, PrefillBound::kLink);
}

proto::AttentionTable Hybrid() {
  proto::LinearSpec state;
  state.heads = 2;
  state.key_dim = state.value_dim = 16;
  proto::LinearConstants decays;
  decays.log_decay.assign(2, -0.1f);
  const proto::SoftmaxSpec full{.query_heads = 4, .kv_heads = 2, .key_dim = 16, .value_dim = 16, .scale = 1};
  return *proto::AttentionTable::Build({state, full}, {decays, {}});
}

TEST_F(DirectPlannerTest, LinearLayersHandOnTheirStatesWhereBothKindsMay) {
  const proto::AttentionTable hybrid = Hybrid();
  PrefillPlanner planner(hybrid, options_);
  LearnGiving(planner, 2, /*rows=*/true, /*states=*/true);
  const proto::PrefillWay direct{PrefixExchange::kGatherDirect, proto::LinearExchange::kChain};
  EXPECT_EQ(planner.Choose(Prompt(1024, 512), Free(2), 2).forecast.way(), direct);
  PrefillPlanner states_only(hybrid, options_);
  LearnGiving(states_only, 2, /*rows=*/false, /*states=*/true);
  const proto::PrefillWay chain{PrefixExchange::kGather, proto::LinearExchange::kChain};
  EXPECT_EQ(states_only.Choose(Prompt(1024, 512), Free(2), 2).forecast.way(), chain);
  PrefillPlanner rows_only(hybrid, options_);
  LearnGiving(rows_only, 2, /*rows=*/true);
  const proto::PrefillWay rows{PrefixExchange::kGatherDirect, proto::LinearExchange::kStates};
  EXPECT_EQ(rows_only.Choose(Prompt(1024, 512), Free(2), 2).forecast.way(), rows);
}

TEST_F(PrefillPlannerTest, AnOrdinaryStepGathersWhatItLacksWhereThatIsFaster) {
  PrefillPlanner planner(table_, options_);
  Learn(planner, 0.001, 0.01, 1, 0.0001);
  const FreeRank lacks{WorkerId(10), {}}, has{WorkerId(10), {0, 4096}};
  EXPECT_EQ(planner.ChooseExchange(Prompt(512, 4096), lacks, 512).exchange, PrefixExchange::kGather);
  const PrefillForecast holds = planner.ChooseExchange(Prompt(512, 4096), has, 512);
  EXPECT_EQ(holds.exchange, PrefixExchange::kAsk);
  EXPECT_EQ(holds.next_best_s, 0) << "nothing is missing";
}

TEST_F(PrefillPlannerTest, WithoutRoomNothingIsGathered) {
  PrefillPlanner planner(table_, options_);
  Learn(planner, 0.001, 0.01, 1, 0.0001);
  proto::StepResult result;
  result.work = {.tokens = 1000, .step_tokens = 1000, .scratch_blocks = 16};  // 8 segments
  result.timings = {.dense_us = 1000};
  planner.Learn(WorkerId(10), {}, result, false);
  const PrefillForecast forecast = planner.ChooseExchange(Prompt(512, 4096), {WorkerId(10), {}}, 512);
  EXPECT_EQ(forecast.exchange, PrefixExchange::kAsk);
}

TEST_F(PrefillPlannerTest, AForcedExchangeAndAForcedNumberStay) {
  PrefillPlannerOptions forced = options_;
  forced.exchange = PrefixExchange::kGather;
  forced.choose_ranks = false;
  PrefillPlanner planner(table_, forced);
  Learn(planner, 0.001, 1, 0.01, 1000);
  const PrefillChoice choice = planner.Choose(Prompt(1024, 4096), Free(2), 2);
  EXPECT_EQ(choice.ranks(), 2);
  EXPECT_EQ(choice.forecast.exchange, PrefixExchange::kGather);
}

TEST_F(PrefillPlannerTest, WhatIsKnownOfAWorkerGoesWithIt) {
  PrefillPlanner planner(table_, options_);
  Learn(planner, 1, 1, 1, 1, /*workers=*/1);
  planner.ForgetComputeWorker(WorkerId(10));
  planner.ForgetAttentionWorker(kAttention);
  EXPECT_FALSE(planner.compute_rates().token_s.has_value());
  EXPECT_FALSE(planner.plane_rates().flop_s.has_value());
}

// ---- in the scheduler ----

class PlannedGroupsTest : public testing::Test {
 protected:
  static SchedulerOptions Options() {
    SchedulerOptions options = SmallOptions();
    options.prefill_rank_tokens = 64;
    options.max_num_batched_tokens = 512;
    options.prefill_exchange.reset();
    return options;
  }
  PlannedGroupsTest() {
    parts_.AddAttentionWorker(0, 1000);
    for (const uint32_t worker : {10, 11}) parts_.pool.Join(WorkerId(worker));
  }
  CoreParts parts_{Options()};
  PrefillGroups groups_{parts_.options, parts_.pool,   parts_.batches, parts_.accounts,
                        parts_.room,    parts_.writer, parts_.turn};
};

TEST_F(PlannedGroupsTest, NoPromptIsDividedWhileRequestsWait) {
  parts_.AddReady(400);
  groups_.Plan(/*requests_wait=*/true);
  EXPECT_TRUE(parts_.Take<RunStep>().empty());
  groups_.Plan(/*requests_wait=*/false);
  EXPECT_EQ(parts_.Take<RunStep>().size(), 2u);
}

TEST_F(PlannedGroupsTest, ARanksEntrySaysTheExchangeAndItsResultTeachesThePlanner) {
  Sequence& sequence = parts_.AddReady(400);
  groups_.Plan(/*requests_wait=*/false);
  const std::vector<RunStep> ranks = parts_.Take<RunStep>();
  ASSERT_EQ(ranks.size(), 2u);
  EXPECT_EQ(ranks[1].plan.entries[0].exchange, PrefixExchange::kAsk) << "rates are not known";
  EXPECT_EQ(sequence.KeptBy(WorkerId(10)), (HeldTokens{0, ranks[1].plan.entries[0].ctx_len}));
  for (const RunStep& rank : ranks) {
    proto::StepResult result{.step = rank.plan.step, .micro_batch = rank.plan.micro_batch};
    result.entries.push_back({.sequence = sequence.id});
    result.work = {.tokens = 200, .step_tokens = 200, .here_flops = 1e6};
    result.timings = {.dense_us = 1000, .prompt_us = 1000};
    const auto ended = groups_.Finish(parts_.batches[rank.plan.micro_batch.value()], result);
    EXPECT_EQ(ended.has_value(), rank.plan.step == ranks[1].plan.step);
  }
  EXPECT_DOUBLE_EQ(*parts_.pool.planner().compute_rates().token_s, 1e-3 / 200);
  EXPECT_EQ(parts_.pool.planner().last().ranks, 2);
  EXPECT_EQ(parts_.pool.planner().last().tokens, 400);
}

TEST(Describe, AForecastIsALine) {
  const PrefillForecast forecast{.ranks = 2,
                                 .tokens = 4096,
                                 .exchange = PrefixExchange::kGather,
                                 .predicted_s = 1.5,
                                 .measured_s = 1.25,
                                 .bound = PrefillBound::kLink};
  EXPECT_EQ(Describe(forecast),
            "4096 tokens on 2 ranks by gather: predicted 1.500 s, took 1.250 s; most of it is link");
  EXPECT_EQ(Describe({.ranks = 1, .tokens = 512, .measured_s = 2}),
            "512 tokens on 1 rank by plane: not predicted, for rates are not known yet, took 2.000 s");
  EXPECT_EQ(Describe({.ranks = 2,
                      .tokens = 640,
                      .exchange = PrefixExchange::kGatherDirect,
                      .linear = proto::LinearExchange::kChain,
                      .predicted_s = 1,
                      .measured_s = 1}),
            "640 tokens on 2 ranks by gather-direct+chain: predicted 1.000 s, took 1.000 s; most of it is dense "
            "layers");
  EXPECT_EQ(Describe({}), "");
}

}  // namespace
}  // namespace dovetail::scheduler
