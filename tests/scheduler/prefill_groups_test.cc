#include "scheduler/core/prefill_groups.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "tests/scheduler/core_parts.h"

// Prefill groups without a scheduler: which ranks begin, and what a group comes to. prefill_group_test.cc has whole
// clusters.

namespace dovetail::scheduler {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;
using Outcome = PrefillGroups::Ended::Outcome;

class PrefillGroupsTest : public ::testing::Test {
 protected:
  static SchedulerOptions Options() {
    SchedulerOptions options = SmallOptions();
    options.prefill_rank_tokens = 64;
    options.max_num_batched_tokens = 512;
    options.step_timeout = absl::Seconds(1);
    return options;
  }
  explicit PrefillGroupsTest(int compute_workers = 2) {
    parts_.AddAttentionWorker(0, 1000);
    for (int i = 0; i < compute_workers; ++i) parts_.pool.Join(WorkerId(static_cast<uint32_t>(10 + i)));
  }

  // Begins one group and returns its ranks' steps.
  std::vector<RunStep> Begin(Sequence& sequence) {
    groups_.Plan(/*requests_wait=*/false);
    std::vector<RunStep> ranks = parts_.Take<RunStep>();
    EXPECT_THAT(ranks, SizeIs(2));
    EXPECT_EQ(sequence.in_flight, 2);
    return ranks;
  }
  MicroBatch& BatchOf(const RunStep& rank) { return parts_.batches[rank.plan.micro_batch.value()]; }
  static proto::StepResult ResultOf(const RunStep& rank, proto::StepStatus status = proto::StepStatus::kOk) {
    proto::StepResult result{.step = rank.plan.step, .micro_batch = rank.plan.micro_batch};
    result.status = status;
    if (status == proto::StepStatus::kOk) result.entries.push_back({.sequence = rank.plan.entries[0].sequence});
    return result;
  }

