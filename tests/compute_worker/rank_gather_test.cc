#include <algorithm>
#include <deque>
#include <random>
#include <tuple>
#include <vector>

#include "compute_worker/core/compute_worker_core.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/prefix_traffic.h"
#include "scheduler/core/prefill_cost.h"
#include "tests/compute_worker/rank_fixture.h"

// Ranks of a prefill group that give each other K and V of softmax layers: whatever the order in which frames and plans
// come, and however often, each rank attends each op once, over what every rank before it has of that op, and none is
// more than kRankOpsAhead ops ahead.

namespace dovetail::compute {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr int kOps = 8;  // one linear and one windowed
constexpr int kLinearOp = 2, kWindowedOp = 4, kWindow = 60;
constexpr int64_t kRowBytes = 2 * (8 + 8) * 2;

proto::AttentionTable Table() { return HybridTable(kOps, kLinearOp, kWindowedOp, kWindow); }

struct Rank : FakeRank {
  explicit Rank(int rank, uint32_t prompt_blocks = 2000) : FakeRank(rank, Table(), prompt_blocks) {}
};

proto::StepPlan PlanOf(int rank, const std::vector<Position>& cuts, uint64_t group,
                       proto::PrefixExchange exchange = proto::PrefixExchange::kGatherDirect) {
  return RankPlan(Table(), rank, cuts, group, exchange, proto::LinearExchange::kChain);
}

template <typename Kind>
std::vector<int> OpsOf(const std::vector<FakeRank::ToRank>& sent) {
  std::vector<int> ops;
  for (const FakeRank::ToRank& one : sent)
    if (const auto* event = std::get_if<Kind>(&one.event)) ops.push_back(event->op);
  return ops;
}

// What a rank is to begin an op with.
std::vector<std::byte> ExpectedFrom(const std::vector<Position>& cuts, int rank, int op) {
  if (op == kLinearOp) return rank == 0 ? std::vector<std::byte>() : StateOf(Table(), rank - 1, op);
  std::vector<std::byte> from;
  for (int before = 0; before < rank; ++before) {
    Position first = cuts[before];
    if (op == kWindowedOp) first = std::max(first, (cuts[rank] - kWindow + 1) / 64 * 64);
    if (first >= cuts[before + 1]) continue;
    const auto rows = RowsOf(Table(), before, op, first, cuts[before + 1]);
    from.insert(from.end(), rows.begin(), rows.end());
  }
  return from;
}

TEST(RankGather, ARankGivesItsRowsToAllLaterOnesAndIsAtMostFourOpsAhead) {
  Rank first(0), second(1);
  const std::vector<Position> cuts = {0, 128, 192, 250};
  std::vector<FakeRank::ToRank> sent = first.Feed(PlanArrived{PlanOf(0, cuts, 10)});
  EXPECT_THAT(OpsOf<RankRowsArrived>(sent), ElementsAre(0, 0, 1, 1, 3, 3, 4)) << "of op 4 rank 2 sees nothing";
  EXPECT_THAT(OpsOf<RankStateArrived>(sent), ElementsAre(kLinearOp));
  EXPECT_THAT(first.results(), IsEmpty());
  EXPECT_THAT(OpsOf<RankRowsArrived>(second.Feed(PlanArrived{PlanOf(1, cuts, 10)})), ElementsAre(0))
      << "to rank 2, before it attends itself";
  std::vector<FakeRank::ToRank> from_second;
  for (FakeRank::ToRank& one : sent)
    if (one.rank == 1)
      for (FakeRank::ToRank& answer : second.Feed(std::move(one.event)))
        if (answer.rank == 0) from_second.push_back(std::move(answer));
  EXPECT_THAT(second.ran(), ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(OpsOf<RankAttended>(from_second), ElementsAre(0, 1, 3, 4));
  const auto& attended = std::get<RankAttended>(from_second[1].event);
  EXPECT_EQ(std::tuple(attended.step, attended.micro_batch, attended.rank), std::tuple(StepId(10), MicroBatchId(0), 1));
  sent.clear();
  for (FakeRank::ToRank& one : from_second)
    for (FakeRank::ToRank& more : first.Feed(std::move(one.event))) sent.push_back(std::move(more));
  EXPECT_THAT(OpsOf<RankRowsArrived>(sent), ElementsAre(5, 5)) << "now rank 2 is behind, which has four, too";
}

TEST(RankGather, ARankWithoutRoomAsksAndLetsTheOthersGoOn) {
  Rank first(0), second(1, /*prompt_blocks=*/1);
  const std::vector<Position> cuts = {0, 64, 120};
  std::vector<FakeRank::ToRank> to_second = first.Feed(PlanArrived{PlanOf(0, cuts, 10)});
  std::vector<FakeRank::ToRank> to_first;
  for (FakeRank::ToRank& frame : to_second)  // before the plan
    EXPECT_THAT(second.Feed(std::move(frame.event)), IsEmpty());
  to_first = second.Feed(PlanArrived{PlanOf(1, cuts, 10)});
  EXPECT_THAT(OpsOf<RankAttended>(to_first), ElementsAre(0, 1, 3, 4));
  while (!to_first.empty() || !to_second.empty()) {
    to_second.clear();
    for (FakeRank::ToRank& frame : to_first)
      for (FakeRank::ToRank& sent : first.Feed(std::move(frame.event))) to_second.push_back(std::move(sent));
    to_first.clear();
    for (FakeRank::ToRank& frame : to_second)
      for (FakeRank::ToRank& sent : second.Feed(std::move(frame.event))) to_first.push_back(std::move(sent));
  }
  EXPECT_THAT(first.errors(), ElementsAre(""));
  EXPECT_THAT(second.errors(), ElementsAre(""));
  EXPECT_THAT(second.ran(), ElementsAre(kLinearOp)) << "there is no room for a prompt";
  EXPECT_EQ(second.results()[0].prefix.direct_bytes, 0);
  EXPECT_GT(second.results()[0].prefix.asked_bytes + second.results()[0].prefix.state_bytes, 0);
  EXPECT_EQ(second.core().rank_bytes(), 0u);
}

TEST(RankGather, WhatDoesNotFitIsDropped) {
  Rank rank(1);
  const std::vector<Position> cuts = {0, 64, 128, 192};
  const MicroBatchId id(1);
  const auto rows = RowsOf(Table(), 0, 0, 0, 64);
  rank.Feed(RankRowsArrived{StepId(11), id, 1, 0, std::vector<std::byte>(rows.size() - 1)});  // before the plan
  rank.Feed(RankRowsArrived{StepId(11), id, 0, 1, rows});                                     // of itself
  rank.Feed(PlanArrived{PlanOf(1, cuts, 10)});
  EXPECT_EQ(rank.core().counters().dropped_frames, 2u);
  rank.Feed(RankRowsArrived{StepId(11), id, 0, 0, std::vector<std::byte>(rows.size() + 1)});
  rank.Feed(RankRowsArrived{StepId(11), id, 0, 0, {}});
  rank.Feed(RankRowsArrived{StepId(11), id, 0, 2, rows});
  rank.Feed(RankRowsArrived{StepId(11), id, 0, proto::kMaxPrefillRanks, rows});
  rank.Feed(RankRowsArrived{StepId(11), id, kLinearOp, 0, rows});
  rank.Feed(RankRowsArrived{StepId(11), id, kOps, 0, rows});
  rank.Feed(RankRowsArrived{StepId(11), MicroBatchId(4), 0, 0, rows});
  rank.Feed(RankRowsArrived{StepId(10), id, 0, 0, rows});
  rank.Feed(RankAttended{StepId(11), id, 1, 2});  // of which nothing went there yet
  rank.Feed(RankAttended{StepId(11), id, 0, proto::kMaxPrefillRanks});
  rank.Feed(RankAttended{StepId(10), id, 0, 2});
  EXPECT_EQ(rank.core().counters().dropped_frames, 13u);
  EXPECT_THAT(rank.ran(), IsEmpty());
  EXPECT_EQ(rank.core().rank_bytes(), 0u);
  rank.Feed(RankRowsArrived{StepId(11), id, 1, 0, RowsOf(Table(), 0, 1, 0, 64)});
  rank.Feed(RankRowsArrived{StepId(11), id, 0, 0, rows});
  EXPECT_THAT(rank.ran(), ElementsAre(0, 1)) << "the right ones came after all";
}

TEST(RankGather, AWorkerThatExchangesNoRowsRefuses) {
  ComputeWorkerCore core(Table(), {},
                         {.micro_batches = 4, .max_step_tokens = 256, .vocab_size = 100, .linear_prompts = true});
  core.AddAttentionWorker({WorkerId(0), Epoch(1), NodeId(10)});
  std::vector<Action> actions;
  core.Handle(PlanArrived{PlanOf(1, {0, 64, 128}, 10)}, actions);
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_EQ(std::get<FinishStep>(actions[0]).result.error,
            "sequence 1: this worker exchanges no K and V of prompts with other compute workers (gather-direct); "
            "on a GPU that needs --prompt-scratch SIZE");
}

// Some of them with scratches that hold little, over several groups: what the planner counts is what they move.
struct Moved {
  int direct = 0, gathered = 0, asked = 0, none = 0;  // steps
};
Moved CompareWithThePlanner(proto::PrefixExchange exchange) {
  const proto::AttentionTable table = Table();
  Moved moved;
  for (uint32_t seed = 1; seed <= 60; ++seed) {
    std::mt19937 random(seed);
    const int some = 2 + static_cast<int>(random() % 3);
    const int ranks = exchange == proto::PrefixExchange::kSwitch ? 2 : some;  // as many as there are KV heads
    std::vector<Rank> workers;
    std::vector<uint32_t> blocks;
    for (int r = 0; r < ranks; ++r) {
      blocks.push_back(random() % 3 == 0 ? 2000 : 2 + random() % 100);
      workers.emplace_back(r, blocks.back());
    }
    std::vector<scheduler::HeldTokens> held(ranks);
    Position base = static_cast<Position>(random() % 3) * 50;
    for (uint64_t group = 10; group < 50; group += 10) {
      std::vector<Position> cuts = {base};
      for (int r = 1; r < ranks; ++r) cuts.push_back((cuts.back() / 64 + 1 + static_cast<Position>(random() % 3)) * 64);
      cuts.push_back(cuts.back() + 1 + static_cast<Position>(random() % 130));
      std::deque<FakeRank::ToRank> ready;
      for (int r = 0; r < ranks; ++r) ready.push_back({r, PlanArrived{PlanOf(r, cuts, group, exchange)}});
      for (Rank& worker : workers) worker.Clear();
      for (; !ready.empty(); ready.pop_front())
        for (FakeRank::ToRank& sent : workers[ready[0].rank].Feed(std::move(ready[0].event)))
          ready.push_back(std::move(sent));
      for (int r = 0; r < ranks; ++r) {
        SCOPED_TRACE(absl::StrCat("seed ", seed, ", group ", group, ", rank ", r));
        EXPECT_THAT(workers[r].errors(), ElementsAre(""));
        if (testing::Test::HasFailure()) return moved;
        const scheduler::StepWork work = scheduler::WorkOf(table, {.ctx_len = cuts[r],
                                                                   .base = base,
                                                                   .tokens = cuts[r + 1] - cuts[r],
                                                                   .group_end = cuts.back(),
                                                                   .rank = r,
                                                                   .ranks = ranks,
                                                                   .cuts = cuts,
                                                                   .exchange = exchange,
                                                                   .held = held[r],
                                                                   .scratch_blocks = blocks[r],
                                                                   .chained = r > 0});
        const proto::StepResult& result = workers[r].results()[0];
        EXPECT_EQ(work.traffic, result.prefix);
        EXPECT_EQ(work.here_flops, result.work.here_flops);
        held[r] = work.held;
        const int64_t from_ranks = proto::RankBytesOf(result.prefix) - result.prefix.chain_bytes;
        moved.direct += from_ranks > 0 ? 1 : 0;
        moved.gathered += result.prefix.gathered_bytes > 0 ? 1 : 0;
        moved.asked += result.prefix.asked_bytes > 0 ? 1 : 0;
        moved.none += r > 0 && from_ranks == 0 ? 1 : 0;
      }
      base = cuts.back();
    }
  }
  return moved;
}

TEST(RankGather, RanksMoveAndKeepWhatThePlannerCounts) {
  const Moved moved = CompareWithThePlanner(proto::PrefixExchange::kGatherDirect);
  EXPECT_GT(moved.direct, 100);
  EXPECT_GT(moved.gathered, 50);
  EXPECT_GT(moved.asked, 20);
  EXPECT_GT(moved.none, 5);
}

TEST(RankRing, RanksMoveAndKeepWhatThePlannerCounts) {
  const Moved moved = CompareWithThePlanner(proto::PrefixExchange::kRing);
  EXPECT_GT(moved.direct, 100);
  EXPECT_GT(moved.gathered, 50);
  EXPECT_GT(moved.asked, 100) << "what lies before the group";
  EXPECT_GT(moved.none, 5) << "without room";
}

TEST(RankSwitch, RanksMoveAndKeepWhatThePlannerCounts) {
  const Moved moved = CompareWithThePlanner(proto::PrefixExchange::kSwitch);
  EXPECT_GT(moved.direct, 400) << "all of them";
  EXPECT_GT(moved.gathered, 50) << "by rank 0, of the first segment";
  EXPECT_GT(moved.asked, 300) << "what lies before the group";
  EXPECT_EQ(moved.none, 0);
}

TEST(RankPassQ, RanksMoveAndKeepWhatThePlannerCounts) {
  const Moved moved = CompareWithThePlanner(proto::PrefixExchange::kPassQ);
  EXPECT_GT(moved.direct, 400) << "all of them";
  EXPECT_GT(moved.gathered, 50) << "by rank 0, of the first segment";
  EXPECT_GT(moved.asked, 300) << "what lies before the group";
  EXPECT_EQ(moved.none, 0);
}

class RankGatherOrder : public ::testing::TestWithParam<int> {};

// Plans and frames come in any order, frames again and again, some of groups that were given up at any point.
TEST_P(RankGatherOrder, EachRankAttendsEachOpOnceOverWhatAllRanksBeforeItHave) {
  std::mt19937 random(static_cast<uint32_t>(GetParam()));
  const int ranks = 2 + static_cast<int>(random() % 3);
  std::vector<Rank> workers;
  for (int r = 0; r < ranks; ++r) workers.emplace_back(r);
  std::vector<FakeRank::ToRank> late;  // of groups that have ended
  Position base = static_cast<Position>(random() % 2) * 100;
  for (uint64_t group = 10; group < 40; group += 10) {
    const std::vector<Position> cuts = RandomCuts(base, ranks, random);
    const bool given_up = random() % 2 == 0;
    const int events = given_up ? static_cast<int>(random() % 30) : 1 << 20;
    std::vector<FakeRank::ToRank> ready;
    for (int r = 0; r < ranks; ++r) ready.push_back({r, PlanArrived{PlanOf(r, cuts, group)}});
    for (Rank& worker : workers) worker.Clear();
    ready.insert(ready.end(), late.begin(), late.end());
    FeedInAnyOrder(std::move(ready), events, random, workers, late, [&] {
      for (int r = 0; r < ranks; ++r) {
        const int64_t states = StateOf(Table(), 0, kLinearOp).size();
        EXPECT_LE(static_cast<int64_t>(workers[r].core().rank_bytes()),
                  kRankOpsAhead * (cuts[r] - base) * kRowBytes + states);
      }
    });
    for (int r = 0; r < ranks; ++r) {
      SCOPED_TRACE(absl::StrCat("seed ", GetParam(), ", group ", group, ", rank ", r));
      if (given_up) workers[r].Feed(StepWithdrawn{StepId(group + r), MicroBatchId(static_cast<uint16_t>(r))});
      EXPECT_EQ(workers[r].core().rank_bytes(), 0u);
      if (given_up) continue;
      EXPECT_THAT(workers[r].ran(), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
      EXPECT_THAT(workers[r].errors(), ElementsAre(""));
      int64_t direct = 0;
      for (int op = 0; op < kOps && !HasFailure(); ++op) {
        const auto expected = ExpectedFrom(cuts, r, op);
        EXPECT_TRUE(workers[r].from()[op] == expected) << "op " << op;
        if (op != kLinearOp) direct += static_cast<int64_t>(expected.size());
      }
      if (!HasFailure()) {
        EXPECT_EQ(workers[r].results()[0].prefix.direct_bytes, direct);
      }
    }
    if (!given_up) base = cuts.back();
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RankGatherOrder, ::testing::Range(0, 200));

}  // namespace
}  // namespace dovetail::compute
