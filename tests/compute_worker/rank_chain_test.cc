#include <algorithm>
#include <random>
#include <tuple>
#include <vector>

#include "compute_worker/core/compute_worker_core.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/compute_worker/rank_fixture.h"
#include "tests/compute_worker/small_spec.h"

// Ranks of a prefill group that hand on the states of linear layers: whatever the order in which frames and plans come,
// and however often, each rank runs each linear op once, from what the rank before it left of that op.

namespace dovetail::compute {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr int kOps = 3;  // linear, softmax, linear
constexpr int kHeads = 2, kStateBytes = kHeads * 16 * 16 * 4;

proto::AttentionTable Table() {
  proto::LinearSpec state;
  state.heads = kHeads;
  state.key_dim = state.value_dim = 16;
  proto::LinearConstants decays;
  decays.log_decay.assign(kHeads, -0.1f);
  return *proto::AttentionTable::Build({state, SmallSpec(), state}, {decays, {}, decays});
}

std::vector<std::byte> State(int rank, int op) { return StateOf(Table(), rank, op); }

// Of which the softmax op is attended on the attention worker.
struct Rank : FakeRank {
  explicit Rank(int rank) : FakeRank(rank, Table(), /*prompt_blocks=*/0) {}
};

// Tokens 64 r .. 64 (r + 1) for rank r, in micro-batch r of compute worker r.
proto::StepPlan PlanOf(int rank, int ranks, uint64_t group, Position base = 0) {
  std::vector<Position> cuts;
  for (int r = 0; r <= ranks; ++r) cuts.push_back(base + Position{64} * r);
  return RankPlan(Table(), rank, cuts, group, proto::PrefixExchange::kAsk, proto::LinearExchange::kChain);
}

TEST(RankChain, ARankWaitsForTheStateOfEachLinearOpAndHandsItsOwnOn) {
  Rank first(0), second(1);
  const std::vector<FakeRank::ToRank> sent = first.Feed(PlanArrived{PlanOf(0, 2, 10)});
  ASSERT_EQ(sent.size(), 2u);
  EXPECT_EQ(sent[1].rank, 1);
  const auto& state = std::get<RankStateArrived>(sent[1].event);
  EXPECT_EQ(std::tuple(state.step, state.micro_batch, state.op), std::tuple(StepId(11), MicroBatchId(1), 2));
  EXPECT_THAT(first.errors(), ElementsAre(""));
  EXPECT_EQ(first.results()[0].prefix.chain_bytes, 0) << "nothing came to rank 0";
  EXPECT_THAT(second.Feed(PlanArrived{PlanOf(1, 2, 10)}), IsEmpty());
  EXPECT_THAT(second.ran(), IsEmpty()) << "the state before its tokens has not come";
  EXPECT_THAT(second.Feed(sent[1].event), IsEmpty()) << "of a later op";
  EXPECT_THAT(second.ran(), IsEmpty());
  EXPECT_THAT(second.Feed(sent[0].event), IsEmpty()) << "it is the last rank";
  EXPECT_THAT(second.ran(), ElementsAre(0, 2));
  EXPECT_THAT(second.from(), ElementsAre(State(0, 0), State(0, 2)));
  EXPECT_THAT(second.errors(), ElementsAre(""));
  EXPECT_EQ(second.results()[0].prefix.chain_bytes, 2 * kStateBytes);
  EXPECT_EQ(second.core().rank_bytes(), 0u);
}

TEST(RankChain, WhatDoesNotFitIsDropped) {
  Rank rank(1);
  rank.Feed(PlanArrived{PlanOf(1, 2, 10)});
  const MicroBatchId id(1);
  std::vector<std::byte> shorter(kStateBytes - 1);
  rank.Feed(RankStateArrived{StepId(11), id, 0, shorter});
  rank.Feed(RankStateArrived{StepId(11), id, 1, {}});
  rank.Feed(RankStateArrived{StepId(11), id, 1, State(0, 1)});
  rank.Feed(RankStateArrived{StepId(11), id, kOps, State(0, 0)});
  rank.Feed(RankStateArrived{StepId(11), MicroBatchId(4), 0, State(0, 0)});
  rank.Feed(RankStateArrived{StepId(10), id, 0, State(0, 0)});
  EXPECT_EQ(rank.core().counters().dropped_frames, 6u);
  EXPECT_THAT(rank.ran(), IsEmpty());
  EXPECT_EQ(rank.core().rank_bytes(), 0u);
}

TEST(RankChain, AWithdrawnRankKeepsNothingAndWhatComesLateIsDropped) {
  Rank rank(1);
  rank.Feed(PlanArrived{PlanOf(1, 2, 10)});
  rank.Feed(RankStateArrived{StepId(11), MicroBatchId(1), 2, State(0, 2)});
  EXPECT_GT(rank.core().rank_bytes(), 0u);
  rank.Feed(StepWithdrawn{StepId(11), MicroBatchId(1)});
  EXPECT_THAT(rank.errors(), ElementsAre("the scheduler has withdrawn the step"));
  EXPECT_EQ(rank.core().rank_bytes(), 0u);
  rank.Feed(RankStateArrived{StepId(11), MicroBatchId(1), 0, State(0, 0)});
  EXPECT_EQ(rank.core().rank_bytes(), 0u);
  // Of a step whose plan was answered without the core, too.
  rank.Feed(RankStateArrived{StepId(21), MicroBatchId(1), 0, State(0, 0)});
  rank.core().DropBefore(MicroBatchId(1), StepId(21));
  EXPECT_EQ(rank.core().rank_bytes(), 0u);
  rank.Feed(RankStateArrived{StepId(21), MicroBatchId(1), 2, State(0, 2)});
  EXPECT_EQ(rank.core().rank_bytes(), 0u);
}

TEST(RankChain, AWorkerThatRunsNoLinearLayersOfPromptsRefuses) {
  ComputeWorkerCore core(Table(), {}, {.micro_batches = 4, .max_step_tokens = 256, .vocab_size = 100});
  core.AddAttentionWorker({WorkerId(0), Epoch(1), NodeId(10)});
  std::vector<Action> actions;
  core.Handle(PlanArrived{PlanOf(1, 2, 10)}, actions);
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_EQ(std::get<FinishStep>(actions[0]).result.error,
            "sequence 1: this worker runs no linear layers of prompts, whose states ranks would hand on (chain)");
}

class RankChainOrder : public ::testing::TestWithParam<int> {};

// Plans and states come in any order, states again and again, some of groups that were given up at any point.
TEST_P(RankChainOrder, EachRankBeginsEachOpOnceWithWhatTheOneBeforeLeft) {
  std::mt19937 random(static_cast<uint32_t>(GetParam()));
  const int ranks = 2 + static_cast<int>(random() % 3);
  std::vector<Rank> workers;
  for (int r = 0; r < ranks; ++r) workers.emplace_back(r);
  std::vector<std::pair<int, RankStateArrived>> late;  // of groups that have ended
  Position base = 0;
  for (uint64_t group = 10; group < 40; group += 10) {
    const bool given_up = random() % 2 == 0;
    int events = given_up ? static_cast<int>(random() % 8) : 1 << 20;
    std::vector<std::pair<int, Event>> ready;
    for (int r = 0; r < ranks; ++r) ready.emplace_back(r, PlanArrived{PlanOf(r, ranks, group, base)});
    for (Rank& worker : workers) worker.Clear();
    for (const auto& [to, frame] : late) ready.emplace_back(to, frame);
    while (!ready.empty() && events-- > 0) {
      const size_t next = random() % ready.size();
      auto [to, event] = ready[next];
      const auto* frame = std::get_if<RankStateArrived>(&event);
      if (frame == nullptr || random() % 4 != 0) ready.erase(ready.begin() + static_cast<int64_t>(next));
      if (frame != nullptr) late.emplace_back(to, *frame);
      for (const FakeRank::ToRank& sent : workers[to].Feed(std::move(event))) ready.emplace_back(sent.rank, sent.event);
    }
    for (int r = 0; r < ranks; ++r) {
      SCOPED_TRACE(absl::StrCat("seed ", GetParam(), ", group ", group, ", rank ", r));
      if (given_up) workers[r].Feed(StepWithdrawn{StepId(group + r), MicroBatchId(static_cast<uint16_t>(r))});
      EXPECT_EQ(workers[r].core().rank_bytes(), 0u);
      if (given_up) continue;
      EXPECT_THAT(workers[r].ran(), ElementsAre(0, 2));
      EXPECT_THAT(workers[r].errors(), ElementsAre(""));
      if (r > 0) {
        EXPECT_THAT(workers[r].from(), ElementsAre(State(r - 1, 0), State(r - 1, 2)));
      }
    }
    if (!given_up) base += 64 * ranks;
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RankChainOrder, ::testing::Range(0, 200));

}  // namespace
}  // namespace dovetail::compute
