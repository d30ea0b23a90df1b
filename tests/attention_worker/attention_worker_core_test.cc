#include "attention_worker/core/attention_worker_core.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/link_frames.h"
#include "tests/attention_worker/sequence_fixture.h"

namespace dovetail::attention::testing {
namespace {

using proto::FrameType;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr NodeId kScheduler{0}, kCompute{1}, kOtherCompute{2};

class AttentionWorkerCoreTest : public ::testing::Test {
 protected:
  // MixedTable: ops 0 and 2 are of group 0 (2 KV heads, 4 query heads), op 1 of group 1 (1 KV head, 2 query heads,
  // window 100). A whole step of r rows carries 64 r bytes of q and 48 r of k, v for group 0; half of that for group 1.
  explicit AttentionWorkerCoreTest(uint32_t blocks = 64)
      : core_(MixedTable(), {kWorker, kEpoch, blocks, /*micro_batches=*/2}) {}

  // Gives the core a frame; returns what it wants done.
  std::vector<Action> Send(NodeId from, FrameType type, std::vector<std::byte> payload, uint64_t step = 0,
                           int micro_batch = 0, int op = 0, Epoch epoch = kEpoch) {
    const auto header = proto::MakeHeader(type, epoch, StepId(step), MicroBatchId(static_cast<uint16_t>(micro_batch)),
                                          op, payload.size());
    std::vector<Action> actions;
    core_.Handle(ReadFrame(from, header, payload), actions);
    EXPECT_EQ(core_.CheckInvariants(), absl::OkStatus());
    return actions;
  }
  template <typename Message>
  std::vector<Action> SendMessage(FrameType type, const Message& message, uint64_t step = 0, int micro_batch = 0) {
    std::vector<std::byte> payload;
    proto::Encode(message, payload);
    return Send(type == FrameType::kStepBegin ? kCompute : kScheduler, type, payload, step, micro_batch);
  }
  std::vector<Action> Open(uint64_t id, std::vector<proto::Shard> shards, std::vector<proto::BlockHash> hashes = {}) {
    return SendMessage(FrameType::kOpenSequence,
                       proto::OpenSequence{SequenceId(id), std::move(shards), std::move(hashes)});
  }
  std::vector<Action> Open(uint64_t id) { return Open(id, WholeShards(MixedTable())); }
  std::vector<Action> Begin(uint64_t step, std::vector<proto::StepBeginEntry> entries, int micro_batch = 0) {
    return SendMessage(FrameType::kStepBegin, proto::StepBegin{std::move(entries)}, step, micro_batch);
  }
  std::vector<Action> Query(uint64_t step, int op, size_t bytes, int micro_batch = 0, NodeId from = kCompute) {
    return Send(from, FrameType::kQuery, std::vector<std::byte>(bytes), step, micro_batch, op);
  }
  std::vector<Action> KeyValue(uint64_t step, int op, size_t bytes, int micro_batch = 0, NodeId from = kCompute) {
    return Send(from, FrameType::kKeyValue, std::vector<std::byte>(bytes), step, micro_batch, op);
  }
  // All tensors of a step of `rows` rows, whole shards.
  void RunStep(uint64_t step, size_t rows, int micro_batch = 0) {
    for (int op = 0; op < 3; ++op) {
      const size_t part = op == 1 ? 2 : 1;
      EXPECT_THAT(Query(step, op, 64 * rows / part, micro_batch), SizeIs(1)) << "op " << op;
      EXPECT_THAT(KeyValue(step, op, 48 * rows / part, micro_batch), SizeIs(1)) << "op " << op;
    }
  }

  template <typename Message>
  static Message Sent(const std::vector<Action>& actions, FrameType type) {
    EXPECT_THAT(actions, SizeIs(1));
    const auto* frame = actions.empty() ? nullptr : std::get_if<SendFrame>(&actions.back());
    if (frame == nullptr || frame->type != type) {
      ADD_FAILURE() << "no frame of type " << static_cast<int>(type) << " was sent";
      return {};
    }
    return *proto::Decode<Message>(frame->message);
  }
  static proto::StepRefused Refused(const std::vector<Action>& actions) {
    return Sent<proto::StepRefused>(actions, FrameType::kStepRefused);
  }
  static bool Prepares(const std::vector<Action>& actions) {
    return !actions.empty() && std::holds_alternative<PrepareStep>(actions.back());
  }
  uint64_t Dropped() const { return core_.counters().dropped_frames; }
  const SequenceState& State(uint64_t id) { return *core_.sequences().Find(SequenceId(id)); }

