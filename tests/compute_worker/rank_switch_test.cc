#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "compute_worker/core/compute_worker_core.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/head_switch.h"
#include "tests/compute_worker/rank_fixture.h"
#include "tests/compute_worker/small_spec.h"

// Ranks of a prefill group that exchange tokens for heads: whatever the order in which frames and plans come, and
// however often, each rank attends once to the tokens of each rank in every softmax op, gets once what each of the
// others gives for its own, and never holds what others sent of more than two ops.

namespace dovetail::compute {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int kOps = 5;  // one linear and one windowed
constexpr int kLinearOp = 2, kWindowedOp = 4, kWindow = 60, kHeads = 5;

// 5 KV heads, which 2, 3 and 4 ranks do not divide.
proto::AttentionTable Table() {
  proto::LinearSpec state;
  state.heads = 2;
  state.key_dim = state.value_dim = 16;
  proto::LinearConstants decays;
  decays.log_decay.assign(2, -0.1f);
  proto::SoftmaxSpec softmax = SmallSpec();
  softmax.kv_heads = kHeads;
  softmax.query_heads = 2 * kHeads;
  std::vector<proto::AttentionSpec> specs(kOps, softmax);
  std::vector<proto::LinearConstants> constants(kOps);
  specs[kLinearOp] = state;
  constants[kLinearOp] = decays;
  std::get<proto::SoftmaxSpec>(specs[kWindowedOp]).window = kWindow;
  return *proto::AttentionTable::Build(specs, constants);
}

struct Rank : FakeRank {
  explicit Rank(int rank) : FakeRank(rank, Table(), /*prompt_blocks=*/1) {}
};

proto::StepPlan PlanOf(int rank, const std::vector<Position>& cuts, uint64_t group) {
  return RankPlan(Table(), rank, cuts, group, proto::PrefixExchange::kSwitch, proto::LinearExchange::kChain);
}

Event HeadsFrom(int from, int to, int op, const std::vector<Position>& cuts, uint64_t group) {
  return RankHeadsArrived{StepId(group + static_cast<uint64_t>(to)), MicroBatchId(static_cast<uint16_t>(to)), op, from,
                          HeadsOf(Table(), op, cuts, from, to)};
}

Event OutputsFrom(int from, int to, int op, const std::vector<Position>& cuts, uint64_t group) {
  return RankOutputsArrived{StepId(group + static_cast<uint64_t>(to)), MicroBatchId(static_cast<uint16_t>(to)), op,
                            from, OutputsOf(Table(), op, cuts, from, to)};
}

template <typename T>
int CountOf(const std::vector<FakeRank::ToRank>& sent) {
  return static_cast<int>(std::count_if(
      sent.begin(), sent.end(), [](const FakeRank::ToRank& one) { return std::holds_alternative<T>(one.event); }));
}

std::vector<int> RanksOf(const std::vector<FakeRank::Heads>& heads) {
  std::vector<int> ranks;
  for (const FakeRank::Heads& one : heads) ranks.push_back(one.rank);
  return ranks;
}

TEST(RankSwitch, ARankAttendsToTokensInTheirOrderAndGoesOnWhenItHasAllHeads) {
  Rank second(1);
  const std::vector<Position> cuts = {0, 64, 128, 190};
  EXPECT_EQ(CountOf<RankHeadsArrived>(second.Feed(PlanArrived{PlanOf(1, cuts, 10)})), 2);
  EXPECT_THAT(second.Feed(HeadsFrom(2, 1, 0, cuts, 10)), IsEmpty());
  EXPECT_THAT(second.heads(), IsEmpty()) << "what rank 0 has is missing";
  EXPECT_EQ(CountOf<RankOutputsArrived>(second.Feed(HeadsFrom(0, 1, 0, cuts, 10))), 2);
  EXPECT_THAT(RanksOf(second.heads()), ElementsAre(0, 1, 2));
  EXPECT_EQ(second.core().rank_bytes(), 0u);
  second.Feed(OutputsFrom(2, 1, 0, cuts, 10));
  EXPECT_EQ(CountOf<RankHeadsArrived>(second.Feed(OutputsFrom(2, 1, 0, cuts, 10))), 0) << "it came before";
  EXPECT_EQ(CountOf<RankHeadsArrived>(second.Feed(OutputsFrom(0, 1, 0, cuts, 10))), 2) << "of the next op";
  EXPECT_THAT(RanksOf(second.placed()), ElementsAre(2, 0));
}

// Rank 0 gathers them, and gives them to the others with its own.
TEST(RankSwitch, EarlierTokensOfTheFirstSegmentComeFromRankZero) {
  Rank first(0), second(1);
  const std::vector<Position> cuts = {100, 128, 190};
  const int heads = proto::HeadsOfRank(kHeads, 1, 2).size();
  const auto sent = first.Feed(PlanArrived{PlanOf(0, cuts, 10)});
  ASSERT_EQ(CountOf<RankHeadsArrived>(sent), 1);
  EXPECT_EQ(std::get<RankHeadsArrived>(sent[0].event).rows.size(),
            static_cast<size_t>((28 * 2 * 8 + 64 * (8 + 8)) * heads * 2));
  second.Feed(PlanArrived{PlanOf(1, cuts, 10)});
  const auto gathers = [](Rank& rank, uint16_t id) {
    return rank.core().PartsOf(MicroBatchId(id))[0].layouts[0].gather_bytes > 0;
  };
  EXPECT_TRUE(gathers(first, 0));
  EXPECT_FALSE(gathers(second, 1));
}

// The next rank may wait for them at an attention worker, and this one for that rank in the op after.
TEST(RankSwitch, StatesDoNotWaitForTheEndOfTheStep) {
  FakeRank first(0, Table(), 1, /*hand_over_at_end=*/true);
  const std::vector<Position> cuts = {0, 64, 128};
  first.Feed(
      PlanArrived{RankPlan(Table(), 0, cuts, 10, proto::PrefixExchange::kSwitch, proto::LinearExchange::kStates)});
  for (const int op : {0, 1}) {
    first.Feed(HeadsFrom(1, 0, op, cuts, 10));
    first.Feed(OutputsFrom(1, 0, op, cuts, 10));
  }
  EXPECT_THAT(first.handed_over(), ElementsAre(0, 1, kLinearOp, 3)) << "it waits in op 3";
}

TEST(RankSwitch, WhatDoesNotFitIsDropped) {
  Rank rank(1);
  const std::vector<Position> cuts = {0, 64, 128, 192};
  const MicroBatchId id(1);
  const auto heads = HeadsOf(Table(), 0, cuts, 0, 1);
  rank.Feed(RankHeadsArrived{StepId(11), id, 1, 0, std::vector<std::byte>(heads.size() - 1)});  // before the plan
  rank.Feed(RankHeadsArrived{StepId(11), id, 0, 1, heads});                                     // of itself
  rank.Feed(PlanArrived{PlanOf(1, cuts, 10)});
  EXPECT_EQ(rank.core().counters().dropped_frames, 2u);
  rank.Feed(RankHeadsArrived{StepId(11), id, 0, 3, heads});
  rank.Feed(RankHeadsArrived{StepId(11), id, kLinearOp, 0, heads});
  rank.Feed(RankHeadsArrived{StepId(11), id, 0, proto::kMaxPrefillRanks, heads});
  rank.Feed(RankRowsArrived{StepId(11), id, 0, 0, heads});
  EXPECT_EQ(rank.core().counters().dropped_frames, 6u);
  const auto outputs = OutputsOf(Table(), 0, cuts, 0, 1);
  rank.Feed(RankOutputsArrived{StepId(11), id, 1, 0, outputs});  // of an op to come
  rank.Feed(RankOutputsArrived{StepId(11), id, 0, 1, outputs});  // of itself
  rank.Feed(RankOutputsArrived{StepId(11), id, 0, 3, outputs});
  rank.Feed(RankOutputsArrived{StepId(10), id, 0, 0, outputs});
  rank.Feed(RankOutputsArrived{StepId(11), id, 0, 0, std::vector<std::byte>(outputs.size() + 4)});
  EXPECT_EQ(rank.core().counters().dropped_frames, 11u);
  EXPECT_EQ(rank.core().rank_bytes(), 0u);
  EXPECT_THAT(rank.heads(), IsEmpty());
  EXPECT_THAT(rank.placed(), IsEmpty());
}

TEST(RankSwitch, MoreRanksThanKvHeadsAreRefused) {
  Rank rank(0);
  std::vector<Position> cuts;
  for (int r = 0; r <= kHeads + 1; ++r) cuts.push_back(64 * r);
  rank.Feed(PlanArrived{PlanOf(0, cuts, 10)});
  EXPECT_THAT(rank.errors(),
              ElementsAre("sequence 1: 6 ranks divide 5 KV heads among each other (switch); take at most "
                          "5 ranks, or gather-direct"));
}

// One on a GPU: the scheduler may not know that it is.
TEST(RankSwitch, AWorkerThatSwitchesNoStatesHandsThemOnInPlaceOfThat) {
  FakeRank first(0, Table(), 1, /*hand_over_at_end=*/false, /*switches_states=*/false);
  const std::vector<Position> cuts = {0, 64, 128};
  first.Feed(
      PlanArrived{RankPlan(Table(), 0, cuts, 10, proto::PrefixExchange::kSwitch, proto::LinearExchange::kSwitch)});
  for (const int op : {0, 1}) {
    first.Feed(HeadsFrom(1, 0, op, cuts, 10));
    const auto sent = first.Feed(OutputsFrom(1, 0, op, cuts, 10));
    EXPECT_EQ(CountOf<RankStateArrived>(sent), op + 1 == kLinearOp ? 1 : 0);
    EXPECT_EQ(CountOf<RankHeadsArrived>(sent), 1) << "of the next softmax op";
  }
}

// The most that other ranks send of one op.
int64_t MostOfAnOp(const std::vector<Position>& cuts, int rank) {
  size_t most = 0;
  for (int op = 0; op < kOps; ++op) {
    size_t bytes = 0;
    for (int from = 0; op != kLinearOp && from + 1 < static_cast<int>(cuts.size()); ++from)
      if (from != rank) bytes += HeadsOf(Table(), op, cuts, from, rank).size();
    most = std::max(most, bytes);
  }
  return static_cast<int64_t>(most);
}

// All that a rank was to attend to and to get, once; returns the bytes that came from other ranks.
int64_t ExpectAll(const Rank& worker, const std::vector<Position>& cuts, int rank) {
  const int ranks = static_cast<int>(cuts.size()) - 1;
  int64_t bytes = 0;
  size_t attended = 0, placed = 0;
  for (int op = 0; op < kOps; ++op) {
    for (int from = 0; op != kLinearOp && from < ranks; ++from) {
      EXPECT_GT(worker.heads().size(), attended);
      if (::testing::Test::HasFailure()) return 0;
      const FakeRank::Heads& heads = worker.heads()[attended++];
      EXPECT_EQ(heads.op, op);
      EXPECT_EQ(heads.rank, from);
      EXPECT_TRUE(from == rank || heads.rows == HeadsOf(Table(), op, cuts, from, rank));
      bytes += static_cast<int64_t>(heads.rows.size());
      if (from == rank) continue;
      const auto got = std::count_if(worker.placed().begin(), worker.placed().end(), [&](const FakeRank::Heads& one) {
        return one.op == op && one.rank == from && one.rows == OutputsOf(Table(), op, cuts, from, rank);
      });
      EXPECT_EQ(got, 1) << "op " << op << " from " << from;
      ++placed;
      bytes += static_cast<int64_t>(OutputsOf(Table(), op, cuts, from, rank).size());
    }
  }
  EXPECT_THAT(worker.heads(), SizeIs(attended));
  EXPECT_THAT(worker.placed(), SizeIs(placed));
  return bytes;
}

class RankSwitchOrder : public ::testing::TestWithParam<int> {};

// Plans and frames come in any order, frames again and again, some of groups that were given up at any point.
TEST_P(RankSwitchOrder, EachRankAttendsOnceToAllTokensAndGetsAllHeadsOfItsOwn) {
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
        EXPECT_LE(static_cast<int64_t>(workers[r].core().rank_bytes()), 2 * MostOfAnOp(cuts, r) + states);
    });
    for (int r = 0; r < ranks; ++r) {
      SCOPED_TRACE(absl::StrCat("seed ", GetParam(), ", group ", group, ", rank ", r));
      if (given_up) workers[r].Feed(StepWithdrawn{StepId(group + r), MicroBatchId(static_cast<uint16_t>(r))});
      EXPECT_EQ(workers[r].core().rank_bytes(), 0u);
      if (given_up) continue;
      EXPECT_THAT(workers[r].errors(), ElementsAre(""));
      if (HasFailure()) return;
      EXPECT_EQ(workers[r].results()[0].prefix.switch_bytes, ExpectAll(workers[r], cuts, r));
      EXPECT_TRUE(workers[r].results()[0].work.switches_heads);
    }
    if (!given_up) base = cuts.back();
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RankSwitchOrder, ::testing::Range(0, 300));

}  // namespace
}  // namespace dovetail::compute
