#include <deque>
#include <map>

#include "attention_worker/core/attention_worker_core.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/attention_worker/sequence_fixture.h"

// A sequence goes from one attention worker to another by the frames of steps without queries. Two cores, and the test
// as the wire between them.

namespace dovetail::attention::testing {
namespace {

using proto::FrameType;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr NodeId kScheduler{0}, kCompute{1}, kGiverNode{2}, kTakerNode{3};
constexpr WorkerId kTaker{8};
constexpr Epoch kTakerEpoch{5};

class Moves : public ::testing::Test {
 protected:
  explicit Moves(uint32_t taker_blocks = 400)
      : giver_(MixedTable(), {kWorker, kEpoch, 400, 2}), taker_(MixedTable(), {kTaker, kTakerEpoch, taker_blocks, 2}) {}

  AttentionWorkerCore& CoreOf(NodeId node) { return node == kGiverNode ? giver_ : taker_; }

  // What the core answers to the scheduler or the compute worker stays in `answers_`; the rest is delivered.
  void Send(NodeId from, NodeId to, const proto::FrameHeader& header, const std::vector<std::byte>& payload) {
    std::vector<Action> actions;
    CoreOf(to).Handle(ReadFrame(from, header, payload), actions);
    EXPECT_EQ(CoreOf(to).CheckInvariants(), absl::OkStatus());
    for (Action& action : actions) {
      if (auto* frame = std::get_if<SendFrame>(&action)) {
        const auto made =
            proto::MakeHeader(frame->type, frame->epoch, frame->step, frame->micro_batch, 0, frame->message.size());
        if (frame->to == kScheduler || frame->to == kCompute) {
          answers_[frame->type] = frame->message;
        } else {
          wire_.push_back({to, frame->to, made, frame->message});
        }
      } else if (auto* move = std::get_if<SendMovedKeyValue>(&action)) {
        const OutgoingMove& out = CoreOf(to).OutgoingMoveOf(move->slot);
        const auto& layout = out.layouts[CoreOf(to).table().op_group[move->op].value()];
        EXPECT_EQ(layout.query_bytes, 0);
        wire_.push_back({to, out.order.target,
                         proto::MakeHeader(FrameType::kKeyValue, out.order.target_epoch, out.step, move->micro_batch,
                                           move->op, layout.key_value_bytes),
                         std::vector<std::byte>(layout.key_value_bytes)});
        key_value_bytes_ += layout.key_value_bytes;
      } else if (auto* finish = std::get_if<AppendAndFinish>(&action); finish != nullptr && to == kTakerNode) {
        ++appended_ops_;
        wire_.push_back(
            {to,
             finish->reply_to,
             proto::MakeHeader(FrameType::kPartial, kTakerEpoch, finish->step, finish->micro_batch, finish->op, 0),
             {}});
      }
    }
  }
  void Deliver() {
    while (!wire_.empty()) {
      const Frame frame = wire_.front();
      wire_.pop_front();
      if (frame.to == kCompute) continue;
      Send(frame.from, frame.to, frame.header, frame.payload);
    }
  }
  template <typename Message>
  void Tell(NodeId to, FrameType type, const Message& message, uint64_t step = 0) {
    std::vector<std::byte> payload;
    proto::Encode(message, payload);
    const Epoch epoch = to == kGiverNode ? kEpoch : kTakerEpoch;
    Send(type == FrameType::kStepBegin ? kCompute : kScheduler, to,
         proto::MakeHeader(type, epoch, StepId(step), MicroBatchId(0), 0, payload.size()), payload);
  }
  // The giver holds `tokens` tokens of sequence 1 (and none is committed but those before the last 300).
  void Hold(int tokens, std::vector<proto::Shard> shards = WholeShards(MixedTable())) {
    Tell(kGiverNode, FrameType::kOpenSequence, proto::OpenSequence{SequenceId(1), shards, {}});
    for (int at = 0; at < tokens; at += 300)
      Tell(kGiverNode, FrameType::kStepBegin, proto::StepBegin{{{SequenceId(1), at, std::min(300, tokens - at), {}}}},
           ++step_);
  }
  static std::vector<proto::Shard> Taken(std::vector<proto::Shard> shards) {
    for (proto::Shard& shard : shards) shard.worker = kTaker, shard.epoch = kTakerEpoch;
    return shards;
  }
  proto::SequenceMoved Move(Position begin, Position end) {
    answers_.erase(FrameType::kSequenceMoved);
    Tell(kGiverNode, FrameType::kMoveSequence,
         proto::MoveSequence{SequenceId(1), begin, end, 1, StepId(++step_), kTakerNode, kTakerEpoch});
    step_ += static_cast<uint64_t>((end - begin) / proto::kMoveChunkTokens);  // each part has a number
    Deliver();
    const auto moved = proto::Decode<proto::SequenceMoved>(answers_[FrameType::kSequenceMoved]);
    EXPECT_TRUE(moved.ok()) << "no answer";
    return moved.ok() ? *moved : proto::SequenceMoved{};
  }
  size_t SetsAt(size_t shard) {
    size_t held = 0;
    for (const BlockSetId set : taker_.sequences().Find(SequenceId(1))->shards[shard].sets) held += set != kNoBlockSet;
    return held;
  }

