#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "compute_worker/core/compute_worker_core.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/pass_q.h"
#include "tests/compute_worker/rank_fixture.h"

// Ranks of a prefill group that ask each other about earlier tokens: whatever the order in which frames and plans come,
// and however often, each rank answers once whatever each later rank asks, gets one answer from each earlier rank whose
// tokens it sees, and keeps its own K and V until they are asked about, of no more than kRankOpsAhead ops.

namespace dovetail::compute {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int kOps = 8;  // one linear and one windowed
constexpr int kLinearOp = 2, kWindowedOp = 4, kWindow = 60;

proto::AttentionTable Table() { return HybridTable(kOps, kLinearOp, kWindowedOp, kWindow); }

struct Rank : FakeRank {
  explicit Rank(int rank) : FakeRank(rank, Table(), /*prompt_blocks=*/1) {}
};

proto::StepPlan PlanOf(int rank, const std::vector<Position>& cuts, uint64_t group) {
  return RankPlan(Table(), rank, cuts, group, proto::PrefixExchange::kPassQ, proto::LinearExchange::kChain);
}

Event QueriesFrom(int from, int to, int op, const std::vector<Position>& cuts, uint64_t group) {
  return RankHeadsArrived{StepId(group + static_cast<uint64_t>(to)), MicroBatchId(static_cast<uint16_t>(to)), op, from,
                          QueriesOf(Table(), op, cuts, from, to)};
}

Event AnswerFrom(int from, int to, int op, const std::vector<Position>& cuts, uint64_t group) {
  return RankOutputsArrived{StepId(group + static_cast<uint64_t>(to)), MicroBatchId(static_cast<uint16_t>(to)), op,
                            from, PartialsOf(Table(), op, cuts, from, to)};
}

template <typename T>
std::vector<std::pair<int, int>> SentOf(const std::vector<FakeRank::ToRank>& sent) {  // op and receiver
  std::vector<std::pair<int, int>> all;
  for (const FakeRank::ToRank& one : sent)
    if (const auto* event = std::get_if<T>(&one.event)) all.emplace_back(event->op, one.rank);
  return all;
}

std::vector<std::pair<int, int>> OpAndRankOf(const std::vector<FakeRank::Heads>& heads) {
  std::vector<std::pair<int, int>> all;
  for (const FakeRank::Heads& one : heads) all.emplace_back(one.op, one.rank);
  return all;
}

using P = std::pair<int, int>;

TEST(RankPassQ, ARankAsksThoseBeforeItAndGoesOnWhenAllHaveAnswered) {
  Rank third(2);
  const std::vector<Position> cuts = {0, 64, 128, 190};
  EXPECT_THAT(SentOf<RankHeadsArrived>(third.Feed(PlanArrived{PlanOf(2, cuts, 10)})), ElementsAre(P(0, 1), P(0, 0)));
  EXPECT_THAT(third.ran(), ElementsAre(0)) << "its own tokens meanwhile";
  EXPECT_THAT(third.Feed(AnswerFrom(0, 2, 0, cuts, 10)), IsEmpty());
  EXPECT_THAT(third.Feed(AnswerFrom(0, 2, 0, cuts, 10)), IsEmpty()) << "it came before";
  EXPECT_THAT(SentOf<RankHeadsArrived>(third.Feed(AnswerFrom(1, 2, 0, cuts, 10))), ElementsAre(P(1, 1), P(1, 0)));
  EXPECT_THAT(OpAndRankOf(third.placed()), ElementsAre(P(0, 0), P(0, 1)));
}

TEST(RankPassQ, ARankKeepsItsTokensOfFourOpsUntilTheyAreAskedAbout) {
  Rank first(0);
  const std::vector<Position> cuts = {0, 64, 100};
  EXPECT_THAT(first.Feed(QueriesFrom(1, 0, 0, cuts, 10)), IsEmpty()) << "before the plan";
  EXPECT_THAT(SentOf<RankOutputsArrived>(first.Feed(PlanArrived{PlanOf(0, cuts, 10)})), ElementsAre(P(0, 1)));
  EXPECT_THAT(first.ran(), ElementsAre(0, 1, 2, 3, 4, 5)) << "1, 3, 4 and 5 are kept";
  EXPECT_THAT(SentOf<RankOutputsArrived>(first.Feed(QueriesFrom(1, 0, 1, cuts, 10))), ElementsAre(P(1, 1)));
  EXPECT_THAT(first.ran(), ElementsAre(0, 1, 2, 3, 4, 5, 6));
  for (const int op : {3, 4, 5, 6}) first.Feed(QueriesFrom(1, 0, op, cuts, 10));
  EXPECT_THAT(first.ran(), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  EXPECT_THAT(first.results(), IsEmpty()) << "it ends when nothing more is asked";
  EXPECT_THAT(SentOf<RankOutputsArrived>(first.Feed(QueriesFrom(1, 0, 7, cuts, 10))), ElementsAre(P(7, 1)));
  EXPECT_THAT(first.errors(), ElementsAre(""));
  EXPECT_EQ(first.core().rank_bytes(), 0u);
}

// Of op 4 rank 2 sees nothing that rank 0 has, and some of its rows something that rank 1 has.
TEST(RankPassQ, OnlyRowsThatSeeSomethingAreSent) {
  Rank third(2);
  const std::vector<Position> cuts = {0, 128, 192, 300};
  third.Feed(PlanArrived{PlanOf(2, cuts, 10)});
  std::vector<FakeRank::ToRank> sent;
  for (int op = 0; op < kWindowedOp; ++op) {
    if (op == kLinearOp) {
      sent = third.Feed(RankStateArrived{StepId(12), MicroBatchId(2), op, StateOf(Table(), 1, op)});
      continue;
    }
    third.Feed(AnswerFrom(0, 2, op, cuts, 10));
    sent = third.Feed(AnswerFrom(1, 2, op, cuts, 10));
  }
  EXPECT_THAT(SentOf<RankHeadsArrived>(sent), ElementsAre(P(kWindowedOp, 1)));
  EXPECT_EQ(std::get<RankHeadsArrived>(sent[0].event).rows.size(), static_cast<size_t>((kWindow - 1) * 4 * 8 * 2));
  EXPECT_THAT(SentOf<RankHeadsArrived>(third.Feed(AnswerFrom(1, 2, kWindowedOp, cuts, 10))),
              ElementsAre(P(5, 1), P(5, 0)));
}

TEST(RankPassQ, EarlierTokensOfTheFirstSegmentComeToRankZero) {
  Rank first(0), second(1);
  const std::vector<Position> cuts = {100, 128, 190};
  first.Feed(PlanArrived{PlanOf(0, cuts, 10)});
  second.Feed(PlanArrived{PlanOf(1, cuts, 10)});
  const auto gathers = [](Rank& rank, uint16_t id) {
    return rank.core().PartsOf(MicroBatchId(id))[0].layouts[0].gather_bytes > 0;
  };
  EXPECT_TRUE(gathers(first, 0));
  EXPECT_FALSE(gathers(second, 1));
  EXPECT_EQ(first.core().ShardOf(MicroBatchId(0), 0).begin, 64);
  EXPECT_THAT(OpAndRankOf(first.queries()), IsEmpty());
}

// A later rank may wait for them at an attention worker, and this one for that rank's queries.
TEST(RankPassQ, StatesDoNotWaitForTheEndOfTheStep) {
  FakeRank first(0, Table(), 1, /*hand_over_at_end=*/true);
  const std::vector<Position> cuts = {0, 64, 128};
  first.Feed(
      PlanArrived{RankPlan(Table(), 0, cuts, 10, proto::PrefixExchange::kPassQ, proto::LinearExchange::kStates)});
  EXPECT_THAT(first.handed_over(), ElementsAre(0, 1, kLinearOp, 3, 4)) << "it waits in op 4";
}

TEST(RankPassQ, WhatDoesNotFitIsDropped) {
  Rank rank(1);
  const std::vector<Position> cuts = {0, 64, 128, 192};
  const MicroBatchId id(1);
  const auto queries = QueriesOf(Table(), 0, cuts, 2, 1);
  rank.Feed(RankHeadsArrived{StepId(11), id, 1, 2, std::vector<std::byte>(queries.size() - 1)});  // before the plan
  rank.Feed(RankHeadsArrived{StepId(11), id, 0, 0, queries});                                     // of an earlier rank
  rank.Feed(PlanArrived{PlanOf(1, cuts, 10)});
  EXPECT_EQ(rank.core().counters().dropped_frames, 2u);
  rank.Feed(RankHeadsArrived{StepId(11), id, 0, 1, queries});  // of itself
  rank.Feed(RankHeadsArrived{StepId(11), id, 0, 3, queries});
  rank.Feed(RankHeadsArrived{StepId(11), id, kLinearOp, 2, queries});
  rank.Feed(RankHeadsArrived{StepId(10), id, 0, 2, queries});
  EXPECT_EQ(rank.core().counters().dropped_frames, 6u);
  const auto answer = PartialsOf(Table(), 0, cuts, 0, 1);
  rank.Feed(RankOutputsArrived{StepId(11), id, 1, 0, answer});  // of an op to come
  rank.Feed(RankOutputsArrived{StepId(11), id, 0, 1, answer});  // of itself
  rank.Feed(RankOutputsArrived{StepId(11), id, 0, 2, answer});  // of a later rank
  rank.Feed(RankOutputsArrived{StepId(10), id, 0, 0, answer});
  rank.Feed(RankOutputsArrived{StepId(11), id, 0, 0, std::vector<std::byte>(answer.size() + 4)});
  EXPECT_EQ(rank.core().counters().dropped_frames, 11u);
  EXPECT_EQ(rank.core().rank_bytes(), 0u);
  EXPECT_THAT(rank.queries(), IsEmpty());
  EXPECT_THAT(rank.placed(), IsEmpty());
}

TEST(RankPassQ, AWorkerThatAnswersNoQueriesRefuses) {
  ComputeWorkerCore core(Table(), {},
                         {.micro_batches = 4, .max_step_tokens = 256, .vocab_size = 100, .linear_prompts = true});
  core.AddAttentionWorker({WorkerId(0), Epoch(1), NodeId(10)});
  std::vector<Action> actions;
  core.Handle(PlanArrived{PlanOf(1, {0, 64, 128}, 10)}, actions);
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_EQ(
      std::get<FinishStep>(actions[0]).result.error,
      "sequence 1: compute workers on CPUs only ask each other about earlier tokens (pass-q); take gather-direct");
}

// The most that later ranks ask at a time: each about one op.
int64_t MostAsked(const std::vector<Position>& cuts, int rank) {
  int64_t asked = 0;
  for (int from = rank + 1; from + 1 < static_cast<int>(cuts.size()); ++from)
    asked += static_cast<int64_t>(QueriesOf(Table(), 0, cuts, from, rank).size());
  return asked;
}

// All that a rank was to answer and to get, once; returns the bytes that came from other ranks.
int64_t ExpectAll(const Rank& worker, const std::vector<Position>& cuts, int rank) {
  const int ranks = static_cast<int>(cuts.size()) - 1;
  int64_t bytes = 0;
  size_t answered = 0, placed = 0;
  const auto expect_one = [&](const std::vector<FakeRank::Heads>& all, int op, int from,
                              const std::vector<std::byte>& rows, size_t& count) {
    const auto got = std::count_if(all.begin(), all.end(), [&](const FakeRank::Heads& one) {
      return one.op == op && one.rank == from && one.rows == rows;
    });
    EXPECT_EQ(got, rows.empty() ? 0 : 1) << "op " << op << " of rank " << from;
    count += rows.empty() ? 0 : 1;
    bytes += static_cast<int64_t>(rows.size());
  };
  for (int op = 0; op < kOps; ++op) {
    if (op == kLinearOp) continue;
    for (int from = 0; from < rank; ++from)
      expect_one(worker.placed(), op, from, PartialsOf(Table(), op, cuts, from, rank), placed);
    for (int from = rank + 1; from < ranks; ++from)
      expect_one(worker.queries(), op, from, QueriesOf(Table(), op, cuts, from, rank), answered);
  }
  EXPECT_THAT(worker.queries(), SizeIs(answered));
  EXPECT_THAT(worker.placed(), SizeIs(placed));
  EXPECT_THAT(worker.ran(), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  return bytes;
}

class RankPassQOrder : public ::testing::TestWithParam<int> {};

// Plans and frames come in any order, frames again and again, some of groups that were given up at any point.
TEST_P(RankPassQOrder, EachRankAnswersAllLaterOnesAndIsAnsweredByAllEarlierOnes) {
  std::mt19937 random(static_cast<uint32_t>(GetParam()));
  const int ranks = 2 + static_cast<int>(random() % 3);
  std::vector<Rank> workers;
  for (int r = 0; r < ranks; ++r) workers.emplace_back(r);
  std::vector<FakeRank::ToRank> late;  // of groups that have ended
  Position base = static_cast<Position>(random() % 3) * 50;
  for (uint64_t group = 10; group < 40; group += 10) {
    const std::vector<Position> cuts = RandomCuts(base, ranks, random);
    const bool given_up = random() % 2 == 0;
    const int events = given_up ? static_cast<int>(random() % 60) : 1 << 20;
    std::vector<FakeRank::ToRank> ready;
    for (int r = 0; r < ranks; ++r) ready.push_back({r, PlanArrived{PlanOf(r, cuts, group)}});
    for (Rank& worker : workers) worker.Clear();
    ready.insert(ready.end(), late.begin(), late.end());
    FeedInAnyOrder(std::move(ready), events, random, workers, late, [&] {
      const auto states = static_cast<int64_t>(StateOf(Table(), 0, kLinearOp).size());
      for (int r = 0; r < ranks; ++r)
        EXPECT_LE(static_cast<int64_t>(workers[r].core().rank_bytes()), MostAsked(cuts, r) + states);
    });
    for (int r = 0; r < ranks; ++r) {
      SCOPED_TRACE(absl::StrCat("seed ", GetParam(), ", group ", group, ", rank ", r));
      if (given_up) workers[r].Feed(StepWithdrawn{StepId(group + r), MicroBatchId(static_cast<uint16_t>(r))});
      EXPECT_EQ(workers[r].core().rank_bytes(), 0u);
      if (given_up) continue;
      EXPECT_THAT(workers[r].errors(), ElementsAre(""));
      if (HasFailure()) return;
      EXPECT_EQ(workers[r].results()[0].prefix.pass_q_bytes, ExpectAll(workers[r], cuts, r));
    }
    if (!given_up) base = cuts.back();
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RankPassQOrder, ::testing::Range(0, 300));

}  // namespace
}  // namespace dovetail::compute