  CoreParts parts_{Options()};
  PrefillGroups groups_{parts_.options, parts_.pool,   parts_.batches, parts_.accounts,
                        parts_.room,    parts_.writer, parts_.turn};
};

TEST_F(PrefillGroupsTest, ALongPromptIsCutBetweenTheWorkersThatAreFree) {
  Sequence& sequence = parts_.AddReady(400);
  const std::vector<RunStep> ranks = Begin(sequence);
  EXPECT_EQ(ranks[0].compute_worker, WorkerId(10));
  EXPECT_EQ(ranks[1].compute_worker, WorkerId(11));
  const proto::PrefillPart& first = ranks[0].plan.part;
  const proto::PrefillPart& second = ranks[1].plan.part;
  EXPECT_EQ(first.group, second.group);
  EXPECT_EQ(first.base, 0);
  EXPECT_EQ(first.end, 400);
  const auto cut = static_cast<Position>(ranks[0].plan.entries[0].tokens.size());
  EXPECT_EQ(cut % kSegmentTokens, 0);
  EXPECT_EQ(ranks[1].plan.entries[0].ctx_len, cut);
  EXPECT_FALSE(ranks[0].plan.entries[0].sample);
  EXPECT_TRUE(ranks[1].plan.entries[0].sample) << "the last rank draws the first token";
  EXPECT_EQ(groups_.groups(), 1u);
  EXPECT_EQ(groups_.tokens(), 400u);
  parts_.AddReady(400);
  groups_.Plan(/*requests_wait=*/false);
  EXPECT_THAT(parts_.actions, IsEmpty()) << "no worker is free";
}

// Ranks on a CPU and on a GPU would wait for what the other does not send.
TEST(PrefillGroupsOfKinds, ARankIsNoWorkerThatComputesInAnotherWay) {
  for (const int second_cpus : {0, 1}) {
    SchedulerOptions options = SmallOptions();
    options.prefill_rank_tokens = 64;
    CoreParts parts(options);
    PrefillGroups groups(parts.options, parts.pool, parts.batches, parts.accounts, parts.room, parts.writer,
                         parts.turn);
    parts.AddAttentionWorker(0, 1000);
    parts.pool.Join(WorkerId(10), false, /*kind=*/1);
    for (int i = 0; i <= second_cpus; ++i) parts.pool.Join(WorkerId(static_cast<uint32_t>(11 + i)), false, 0);
    parts.AddReady(400);
    groups.Plan(/*requests_wait=*/false);
    std::vector<WorkerId> ranks;
    for (const RunStep& rank : parts.Take<RunStep>()) ranks.push_back(rank.compute_worker);
    if (second_cpus == 0)
      EXPECT_THAT(ranks, IsEmpty());
    else
      EXPECT_THAT(ranks, ::testing::ElementsAre(WorkerId(11), WorkerId(12)));
  }
}

// Where they hand on states, each knows the step and the micro-batch of all.
TEST(PrefillGroupsChain, RanksAreToldOfEachOtherWhereThereAreStatesToHandOn) {
  for (const bool hybrid : {false, true}) {
    SchedulerOptions options = SmallOptions();
    options.prefill_rank_tokens = 64;
    options.max_num_batched_tokens = 512;
    options.linear_exchange = proto::LinearExchange::kChain;
    if (hybrid) {
      proto::LinearSpec state;
      state.heads = 2;
      state.key_dim = state.value_dim = 16;
      proto::LinearConstants decays;
      decays.log_decay.assign(2, -0.1f);
      options.attention = *proto::AttentionTable::Build({state}, {decays});
    }
    CoreParts parts(options);
    PrefillGroups groups(parts.options, parts.pool, parts.batches, parts.accounts, parts.room, parts.writer,
                         parts.turn);
    parts.AddAttentionWorker(0, 1000);
    for (const uint32_t worker : {10, 11, 12}) parts.pool.Join(WorkerId(worker));
    parts.AddReady(400);
    groups.Plan(/*requests_wait=*/false);
    const std::vector<RunStep> ranks = parts.Take<RunStep>();
    ASSERT_THAT(ranks, SizeIs(3));
    for (const RunStep& rank : ranks) {
      EXPECT_EQ(rank.plan.entries[0].linear_exchange,
                hybrid ? proto::LinearExchange::kChain : proto::LinearExchange::kStates);
      ASSERT_THAT(rank.plan.ranks, SizeIs(hybrid ? 3 : 0));
      for (size_t r = 0; r < rank.plan.ranks.size(); ++r)
        EXPECT_EQ(rank.plan.ranks[r],
                  (proto::RankAddress{ranks[r].compute_worker, ranks[r].plan.step, ranks[r].plan.micro_batch,
                                      ranks[r].plan.entries[0].ctx_len}));
    }
  }
}

TEST(PrefillGroupsDirect, RanksThatGiveEachOtherRowsKnowWhereEachBegins) {
  SchedulerOptions options = SmallOptions();
  options.prefill_rank_tokens = 64;
  options.max_num_batched_tokens = 512;
  options.prefill_exchange = proto::PrefixExchange::kGatherDirect;
  CoreParts parts(options);
  PrefillGroups groups(parts.options, parts.pool, parts.batches, parts.accounts, parts.room, parts.writer, parts.turn);
  parts.AddAttentionWorker(0, 1000);
  for (const uint32_t worker : {10, 11, 12}) parts.pool.Join(WorkerId(worker));
  parts.AddReady(400);
  groups.Plan(/*requests_wait=*/false);
  const std::vector<RunStep> ranks = parts.Take<RunStep>();
  ASSERT_THAT(ranks, SizeIs(3));
  for (const RunStep& rank : ranks) {
    EXPECT_EQ(rank.plan.entries[0].exchange, proto::PrefixExchange::kGatherDirect);
    ASSERT_THAT(rank.plan.ranks, SizeIs(3));
    for (size_t r = 0; r < 3; ++r) EXPECT_EQ(rank.plan.ranks[r].begin, ranks[r].plan.entries[0].ctx_len);
  }
}

// So the next group finds what later ranks computed. After the last one nothing needs it.
TEST(PrefillGroupsDirect, RanksGiveBackWhereThePromptGoesOnAndOneHasRoom) {
  for (const auto exchange : {proto::PrefixExchange::kGatherDirect, proto::PrefixExchange::kGather})
    for (const bool has_room : {true, false}) {
      SchedulerOptions options = SmallOptions();
      options.prefill_rank_tokens = 64;
      options.max_num_batched_tokens = 512;
      options.prefill_exchange = exchange;
      CoreParts parts(options);
      PrefillGroups groups(parts.options, parts.pool, parts.batches, parts.accounts, parts.room, parts.writer,
                           parts.turn);
      parts.AddAttentionWorker(0, 1000);
      for (const uint32_t worker : {10, 11}) parts.pool.Join(WorkerId(worker));
      proto::StepResult known;
      known.work = {.tokens = 100, .step_tokens = 100, .scratch_blocks = has_room ? 100'000u : 1};
      for (const uint32_t worker : {10, 11}) parts.pool.planner().Learn(WorkerId(worker), {}, known, false);
      Sequence& sequence = parts.AddReady(1500);
      const bool expected = has_room && exchange == proto::PrefixExchange::kGatherDirect;
      for (const Position base : {0, 768}) {
        sequence.ctx_len = base;
        groups.Plan(/*requests_wait=*/false);
        const std::vector<RunStep> ranks = parts.Take<RunStep>();
        ASSERT_THAT(ranks, SizeIs(2));
        EXPECT_EQ(ranks[0].plan.part.end, base == 0 ? 768 : 1500);
        for (const RunStep& rank : ranks) EXPECT_EQ(rank.plan.gives_back, expected && base == 0);
        if (base > 0) break;
        if (expected) {
          EXPECT_EQ(sequence.KeptBy(WorkerId(10)), (HeldTokens{0, 768}));
        }
        for (const RunStep& rank : ranks) {
          proto::StepResult result{.step = rank.plan.step, .micro_batch = rank.plan.micro_batch};
          result.entries.push_back({.sequence = sequence.id});
          const auto ended = groups.Finish(parts.batches[rank.plan.micro_batch.value()], result);
          if (!ended) continue;
          ended->batch->entries.clear();
          sequence.in_flight = sequence.flying = sequence.planned = 0;
        }
      }
    }
}

// What it gave the others may not have got there.
TEST(PrefillGroupsDirect, AWorkerThatIsLostAfterItsRankHasEndedEndsTheGroup) {
  for (const bool direct : {false, true}) {
    SchedulerOptions options = SmallOptions();
    options.prefill_rank_tokens = 64;
    options.max_num_batched_tokens = 512;
    options.prefill_exchange = direct ? proto::PrefixExchange::kGatherDirect : proto::PrefixExchange::kGather;
    CoreParts parts(options);
    PrefillGroups groups(parts.options, parts.pool, parts.batches, parts.accounts, parts.room, parts.writer,
                         parts.turn);
    parts.AddAttentionWorker(0, 1000);
    for (const uint32_t worker : {10, 11, 12}) parts.pool.Join(WorkerId(worker));
    parts.AddReady(400);
    groups.Plan(/*requests_wait=*/false);
    const std::vector<RunStep> ranks = parts.Take<RunStep>();
    ASSERT_THAT(ranks, SizeIs(3));
    const auto finish = [&](const RunStep& rank, proto::StepStatus status) {
      proto::StepResult result{.step = rank.plan.step, .micro_batch = rank.plan.micro_batch, .status = status};
      result.entries.resize(1);
      result.entries[0].sequence = rank.plan.entries[0].sequence;
      return groups.Finish(parts.batches[rank.plan.micro_batch.value()], result);
    };
    EXPECT_FALSE(finish(ranks[0], proto::StepStatus::kOk).has_value());
    groups.LoseEndedRanks(ranks[1].compute_worker);
    EXPECT_THAT(parts.Take<WithdrawStep>(), IsEmpty()) << "its rank is in flight, which ends as others do";
    groups.LoseEndedRanks(ranks[0].compute_worker);
    EXPECT_THAT(parts.Take<WithdrawStep>(), SizeIs(direct ? 2 : 0)) << "attention workers have what it computed";
    if (!direct) continue;
    EXPECT_FALSE(finish(ranks[1], proto::StepStatus::kOk).has_value());
    const auto ended = finish(ranks[2], proto::StepStatus::kWorkerFailed);
    ASSERT_TRUE(ended.has_value());
    EXPECT_EQ(ended->outcome, PrefillGroups::Ended::Outcome::kRepeat);
  }
}

TEST(PrefillGroupsDirect, AGroupEndsWhenTwoOfItsRanksReachEachOtherNoMore) {
  for (const bool direct : {false, true}) {
    SchedulerOptions options = SmallOptions();
    options.prefill_rank_tokens = 64;
    options.max_num_batched_tokens = 512;
    options.prefill_exchange = direct ? proto::PrefixExchange::kGatherDirect : proto::PrefixExchange::kGather;
    CoreParts parts(options);
    PrefillGroups groups(parts.options, parts.pool, parts.batches, parts.accounts, parts.room, parts.writer,
                         parts.turn);
    parts.AddAttentionWorker(0, 1000);
    for (const uint32_t worker : {10, 11}) parts.pool.Join(WorkerId(worker));
    parts.AddReady(400);
    groups.Plan(/*requests_wait=*/false);
    const std::vector<RunStep> ranks = parts.Take<RunStep>();
    ASSERT_THAT(ranks, SizeIs(2));
    groups.LoseLink(WorkerId(10), WorkerId(12));
    EXPECT_THAT(parts.Take<WithdrawStep>(), IsEmpty()) << "one of them is no rank";
    groups.LoseLink(WorkerId(10), WorkerId(11));
    EXPECT_THAT(parts.Take<WithdrawStep>(), SizeIs(direct ? 2 : 0));
    if (!direct) continue;
    for (const RunStep& rank : ranks) {
      const proto::StepResult result{
          .step = rank.plan.step, .micro_batch = rank.plan.micro_batch, .status = proto::StepStatus::kWorkerFailed};
      const auto ended = groups.Finish(parts.batches[rank.plan.micro_batch.value()], result);
      ASSERT_EQ(ended.has_value(), &rank == &ranks[1]);
      if (ended) {
        EXPECT_EQ(ended->outcome, PrefillGroups::Ended::Outcome::kRepeat);
      }
    }
  }
}

TEST_F(PrefillGroupsTest, ShortPromptsAndWhatIsHeldUpBeginNone) {
  Sequence& brief = parts_.AddReady(127);
  Sequence& paused = parts_.AddReady(400);
  paused.request->paused = true;
  groups_.Plan(/*requests_wait=*/false);
  EXPECT_THAT(parts_.actions, IsEmpty());
  EXPECT_EQ(brief.in_flight, 0);
  paused.request->paused = false;
  parts_.batches[paused.micro_batch].held = true;
  groups_.Plan(/*requests_wait=*/false);
  EXPECT_THAT(parts_.actions, IsEmpty());
}

TEST_F(PrefillGroupsTest, OnlyTheRankWhoseTurnItIsCanBeOverdue) {
  const std::vector<RunStep> ranks = Begin(parts_.AddReady(400));
  EXPECT_LT(BatchOf(ranks[0]).deadline, absl::InfiniteFuture());
  EXPECT_EQ(BatchOf(ranks[1]).deadline, absl::InfiniteFuture());
  EXPECT_FALSE(groups_.Finish(BatchOf(ranks[0]), ResultOf(ranks[0])).has_value());
  EXPECT_LT(BatchOf(ranks[1]).deadline, absl::InfiniteFuture());
}

TEST_F(PrefillGroupsTest, WhenAllRanksHaveEndedItIsOneStepWithAllTokens) {
  Sequence& sequence = parts_.AddReady(400);
  const std::vector<RunStep> ranks = Begin(sequence);
  proto::StepResult last = ResultOf(ranks[1]);
  last.entries[0].token = 42;
  last.prefix.asked_bytes = 7;
  EXPECT_FALSE(groups_.Finish(BatchOf(ranks[1]), last).has_value());
  const auto ended = groups_.Finish(BatchOf(ranks[0]), ResultOf(ranks[0]));
  ASSERT_TRUE(ended.has_value());
  EXPECT_EQ(ended->outcome, Outcome::kFinished);
  ASSERT_THAT(ended->batch->entries, SizeIs(1));
  EXPECT_EQ(ended->batch->entries[0].ctx_len, 0);
  EXPECT_EQ(ended->batch->entries[0].q_len, 400);
  EXPECT_TRUE(ended->batch->entries[0].sample);
  EXPECT_EQ(ended->result.entries[0].token, 42);
  EXPECT_EQ(ended->result.prefix.asked_bytes, 7);
  EXPECT_EQ(sequence.in_flight, 1);
}

TEST_F(PrefillGroupsTest, ARankThatFailsWithdrawsTheOthersAndItsResultIsTheGroups) {
  const std::vector<RunStep> ranks = Begin(parts_.AddReady(400));
  EXPECT_FALSE(groups_.Finish(BatchOf(ranks[0]), ResultOf(ranks[0], proto::StepStatus::kOutOfMemory)).has_value());
  const std::vector<WithdrawStep> withdrawn = parts_.Take<WithdrawStep>();
  ASSERT_THAT(withdrawn, SizeIs(1));
  EXPECT_EQ(withdrawn[0].step, ranks[1].plan.step);
  const auto ended = groups_.Finish(BatchOf(ranks[1]), ResultOf(ranks[1], proto::StepStatus::kWorkerFailed));
  ASSERT_TRUE(ended.has_value());
  EXPECT_EQ(ended->outcome, Outcome::kFinished);
  EXPECT_EQ(ended->result.status, proto::StepStatus::kOutOfMemory) << "the first failure counts";
}

TEST_F(PrefillGroupsTest, AGroupWhoseSequenceHasEndedIsRepeatedWhichForgetsIt) {
  Sequence& sequence = parts_.AddReady(400);
  const std::vector<RunStep> ranks = Begin(sequence);
  groups_.Withdraw(sequence);
  groups_.Withdraw(sequence);
  EXPECT_THAT(parts_.Take<WithdrawStep>(), SizeIs(2)) << "each rank once";
  groups_.Finish(BatchOf(ranks[0]), ResultOf(ranks[0]));
  const auto ended = groups_.Finish(BatchOf(ranks[1]), ResultOf(ranks[1]));
  ASSERT_TRUE(ended.has_value());
  EXPECT_EQ(ended->outcome, Outcome::kRepeat);
}

TEST_F(PrefillGroupsTest, ALostWorkerEndsTheGroupByWhyItWasLost) {
  for (const bool overdue : {false, true}) {
    Sequence& sequence = parts_.AddReady(400);
    const std::vector<RunStep> ranks = Begin(sequence);
    EXPECT_FALSE(groups_.Lose(BatchOf(ranks[0]), overdue ? "no result for 5s" : "").has_value());
    const auto ended = groups_.Finish(BatchOf(ranks[1]), ResultOf(ranks[1], proto::StepStatus::kWorkerFailed));
    ASSERT_TRUE(ended.has_value());
    EXPECT_EQ(ended->outcome, overdue ? Outcome::kTryElsewhere : Outcome::kRepeat);
    EXPECT_EQ(ended->error, overdue ? "no result for 5s" : "");
    ended->batch->entries.clear();
    parts_.batches.Leave(sequence);
    parts_.actions.clear();
  }
}

class ThreeWorkers : public PrefillGroupsTest {
 protected:
  ThreeWorkers() : PrefillGroupsTest(/*compute_workers=*/3) {}
};

TEST_F(ThreeWorkers, APromptHasNoMoreRanksThanPartsOfTheLeastSize) {
  parts_.AddReady(130);
  groups_.Plan(/*requests_wait=*/false);
  EXPECT_THAT(parts_.Take<RunStep>(), SizeIs(2));
}

}  // namespace
}  // namespace dovetail::scheduler