  struct Frame {
    NodeId from, to;
    proto::FrameHeader header;
    std::vector<std::byte> payload;
  };
  AttentionWorkerCore giver_, taker_;
  std::deque<Frame> wire_;
  std::map<FrameType, std::vector<std::byte>> answers_;
  uint64_t step_ = 0;
  int64_t key_value_bytes_ = 0;
  int appended_ops_ = 0;
};

TEST_F(Moves, TheTakerThenStandsWhereTheGiverStood) {
  Hold(1300);
  Tell(kTakerNode, FrameType::kOpenSequence, proto::OpenSequence{SequenceId(1), Taken(WholeShards(MixedTable())), {}});
  EXPECT_TRUE(Move(0, 1300).moved);
  EXPECT_EQ(SetsAt(0), 21u) << "1300 tokens in blocks of 64";
  EXPECT_EQ(SetsAt(1), 3u) << "of the window of 100 tokens only what is still seen";
  // 48 bytes a token in ops 0 and 2; 24 in op 1, of tokens from 1152 on.
  EXPECT_EQ(key_value_bytes_, 2 * 48 * 1300 + 24 * (1300 - 1152));
  EXPECT_EQ(taker_.counters().moved_parts, 3u) << "512 tokens at most each";
  Tell(kTakerNode, FrameType::kStepBegin, proto::StepBegin{{{SequenceId(1), 1300, 1, {}}}}, ++step_);
  EXPECT_FALSE(answers_.contains(FrameType::kStepRefused));
  EXPECT_EQ(taker_.sequences().Find(SequenceId(1))->ctx_len, 1300);
  Tell(kGiverNode, FrameType::kReleaseSequence, proto::ReleaseSequence{SequenceId(1), 1300, {}});
  EXPECT_EQ(giver_.status().blocks_in_use, 0u);
}

TEST_F(Moves, AFewOpsGoBeforeTheFirstIsAnswered) {
  Hold(100);
  Tell(kTakerNode, FrameType::kOpenSequence, proto::OpenSequence{SequenceId(1), Taken(WholeShards(MixedTable())), {}});
  Tell(kGiverNode, FrameType::kMoveSequence,
       proto::MoveSequence{SequenceId(1), 0, 100, 1, StepId(50), kTakerNode, kTakerEpoch});
  ASSERT_EQ(wire_.size(), 4u) << "the begin, and K and V of three ops";
  for (size_t op = 0; op < 3; ++op) EXPECT_EQ(wire_[1 + op].header.op, op);
  Deliver();
  EXPECT_EQ(appended_ops_, 3);
  EXPECT_TRUE(answers_.contains(FrameType::kSequenceMoved));
}

// Sequence 1 is opened at both, on what the giver has cached of 256 tokens.
class MovesOfCached : public Moves {
 protected:
  void SetUp() override {
    Tell(kGiverNode, FrameType::kOpenSequence, proto::OpenSequence{SequenceId(9), WholeShards(MixedTable()), {}});
    Tell(kGiverNode, FrameType::kStepBegin, proto::StepBegin{{{SequenceId(9), 0, 256, {}}}}, ++step_);
    Tell(kGiverNode, FrameType::kReleaseSequence, proto::ReleaseSequence{SequenceId(9), 256, Hashes(1, 4)});
    Tell(kGiverNode, FrameType::kOpenSequence,
         proto::OpenSequence{SequenceId(1), WholeShards(MixedTable()), Hashes(1, 4)});
    EXPECT_EQ(StartsOpened().front(), 4u);
    Tell(kTakerNode, FrameType::kOpenSequence,
         proto::OpenSequence{SequenceId(1), Taken(WholeShards(MixedTable())), Hashes(1, 4)});
  }
  std::vector<uint32_t> StartsOpened() {
    return proto::Decode<proto::SequenceOpened>(answers_[FrameType::kSequenceOpened])->resumable;
  }
  // What the taker offers another sequence with these names.
  std::vector<uint32_t> StartsAtTheTaker() {
    Tell(kTakerNode, FrameType::kOpenSequence,
         proto::OpenSequence{SequenceId(2), Taken(WholeShards(MixedTable())), Hashes(1, 4)});
    return StartsOpened();
  }
};

TEST_F(MovesOfCached, WhatTheGiverHasOnlyCachedMovesBeforeAnyStep) {
  EXPECT_TRUE(Move(0, 256).moved);
  EXPECT_EQ(SetsAt(0), 4u);
  Tell(kTakerNode, FrameType::kStepBegin, proto::StepBegin{{{SequenceId(1), 256, 10, {}}}}, ++step_);
  EXPECT_FALSE(answers_.contains(FrameType::kStepRefused));
}

TEST_F(MovesOfCached, MoreThanTheGiverHasCachedDoesNotMove) { EXPECT_FALSE(Move(0, 320).moved); }

TEST_F(MovesOfCached, WhatArrivedAsAWholeIsFoundWithoutAStep) {
  EXPECT_TRUE(Move(0, 256).moved);
  Tell(kGiverNode, FrameType::kReleaseSequence, proto::ReleaseSequence{SequenceId(1), 256, {}});
  Tell(kTakerNode, FrameType::kReleaseSequence, proto::ReleaseSequence{SequenceId(1), 256, {}});
  EXPECT_EQ(taker_.status().blocks_in_use, 0u);
  EXPECT_EQ(StartsAtTheTaker().front(), 4u);
}

TEST_F(MovesOfCached, WhatDidNotArriveAsAWholeIsNotFound) {
  Tell(kGiverNode, FrameType::kMoveSequence,
       proto::MoveSequence{SequenceId(1), 0, 256, 1, StepId(++step_), kTakerNode, kTakerEpoch});
  while (appended_ops_ < 2) {  // of three
    ASSERT_FALSE(wire_.empty());
    const Frame frame = wire_.front();
    wire_.pop_front();
    Send(frame.from, frame.to, frame.header, frame.payload);
  }
  Tell(kTakerNode, FrameType::kReleaseSequence, proto::ReleaseSequence{SequenceId(1), 256, {}});
  EXPECT_THAT(StartsAtTheTaker(), ElementsAre(0));
}

TEST_F(Moves, WhatTheTakersCacheHasStaysAtHome) {
  Tell(kTakerNode, FrameType::kOpenSequence, proto::OpenSequence{SequenceId(9), Taken(WholeShards(MixedTable())), {}});
  Tell(kTakerNode, FrameType::kStepBegin, proto::StepBegin{{{SequenceId(9), 0, 256, {}}}}, ++step_);
  Tell(kTakerNode, FrameType::kReleaseSequence, proto::ReleaseSequence{SequenceId(9), 256, Hashes(1, 4)});
  Hold(300);
  Tell(kTakerNode, FrameType::kOpenSequence,
       proto::OpenSequence{SequenceId(1), Taken(WholeShards(MixedTable())), Hashes(1, 4)});
  EXPECT_EQ(proto::Decode<proto::SequenceOpened>(answers_[FrameType::kSequenceOpened])->resumable.front(), 4u);
  EXPECT_TRUE(Move(256, 300).moved);
  EXPECT_EQ(key_value_bytes_, 2 * 48 * 44 + 24 * 44);
}

// The scheduler counts on it: until the next step the sequence may use no more here than where it came from.
TEST_F(Moves, WhatTheTakersCacheHasAndTheWindowHasLeftIsNotHeld) {
  Tell(kTakerNode, FrameType::kOpenSequence, proto::OpenSequence{SequenceId(9), Taken(WholeShards(MixedTable())), {}});
  for (int at = 0; at < 1280; at += 64)
    Tell(kTakerNode, FrameType::kStepBegin, proto::StepBegin{{{SequenceId(9), at, 64, {}}}}, ++step_);
  Tell(kTakerNode, FrameType::kReleaseSequence, proto::ReleaseSequence{SequenceId(9), 1280, Hashes(1, 20)});
  Hold(1300);
  Tell(kTakerNode, FrameType::kOpenSequence,
       proto::OpenSequence{SequenceId(1), Taken(WholeShards(MixedTable())), Hashes(1, 20)});
  EXPECT_TRUE(Move(1280, 1300).moved);
  EXPECT_EQ(SetsAt(0), 21u);
  EXPECT_EQ(SetsAt(1), 3u);
  Tell(kTakerNode, FrameType::kStepBegin, proto::StepBegin{{{SequenceId(1), 1300, 1, {}}}}, ++step_);
  EXPECT_FALSE(answers_.contains(FrameType::kStepRefused));
}

TEST_F(Moves, AWorkerThatHoldsHeadsOfASequenceGetsTheOthersToo) {
  const auto first = ShardOf(0, {0, 1}), second = ShardOf(0, {1, 2}), windowed = ShardOf(1, {0, 1});
  Hold(200, {first, windowed});
  Tell(kTakerNode, FrameType::kOpenSequence, proto::OpenSequence{SequenceId(1), Taken({second}), {}});
  Tell(kTakerNode, FrameType::kStepBegin, proto::StepBegin{{{SequenceId(1), 0, 200, {}}}}, step_);
  Tell(kTakerNode, FrameType::kOpenSequence,
       proto::OpenSequence{SequenceId(1), Taken({first, windowed}), {}, /*extend=*/true, 200, StepId(step_ + 1)});
  EXPECT_TRUE(Move(0, 200).moved);
  ASSERT_EQ(taker_.sequences().Find(SequenceId(1))->shards.size(), 3u);
  EXPECT_EQ(SetsAt(0), 4u);
  EXPECT_EQ(SetsAt(1), 4u);
  Tell(kTakerNode, FrameType::kStepBegin, proto::StepBegin{{{SequenceId(1), 200, 1, {}}}}, ++step_);
  EXPECT_FALSE(answers_.contains(FrameType::kStepRefused));
}

// The taker holds tokens of which a step brings none, so its compute worker went on without an answer. The step's begin
// comes when the scheduler has already moved the sequence.
TEST_F(Moves, TheBeginOfAStepThatIsOverChangesNothing) {
  proto::Shard first = ShardOf(0, {0, 1}), second = first;
  first.tokens = {0, 64};
  second.tokens = {64, 1024};
  Hold(150, {second});
  for (const bool between_parts : {false, true}) {
    SCOPED_TRACE(between_parts);
    Tell(kTakerNode, FrameType::kOpenSequence, proto::OpenSequence{SequenceId(1), Taken({first}), {}});
    Tell(kTakerNode, FrameType::kStepBegin, proto::StepBegin{{{SequenceId(1), 0, 149, {}}}}, ++step_);
    const uint64_t over = ++step_;
    Tell(kTakerNode, FrameType::kOpenSequence,
         proto::OpenSequence{SequenceId(1), Taken({second}), Hashes(1, 2), /*extend=*/true, 150, StepId(step_ + 1)});
    const auto late_begin = [&] {
      answers_.erase(FrameType::kStepRefused);
      Tell(kTakerNode, FrameType::kStepBegin, proto::StepBegin{{{SequenceId(1), 149, 1, {}}}}, over);
      EXPECT_TRUE(answers_.contains(FrameType::kStepRefused));
    };
    if (!between_parts) late_begin();
    EXPECT_TRUE(Move(64, 150).moved);
    if (between_parts) late_begin();
    EXPECT_EQ(SetsAt(1), 2u);
    answers_.erase(FrameType::kStepRefused);
    Tell(kTakerNode, FrameType::kStepBegin, proto::StepBegin{{{SequenceId(1), 150, 1, {}}}}, ++step_);
    EXPECT_FALSE(answers_.contains(FrameType::kStepRefused));
  }
}

TEST_F(Moves, AWorkerThatNoStepHasReachedYetGetsMoreOfTheSequence) {
  proto::Shard first = ShardOf(0, {0, 1}), last = first;
  first.tokens = {0, 192};
  last.tokens = {192, 1024};
  Hold(100, {first});
  Tell(kTakerNode, FrameType::kOpenSequence, proto::OpenSequence{SequenceId(1), Taken({last}), {}});
  Tell(kTakerNode, FrameType::kOpenSequence,
       proto::OpenSequence{SequenceId(1), Taken({first}), {}, /*extend=*/true, 100, StepId(step_ + 1)});
  EXPECT_TRUE(Move(0, 100).moved);
  EXPECT_EQ(SetsAt(1), 2u);
}

// The tokens after the first 64 lie on a third worker, and those 64 are in the taker's cache: no byte of K and V goes,
// but the sequence's next step, which comes by another way, must find the taker ready.
TEST_F(Moves, APartWithoutKeysAndValuesEndsWhenTheTakerHasBegunIt) {
  proto::Shard first = ShardOf(0, {0, 1});
  first.tokens = {0, 64};
  Tell(kTakerNode, FrameType::kOpenSequence, proto::OpenSequence{SequenceId(9), Taken({first}), {}});
  Tell(kTakerNode, FrameType::kStepBegin, proto::StepBegin{{{SequenceId(9), 0, 100, {}}}}, ++step_);
  Tell(kTakerNode, FrameType::kReleaseSequence, proto::ReleaseSequence{SequenceId(9), 100, Hashes(1, 1)});
  Hold(119, {first});
  Tell(kTakerNode, FrameType::kOpenSequence, proto::OpenSequence{SequenceId(1), Taken({first}), Hashes(1, 1)});
  Tell(kGiverNode, FrameType::kMoveSequence,
       proto::MoveSequence{SequenceId(1), 64, 119, 1, StepId(50), kTakerNode, kTakerEpoch});
  EXPECT_FALSE(answers_.contains(FrameType::kSequenceMoved)) << "the taker knows of nothing";
  Deliver();
  ASSERT_TRUE(answers_.contains(FrameType::kSequenceMoved));
  EXPECT_TRUE(proto::Decode<proto::SequenceMoved>(answers_[FrameType::kSequenceMoved])->moved);
  EXPECT_EQ(key_value_bytes_, 0);
  Tell(kTakerNode, FrameType::kStepBegin, proto::StepBegin{{{SequenceId(1), 119, 1, {}}}}, 51);
  EXPECT_FALSE(answers_.contains(FrameType::kStepRefused))
      << proto::Decode<proto::StepRefused>(answers_[FrameType::kStepRefused])->reason;
}

TEST_F(Moves, SaysWhyNot) {
  Hold(100);
  EXPECT_THAT(Move(0, 100).reason, HasSubstr("not open here"));
  Tell(kTakerNode, FrameType::kOpenSequence, proto::OpenSequence{SequenceId(1), Taken(WholeShards(MixedTable())), {}});
  EXPECT_THAT(Move(64, 100).reason, HasSubstr("does not continue")) << "the taker has nothing of the first 64";
  EXPECT_THAT(Move(0, 101).reason, HasSubstr("does not stand there"));
}

TEST_F(Moves, AnswersOfOthersAndOfFormerMovesAreDropped) {
  Hold(100);
  Tell(kTakerNode, FrameType::kOpenSequence, proto::OpenSequence{SequenceId(1), Taken(WholeShards(MixedTable())), {}});
  Tell(kGiverNode, FrameType::kMoveSequence,
       proto::MoveSequence{SequenceId(1), 0, 100, 1, StepId(50), kTakerNode, kTakerEpoch});
  const uint64_t before = giver_.counters().dropped_frames;
  const auto answer = [&](NodeId from, Epoch epoch, uint64_t step, int op) {
    Send(from, kGiverNode, proto::MakeHeader(FrameType::kPartial, epoch, StepId(step), MicroBatchId(3), op, 0), {});
  };
  answer(kCompute, kTakerEpoch, 50, 0);
  answer(kTakerNode, kEpoch, 50, 0);
  answer(kTakerNode, kTakerEpoch, 49, 0);
  answer(kTakerNode, kTakerEpoch, 50, 1);
  EXPECT_EQ(giver_.counters().dropped_frames, before + 4);
  Deliver();
  EXPECT_TRUE(proto::Decode<proto::SequenceMoved>(answers_[FrameType::kSequenceMoved])->moved);
}

TEST_F(Moves, WhatHasNotArrivedIsNoPrefixOfOthers) {
  Hold(200);
  Tell(kTakerNode, FrameType::kOpenSequence,
       proto::OpenSequence{SequenceId(1), Taken(WholeShards(MixedTable())), Hashes(1, 3)});
  Tell(kGiverNode, FrameType::kMoveSequence,
       proto::MoveSequence{SequenceId(1), 0, 200, 1, StepId(50), kTakerNode, kTakerEpoch});
  const Frame begin = wire_.front();  // and then the giver stops
  wire_.clear();
  Send(begin.from, begin.to, begin.header, begin.payload);
  Tell(kTakerNode, FrameType::kReleaseSequence, proto::ReleaseSequence{SequenceId(1), 200, {}});
  EXPECT_EQ(taker_.status().blocks_in_use + taker_.status().blocks_cached, 0u);
  Tell(kTakerNode, FrameType::kOpenSequence,
       proto::OpenSequence{SequenceId(2), Taken(WholeShards(MixedTable())), Hashes(1, 3)});
  EXPECT_THAT(proto::Decode<proto::SequenceOpened>(answers_[FrameType::kSequenceOpened])->resumable, ElementsAre(0));
}

TEST_F(Moves, AReleasedSequenceStopsMoving) {
  Hold(100);
  Tell(kTakerNode, FrameType::kOpenSequence, proto::OpenSequence{SequenceId(1), Taken(WholeShards(MixedTable())), {}});
  Tell(kGiverNode, FrameType::kMoveSequence,
       proto::MoveSequence{SequenceId(1), 0, 100, 0, StepId(50), kTakerNode, kTakerEpoch});
  Tell(kGiverNode, FrameType::kReleaseSequence, proto::ReleaseSequence{SequenceId(1), 100, {}});
  Tell(kTakerNode, FrameType::kReleaseSequence, proto::ReleaseSequence{SequenceId(1), 0, {}});
  Deliver();
  EXPECT_FALSE(answers_.contains(FrameType::kSequenceMoved));
  EXPECT_EQ(giver_.status().blocks_in_use + taker_.status().blocks_in_use, 0u);
}

// Otherwise its queries would be answered from blocks that are not there.
TEST_F(Moves, WithoutAllThatItLacksASequenceTakesNoStepAndMustBeginAgain) {
  const auto first = ShardOf(0, {0, 1}), second = ShardOf(0, {1, 2});
  Tell(kTakerNode, FrameType::kOpenSequence, proto::OpenSequence{SequenceId(1), Taken({second}), {}});
  Tell(kTakerNode, FrameType::kStepBegin, proto::StepBegin{{{SequenceId(1), 0, 200, {}}}}, ++step_);
  Tell(kTakerNode, FrameType::kOpenSequence,
       proto::OpenSequence{SequenceId(1), Taken({first}), {}, /*extend=*/true, 200, StepId(step_ + 1)});
  Tell(kTakerNode, FrameType::kStepBegin, proto::StepBegin{{{SequenceId(1), 200, 1, {}}}}, ++step_);
  ASSERT_TRUE(answers_.contains(FrameType::kStepRefused));
  EXPECT_THAT(proto::Decode<proto::StepRefused>(answers_[FrameType::kStepRefused])->damaged,
              ElementsAre(SequenceId(1)));
  EXPECT_EQ(taker_.status().blocks_in_use, 2u * 4) << "of 2 ops, 200 tokens: nothing was appended";
}

TEST_F(Moves, APartBehindOneThatEndsInABlockIsRefused) {
  Tell(kTakerNode, FrameType::kOpenSequence, proto::OpenSequence{SequenceId(1), Taken(WholeShards(MixedTable())), {}});
  const auto part = [&](Position begin, Position end) {
    answers_.erase(FrameType::kStepRefused);
    std::vector<std::byte> payload;
    proto::Encode(
        proto::StepBegin{
            {{.sequence = SequenceId(1), .ctx_len = begin, .q_len = static_cast<int>(end - begin), .fill_end = 300}}},
        payload);
    Send(kCompute, kTakerNode,
         proto::MakeHeader(FrameType::kStepBegin, kTakerEpoch, StepId(++step_), MicroBatchId(2), 0, payload.size()),
         payload);
    return !answers_.contains(FrameType::kStepRefused);
  };
  EXPECT_TRUE(part(0, 128));
  EXPECT_TRUE(part(128, 150));
  EXPECT_FALSE(part(150, 300));
  Tell(kTakerNode, FrameType::kReleaseSequence, proto::ReleaseSequence{SequenceId(1), 0, {}});
  EXPECT_EQ(taker_.status().blocks_in_use, 0u);
}

TEST_F(Moves, AForkInThePlaceOfASequenceEndsItsMove) {
  Hold(600);
  Tell(kGiverNode, FrameType::kOpenSequence, proto::OpenSequence{SequenceId(2), {ShardOf(0, {0, 1})}, {}});
  Tell(kGiverNode, FrameType::kStepBegin, proto::StepBegin{{{SequenceId(2), 0, 100, {}}}}, ++step_);
  Tell(kTakerNode, FrameType::kOpenSequence, proto::OpenSequence{SequenceId(1), Taken(WholeShards(MixedTable())), {}});
  Tell(kGiverNode, FrameType::kMoveSequence,
       proto::MoveSequence{SequenceId(1), 0, 600, 1, StepId(50), kTakerNode, kTakerEpoch});
  Tell(kGiverNode, FrameType::kForkSequence, proto::ForkSequence{SequenceId(2), SequenceId(1), 100});
  Deliver();
  EXPECT_EQ(key_value_bytes_, 2 * 48 * 512 + 24 * (512 - 448)) << "of the first part, which had gone";
  EXPECT_EQ(taker_.counters().moved_parts, 1u);
  EXPECT_FALSE(answers_.contains(FrameType::kSequenceMoved));
}

class FullTaker : public Moves {
 protected:
  FullTaker() : Moves(10) {}
};

TEST_F(FullTaker, RefusesAndKeepsNothing) {
  Hold(600);
  Tell(kTakerNode, FrameType::kOpenSequence, proto::OpenSequence{SequenceId(1), Taken(WholeShards(MixedTable())), {}});
  const auto moved = Move(0, 600);
  EXPECT_FALSE(moved.moved);
  EXPECT_THAT(moved.reason, HasSubstr("KvBlocks"));
  EXPECT_EQ(taker_.status().blocks_in_use, 0u);
}

}  // namespace
}  // namespace dovetail::attention::testing
