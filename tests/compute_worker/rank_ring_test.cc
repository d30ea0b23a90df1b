#include <algorithm>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "compute_worker/core/compute_worker_core.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/compute_worker/rank_fixture.h"

// Ranks of a prefill group among which K and V of softmax layers go round: whatever the order in which frames and plans
// come, and however often, each rank attends once to what each rank before it has of each op, and never holds more than
// kRingShards of others.

namespace dovetail::compute {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

constexpr int kOps = 6;  // one linear and one windowed
constexpr int kLinearOp = 2, kWindowedOp = 4, kWindow = 60;
constexpr int64_t kRowBytes = 2 * (8 + 8) * 2;

proto::AttentionTable Table() { return HybridTable(kOps, kLinearOp, kWindowedOp, kWindow); }

struct Rank : FakeRank {
  explicit Rank(int rank, uint32_t prompt_blocks = 2000) : FakeRank(rank, Table(), prompt_blocks) {}
};

proto::StepPlan PlanOf(int rank, const std::vector<Position>& cuts, uint64_t group) {
  return RankPlan(Table(), rank, cuts, group, proto::PrefixExchange::kRing, proto::LinearExchange::kChain);
}

// The K and V that a rank is to attend to: by op, and rank before it.
using Shards = std::map<std::pair<int, int>, std::vector<std::byte>>;
Shards ExpectedShards(const std::vector<Position>& cuts, int rank) {
  Shards shards;
  for (int op = 0; op < kOps; ++op)
    for (int of = 0; op != kLinearOp && of < rank; ++of) {
      Position first = cuts[of];
      if (op == kWindowedOp) first = std::max(first, (cuts[rank] - kWindow + 1) / 64 * 64);
      if (first < cuts[of + 1]) shards[{op, of}] = RowsOf(Table(), of, op, first, cuts[of + 1]);
    }
  return shards;
}

// (op, whose) of the K and V that were sent, in order.
std::vector<std::pair<int, int>> RowsIn(const std::vector<FakeRank::ToRank>& sent) {
  std::vector<std::pair<int, int>> rows;
  for (const FakeRank::ToRank& one : sent)
    if (const auto* event = std::get_if<RankRowsArrived>(&one.event)) rows.emplace_back(event->op, event->rank);
  return rows;
}

TEST(RankRing, ARankGivesItsOwnAndHandsOnWhatComes) {
  Rank second(1);
  const std::vector<Position> cuts = {0, 64, 128, 192, 250};
  std::vector<FakeRank::ToRank> to_third = second.Feed(PlanArrived{PlanOf(1, cuts, 10)});
  EXPECT_THAT(RowsIn(to_third), ElementsAre(Pair(0, 1)));
  for (FakeRank::ToRank& more :
       second.Feed(RankRowsArrived{StepId(11), MicroBatchId(1), 0, 0, RowsOf(Table(), 0, 0, 0, 64)}))
    to_third.push_back(std::move(more));
  EXPECT_THAT(RowsIn(to_third), ElementsAre(Pair(0, 1), Pair(0, 0)));
  ASSERT_EQ(second.shards().size(), 1u);
  EXPECT_TRUE(second.shards()[0].rows == RowsOf(Table(), 0, 0, 0, 64));
}

TEST(RankRing, NothingIsSentToARankThatHoldsTwo) {
  Rank second(1);
  const std::vector<Position> cuts = {0, 64, 128, 192};
  std::vector<FakeRank::ToRank> sent = second.Feed(PlanArrived{PlanOf(1, cuts, 10)});
  const auto feed = [&](Event event) {
    for (FakeRank::ToRank& more : second.Feed(std::move(event))) sent.push_back(std::move(more));
  };
  for (const int op : {0, 1}) feed(RankRowsArrived{StepId(11), MicroBatchId(1), op, 0, RowsOf(Table(), 0, op, 0, 64)});
  EXPECT_THAT(RowsIn(sent), ElementsAre(Pair(0, 1), Pair(0, 0))) << "of op 1 nothing has room";
  EXPECT_EQ(second.shards().size(), 2u) << "but that is attended to";
  EXPECT_EQ(second.core().rank_bytes(), static_cast<size_t>(64 * kRowBytes)) << "and kept until it is handed on";
  feed(RankAttended{StepId(11), MicroBatchId(1), 0, 1});
  EXPECT_THAT(RowsIn(sent), ElementsAre(Pair(0, 1), Pair(0, 0), Pair(1, 1)));
  feed(RankAttended{StepId(11), MicroBatchId(1), 0, 1});
  EXPECT_EQ(RowsIn(sent).size(), 3u) << "it was told before";
  feed(RankAttended{StepId(11), MicroBatchId(1), 0, 0});
  EXPECT_EQ(RowsIn(sent)[3], std::pair(1, 0));
  EXPECT_EQ(second.core().rank_bytes(), 0u);
}

TEST(RankRing, WhatDoesNotFitIsDropped) {
  Rank rank(1);
  const std::vector<Position> cuts = {0, 64, 128, 192};
  const MicroBatchId id(1);
  const auto rows = RowsOf(Table(), 0, 0, 0, 64);
  rank.Feed(RankRowsArrived{StepId(11), id, 1, 0, std::vector<std::byte>(rows.size() - 1)});  // before the plan
  rank.Feed(RankRowsArrived{StepId(11), id, 0, 1, rows});                                     // of itself
  rank.Feed(PlanArrived{PlanOf(1, cuts, 10)});
  EXPECT_EQ(rank.core().counters().dropped_frames, 2u);
  rank.Feed(RankRowsArrived{StepId(11), id, 0, 2, rows});
  rank.Feed(RankRowsArrived{StepId(11), id, kLinearOp, 0, rows});
  rank.Feed(RankAttended{StepId(11), id, 1, 1});                        // has not gone there
  rank.Feed(RankAttended{StepId(11), id, 0, proto::kMaxPrefillRanks});  // is none
  EXPECT_EQ(rank.core().counters().dropped_frames, 6u);
  EXPECT_EQ(rank.core().rank_bytes(), 0u);
  EXPECT_THAT(rank.shards(), IsEmpty());
}

class RankRingOrder : public ::testing::TestWithParam<int> {};

// Plans and frames come in any order, frames again and again, some of groups that were given up at any point. Some
// ranks have no room, and hand on all the same.
TEST_P(RankRingOrder, EachRankAttendsOnceToWhatEachRankBeforeItHasAndHoldsNoMoreThanTwo) {
  std::mt19937 random(static_cast<uint32_t>(GetParam()));
  const int ranks = 2 + static_cast<int>(random() % 3);
  std::vector<Rank> workers;
  std::vector<bool> has_room;
  for (int r = 0; r < ranks; ++r) {
    has_room.push_back(random() % 5 != 0);
    workers.emplace_back(r, has_room.back() ? 2000 : 1);
  }
  std::vector<FakeRank::ToRank> late;  // of groups that have ended
  Position base = static_cast<Position>(random() % 2) * 100;
  for (uint64_t group = 10; group < 40; group += 10) {
    const std::vector<Position> cuts = RandomCuts(base, ranks, random);
    int64_t longest = 0;
    for (int r = 0; r + 1 < ranks; ++r) longest = std::max<int64_t>(longest, cuts[r + 1] - cuts[r]);
    const bool given_up = random() % 2 == 0;
    const int events = given_up ? static_cast<int>(random() % 40) : 1 << 20;
    std::vector<FakeRank::ToRank> ready;
    for (int r = 0; r < ranks; ++r) ready.push_back({r, PlanArrived{PlanOf(r, cuts, group)}});
    for (Rank& worker : workers) worker.Clear();
    ready.insert(ready.end(), late.begin(), late.end());
    FeedInAnyOrder(std::move(ready), events, random, workers, late, [&] {
      const auto states = static_cast<int64_t>(StateOf(Table(), 0, kLinearOp).size());
      for (int r = 0; r < ranks; ++r)
        EXPECT_LE(static_cast<int64_t>(workers[r].core().rank_bytes()), kRingShards * longest * kRowBytes + states);
    });
    for (int r = 0; r < ranks; ++r) {
      SCOPED_TRACE(absl::StrCat("seed ", GetParam(), ", group ", group, ", rank ", r));
      if (given_up) workers[r].Feed(StepWithdrawn{StepId(group + r), MicroBatchId(static_cast<uint16_t>(r))});
      EXPECT_EQ(workers[r].core().rank_bytes(), 0u);
      if (given_up) continue;
      EXPECT_THAT(workers[r].errors(), ElementsAre(""));
      if (HasFailure()) return;
      Shards attended;
      int64_t bytes = 0;
      for (const FakeRank::Shard& shard : workers[r].shards()) {
        EXPECT_TRUE(attended.emplace(std::pair(shard.op, shard.rank), shard.rows).second) << "twice";
        bytes += static_cast<int64_t>(shard.rows.size());
      }
      EXPECT_TRUE(attended == (has_room[r] ? ExpectedShards(cuts, r) : Shards()));
      EXPECT_EQ(workers[r].results()[0].prefix.ring_bytes, bytes);
    }
    if (!given_up) base = cuts.back();
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RankRingOrder, ::testing::Range(0, 300));

}  // namespace
}  // namespace dovetail::compute
