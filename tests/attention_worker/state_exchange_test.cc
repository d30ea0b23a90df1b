#include <string>
#include <vector>

#include "attention_worker/core/attention_worker_core.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

// Steps whose linear layers run on compute workers: the states before them are given when the tokens before are in
// place, and of those that they leave, only the blocks are held that later steps and other prompts go on from.

namespace dovetail::attention {
namespace {

using proto::FrameType;
using proto::StateExchange;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr Epoch kEpoch{3};
constexpr SequenceId kSequence{1};

// One op, a linear state of two heads with a block each.
proto::AttentionTable OneState() {
  proto::LinearSpec state;
  state.heads = 2;
  state.key_dim = state.value_dim = 16;
  state.blocks_per_head = 1;
  proto::LinearConstants decays;
  decays.log_decay.assign(2, -0.1f);
  return *proto::AttentionTable::Build({state}, {decays});
}

class StateExchangeTest : public ::testing::Test {
 protected:
  explicit StateExchangeTest(uint32_t blocks = 100)
      : core_(OneState(), {WorkerId(0), kEpoch, blocks, /*micro_batches=*/4}) {
    const proto::Placement placement = proto::WholePlacement(OneState(), WorkerId(0), kEpoch);
    proto::OpenSequence open{kSequence, {placement.begin(), placement.end()}, {}};
    std::vector<std::byte> payload;
    proto::Encode(open, payload);
    Send(0, FrameType::kOpenSequence, payload, 0);
  }
  std::vector<std::string> Send(int batch, FrameType type, const std::vector<std::byte>& payload, uint64_t step) {
    const auto header =
        proto::MakeHeader(type, kEpoch, StepId(step), MicroBatchId(static_cast<uint16_t>(batch)), 0, payload.size());
    std::vector<Action> actions;
    core_.Handle(ReadFrame(NodeId(10 + static_cast<uint32_t>(batch)), header, payload), actions);
    std::vector<std::string> lines;
    for (const Action& action : actions) {
      if (const auto* give = std::get_if<AnswerStates>(&action))
        lines.push_back(absl::StrCat("give to ", give->reply_to.value()));
      if (const auto* finish = std::get_if<AppendAndFinish>(&action))
        lines.push_back(absl::StrCat("take from ", finish->reply_to.value()));
      if (std::holds_alternative<AttendComplete>(action)) lines.push_back("attend");
      const auto* frame = std::get_if<SendFrame>(&action);
      if (frame != nullptr && frame->type == FrameType::kStepRefused)
        lines.push_back(proto::Decode<proto::StepRefused>(frame->message)->reason);
    }
    return lines;
  }
  std::vector<std::string> Begin(int batch, uint64_t step, Position ctx_len, int q_len, StateExchange states,
                                 const proto::PrefillPart& part = {}) {
    proto::StepBeginEntry entry{.sequence = kSequence, .ctx_len = ctx_len, .q_len = q_len, .hashes = {}};
    entry.states = states;
    std::vector<std::byte> payload;
    proto::Encode(proto::StepBegin{{entry}, part}, payload);
    return Send(batch, FrameType::kStepBegin, payload, step);
  }
  std::vector<std::string> Ask(int batch, uint64_t step) { return Send(batch, FrameType::kQuery, {}, step); }
  std::vector<std::string> Leave(int batch, uint64_t step) {
    const auto bytes = core_.LayoutOf(MicroBatchId(static_cast<uint16_t>(batch)), LayerGroup(0)).key_value_bytes;
    return Send(batch, FrameType::kKeyValue, std::vector<std::byte>(static_cast<size_t>(bytes)), step);
  }
  std::vector<int64_t> Held() {
    std::vector<int64_t> held;
    const auto& sets = core_.sequences().Find(kSequence)->shards[0].sets;
    for (size_t i = 0; i < sets.size(); ++i)
      if (sets[i] != kNoBlockSet) held.push_back(static_cast<int64_t>(i));
    return held;
  }
  uint64_t InUse() { return core_.sequences().status().blocks_in_use; }

