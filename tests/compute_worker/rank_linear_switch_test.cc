#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "compute_worker/core/compute_worker_core.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/linear_switch.h"
#include "tests/compute_worker/rank_fixture.h"
#include "tests/compute_worker/small_spec.h"

// Ranks of a prefill group that exchange tokens for heads in linear layers, too: whatever the order in which frames and
// plans come, and however often, each rank runs once the tokens of each rank, in their order, in every op, and hands
// over the states of an op when it has all heads of its own tokens.

namespace dovetail::compute {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int kOps = 4, kHeads = 5;  // ops 1 and 2 are linear
constexpr auto kSwitch = proto::PrefixExchange::kSwitch;
constexpr auto kStatesSwitch = proto::LinearExchange::kSwitch;

// With gates and a convolution, whose inputs go with the states.
proto::AttentionTable Table(int linear_heads = kHeads, bool with_softmax = true) {
  proto::LinearSpec state;
  state.heads = linear_heads;
  state.key_dim = state.value_dim = 16;
  state.token_decay = true;
  state.conv_width = 4;
  proto::LinearConstants constants;
  constants.conv.assign(static_cast<size_t>(linear_heads) * 48 * 4, 0.1f);
  proto::SoftmaxSpec softmax = SmallSpec();
  softmax.kv_heads = kHeads;
  softmax.query_heads = 2 * kHeads;
  if (!with_softmax) return *proto::AttentionTable::Build({state, state}, {constants, constants});
  return *proto::AttentionTable::Build({softmax, state, state, softmax}, {{}, constants, constants, {}});
}

proto::StepPlan PlanOf(int rank, const std::vector<Position>& cuts, uint64_t group) {
  return RankPlan(Table(), rank, cuts, group, kSwitch, kStatesSwitch);
}

struct Rank : FakeRank {
  explicit Rank(int rank) : FakeRank(rank, Table(), /*prompt_blocks=*/1) {}
};

std::vector<FakeRank::ToRank> HeadsIn(const std::vector<FakeRank::ToRank>& sent) {
  std::vector<FakeRank::ToRank> heads;
  for (const FakeRank::ToRank& one : sent)
    if (std::holds_alternative<RankHeadsArrived>(one.event)) heads.push_back(one);
  return heads;
}

TEST(RankLinearSwitch, RankZeroGivesTheOthersTheStatesBeforeTheGroup) {
  const proto::AttentionTable table = Table(kHeads, /*with_softmax=*/false);
  const std::vector<Position> cuts = {100, 128, 190};
  FakeRank first(0, table, 1), second(1, table, 1);
  const auto sent = HeadsIn(first.Feed(PlanArrived{RankPlan(table, 0, cuts, 10, kSwitch, kStatesSwitch)}));
  ASSERT_EQ(sent.size(), 1u) << "when the attention worker has given them";
  const int heads = proto::HeadsOfRank(kHeads, 1, 2).size();
  const int64_t token = 3 * 16 * 2 + 4;                                     // q, k, v in 16 bits and a gate
  const int64_t state = 16 * 16 * 4 + 3 * 48 * 2;                           // S, and what the convolution looks back at
  const int64_t open = (16 * 4 + 16 * 4 + 4 + 48 * 2) * int64_t{100 - 64};  // tokens of the open block
  EXPECT_EQ(std::get<RankHeadsArrived>(sent[0].event).rows.size(),
            static_cast<size_t>(heads * (28 * token + state + open)));
  second.Feed(PlanArrived{RankPlan(table, 1, cuts, 10, kSwitch, kStatesSwitch)});
  EXPECT_THAT(second.handed_over(), IsEmpty()) << "it waits for rank 0";
  EXPECT_EQ(second.core().PartsOf(MicroBatchId(1))[0].layouts[0].before_bytes, 0) << "it asks for no state";
}

TEST(RankLinearSwitch, StatesAreHandedOverWhenAllHeadsHaveComeBack) {
  const proto::AttentionTable table = Table(kHeads, /*with_softmax=*/false);
  const std::vector<Position> cuts = {0, 64, 128};
  FakeRank first(0, table, 1);
  first.Feed(PlanArrived{RankPlan(table, 0, cuts, 10, kSwitch, kStatesSwitch)});
  first.Feed(RankHeadsArrived{StepId(10), MicroBatchId(0), 0, 1, HeadsOf(table, 0, cuts, 1, 0)});
  EXPECT_THAT(first.handed_over(), IsEmpty());
  first.Feed(RankStateArrived{StepId(10), MicroBatchId(0), 0, StateOf(table, 1, 0)});
  EXPECT_EQ(first.core().counters().dropped_frames, 1u) << "nothing is handed on";
  first.Feed(RankOutputsArrived{StepId(10), MicroBatchId(0), 0, 1, OutputsOf(table, 0, cuts, 1, 0)});
  EXPECT_THAT(first.handed_over(), ElementsAre(0));
}

TEST(RankLinearSwitch, MoreRanksThanHeadsAndOtherExchangesAreRefused) {
  const std::vector<Position> cuts = {0, 64, 128, 192};
  FakeRank few(0, Table(2), 1);
  few.Feed(PlanArrived{RankPlan(Table(2), 0, cuts, 10, kSwitch, kStatesSwitch)});
  EXPECT_THAT(few.errors(), ElementsAre("sequence 1: 3 ranks divide 2 heads of linear layers among each other "
                                        "(switch); take at most 2 ranks, or chain"));
  Rank other(0);
  other.Feed(PlanArrived{RankPlan(Table(), 0, cuts, 10, proto::PrefixExchange::kRing, kStatesSwitch)});
  EXPECT_THAT(other.errors(), ElementsAre(HasSubstr("this worker has no exchange by switch with other compute")));
}

TEST(RankLinearSwitch, WhatDoesNotFitIsDropped) {
  Rank rank(1);
  const std::vector<Position> cuts = {0, 64, 128, 192};
  const auto heads = HeadsOf(Table(), 1, cuts, 0, 1);
  const MicroBatchId id(1);
  rank.Feed(RankHeadsArrived{StepId(11), id, 1, 0, std::vector<std::byte>(heads.size() - 1)});  // before the plan
  rank.Feed(RankStateArrived{StepId(11), id, 2, StateOf(Table(), 0, 2)});                       // nor a state
  rank.Feed(PlanArrived{PlanOf(1, cuts, 10)});
  EXPECT_EQ(rank.core().counters().dropped_frames, 2u);
  rank.Feed(RankHeadsArrived{StepId(11), id, 1, 1, heads});
  rank.Feed(RankHeadsArrived{StepId(11), id, 1, 3, heads});
  rank.Feed(RankOutputsArrived{StepId(11), id, 1, 0, OutputsOf(Table(), 1, cuts, 0, 1)});  // of an op to come
  EXPECT_EQ(rank.core().counters().dropped_frames, 5u);
  EXPECT_EQ(rank.core().rank_bytes(), 0u);
}

// All that a rank was to attend to and to get, once; returns the bytes that came from other ranks.
int64_t ExpectAll(const Rank& worker, const std::vector<Position>& cuts, int rank) {
  const int ranks = static_cast<int>(cuts.size()) - 1;
  int64_t bytes = 0;
  size_t attended = 0;
  for (int op = 0; op < kOps; ++op)
    for (int from = 0; from < ranks; ++from) {
      EXPECT_GT(worker.heads().size(), attended);
      if (::testing::Test::HasFailure()) return 0;
      const FakeRank::Heads& heads = worker.heads()[attended++];
      EXPECT_EQ(std::pair(heads.op, heads.rank), std::pair(op, from));
      EXPECT_TRUE(from == rank || heads.rows == HeadsOf(Table(), op, cuts, from, rank));
      if (from == rank) continue;
      const auto got = std::count_if(worker.placed().begin(), worker.placed().end(), [&](const FakeRank::Heads& one) {
        return one.op == op && one.rank == from && one.rows == OutputsOf(Table(), op, cuts, from, rank);
      });
      EXPECT_EQ(got, 1) << "op " << op << " from " << from;
      bytes += static_cast<int64_t>(heads.rows.size() + OutputsOf(Table(), op, cuts, from, rank).size());
    }
  EXPECT_EQ(worker.heads().size(), attended);
  EXPECT_EQ(worker.placed().size(), static_cast<size_t>(kOps * (ranks - 1)));
  EXPECT_THAT(worker.handed_over(), ElementsAre(0, 1, 2, 3));
  return bytes;
}

class RankLinearSwitchOrder : public ::testing::TestWithParam<int> {};

// Plans and frames come in any order, frames again and again, some of groups that were given up at any point.
TEST_P(RankLinearSwitchOrder, EachRankRunsOnceAllTokensAndGetsAllHeadsOfItsOwn) {
  std::mt19937 random(static_cast<uint32_t>(GetParam()));
  const int ranks = 2 + static_cast<int>(random() % 3);
  std::vector<FakeRank::ToRank> late;  // of groups that have ended
  Position base = static_cast<Position>(random() % 3) * 50;
  std::vector<Rank> workers;
  for (int r = 0; r < ranks; ++r) workers.emplace_back(r);
  for (uint64_t group = 10; group < 40; group += 10) {
    const std::vector<Position> cuts = RandomCuts(base, ranks, random);
    const bool given_up = random() % 2 == 0;
    const int events = given_up ? static_cast<int>(random() % 60) : 1 << 20;
    std::vector<FakeRank::ToRank> ready;
    for (int r = 0; r < ranks; ++r) ready.push_back({r, PlanArrived{PlanOf(r, cuts, group)}});
    for (Rank& worker : workers) worker.Clear();
    ready.insert(ready.end(), late.begin(), late.end());
    FeedInAnyOrder(std::move(ready), events, random, workers, late, [&] {});
    for (int r = 0; r < ranks; ++r) {
      SCOPED_TRACE(absl::StrCat("seed ", GetParam(), ", group ", group, ", rank ", r));
      if (given_up) workers[r].Feed(StepWithdrawn{StepId(group + r), MicroBatchId(static_cast<uint16_t>(r))});
      EXPECT_EQ(workers[r].core().rank_bytes(), 0u);
      if (given_up) continue;
      EXPECT_THAT(workers[r].errors(), ElementsAre(""));
      if (HasFailure()) return;
      EXPECT_EQ(workers[r].results()[0].prefix.switch_bytes, ExpectAll(workers[r], cuts, r));
      EXPECT_EQ(workers[r].results()[0].prefix.chain_bytes, 0);
    }
    if (!given_up) base = cuts.back();
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RankLinearSwitchOrder, ::testing::Range(0, 200));

}  // namespace
}  // namespace dovetail::compute
