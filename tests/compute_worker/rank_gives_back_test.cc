#include <algorithm>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "compute_worker/core/compute_worker_core.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "scheduler/core/prefill_cost.h"
#include "tests/compute_worker/rank_fixture.h"

// Later ranks of a prefill group give earlier ones K and V where the prompt goes on: whatever the order in which frames
// and plans come, and however often, the next group of the prompt finds them, unless there was no room.

namespace dovetail::compute {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int kOps = 6;  // one linear and one windowed
constexpr int kLinearOp = 1, kWindowedOp = 3, kWindow = 60;
constexpr int64_t kRowBytes = 2 * (8 + 8) * 2;

proto::AttentionTable Table() { return HybridTable(kOps, kLinearOp, kWindowedOp, kWindow); }

struct Rank : FakeRank {
  explicit Rank(int rank, uint32_t prompt_blocks = 4000) : FakeRank(rank, Table(), prompt_blocks) {}
};

proto::StepPlan PlanOf(int rank, const std::vector<Position>& cuts, uint64_t group, bool gives_back) {
  proto::StepPlan plan =
      RankPlan(Table(), rank, cuts, group, proto::PrefixExchange::kGatherDirect, proto::LinearExchange::kChain);
  plan.gives_back = gives_back;
  return plan;
}

// Of a later rank's tokens, those of an op that the next group needs.
proto::TokenRange GivenBack(const std::vector<Position>& cuts, int rank, int op) {
  Position first = cuts[rank];
  if (op == kWindowedOp) first = std::max(first, (cuts.back() - kWindow + 1) / 64 * 64);
  return {std::min(first, cuts[rank + 1]), cuts[rank + 1]};
}

// (op, rank) of all that an earlier rank is to be given.
std::set<std::pair<int, int>> ExpectedBy(const std::vector<Position>& cuts, int rank) {
  std::set<std::pair<int, int>> expected;
  for (int later = rank + 1; later + 1 < static_cast<int>(cuts.size()); ++later)
    for (int op = 0; op < kOps; ++op)
      if (const auto rows = GivenBack(cuts, later, op); op != kLinearOp && rows.begin < rows.end)
        expected.emplace(op, later);
  return expected;
}

std::vector<Position> Cuts(std::mt19937& random, Position base, int ranks) {
  std::vector<Position> cuts = {base};
  for (int r = 1; r < ranks; ++r) cuts.push_back((cuts.back() / 64 + 1 + static_cast<Position>(random() % 3)) * 64);
  cuts.push_back(cuts.back() + 1 + static_cast<Position>(random() % 130));
  return cuts;
}

// All ranks, by turns.
void RunGroup(std::vector<Rank>& workers, const std::vector<Position>& cuts, uint64_t group, bool gives_back) {
  std::deque<FakeRank::ToRank> ready;
  for (size_t r = 0; r < workers.size(); ++r)
    ready.push_back({static_cast<int>(r), PlanArrived{PlanOf(static_cast<int>(r), cuts, group, gives_back)}});
  for (Rank& worker : workers) worker.Clear();
  for (; !ready.empty(); ready.pop_front())
    for (FakeRank::ToRank& sent : workers[ready[0].rank].Feed(std::move(ready[0].event)))
      ready.push_back(std::move(sent));
}

Position HeldBy(Rank& worker) {
  const PromptScratch::Part* const part = worker.core().scratch().Find(SequenceId(1));
  return part == nullptr ? 0 : part->end;
}

TEST(RankGivesBack, AStepEndsBeforeWhatComesBackToItButNotBeforeWhatItGivesBackIsInItsPlace) {
  Rank first(0), second(1);
  const std::vector<Position> cuts = {0, 64, 192};
  std::vector<FakeRank::ToRank> to_second = first.Feed(PlanArrived{PlanOf(0, cuts, 10, true)});
  second.Feed(PlanArrived{PlanOf(1, cuts, 10, true)});
  std::vector<FakeRank::ToRank> back;  // K and V that rank 1 gives back: they stay on their way
  while (!to_second.empty()) {
    std::vector<FakeRank::ToRank> to_first;
    for (FakeRank::ToRank& frame : to_second)
      for (FakeRank::ToRank& sent : second.Feed(std::move(frame.event)))
        (std::holds_alternative<RankRowsArrived>(sent.event) ? back : to_first).push_back(std::move(sent));
    to_second.clear();
    for (FakeRank::ToRank& frame : to_first)
      for (FakeRank::ToRank& sent : first.Feed(std::move(frame.event))) to_second.push_back(std::move(sent));
  }
  EXPECT_THAT(first.results(), SizeIs(1));
  EXPECT_EQ(HeldBy(first), 64);
  EXPECT_THAT(second.results(), IsEmpty());
  ASSERT_THAT(back, SizeIs(3)) << "and that of op 0, which it sent with the plan: it waits where it has given four";
  const auto deliver = [&](std::deque<FakeRank::ToRank> frames) {
    for (; !frames.empty(); frames.pop_front())
      for (FakeRank::ToRank& sent : (frames[0].rank == 0 ? first : second).Feed(std::move(frames[0].event)))
        frames.push_back(std::move(sent));
  };
  deliver({back.begin(), back.end()});
  EXPECT_THAT(second.results(), IsEmpty()) << "op 0 is not there";
  EXPECT_EQ(HeldBy(first), 64);
  deliver({{0, RankRowsArrived{StepId(10), MicroBatchId(0), 0, 1, RowsOf(Table(), 1, 0, 64, 192)}}});
  EXPECT_THAT(second.errors(), ElementsAre(""));
  EXPECT_EQ(HeldBy(first), 192);
  EXPECT_EQ(HeldBy(second), 192);
}

TEST(RankGivesBack, ARankWithoutRoomForThemDropsThemAndTheOthersGoOn) {
  std::vector<Rank> workers;
  workers.emplace_back(0, /*prompt_blocks=*/2 * (kOps - 1));  // two heads, 64 tokens
  workers.emplace_back(1);
  RunGroup(workers, {0, 64, 128}, 10, true);
  for (Rank& worker : workers) EXPECT_THAT(worker.errors(), ElementsAre(""));
  EXPECT_EQ(workers[0].results()[0].prefix.direct_bytes, 0);
  EXPECT_THAT(workers[0].kept(), IsEmpty());
  EXPECT_EQ(HeldBy(workers[0]), 64);
}

TEST(RankGivesBack, RowsThatCannotBePutAwayAreGatheredInTheNextGroup) {
  std::vector<Rank> workers;
  for (const int r : {0, 1}) workers.emplace_back(r);
  workers[0].keeps = false;
  RunGroup(workers, {0, 64, 128}, 10, true);
  for (Rank& worker : workers) EXPECT_THAT(worker.errors(), ElementsAre(""));
  EXPECT_EQ(HeldBy(workers[0]), 64);
  RunGroup(workers, {128, 192, 256}, 20, false);
  EXPECT_GT(workers[0].results()[0].prefix.gathered_bytes, 0);
  EXPECT_EQ(workers[1].results()[0].prefix.gathered_bytes, 0);
}

TEST(RankGivesBack, WhatDoesNotFitIsDropped) {
  Rank rank(0);
  const std::vector<Position> cuts = {0, 64, 128, 192};
  const MicroBatchId id(0);
  const auto rows = RowsOf(Table(), 1, 0, 64, 128);
  rank.Feed(RankRowsArrived{StepId(10), id, 0, 1, std::vector<std::byte>(rows.size() + 1)});  // before the plan
  rank.Feed(PlanArrived{PlanOf(0, cuts, 10, true)});
  rank.Feed(RankRowsArrived{StepId(10), id, 0, 1, {}});
  rank.Feed(RankRowsArrived{StepId(10), id, kWindowedOp, 1, rows});  // the next group does not see them
  rank.Feed(RankRowsArrived{StepId(10), id, kLinearOp, 1, rows});
  rank.Feed(RankRowsArrived{StepId(10), id, 0, 3, rows});
  rank.Feed(RankRowsArrived{StepId(9), id, 0, 1, rows});
  EXPECT_EQ(rank.core().counters().dropped_frames, 6u);
  rank.Feed(RankRowsArrived{StepId(10), id, 0, 1, rows});
  rank.Feed(RankRowsArrived{StepId(10), id, 0, 1, rows});
  EXPECT_EQ(rank.core().counters().dropped_frames, 7u) << "came twice";
  EXPECT_THAT(rank.kept(), SizeIs(1));
  rank.Feed(StepWithdrawn{StepId(10), id});
  rank.Feed(RankRowsArrived{StepId(10), id, 0, 2, RowsOf(Table(), 2, 0, 128, 192)});
  EXPECT_EQ(rank.core().counters().dropped_frames, 8u) << "the step was given up";
  EXPECT_EQ(rank.core().rank_bytes(), 0u);
}

// The group of a step that went well is given up, and its tokens are computed anew. What still comes is of no use.
TEST(RankGivesBack, WhatComesForAGroupThatWasGivenUpDoesNotCountInTheNext) {
  Rank rank(0);
  const auto begin = [&](uint64_t step, MicroBatchId id) {
    proto::StepPlan plan = PlanOf(0, {0, 64, 128}, step, true);
    plan.micro_batch = plan.ranks[0].micro_batch = id;
    const std::vector<FakeRank::ToRank> first = rank.Feed(PlanArrived{plan});
    std::deque<FakeRank::ToRank> sent(first.begin(), first.end());
    for (; !sent.empty(); sent.pop_front())  // as rank 1 would answer
      if (const auto* rows = std::get_if<RankRowsArrived>(&sent[0].event))
        for (FakeRank::ToRank& more : rank.Feed(RankAttended{StepId(step), id, rows->op, 1})) sent.push_back(more);
    EXPECT_THAT(rank.errors(), ElementsAre(""));
    rank.Clear();
  };
  const auto give_back = [&](uint64_t step, MicroBatchId id, int op) {
    rank.Feed(RankRowsArrived{StepId(step), id, op, 1, RowsOf(Table(), 1, op, 64, 128)});
  };
  const MicroBatchId one(0), other(3);
  begin(10, one);
  for (int op = 0; op < kOps - 1; ++op) give_back(10, one, op);
  EXPECT_EQ(HeldBy(rank), 64);
  begin(20, other);
  give_back(10, one, kOps - 1);
  EXPECT_EQ(HeldBy(rank), 64);
  for (int op = 0; op < kOps; ++op) give_back(20, other, op);
  EXPECT_EQ(HeldBy(rank), 128);
}

class RankGivesBackOrder : public ::testing::TestWithParam<int> {};

// Plans and frames come in any order, frames again and again, some of groups that were given up at any point.
TEST_P(RankGivesBackOrder, TheNextGroupFindsEverythingThatIsBeforeIt) {
  std::mt19937 random(static_cast<uint32_t>(GetParam()));
  const int ranks = 2 + static_cast<int>(random() % 3);
  std::vector<Rank> workers;
  for (int r = 0; r < ranks; ++r) workers.emplace_back(r);
  std::vector<FakeRank::ToRank> late;  // of groups that have ended
  Position base = 0;
  bool all_held = true;  // by all ranks, before base
  for (uint64_t group = 10; group < 60; group += 10) {
    const std::vector<Position> cuts = Cuts(random, base, ranks);
    const bool gives_back = random() % 4 != 0, given_up = random() % 3 == 0;
    const int events = given_up ? static_cast<int>(random() % 60) : 1 << 20;
    std::vector<FakeRank::ToRank> ready;
    for (int r = 0; r < ranks; ++r) ready.push_back({r, PlanArrived{PlanOf(r, cuts, group, gives_back)}});
    for (Rank& worker : workers) worker.Clear();
    ready.insert(ready.end(), late.begin(), late.end());
    FeedInAnyOrder(std::move(ready), events, random, workers, late, [&] {
      for (int r = 0; r < ranks; ++r) {
        const auto states = static_cast<int64_t>(StateOf(Table(), 0, kLinearOp).size());
        EXPECT_LE(static_cast<int64_t>(workers[r].core().rank_bytes()),
                  kRankOpsAhead * (cuts.back() - base) * kRowBytes + states);
        if (!gives_back || workers[r].results().empty()) continue;
        for (int before = 0; before < r; ++before) {  // what it has given is in its place
          std::set<std::pair<int, int>> there;
          for (const FakeRank::Shard& kept : workers[before].kept()) there.emplace(kept.op, kept.rank);
          for (const auto& [op, later] : ExpectedBy(cuts, before))
            if (later == r) {
              EXPECT_TRUE(there.contains({op, later})) << "op " << op << " of rank " << r;
            }
        }
      }
    });
    for (int r = 0; r < ranks; ++r) {
      SCOPED_TRACE(absl::StrCat("seed ", GetParam(), ", group ", group, ", rank ", r));
      if (given_up && workers[r].results().empty())
        workers[r].Feed(StepWithdrawn{StepId(group + r), MicroBatchId(static_cast<uint16_t>(r))});
      EXPECT_EQ(workers[r].core().rank_bytes(), 0u);
      if (given_up) continue;
      EXPECT_THAT(workers[r].ran(), ElementsAre(0, 1, 2, 3, 4, 5));
      EXPECT_THAT(workers[r].errors(), ElementsAre(""));
      if (all_held) {
        EXPECT_EQ(workers[r].results()[0].prefix.gathered_bytes, 0);
      }
      const auto expected = gives_back ? ExpectedBy(cuts, r) : std::set<std::pair<int, int>>();
      EXPECT_THAT(workers[r].kept(), SizeIs(expected.size()));
      for (const FakeRank::Shard& kept : workers[r].kept()) {
        EXPECT_TRUE(expected.contains({kept.op, kept.rank}));
        const proto::TokenRange rows = GivenBack(cuts, kept.rank, kept.op);
        EXPECT_TRUE(kept.rows == RowsOf(Table(), kept.rank, kept.op, rows.begin, rows.end));
      }
      EXPECT_EQ(HeldBy(workers[r]), gives_back ? cuts.back() : cuts[r + 1]);
    }
    all_held = gives_back && !given_up;
    if (!given_up) base = cuts.back();
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RankGivesBackOrder, ::testing::Range(0, 300));

// Some have scratches that hold little: what the planner counts is what they move, and what they hold afterwards.
TEST(RankGivesBack, RanksMoveAndKeepWhatThePlannerCounts) {
  const proto::AttentionTable table = Table();
  int gathered = 0, kept = 0, without_room = 0;  // steps
  for (uint32_t seed = 1; seed <= 80; ++seed) {
    std::mt19937 random(seed);
    const int ranks = 2 + static_cast<int>(random() % 3);
    std::vector<Rank> workers;
    std::vector<uint32_t> blocks;
    for (int r = 0; r < ranks; ++r) {
      blocks.push_back(random() % 2 == 0 ? 4000 : 2 + random() % 200);
      workers.emplace_back(r, blocks.back());
    }
    std::vector<scheduler::HeldTokens> held(ranks);
    Position base = static_cast<Position>(random() % 3) * 50;
    for (uint64_t group = 10; group < 50; group += 10) {
      const std::vector<Position> cuts = Cuts(random, base, ranks);
      const bool gives_back = random() % 4 != 0;
      RunGroup(workers, cuts, group, gives_back);
      for (int r = 0; r < ranks; ++r) {
        SCOPED_TRACE(absl::StrCat("seed ", seed, ", group ", group, ", rank ", r));
        ASSERT_THAT(workers[r].errors(), ElementsAre(""));
        const scheduler::StepWork work = scheduler::WorkOf(table, {.ctx_len = cuts[r],
                                                                   .base = base,
                                                                   .tokens = cuts[r + 1] - cuts[r],
                                                                   .group_end = cuts.back(),
                                                                   .exchange = proto::PrefixExchange::kGatherDirect,
                                                                   .held = held[r],
                                                                   .scratch_blocks = blocks[r],
                                                                   .given_back = gives_back,
                                                                   .chained = r > 0});
        const proto::StepResult& result = workers[r].results()[0];
        ASSERT_EQ(work.traffic, result.prefix);
        ASSERT_EQ(work.here_flops, result.work.here_flops);
        held[r] = work.held;
        ASSERT_EQ(held[r].end, HeldBy(workers[r]));
        gathered += result.prefix.gathered_bytes > 0 ? 1 : 0;
        kept += workers[r].kept().empty() ? 0 : 1;
        without_room += gives_back && r + 1 < ranks && workers[r].kept().empty() ? 1 : 0;
      }
      base = cuts.back();
    }
  }
  EXPECT_GT(gathered, 50);
  EXPECT_GT(kept, 100);
  EXPECT_GT(without_room, 50);
}

}  // namespace
}  // namespace dovetail::compute
