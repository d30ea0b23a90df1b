#include <algorithm>
#include <deque>
#include <random>
#include <string>
#include <vector>

#include "compute_worker/core/compute_worker_core.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/compute_worker/small_spec.h"

// Ranks of a prefill group that hand on the states of linear layers: whatever the order in which frames and plans come,
// and however often, each rank runs each linear op once, from what the rank before it left of that op.

namespace dovetail::compute {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr Epoch kEpoch{1};
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

StepProgram Program() {
  StepProgram program;
  for (int op = 0; op < kOps; ++op) {
    program.push_back({StageKind::kDense, 2 * op});
    program.push_back({StageKind::kSendQuery, op});
    program.push_back({StageKind::kDense, 2 * op + 1});
    if (op != 1) program.push_back({StageKind::kAttendPrompts, op});
    program.push_back({StageKind::kSendKeyValue, op});
    program.push_back({StageKind::kAwaitPartials, op});
  }
  program.push_back({StageKind::kDense, 2 * kOps});
  return program;
}

std::vector<std::byte> State(int rank, int op) {
  return std::vector<std::byte>(kStateBytes, static_cast<std::byte>(16 * rank + op + 1));
}

class Rank {
 public:
  explicit Rank(int micro_batch)
      : id_(static_cast<uint16_t>(micro_batch)),
        core_(Table(), Program(),
              {.micro_batches = 4, .max_step_tokens = 256, .vocab_size = 100, .linear_prompts = true}) {
    core_.AddAttentionWorker({WorkerId(0), kEpoch, NodeId(10)});
  }

  // Everything that it can do without another's frame; returns what it sends to ranks.
  std::vector<SendRankState> Feed(Event event) {
    std::vector<SendRankState> sent;
    std::deque<Event> events, frames;  // the worker looks at frames when it has nothing else to do
    events.push_back(std::move(event));
    while (!events.empty() || !frames.empty()) {
      if (events.empty()) {
        events.push_back(std::move(frames.front()));
        frames.pop_front();
      }
      std::vector<Action> actions;
      core_.Handle(std::move(events.front()), actions);
      EXPECT_EQ(core_.CheckInvariants(), absl::OkStatus());
      events.pop_front();
      for (const Action& action : actions) {
        if (std::holds_alternative<RunDense>(action)) events.push_back(DenseDone{id_});
        if (const auto* attend = std::get_if<AttendPrompts>(&action)) {
          ran_.push_back(attend->op);
          const auto state = core_.RankState(id_, attend->op);
          from_.emplace_back(state.begin(), state.end());
          events.push_back(DenseDone{id_});
        }
        if (const auto* send = std::get_if<SendRankState>(&action)) sent.push_back(*send);
        if (const auto* send = std::get_if<SendQuery>(&action)) AnswerStates(send->op, frames);
        if (const auto* send = std::get_if<SendKeyValue>(&action)) Answer(send->op, frames);
        if (std::holds_alternative<Sample>(action)) events.push_back(SampleDone{id_, {core_.PlanOf(id_).step, id_}});
        if (const auto* finish = std::get_if<FinishStep>(&action)) results_.push_back(finish->result);
      }
    }
    return sent;
  }

  const std::vector<int>& ran() const { return ran_; }
  const std::vector<std::vector<std::byte>>& from() const { return from_; }
  const std::vector<proto::StepResult>& results() const { return results_; }
  std::vector<std::string> errors() const {
    std::vector<std::string> errors;
    for (const proto::StepResult& result : results_) errors.push_back(result.error);
    return errors;
  }
  void Clear() { ran_.clear(), from_.clear(), results_.clear(); }
  ComputeWorkerCore& core() { return core_; }

 private:
  // The attention worker has the state before rank 0 only.
  void AnswerStates(int op, std::deque<Event>& frames) {
    const int64_t bytes = LayoutOf(op).before_bytes;
    EXPECT_EQ(bytes > 0, op != 1 && core_.PlanOf(id_).part.rank == 0 && core_.PlanOf(id_).part.base > 0);
    if (bytes > 0) AnswerWith(op, bytes, frames);
  }
  void Answer(int op, std::deque<Event>& frames) { AnswerWith(op, LayoutOf(op).partial_bytes, frames); }
  void AnswerWith(int op, int64_t bytes, std::deque<Event>& frames) {
    answer_.resize(std::max(answer_.size(), static_cast<size_t>(bytes)));
    frames.push_back(PartialArrived{NodeId(10), kEpoch, core_.PlanOf(id_).step, id_, op,
                                    std::span(answer_).first(static_cast<size_t>(bytes))});
  }
  const proto::StepLayout& LayoutOf(int op) const {
    return core_.PartsOf(id_)[0].layouts[core_.table().op_group[op].value()];
  }