  AttentionWorkerCore core_;
};

class SmallWorkerTest : public AttentionWorkerCoreTest {
 protected:
  SmallWorkerTest() : AttentionWorkerCoreTest(10) {}  // two times 64 tokens
};

TEST_F(AttentionWorkerCoreTest, RunsAStepOpByOpQueriesBeforeKeysAndValues) {
  EXPECT_THAT(Sent<proto::SequenceOpened>(Open(1), FrameType::kSequenceOpened).resumable, ElementsAre(0));
  const auto begun = Begin(10, {{SequenceId(1), 0, 3, {}}}, 1);
  ASSERT_THAT(begun, SizeIs(1));
  EXPECT_EQ(std::get<PrepareStep>(begun[0]).micro_batch, MicroBatchId(1));

  const auto attend = Query(10, 0, 3 * 64, 1);
  ASSERT_THAT(attend, SizeIs(1));
  EXPECT_EQ(std::get<AttendComplete>(attend[0]).op, 0);
  EXPECT_EQ(std::get<AttendComplete>(attend[0]).query.size(), 3u * 64);
  const auto finish = KeyValue(10, 0, 3 * 48, 1);
  ASSERT_THAT(finish, SizeIs(1));
  EXPECT_EQ(std::get<AppendAndFinish>(finish[0]).reply_to, kCompute);
  EXPECT_EQ(std::get<AppendAndFinish>(finish[0]).step, StepId(10));
  Query(10, 1, 3 * 32, 1), KeyValue(10, 1, 3 * 24, 1);
  Query(10, 2, 3 * 64, 1);
  EXPECT_THAT(KeyValue(10, 2, 3 * 48, 1), SizeIs(1));
  EXPECT_EQ(core_.counters().steps, 1u);
  EXPECT_EQ(Dropped(), 0u);
}

TEST_F(AttentionWorkerCoreTest, AStepWithoutFramesForItsPayloadsRunsOpByOpAndTakesNone) {
  Open(1);
  std::vector<std::byte> begin;
  proto::Encode(proto::StepBegin{{{SequenceId(1), 0, 3, {}}}}, begin);
  const auto begun = Send(kCompute, proto::kStepBeginOnDevice, begin, 10, 1);
  ASSERT_THAT(begun, SizeIs(1));
  const auto prepare = std::get<PrepareStep>(begun[0]);
  EXPECT_EQ(prepare.compute, kCompute);
  EXPECT_FALSE(prepare.in_frames);
  EXPECT_EQ(core_.TakeOp(MicroBatchId(0)), std::nullopt) << "another micro-batch";
  EXPECT_EQ(core_.TakeOp(MicroBatchId(1)), 0);
  EXPECT_THAT(Query(10, 1, 3 * 32, 1), IsEmpty());
  EXPECT_EQ(Dropped(), 1u);
  EXPECT_EQ(core_.TakeOp(MicroBatchId(1)), 1);
  EXPECT_EQ(core_.TakeOp(MicroBatchId(1)), 2);
  EXPECT_EQ(core_.TakeOp(MicroBatchId(1)), std::nullopt);

  const auto next = Begin(11, {{SequenceId(1), 3, 1, {}}}, 1);
  ASSERT_TRUE(Prepares(next));
  EXPECT_TRUE(std::get<PrepareStep>(next.back()).in_frames);
  EXPECT_EQ(core_.TakeOp(MicroBatchId(1)), std::nullopt) << "frames bring its payloads";
  RunStep(11, 1, 1);
}

TEST_F(AttentionWorkerCoreTest, DropsAndCountsTensorsThatAreNotExpected) {
  Open(1);
  Begin(10, {{SequenceId(1), 0, 1, {}}});
  uint64_t drops = 0;
  const auto expect_dropped = [&](const std::vector<Action>& actions, const char* what) {
    EXPECT_THAT(actions, IsEmpty()) << what;
    EXPECT_EQ(core_.counters().dropped_frames, ++drops) << what;
  };
  expect_dropped(KeyValue(10, 0, 48), "k and v before q");
  expect_dropped(Query(10, 1, 32), "a later op");
  expect_dropped(Query(9, 0, 64), "an earlier step");
  expect_dropped(Query(11, 0, 64), "a later step");
  expect_dropped(Query(10, 0, 64, /*micro_batch=*/1), "another micro-batch");
  expect_dropped(Query(10, 0, 64, /*micro_batch=*/7), "a micro-batch that there is not");
  expect_dropped(Query(10, 0, 64, 0, kOtherCompute), "another sender");
  expect_dropped(Query(10, 0, 63), "another size");
  EXPECT_THAT(Query(10, 0, 64), SizeIs(1));
  expect_dropped(Query(10, 0, 64), "the same again");
  expect_dropped(KeyValue(10, 0, 47), "k and v of another size");
  EXPECT_THAT(KeyValue(10, 0, 48), SizeIs(1));
  expect_dropped(KeyValue(10, 0, 48), "k and v again");
  expect_dropped(Query(10, 0, 64), "an op that is done");
  Query(10, 1, 32), KeyValue(10, 1, 24), Query(10, 2, 64), KeyValue(10, 2, 48);
  expect_dropped(Query(10, 0, 64), "the step is over");
  expect_dropped(Query(10, 3, 64), "an op that there is not");
}

TEST_F(AttentionWorkerCoreTest, DropsFramesOfAnotherEpochSizeTypeOrWorker) {
  std::vector<std::byte> open;
  proto::Encode(proto::OpenSequence{SequenceId(1), WholeShards(MixedTable()), {}}, open);
  for (const Epoch epoch : {Epoch(2), Epoch(4)})
    EXPECT_THAT(Send(kScheduler, FrameType::kOpenSequence, open, 0, 0, 0, epoch), IsEmpty());
  auto header = proto::MakeHeader(FrameType::kOpenSequence, kEpoch, StepId(0), MicroBatchId(0), 0, open.size() + 1);
  std::vector<Action> actions;
  core_.Handle(ReadFrame(kScheduler, header, open), actions);
  EXPECT_THAT(actions, IsEmpty()) << "a payload of another size than its header says";
  EXPECT_THAT(Send(kScheduler, FrameType::kStepPlan, open), IsEmpty());
  for (const FrameType type : {FrameType::kOpenSequence, FrameType::kForkSequence, FrameType::kReleaseSequence,
                               FrameType::kPrefixProbe, FrameType::kUnpin})
    EXPECT_THAT(Send(kScheduler, type, std::vector<std::byte>(3)), IsEmpty()) << "cut";
  auto foreign = WholeShards(MixedTable());
  foreign[1].worker = WorkerId(8);
  EXPECT_THAT(Open(1, foreign), IsEmpty());
  foreign[1] = WholeShards(MixedTable())[1];
  foreign[1].epoch = Epoch(2);
  EXPECT_THAT(Open(1, foreign), IsEmpty());
  EXPECT_EQ(Dropped(), 11u);
  EXPECT_EQ(core_.status().sequences, 0u);
}

TEST_F(AttentionWorkerCoreTest, SaysNoToShardsThatTheModelDoesNotHave) {
  const auto opened = Sent<proto::SequenceOpened>(Open(1, {ShardOf(1, {0, 2})}), FrameType::kSequenceOpened);
  EXPECT_EQ(opened.sequence, SequenceId(1));
  EXPECT_THAT(opened.resumable, IsEmpty()) << "not even a fresh start";
}

TEST_F(AttentionWorkerCoreTest, RefusesAStepWithTheReasonAndChangesNothing) {
  Open(1), Open(2);
  Begin(1, {{SequenceId(1), 0, 70, {}}, {SequenceId(2), 0, 70, {}}});
  RunStep(1, 140);
  const auto expect_refused = [&](const std::vector<Action>& actions, const char* reason) {
    const proto::StepRefused refused = Refused(actions);
    EXPECT_FALSE(refused.out_of_memory);
    EXPECT_THAT(refused.reason, HasSubstr(reason));
    EXPECT_EQ(State(1).ctx_len, 0) << reason;
    EXPECT_EQ(State(1).q_len, 70) << reason;
  };
  expect_refused(Begin(2, {{SequenceId(1), 70, 1, {}}, {SequenceId(3), 0, 1, {}}}), "sequence 3 is not open here");
  expect_refused(Begin(2, {{SequenceId(1), 70, 1, {}}, {SequenceId(2), 71, 1, {}}}),
                 "steps before this one did not reach this worker as a whole");
  expect_refused(Begin(2, {{SequenceId(1), 70, 1, {}}, {SequenceId(1), 70, 1, {}}}), "sequence 1 is in the step twice");
  expect_refused(Begin(2, {{SequenceId(1), 70, 1, {}}}, 2), "micro-batch 2: this worker has 2");
  expect_refused(Begin(2, {{SequenceId(1), 70, 0, {}}}), "entry.q_len is outside the limit");
  EXPECT_EQ(core_.counters().refused_steps, 5u);
  EXPECT_TRUE(Prepares(Begin(2, {{SequenceId(1), 70, 1, {}}, {SequenceId(2), 70, 1, {}}})));
}

// Its compute worker went on without an answer from here, and was lost with what it had not sent yet.
TEST_F(AttentionWorkerCoreTest, AStepAfterOneThatDidNotComeAsAWholeNamesTheSequencesThatMustBeginAgain) {
  Open(1), Open(2), Open(3);
  Begin(1, {{SequenceId(1), 0, 3, {}}, {SequenceId(2), 0, 3, {}}});
  Query(1, 0, 6 * 64), KeyValue(1, 0, 6 * 48), Query(1, 1, 6 * 32);
  Begin(2, {{SequenceId(3), 0, 1, {}}}, 1);
  RunStep(2, 1, 1);
  const proto::StepRefused cut = Refused(Begin(3, {{SequenceId(1), 3, 1, {}}, {SequenceId(3), 1, 1, {}}}, 1));
  EXPECT_THAT(cut.damaged, ElementsAre(SequenceId(1))) << "the last k and v of op 1 and all of op 2 are missing";
  const proto::StepRefused missed = Refused(Begin(4, {{SequenceId(3), 2, 1, {}}}, 1));
  EXPECT_THAT(missed.damaged, ElementsAre(SequenceId(3))) << "a whole step is missing";
  EXPECT_TRUE(Prepares(Begin(5, {{SequenceId(2), 0, 3, {}}, {SequenceId(3), 1, 1, {}}}, 1))) << "the same step again";
}

// A worker that holds none of a step's tokens is not waited for: the next step may come first, from another compute
// worker.
TEST_F(AttentionWorkerCoreTest, AStepThatOvertakesOneWhoseTokensLieElsewhereGoesOn) {
  Open(1, {ShardOf(0, {0, 2}, {128, 256})});
  EXPECT_TRUE(Prepares(Begin(2, {{SequenceId(1), 128, 1, {}}}, 1))) << "steps of the first 128 tokens come later";
  EXPECT_THAT(Refused(Begin(1, {{SequenceId(1), 0, 128, {}}})).damaged, IsEmpty()) << "it is over elsewhere";
  EXPECT_EQ(State(1).ctx_len, 128);
  const proto::StepRefused missed = Refused(Begin(4, {{SequenceId(1), 130, 1, {}}}));
  EXPECT_THAT(missed.damaged, ElementsAre(SequenceId(1))) << "token 129 belongs here";
}

// A name that the begin of a step brought is missing where that begin did not arrive.
TEST_F(AttentionWorkerCoreTest, AStepThatOvertakesTheNamesOfBlocksBeginsAgain) {
  Open(1, {ShardOf(0, {0, 2}, {128, 256})});
  const std::vector<proto::BlockHash> names = Hashes(5, 2);
  EXPECT_THAT(Refused(Begin(2, {{SequenceId(1), 128, 1, {names[1]}}}, 1)).damaged, ElementsAre(SequenceId(1)));
  EXPECT_TRUE(Prepares(Begin(3, {{SequenceId(1), 128, 1, names}}, 1)));
}

// A worker of the tokens behind those of the first steps answers nothing in these.
TEST_F(AttentionWorkerCoreTest, AStepAfterFirstOnesOfWhichNoneCameNamesTheSequencesThatMustBeginAgain) {
  Open(1), Open(2);
  for (const Position missed : {64, 5}) {
    const proto::StepRefused refused = Refused(Begin(1, {{SequenceId(1), missed, 1, {}}, {SequenceId(2), 0, 1, {}}}));
    EXPECT_THAT(refused.damaged, ElementsAre(SequenceId(1)));
    EXPECT_EQ(refused.reason, "steps before this one did not reach this worker as a whole");
  }
  EXPECT_TRUE(Prepares(Begin(2, {{SequenceId(1), 0, 5, {}}, {SequenceId(2), 0, 1, {}}}))) << "they begin again";
}

TEST_F(SmallWorkerTest, RefusesForLackOfMemoryAndTakesTheStepWhenThereIsSome) {
  Open(1), Open(2);
  ASSERT_TRUE(Prepares(Begin(1, {{SequenceId(1), 0, 64, {}}, {SequenceId(2), 0, 64, {}}})));
  RunStep(1, 128);
  const auto refused = Refused(Begin(2, {{SequenceId(1), 64, 1, {}}}, 1));
  EXPECT_TRUE(refused.out_of_memory);
  EXPECT_EQ(refused.reason, "the step needs 5 KvBlocks; 0 of 10 are free");
  SendMessage(FrameType::kReleaseSequence, proto::ReleaseSequence{SequenceId(2), 64, {}});
  EXPECT_TRUE(Prepares(Begin(3, {{SequenceId(1), 64, 1, {}}}, 1))) << "the same step again";
}

TEST_F(SmallWorkerTest, EvictsCacheBeforeItRefuses) {
  Open(1);
  Begin(1, {{SequenceId(1), 0, 128, {}}});
  SendMessage(FrameType::kReleaseSequence, proto::ReleaseSequence{SequenceId(1), 128, Hashes(5, 2)});
  EXPECT_EQ(core_.status().blocks_cached, 10u);
  Open(2);
  EXPECT_TRUE(Prepares(Begin(2, {{SequenceId(2), 0, 128, {}}})));
  EXPECT_EQ(core_.status().blocks_cached, 0u);
}

TEST_F(AttentionWorkerCoreTest, AStepTriedAgainUnderANewNumberStartsAgain) {
  Open(1);
  Begin(5, {{SequenceId(1), 0, 2, {}}});
  Query(5, 0, 128), KeyValue(5, 0, 96), Query(5, 1, 64);
  ASSERT_TRUE(Prepares(Begin(6, {{SequenceId(1), 0, 2, {}}})));
  EXPECT_THAT(KeyValue(5, 1, 48), IsEmpty()) << "what the first attempt still sends";
  RunStep(6, 2);
}

TEST_F(AttentionWorkerCoreTest, AStepThatBeginsTwiceOrLateTakesNothingBack) {
  Open(1);
  Begin(5, {{SequenceId(1), 0, 2, {}}});
  Query(5, 0, 128), KeyValue(5, 0, 96), Query(5, 1, 64);
  const uint64_t dropped = Dropped();
  EXPECT_THAT(Begin(5, {{SequenceId(1), 0, 2, {}}}), IsEmpty());
  EXPECT_THAT(KeyValue(5, 1, 48), SizeIs(1)) << "the step goes on where it was";
  Query(5, 2, 128), KeyValue(5, 2, 96);
  EXPECT_THAT(Begin(5, {{SequenceId(1), 0, 2, {}}}), IsEmpty()) << "when it is over";
  EXPECT_THAT(Begin(4, {{SequenceId(1), 0, 1, {}}}), IsEmpty());
  EXPECT_EQ(Dropped(), dropped + 3);
  EXPECT_EQ(State(1).q_len, 2);
  ASSERT_TRUE(Prepares(Begin(8, {{SequenceId(1), 2, 1, {}}}, 1)));
  RunStep(8, 1, 1);
  EXPECT_THAT(Refused(Begin(7, {{SequenceId(1), 2, 4, {}}})).reason, HasSubstr("sequence 1 was in step 8 since"));
  EXPECT_EQ(State(1).q_len, 1);
}

TEST_F(AttentionWorkerCoreTest, WhatIsSaidAboutSequencesCountsOnce) {
  std::vector<std::byte> open, release;
  proto::Encode(proto::OpenSequence{SequenceId(1), WholeShards(MixedTable()), {}}, open);
  proto::Encode(proto::ReleaseSequence{SequenceId(1), 0, {}}, release);
  EXPECT_THAT(Send(kScheduler, FrameType::kOpenSequence, open, /*step=*/1), SizeIs(1));
  Begin(1, {{SequenceId(1), 0, 2, {}}});
  EXPECT_THAT(Send(kScheduler, FrameType::kOpenSequence, open, 1), IsEmpty());
  RunStep(1, 2);
  Send(kScheduler, FrameType::kReleaseSequence, release, 2);
  EXPECT_THAT(Send(kScheduler, FrameType::kOpenSequence, open, 1), IsEmpty());
  EXPECT_EQ(core_.status().sequences, 0u) << "no later event would release it";
  EXPECT_THAT(Send(kScheduler, FrameType::kOpenSequence, open, 3), SizeIs(1)) << "it comes back from another worker";
  Send(kScheduler, FrameType::kReleaseSequence, release, 2);
  EXPECT_EQ(core_.status().sequences, 1u);
  EXPECT_EQ(Dropped(), 3u);
}

TEST_F(AttentionWorkerCoreTest, TwoMicroBatchesRunAtOnce) {
  Open(1), Open(2);
  Begin(1, {{SequenceId(1), 0, 1, {}}}, 0);
  Begin(2, {{SequenceId(2), 0, 1, {}}}, 1);
  for (int op = 0; op < 3; ++op) {
    const size_t part = op == 1 ? 2 : 1;
    EXPECT_THAT(Query(1, op, 64 / part, 0), SizeIs(1));
    EXPECT_THAT(Query(2, op, 64 / part, 1), SizeIs(1));
    EXPECT_THAT(KeyValue(2, op, 48 / part, 1), SizeIs(1));
    EXPECT_THAT(KeyValue(1, op, 48 / part, 0), SizeIs(1));
  }
  EXPECT_EQ(Dropped(), 0u);
}

TEST_F(AttentionWorkerCoreTest, ReleasingASequenceEndsTheStepItIsIn) {
  Open(1), Open(2);
  Begin(1, {{SequenceId(1), 0, 1, {}}, {SequenceId(2), 0, 1, {}}});
  Query(1, 0, 128);
  SendMessage(FrameType::kReleaseSequence, proto::ReleaseSequence{SequenceId(1), 0, {}});
  EXPECT_THAT(KeyValue(1, 0, 96), IsEmpty());
  EXPECT_TRUE(Prepares(Begin(2, {{SequenceId(2), 0, 1, {}}}))) << "the other goes on";
  RunStep(2, 1);
}

TEST_F(AttentionWorkerCoreTest, ReopeningASequenceEndsTheStepItIsIn) {
  Open(1);
  Begin(1, {{SequenceId(1), 0, 100, {}}});
  Query(1, 0, 6400);
  Open(1);
  EXPECT_THAT(KeyValue(1, 0, 4800), IsEmpty()) << "its blocks are gone";
  EXPECT_EQ(core_.status().blocks_in_use, 0u);
  EXPECT_TRUE(Prepares(Begin(2, {{SequenceId(1), 0, 1, {}}})));
  RunStep(2, 1);
}

// As a compute worker or a scheduler would speak that has not heard that the sequence was opened again.
TEST_F(AttentionWorkerCoreTest, WhatSpeaksOfAFormerGenerationIsRefused) {
  const KvGeneration former = Sent<proto::SequenceOpened>(Open(1), FrameType::kSequenceOpened).generation;
  Begin(1, {{SequenceId(1), 0, 10, {}}});
  RunStep(1, 10);
  const KvGeneration current = Sent<proto::SequenceOpened>(Open(1), FrameType::kSequenceOpened).generation;
  EXPECT_NE(former, current);

  const auto refused = Refused(Begin(2, {{.sequence = SequenceId(1), .q_len = 10, .generation = former}}));
  EXPECT_THAT(refused.damaged, ElementsAre(SequenceId(1)));
  EXPECT_EQ(State(1).q_len, 0) << "nothing was written";
  ASSERT_TRUE(Prepares(Begin(3, {{.sequence = SequenceId(1), .q_len = 10, .generation = current}})));
  RunStep(3, 10);

  SendMessage(FrameType::kReleaseSequence, proto::ReleaseSequence{SequenceId(1), 10, {}, former});
  EXPECT_EQ(core_.status().sequences, 1u);
  const proto::ForkSequence fork{SequenceId(1), SequenceId(2), 10, former};
  EXPECT_THAT(
      Sent<proto::SequenceOpened>(SendMessage(FrameType::kForkSequence, fork), FrameType::kSequenceOpened).resumable,
      IsEmpty());
  EXPECT_EQ(core_.status().sequences, 1u);
  SendMessage(FrameType::kReleaseSequence, proto::ReleaseSequence{SequenceId(1), 10, {}, current});
  EXPECT_EQ(core_.status().sequences, 0u);
}

TEST_F(AttentionWorkerCoreTest, AMoveOfAFormerGenerationIsRefused) {
  const KvGeneration former = Sent<proto::SequenceOpened>(Open(1), FrameType::kSequenceOpened).generation;
  Open(1);
  Begin(1, {{SequenceId(1), 0, 10, {}}});
  RunStep(1, 10);
  const proto::MoveSequence order{.sequence = SequenceId(1), .end = 10, .step = StepId(5), .generation = former};
  const auto moved =
      Sent<proto::SequenceMoved>(SendMessage(FrameType::kMoveSequence, order), FrameType::kSequenceMoved);
  EXPECT_FALSE(moved.moved);
}

TEST_F(AttentionWorkerCoreTest, ForkingOverASequenceEndsTheStepItIsIn) {
  Open(1), Open(2);
  Begin(1, {{SequenceId(1), 0, 10, {}}});
  RunStep(1, 10);
  Begin(2, {{SequenceId(2), 0, 1, {}}});
  Query(2, 0, 64);
  SendMessage(FrameType::kForkSequence, proto::ForkSequence{SequenceId(1), SequenceId(2), 10});
  EXPECT_THAT(KeyValue(2, 0, 48), IsEmpty());
  EXPECT_TRUE(Prepares(Begin(3, {{SequenceId(2), 10, 1, {}}})));
}

TEST_F(AttentionWorkerCoreTest, ANewerStepOfAnotherMicroBatchTakesTheSequenceOver) {
  Open(1);
  Begin(5, {{SequenceId(1), 0, 100, {}}}, 0);
  Query(5, 0, 6400, 0);
  ASSERT_TRUE(Prepares(Begin(6, {{SequenceId(1), 0, 1, {}}}, 1)));
  EXPECT_THAT(KeyValue(5, 0, 4800, 0), IsEmpty()) << "its blocks are another step's now";
  EXPECT_THAT(Begin(5, {{SequenceId(1), 0, 100, {}}}, 0), IsEmpty());
  RunStep(6, 1, 1);
}

TEST_F(AttentionWorkerCoreTest, AnOlderStepOfAnotherMicroBatchIsRefused) {
  Open(1);
  ASSERT_TRUE(Prepares(Begin(6, {{SequenceId(1), 0, 1, {}}}, 1)));
  EXPECT_THAT(Refused(Begin(5, {{SequenceId(1), 0, 100, {}}}, 0)).reason,
              HasSubstr("sequence 1 is in step 6 of micro-batch 1"));
  RunStep(6, 1, 1);
}

TEST_F(AttentionWorkerCoreTest, AForkIsAnsweredAndItsFirstStepCopiesBeforeAnythingElse) {
  Open(1);
  Begin(1, {{SequenceId(1), 0, 70, {}}});
  RunStep(1, 70);
  const auto forked = Sent<proto::SequenceOpened>(
      SendMessage(FrameType::kForkSequence, proto::ForkSequence{SequenceId(1), SequenceId(2), 70}),
      FrameType::kSequenceOpened);
  EXPECT_EQ(forked.sequence, SequenceId(2));
  EXPECT_THAT(forked.resumable, ElementsAre(1));
  const auto begun = Begin(2, {{SequenceId(1), 70, 1, {}}, {SequenceId(2), 70, 1, {}}});
  ASSERT_THAT(begun, SizeIs(2));
  EXPECT_THAT(std::get<CopyBlocks>(begun[0]).copies, SizeIs(5)) << "the open block: 2 ops x 2 heads and 1 x 1";
  EXPECT_TRUE(Prepares(begun));
  EXPECT_THAT(Sent<proto::SequenceOpened>(
                  SendMessage(FrameType::kForkSequence, proto::ForkSequence{SequenceId(9), SequenceId(3), 0}),
                  FrameType::kSequenceOpened)
                  .resumable,
              IsEmpty());
}

TEST_F(AttentionWorkerCoreTest, ProbesPinAndReopenedPromptsHit) {
  Open(1);
  Begin(1, {{SequenceId(1), 0, 128, {}}});
  SendMessage(FrameType::kReleaseSequence, proto::ReleaseSequence{SequenceId(1), 128, Hashes(5, 2)});
  const auto probed = Sent<proto::PrefixProbed>(
      SendMessage(FrameType::kPrefixProbe, proto::PrefixProbe{12, WholeShards(MixedTable()), Hashes(5, 2)}),
      FrameType::kPrefixProbed);
  EXPECT_EQ(probed.pin_id, 12u);
  EXPECT_THAT(probed.resumable, ElementsAre(2, 1, 0));
  EXPECT_EQ(core_.status().blocks_in_use, 10u);
  SendMessage(FrameType::kUnpin, proto::Unpin{12});
  EXPECT_EQ(core_.status().blocks_in_use, 0u);
  EXPECT_THAT(Sent<proto::SequenceOpened>(Open(2, WholeShards(MixedTable()), Hashes(5, 2)), FrameType::kSequenceOpened)
                  .resumable,
              ElementsAre(2, 1, 0));
  EXPECT_TRUE(Prepares(Begin(2, {{SequenceId(2), 128, 1, {}}})));
  RunStep(2, 1);
}

TEST_F(AttentionWorkerCoreTest, PlacementsByRequestHeadsAndTokensMixInOneStep) {
  Open(1);                        // everything
  Open(2, {ShardOf(0, {1, 2})});  // one head of group 0
  Open(3, {ShardOf(0, {0, 2}, {64, 128}),
           ShardOf(1, {0, 1}, {0, 64})});                      // tokens 64..127, and the beginning of the window
  Open(4, {ShardOf(0, {0, 1}, {0, 64}), ShardOf(0, {1, 2})});  // one head in part, one whole
  ASSERT_TRUE(Prepares(Begin(
      1,
      {{SequenceId(1), 0, 2, {}}, {SequenceId(2), 0, 2, {}}, {SequenceId(3), 0, 100, {}}, {SequenceId(4), 0, 2, {}}})));
  const proto::StepLayout& full = core_.LayoutOf(MicroBatchId(0), LayerGroup(0));
  ASSERT_THAT(full.items, SizeIs(5));
  EXPECT_EQ(full.items[1].entry, 1);
  EXPECT_EQ(full.items[1].query_heads, 2);
  EXPECT_EQ(full.items[2].rows.q_first, 64) << "the tokens before see nothing here";
  EXPECT_EQ(full.items[2].rows.q_count, 36);
  EXPECT_EQ(full.items[2].rows.kv_count, 36);
  EXPECT_EQ(full.items[4].shard, 1);
  EXPECT_EQ(full.query_bytes, 16 * (2 * 4 + 2 * 2 + 36 * 4 + 2 * 2 + 2 * 2));
  EXPECT_EQ(full.key_value_bytes, 24 * (2 * 2 + 2 * 1 + 36 * 2 + 2 * 1 + 2 * 1));
  const proto::StepLayout& windowed = core_.LayoutOf(MicroBatchId(0), LayerGroup(1));
  ASSERT_THAT(windowed.items, SizeIs(2));
  EXPECT_EQ(windowed.items[1].rows.kv_count, 64);
  EXPECT_EQ(windowed.items[1].rows.q_count, 100);
  EXPECT_EQ(core_.ShardOf(MicroBatchId(0), windowed.items[1]).shard.group, LayerGroup(1));
  for (int op = 0; op < 3; ++op) {
    const proto::StepLayout& layout = op == 1 ? windowed : full;
    EXPECT_THAT(Query(1, op, static_cast<size_t>(layout.query_bytes)), SizeIs(1));
    EXPECT_THAT(KeyValue(1, op, static_cast<size_t>(layout.key_value_bytes)), SizeIs(1));
  }
  EXPECT_EQ(Dropped(), 0u);
}

TEST_F(AttentionWorkerCoreTest, SkipsTheOpsInWhichItHasNoPart) {
  Open(1, {ShardOf(1, {0, 1})});
  Begin(1, {{SequenceId(1), 0, 1, {}}});
  EXPECT_THAT(Query(1, 1, 32), SizeIs(1)) << "op 0 concerns another worker";
  EXPECT_THAT(KeyValue(1, 1, 24), SizeIs(1));
  EXPECT_THAT(Query(1, 2, 64), IsEmpty());
}

TEST_F(AttentionWorkerCoreTest, AStepThatConcernsNoneOfItsShardsIsPreparedAndExpectsNothing) {
  Open(1, {ShardOf(0, {0, 2}, {640, proto::kOpenEnd})});
  EXPECT_TRUE(Prepares(Begin(1, {{SequenceId(1), 0, 5, {}}})));
  EXPECT_THAT(Query(1, 0, 0), IsEmpty());
  EXPECT_TRUE(Prepares(Begin(2, {{SequenceId(1), 5, 1, {}}})));
  EXPECT_EQ(core_.status().blocks_in_use, 0u);
}

}  // namespace
}  // namespace dovetail::attention::testing