  AttentionWorkerCore core_;
};

TEST_F(StateExchangeTest, TheStateBeforeIsGivenAtOnceAndThoseThatAreLeftAreTaken) {
  EXPECT_THAT(Begin(0, 1, 0, 700, StateExchange::kLeave), IsEmpty());
  EXPECT_THAT(Ask(0, 1), IsEmpty()) << "nothing is asked for";
  EXPECT_EQ(core_.counters().dropped_frames, 1u);
  EXPECT_THAT(Leave(0, 1), ElementsAre("take from 10"));
  EXPECT_THAT(Held(), ElementsAre(1, 3, 5, 7, 9, 10));
  EXPECT_THAT(Begin(1, 2, 700, 100, StateExchange::kFetch), IsEmpty());
  EXPECT_THAT(Ask(1, 2), ElementsAre("give to 11"));
  EXPECT_THAT(Leave(1, 2), ElementsAre("take from 11"));
  EXPECT_THAT(Begin(1, 3, 800, 1, StateExchange::kTokens), IsEmpty());
  EXPECT_THAT(Held(), ElementsAre(11, 12)) << "the window of a state leaves the rest";
}

TEST_F(StateExchangeTest, ARankGetsTheStateWhenTheRankBeforeHasLeftIt) {
  const auto part = [](int rank) { return proto::PrefillPart{StepId(5), 0, 300, rank, 3}; };
  Begin(2, 7, 256, 44, StateExchange::kFetch, part(2));
  EXPECT_THAT(Ask(2, 7), IsEmpty());
  Begin(1, 6, 128, 128, StateExchange::kFetch, part(1));
  EXPECT_THAT(Ask(1, 6), IsEmpty()) << "rank 0 has not begun";
  Begin(0, 5, 0, 128, StateExchange::kLeave, part(0));
  EXPECT_THAT(Leave(0, 5), ElementsAre("take from 10", "give to 11"));
  EXPECT_THAT(Leave(1, 6), ElementsAre("take from 11", "give to 12"));
  EXPECT_THAT(Leave(2, 7), ElementsAre("take from 12"));
  EXPECT_THAT(Begin(0, 10, 300, 1, StateExchange::kTokens), IsEmpty()) << "the sequence is whole";
}

// Ranks that hand states on to each other ask for none here, and what they leave may come in any order.
TEST_F(StateExchangeTest, WhatARankLeavesWaitsForNoRankBeforeUnlessItAsked) {
  const auto part = [](int rank) { return proto::PrefillPart{StepId(5), 0, 300, rank, 3}; };
  Begin(2, 7, 256, 44, StateExchange::kLeave, part(2));
  EXPECT_THAT(Leave(2, 7), ElementsAre("take from 12"));
  Begin(1, 6, 128, 128, StateExchange::kLeave, part(1));
  Begin(0, 5, 0, 128, StateExchange::kLeave, part(0));
  EXPECT_THAT(Leave(1, 6), ElementsAre("take from 11"));
  EXPECT_THAT(Leave(0, 5), ElementsAre("take from 10"));
  EXPECT_THAT(Begin(0, 10, 300, 1, StateExchange::kTokens), IsEmpty()) << "the sequence is whole";
  EXPECT_EQ(core_.counters().dropped_frames, 0u);
}

TEST_F(StateExchangeTest, RanksMayDifferInHowTheyCross) {
  const auto part = [](int rank) { return proto::PrefillPart{StepId(5), 0, 300, rank, 2}; };
  Begin(0, 5, 0, 256, StateExchange::kTokens, part(0));
  Begin(1, 6, 256, 44, StateExchange::kFetch, part(1));
  EXPECT_THAT(Held(), ElementsAre(0, 1, 2, 3, 4)) << "tokens are kept whole";
  EXPECT_THAT(Ask(1, 6), IsEmpty());
  const auto query = core_.LayoutOf(MicroBatchId(0), LayerGroup(0)).query_bytes;
  EXPECT_THAT(Send(0, FrameType::kQuery, std::vector<std::byte>(static_cast<size_t>(query)), 5), ElementsAre("attend"));
  EXPECT_THAT(Leave(0, 5), ElementsAre("take from 10", "give to 11"));
}

class SmallStateExchangeTest : public StateExchangeTest {
 protected:
  SmallStateExchangeTest() : StateExchangeTest(6) {}  // states at three places
};

TEST_F(SmallStateExchangeTest, ALongStepFitsThatLeavesFewStates) {
  EXPECT_THAT(Begin(0, 1, 512, 0 + 1, StateExchange::kTokens),
              ElementsAre(HasSubstr("steps before this one did not reach")));
  EXPECT_THAT(Begin(0, 2, 0, 192, StateExchange::kLeave), IsEmpty());
  EXPECT_EQ(InUse(), 4u) << "of 128 and 192 tokens";
}

TEST_F(SmallStateExchangeTest, ARankWithoutRoomForItsStatesIsRefused) {
  const auto part = [](int rank) { return proto::PrefillPart{StepId(5), 0, 500, rank, 2}; };
  EXPECT_THAT(Begin(0, 5, 0, 192, StateExchange::kLeave, part(0)), IsEmpty());
  EXPECT_THAT(Begin(1, 6, 192, 308, StateExchange::kFetch, part(1)),
              ElementsAre(HasSubstr("the step needs 8 KvBlocks; 2 of 6 are free")));
}

}  // namespace
}  // namespace dovetail::attention