  const MicroBatchId id_;
  ComputeWorkerCore core_;
  std::vector<std::byte> answer_ = std::vector<std::byte>(1 << 20);  // does not move
  std::vector<int> ran_;                                             // linear ops, in order
  std::vector<std::vector<std::byte>> from_;                         // and the state that each began with
  std::vector<proto::StepResult> results_;
};

// Tokens 64 r .. 64 (r + 1) for rank r, in micro-batch r of compute worker r.
proto::StepPlan PlanOf(int rank, int ranks, uint64_t group, Position base = 0) {
  proto::StepEntry entry;
  entry.sequence = SequenceId(1);
  entry.ctx_len = base + 64 * rank;
  entry.tokens.assign(64, 7);
  entry.linear_exchange = proto::LinearExchange::kChain;
  for (const uint16_t layer_group : {0, 1})
    entry.placement.push_back({LayerGroup(layer_group), WorkerId(0), kEpoch, {0, layer_group == 0 ? kHeads : 2}, {}});
  proto::StepPlan plan{StepId(group + rank), MicroBatchId(static_cast<uint16_t>(rank)), {entry}};
  plan.part = {StepId(group), base, base + 64 * ranks, rank, ranks};
  for (int r = 0; r < ranks; ++r)
    plan.ranks.push_back({WorkerId(r), StepId(group + r), MicroBatchId(static_cast<uint16_t>(r))});
  return plan;
}

RankStateArrived FrameOf(const SendRankState& sent, int from) {
  return {sent.to.step, sent.to.micro_batch, sent.op, State(from, sent.op)};
}

TEST(RankChain, ARankWaitsForTheStateOfEachLinearOpAndHandsItsOwnOn) {
  Rank first(0), second(1);
  const std::vector<SendRankState> sent = first.Feed(PlanArrived{PlanOf(0, 2, 10)});
  ASSERT_EQ(sent.size(), 2u);
  EXPECT_EQ(sent[1].op, 2);
  EXPECT_EQ(sent[1].to, (proto::RankAddress{WorkerId(1), StepId(11), MicroBatchId(1)}));
  EXPECT_THAT(first.errors(), ElementsAre(""));
  EXPECT_EQ(first.results()[0].prefix.chain_bytes, 0) << "nothing came to rank 0";
  EXPECT_THAT(second.Feed(PlanArrived{PlanOf(1, 2, 10)}), IsEmpty());
  EXPECT_THAT(second.ran(), IsEmpty()) << "the state before its tokens has not come";
  EXPECT_THAT(second.Feed(FrameOf(sent[1], 0)), IsEmpty()) << "of a later op";
  EXPECT_THAT(second.ran(), IsEmpty());
  EXPECT_THAT(second.Feed(FrameOf(sent[0], 0)), IsEmpty()) << "it is the last rank";
  EXPECT_THAT(second.ran(), ElementsAre(0, 2));
  EXPECT_THAT(second.from(), ElementsAre(State(0, 0), State(0, 2)));
  EXPECT_THAT(second.errors(), ElementsAre(""));
  EXPECT_EQ(second.results()[0].prefix.chain_bytes, 2 * kStateBytes);
  EXPECT_EQ(second.core().rank_state_bytes(), 0u);
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
  EXPECT_EQ(rank.core().rank_state_bytes(), 0u);
}

TEST(RankChain, AWithdrawnRankKeepsNothingAndWhatComesLateIsDropped) {
  Rank rank(1);
  rank.Feed(PlanArrived{PlanOf(1, 2, 10)});
  rank.Feed(RankStateArrived{StepId(11), MicroBatchId(1), 2, State(0, 2)});
  EXPECT_GT(rank.core().rank_state_bytes(), 0u);
  rank.Feed(StepWithdrawn{StepId(11), MicroBatchId(1)});
  EXPECT_THAT(rank.errors(), ElementsAre("the scheduler has withdrawn the step"));
  EXPECT_EQ(rank.core().rank_state_bytes(), 0u);
  rank.Feed(RankStateArrived{StepId(11), MicroBatchId(1), 0, State(0, 0)});
  EXPECT_EQ(rank.core().rank_state_bytes(), 0u);
  // Of a step whose plan was answered without the core, too.
  rank.Feed(RankStateArrived{StepId(21), MicroBatchId(1), 0, State(0, 0)});
  rank.core().DropBefore(MicroBatchId(1), StepId(21));
  EXPECT_EQ(rank.core().rank_state_bytes(), 0u);
  rank.Feed(RankStateArrived{StepId(21), MicroBatchId(1), 2, State(0, 2)});
  EXPECT_EQ(rank.core().rank_state_bytes(), 0u);
}

TEST(RankChain, AWorkerThatRunsNoLinearLayersOfPromptsRefuses) {
  ComputeWorkerCore core(Table(), Program(), {.micro_batches = 4, .max_step_tokens = 256, .vocab_size = 100});
  core.AddAttentionWorker({WorkerId(0), kEpoch, NodeId(10)});
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
      for (const SendRankState& sent : workers[to].Feed(std::move(event)))
        ready.emplace_back(to + 1, FrameOf(sent, to));
    }
    for (int r = 0; r < ranks; ++r) {
      SCOPED_TRACE(absl::StrCat("seed ", GetParam(), ", group ", group, ", rank ", r));
      if (given_up) workers[r].Feed(StepWithdrawn{StepId(group + r), MicroBatchId(static_cast<uint16_t>(r))});
      EXPECT_EQ(workers[r].core().rank_state_bytes(), 0u);
      if (given_up) continue;
      EXPECT_THAT(workers[r].ran(), ElementsAre(0, 2));
      EXPECT_THAT(workers[r].errors(), ElementsAre(""));
      if (r > 0) EXPECT_THAT(workers[r].from(), ElementsAre(State(r - 1, 0), State(r - 1, 2)));
    }
    if (!given_up) base += 64 * ranks;
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RankChainOrder, ::testing::Range(0, 200));

}  // namespace
}  // namespace dovetail::compute
