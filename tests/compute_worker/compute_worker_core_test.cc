#include "compute_worker/core/compute_worker_core.h"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/drawn_token.h"
#include "tests/compute_worker/core_fixture.h"

namespace dovetail::compute::testing {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST_F(ComputeWorkerCoreTest, APlanThatComesTwiceRunsOnceAndDisturbsNobody) {
  RunToAttention(5, {Entry(1, On(0))});
  EXPECT_THAT(Plan(5, {Entry(1, On(0))}), IsEmpty()) << "its step is running";
  EXPECT_THAT(Plan(4, {Entry(1, On(0))}), IsEmpty()) << "later than the one after it";
  EXPECT_EQ(Dropped(), 2u);
  EXPECT_THAT(Partial(5, 0, 0), ElementsAre("dense 3"));
  Refuse(5, 0, true);
  EXPECT_THAT(Done(), ElementsAre(HasSubstr("failed")));
  EXPECT_THAT(Plan(5, {Entry(1, On(0))}), IsEmpty()) << "when it has ended";
  EXPECT_THAT(Plan(6, {Entry(1, On(0))}), ElementsAre("begin 10 of 1 sequences", "prepare", "dense 0"));
}

TEST_F(ComputeWorkerCoreTest, RunsAStepThroughTheLayersWithQueriesBeforeKeysAndValues) {
  EXPECT_THAT(Plan(1, {Entry(1, On(0))}), ElementsAre("begin 10 of 1 sequences", "prepare", "dense 0"));
  EXPECT_THAT(Done(), ElementsAre("dense 1"));
  EXPECT_THAT(Done(), ElementsAre("q 0", "dense 2")) << "q leaves while k and v are still being computed";
  EXPECT_THAT(Done(), ElementsAre("kv 0"));
  EXPECT_TRUE(core_.running(MicroBatchId(0)));
  EXPECT_THAT(Partial(1, 0, 0), ElementsAre("dense 3"));
  EXPECT_THAT(Done(), ElementsAre("dense 4"));
  EXPECT_THAT(Done(), ElementsAre("q 1", "dense 5"));
  EXPECT_THAT(Done(), ElementsAre("kv 1"));
  EXPECT_THAT(Partial(1, 1, 0), ElementsAre("dense 6"));
  EXPECT_THAT(Done(), ElementsAre("sample"));
  EXPECT_THAT(Sampled(1), ElementsAre("finish"));
  EXPECT_TRUE(core_.idle());
  EXPECT_EQ(finished_.step, StepId(1));
  EXPECT_EQ(core_.counters().steps, 1u);
  EXPECT_EQ(Dropped(), 0u);
}

TEST_F(ComputeWorkerCoreTest, TellsEachWorkerOfItsOwnSequencesInTheOrderOfThePlan) {
  std::vector<Action> actions;
  proto::StepPlan plan{StepId(1),
                       MicroBatchId(0),
                       {Entry(5, On(1)), Entry(6, On(0), 3, 64), Entry(7, {ShardOf(0, 1), ShardOf(1, 0)}, 2)}};
  plan.entries[1].block_hashes = {{1, 2}};
  core_.Handle(PlanArrived{plan}, actions);
  const auto& first = std::get<SendStepBegin>(actions[0]);
  EXPECT_EQ(first.to, NodeOf(1));
  EXPECT_EQ(first.step, StepId(1));
  EXPECT_EQ(first.epoch, kEpoch);
  ASSERT_EQ(first.message.entries.size(), 2u);
  EXPECT_EQ(first.message.entries[0], (proto::StepBeginEntry{SequenceId(5), 0, 1, {}}));
  EXPECT_EQ(first.message.entries[1], (proto::StepBeginEntry{SequenceId(7), 0, 2, {}}));
  const auto& second = std::get<SendStepBegin>(actions[1]);
  EXPECT_EQ(second.to, NodeOf(0));
  EXPECT_EQ(second.message.entries[0], (proto::StepBeginEntry{SequenceId(6), 64, 3, {{1, 2}}}));
}

TEST_F(ComputeWorkerCoreTest, WaitsForEveryPartialInWhateverOrderTheyCome) {
  for (std::vector<int> order : {std::vector<int>{0, 1, 2}, {2, 1, 0}, {1, 2, 0}}) {
    const uint64_t step = ++step_;
    RunToAttention(step, {Entry(1, On(0)), Entry(2, On(1)), Entry(3, On(2))});
    EXPECT_THAT(Partial(step, 0, order[0]), IsEmpty());
    EXPECT_THAT(Partial(step, 0, order[1]), IsEmpty());
    EXPECT_THAT(Partial(step, 0, order[2]), ElementsAre("dense 3"));
    Done(), Done(), Done();
    for (int i = 0; i < 2; ++i) EXPECT_THAT(Partial(step, 1, order[i]), IsEmpty());
    EXPECT_THAT(Partial(step, 1, order[2]), ElementsAre("dense 6"));
    EXPECT_THAT(Done(), ElementsAre("sample"));
    Sampled(step);
  }
  EXPECT_EQ(Dropped(), 0u);
}

TEST_F(ComputeWorkerCoreTest, WaitsOnlyForWorkersThatHaveAPartInTheOp) {
  RunToAttention(1, {Entry(1, {ShardOf(0, 0), ShardOf(1, 1)})});
  EXPECT_THAT(Partial(1, 0, 0), ElementsAre("dense 3")) << "worker 1 holds only the windowed group";
  Done(), Done(), Done();
  EXPECT_THAT(Partial(1, 1, 1), ElementsAre("dense 6"));
}

TEST_F(ComputeWorkerCoreTest, AShardBeyondTheTokensOfTheStepIsNotWaitedFor) {
  RunToAttention(
      1, {Entry(1, {ShardOf(0, 0, {0, 2}, {0, 64}), ShardOf(0, 2, {0, 2}, {64, proto::kOpenEnd}), ShardOf(1, 0)}, 10)});
  EXPECT_THAT(Partial(1, 0, 0), ElementsAre("dense 3"));
}

TEST_F(ComputeWorkerCoreTest, ThePartialsOfAnOpAreKeptUntilTheNextOp) {
  RunToAttention(1, {Entry(1, On(0)), Entry(2, On(1))});
  Partial(1, 0, 1);
  EXPECT_EQ(core_.PartsOf(MicroBatchId(0))[1].partial.size(), 4u * 4 * 2) << "one row, 4 heads of 4 bf16 values";
  EXPECT_TRUE(core_.PartsOf(MicroBatchId(0))[0].partial.empty());
}

TEST_F(ComputeWorkerCoreTest, DropsAndCountsPartialsThatAreNotAwaited) {
  uint64_t drops = 0;
  const auto expect_dropped = [&](const std::vector<std::string>& lines, const char* what) {
    EXPECT_THAT(lines, IsEmpty()) << what;
    EXPECT_EQ(Dropped(), ++drops) << what;
  };
  const auto partial = [&](NodeId from, Epoch epoch, uint64_t step, int micro_batch, int op, size_t bytes) {
    return Feed(PartialArrived{from, epoch, StepId(step), MicroBatchId(static_cast<uint16_t>(micro_batch)), op,
                               std::span(bytes_).first(bytes)});
  };
  expect_dropped(partial(NodeOf(0), kEpoch, 1, 0, 0, 32), "no step runs");
  RunToAttention(1, {Entry(1, On(0)), Entry(2, On(1))});
  expect_dropped(partial(NodeOf(0), kEpoch, 2, 0, 0, 32), "another step");
  expect_dropped(partial(NodeOf(0), kEpoch, 1, 1, 0, 32), "another micro-batch");
  expect_dropped(partial(NodeOf(0), kEpoch, 1, 9, 0, 32), "a micro-batch that there is not");
  expect_dropped(partial(NodeOf(0), kEpoch, 1, 0, 1, 32), "a later op");
  expect_dropped(partial(NodeOf(0), kEpoch, 1, 0, 77, 32), "an op that there is not");
  expect_dropped(partial(NodeOf(0), Epoch(2), 1, 0, 0, 32), "another incarnation");
  expect_dropped(partial(NodeOf(2), kEpoch, 1, 0, 0, 32), "a worker without a part");
  expect_dropped(partial(NodeOf(0), kEpoch, 1, 0, 0, 31), "another size");
  EXPECT_THAT(Partial(1, 0, 0), IsEmpty());
  expect_dropped(Partial(1, 0, 0), "the same again");
  EXPECT_THAT(Partial(1, 0, 1), ElementsAre("dense 3"));
  expect_dropped(Partial(1, 0, 1), "late: the op is done");
  Done(), Done(), Done(), Partial(1, 1, 0), Partial(1, 1, 1), Done();
  expect_dropped(Partial(1, 1, 0), "while sampling");
  EXPECT_THAT(Sampled(1), ElementsAre("finish"));
  expect_dropped(Partial(1, 1, 0), "after the step");
}

// ---- micro-batches ----

TEST_F(ComputeWorkerCoreTest, WhileOneMicroBatchWaitsForAttentionAnotherRunsItsDensePieces) {
  RunToAttention(1, {Entry(1, On(0))}, 0);
  EXPECT_THAT(Plan(2, {Entry(2, On(0))}, 1), ElementsAre("begin 10 of 1 sequences", "prepare", "dense 0"));
  Done(1);
  EXPECT_THAT(Partial(1, 0, 0, 0), ElementsAre("dense 3")) << "micro-batch 1 is inside a dense piece";
  EXPECT_THAT(Done(1), ElementsAre("q 0", "dense 2"));
  EXPECT_THAT(Done(0), ElementsAre("dense 4"));
  EXPECT_THAT(Done(1), ElementsAre("kv 0"));
  EXPECT_FALSE(core_.idle());
}

// Any order of what may come next gives each of 1 to 3 micro-batches the same actions as alone.
TEST_F(ComputeWorkerCoreTest, MicroBatchesNeverMixHoweverTheirEventsInterleave) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 random(seed);
  const std::vector<std::string> alone = {"begin 10 of 1 sequences",
                                          "begin 11 of 1 sequences",
                                          "prepare",
                                          "dense 0",
                                          "dense 1",
                                          "q 0",
                                          "dense 2",
                                          "kv 0",
                                          "dense 3",
                                          "dense 4",
                                          "q 1",
                                          "dense 5",
                                          "kv 1",
                                          "dense 6",
                                          "sample",
                                          "finish"};
  uint64_t step = 0;
  for (int round = 0; round < 200; ++round) {
    const int count = 1 + static_cast<int>(random() % 3);
    std::vector<std::vector<std::string>> seen(static_cast<size_t>(count));
    std::vector<std::vector<int>> awaited(static_cast<size_t>(count));  // workers still to answer
    std::vector<uint64_t> steps(static_cast<size_t>(count));
    std::vector<int> op(static_cast<size_t>(count), 0);
    const auto note = [&](int m, const std::vector<std::string>& lines) {
      for (const std::string& line : lines) {
        seen[m].push_back(line);
        if (line.starts_with("kv ")) awaited[m] = {0, 1}, op[m] = line.back() - '0';
      }
    };
    for (int done = 0; done < count;) {
      const int m = static_cast<int>(random() % static_cast<uint64_t>(count));
      if (!seen[m].empty() && seen[m].back() == "finish") continue;
      if (seen[m].empty()) {
        steps[m] = ++step;
        note(m, Plan(step,
                     {Entry(static_cast<uint64_t>(m + 1), {ShardOf(0, 0, {0, 1}), ShardOf(0, 1, {1, 2}),
                                                           ShardOf(1, 1, {0, 1}), ShardOf(1, 0, {1, 2})})},
                     m));
      } else if (!awaited[m].empty()) {
        const size_t at = random() % awaited[m].size();
        const int worker = awaited[m][at];
        awaited[m].erase(awaited[m].begin() + static_cast<std::ptrdiff_t>(at));
        note(m, Partial(steps[m], op[m], worker, m));
        if (random() % 3 == 0) Partial(steps[m], op[m], worker, m);  // twice
      } else if (seen[m].back() == "sample") {
        note(m, Sampled(steps[m], m));
        ++done;
      } else {
        note(m, Done(m));
      }
    }
    for (const auto& lines : seen) ASSERT_EQ(lines, alone);
    ASSERT_TRUE(core_.idle());
  }
}

// ---- what cannot run ----

TEST_F(ComputeWorkerCoreTest, APlanThatCannotRunFailsAtOnceAndSaysWhy) {
  proto::StepStatus expected = proto::StepStatus::kWorkerFailed;
  const auto failure = [&](std::vector<proto::StepEntry> entries, int micro_batch = 0) {
    const auto lines = Plan(++step_, std::move(entries), micro_batch);
    EXPECT_EQ(lines.size(), 1u);
    EXPECT_EQ(finished_.status, expected);
    EXPECT_EQ(finished_.step, StepId(step_));
    return lines.empty() ? std::string() : lines[0];
  };
  EXPECT_THAT(failure({Entry(1, On(0))}, 3), HasSubstr("micro-batch 3 is busy or not one of this worker's 3"));
  EXPECT_THAT(failure({Entry(1, On(0)), Entry(1, On(0))}), HasSubstr("sequence 1 is in the step twice"));
  EXPECT_THAT(failure({Entry(1, {ShardOf(0, 0)})}),
              HasSubstr("group 1 KV head 0: positions from 0 are placed nowhere"));
  expected = proto::StepStatus::kWorkerUnreachable;
  EXPECT_THAT(failure({Entry(1, On(5))}), HasSubstr("attention worker 5 of epoch 1 is not connected"));
  EXPECT_EQ(finished_.failed_worker, WorkerId(5)) << "which may be lost already";
  expected = proto::StepStatus::kWorkerFailed;
  EXPECT_THAT(failure({Entry(1, On(0), 65)}), HasSubstr("65 tokens; this worker takes 1..64"));
  EXPECT_THAT(failure({}), HasSubstr("0 tokens; this worker takes 1..64"));
  auto entry = Entry(1, On(0));
  entry.tokens[0] = 100;
  EXPECT_THAT(failure({entry}), HasSubstr("token 100 is outside the vocabulary of 100"));
  entry.tokens[0] = -1;
  EXPECT_THAT(failure({entry}), HasSubstr("token -1 is outside the vocabulary"));
  EXPECT_EQ(core_.counters().refused_plans, 8u);
  EXPECT_TRUE(core_.idle());
  EXPECT_THAT(Plan(++step_, {Entry(1, On(0))}), ElementsAre("begin 10 of 1 sequences", "prepare", "dense 0"))
      << "nothing is left behind";
}

TEST_F(ComputeWorkerCoreTest, ABusyMicroBatchOrSequenceIsNotTakenTwice) {
  Plan(1, {Entry(1, On(0))}, 0);
  EXPECT_THAT(Plan(2, {Entry(2, On(0))}, 0), ElementsAre(HasSubstr("micro-batch 0 is busy")));
  EXPECT_THAT(Plan(3, {Entry(1, On(0))}, 1),
              ElementsAre(HasSubstr("sequence 1 is in step 1 of micro-batch 0, which is still running")));
  EXPECT_THAT(Done(0), ElementsAre("dense 1")) << "the running one goes on";
}

TEST_F(ComputeWorkerCoreTest, AnotherEpochOfAWorkerIsAnotherWorker) {
  core_.AddAttentionWorker({WorkerId(0), Epoch(2), NodeId(40)});
  EXPECT_THAT(Plan(1, {Entry(1, On(0))}), ElementsAre(HasSubstr("attention worker 0 of epoch 1 is not connected")));
  auto placement = On(0);
  for (proto::Shard& shard : placement) shard.epoch = Epoch(2);
  EXPECT_THAT(Plan(2, {Entry(1, placement)}), ElementsAre("begin 40 of 1 sequences", "prepare", "dense 0"));
}

TEST_F(ComputeWorkerCoreTest, ARefusedStepEndsAtOnceWhileItWaits) {
  RunToAttention(1, {Entry(1, On(0)), Entry(2, On(1))});
  EXPECT_THAT(Refuse(1, 1, /*out_of_memory=*/true), ElementsAre("failed: attention worker 1: full"));
  EXPECT_EQ(finished_.status, proto::StepStatus::kOutOfMemory);
  EXPECT_EQ(finished_.failed_worker, WorkerId(1));
  EXPECT_TRUE(core_.idle());
  EXPECT_THAT(Partial(1, 0, 0), IsEmpty()) << "the other worker's answer comes too late";
  EXPECT_THAT(Refuse(1, 0, true), IsEmpty());
  EXPECT_EQ(Dropped(), 2u);
}

TEST_F(ComputeWorkerCoreTest, ARefusedStepEndsWhenTheDensePieceAtHandIsDone) {
  Plan(1, {Entry(1, On(0)), Entry(2, On(1))});
  EXPECT_THAT(Refuse(1, 0, false), IsEmpty()) << "its buffers are in use";
  EXPECT_TRUE(core_.running(MicroBatchId(0)));
  EXPECT_THAT(Refuse(1, 1, true), IsEmpty()) << "the first reason stands";
  EXPECT_THAT(Done(), ElementsAre("failed: attention worker 0: sequence 1 is not open here"));
  EXPECT_EQ(finished_.status, proto::StepStatus::kWorkerFailed);
  EXPECT_THAT(Plan(2, {Entry(1, On(0))}), ElementsAre("begin 10 of 1 sequences", "prepare", "dense 0"));
}

TEST_F(ComputeWorkerCoreTest, ARefusalOfAnotherStepOrWorkerIsDropped) {
  RunToAttention(5, {Entry(1, On(0))});
  EXPECT_THAT(Refuse(4, 0, true), IsEmpty());
  EXPECT_THAT(Refuse(5, 2, true), IsEmpty());
  EXPECT_THAT(Refuse(5, 0, true, 1), IsEmpty());
  EXPECT_THAT(Refuse(5, 0, true, 8), IsEmpty());
  EXPECT_THAT(Feed(StepRefused{NodeOf(0), Epoch(9), StepId(5), MicroBatchId(0), {true, ""}}), IsEmpty());
  EXPECT_EQ(Dropped(), 5u);
  EXPECT_THAT(Partial(5, 0, 0), ElementsAre("dense 3"));
}

TEST_F(ComputeWorkerCoreTest, WhatTheShellCannotDoEndsTheStep) {
  RunToAttention(1, {Entry(1, On(0))});
  EXPECT_THAT(Feed(StepFailed{MicroBatchId(0), ResourceExhausted("no memory for 64 rows")}),
              ElementsAre("failed: no memory for 64 rows"));
  EXPECT_EQ(finished_.status, proto::StepStatus::kOutOfMemory);
  EXPECT_THAT(Done(), IsEmpty()) << "what was still running";
  RunToAttention(2, {Entry(1, On(0))});
  EXPECT_THAT(Feed(StepFailed{MicroBatchId(0), Internal("a kernel refused")}), ElementsAre("failed: a kernel refused"));
  EXPECT_EQ(finished_.status, proto::StepStatus::kWorkerFailed);
}

// Steps whose tokens are still to be drawn.
class DrawnBeforeTest : public ComputeWorkerCoreTest {
 protected:
  // Step 1 of micro-batch 0, sequence 1: a token at position 0, the next to be drawn.
  void RunToSample() {
    proto::StepEntry entry = Entry(1, On(0));
    entry.sample = true;
    RunToAttention(1, {entry});
    Partial(1, 0, 0);
    Done(), Done(), Done();
    Partial(1, 1, 0);
    ASSERT_THAT(Done(), ElementsAre("sample"));
  }
  static proto::StepEntry Drawn(Position ctx_len) {
    proto::StepEntry entry = Entry(1, On(0), 1, ctx_len);
    entry.tokens = {proto::kDrawnBefore};
    return entry;
  }
  std::vector<std::string> PlanFollower(Position ctx_len = 1) { return Plan(2, {Drawn(ctx_len)}, 1); }
  std::vector<std::string> SampledToken(TokenId token) {
    proto::EntryResult drawn{.sequence = SequenceId(1), .position = 1, .token = token};
    return Feed(SampleDone{MicroBatchId(0), {.step = StepId(1), .entries = {drawn}}});
  }
  // Step 1 has drawn its token and step 2, in micro-batch 1, draws; step 3, which follows it, runs in micro-batch 0.
  void RunThirdAhead() {
    RunToSample();
    Feed(SampleBegun{MicroBatchId(0)});
    proto::StepEntry second = Drawn(1), third = Drawn(2);
    second.sample = true;
    Plan(2, {second}, 1);
    ASSERT_THAT(SampledToken(42), ElementsAre("finish"));
    Done(1), Done(1), Done(1), Partial(2, 0, 0, 1), Done(1), Done(1), Done(1), Partial(2, 1, 0, 1);
    ASSERT_THAT(Done(1), ElementsAre("sample"));
    Feed(SampleBegun{MicroBatchId(1)});
    ASSERT_THAT(Plan(3, {third}, 0), ElementsAre("begin 10 of 1 sequences", "prepare", "dense 0"));
    Done(), Done(), Done();
  }
};

TEST_F(DrawnBeforeTest, AStepWaitsUntilTheOneBeforeDrawsOnTheDevice) {
  RunToSample();
  EXPECT_THAT(PlanFollower(), IsEmpty());
  EXPECT_THAT(Feed(SampleBegun{MicroBatchId(0)}), ElementsAre("begin 10 of 1 sequences", "prepare", "dense 0"));
  EXPECT_EQ(core_.DrawnBy(MicroBatchId(1)), MicroBatchId(0));
  EXPECT_THAT(SampledToken(42), ElementsAre("finish"));
  EXPECT_TRUE(core_.running(MicroBatchId(1)));
}

TEST_F(DrawnBeforeTest, AStepWaitsForTheOneBeforeItWhateverHasBegunSince) {
  RunToSample();
  EXPECT_THAT(PlanFollower(), IsEmpty());
  EXPECT_THAT(Plan(3, {Entry(2, On(0))}, 2), ElementsAre("begin 10 of 1 sequences", "prepare", "dense 0"));
  EXPECT_THAT(Feed(SampleBegun{MicroBatchId(0)}), ElementsAre("begin 10 of 1 sequences", "prepare", "dense 0"));
  EXPECT_EQ(core_.DrawnBy(MicroBatchId(1)), MicroBatchId(0));
  EXPECT_TRUE(core_.CheckInvariants().ok());
}

TEST_F(DrawnBeforeTest, WhereTokensAreDrawnOnTheHostItTakesThemFromTheResult) {
  RunToSample();
  EXPECT_THAT(PlanFollower(), IsEmpty());
  EXPECT_THAT(SampledToken(42), ElementsAre("finish", "begin 10 of 1 sequences", "prepare", "dense 0"));
  EXPECT_EQ(core_.DrawnBy(MicroBatchId(1)), std::nullopt);
  EXPECT_THAT(core_.PlanOf(MicroBatchId(1)).entries[0].tokens, ElementsAre(42));
}

TEST_F(DrawnBeforeTest, AStepFailsWithTheOneBefore) {
  RunToSample();
  PlanFollower();
  EXPECT_THAT(Feed(StepFailed{MicroBatchId(0), absl::ResourceExhaustedError("no memory")}),
              ElementsAre("failed: no memory", "failed: no memory"));
  EXPECT_EQ(finished_.step, StepId(2));
  EXPECT_EQ(finished_.status, proto::StepStatus::kOutOfMemory);
  EXPECT_TRUE(core_.idle());
}

TEST_F(DrawnBeforeTest, AStepFailsAsTheOneBeforeThatWasRefused) {
  RunToSample();
  Feed(StepFailed{MicroBatchId(0), absl::ResourceExhaustedError("of an earlier step")});
  Plan(2, {Entry(2, On(5))}, 1);
  proto::StepEntry drawn = Drawn(1);
  drawn.sequence = SequenceId(2);
  EXPECT_THAT(Plan(3, {drawn}, 2), ElementsAre(HasSubstr("attention worker 5 of epoch 1 is not connected")));
  EXPECT_EQ(finished_.status, proto::StepStatus::kWorkerUnreachable);
  EXPECT_EQ(finished_.failed_worker, WorkerId(5));
}

TEST_F(DrawnBeforeTest, AStepUnderWayFailsWithTheOneBefore) {
  RunToSample();
  Feed(SampleBegun{MicroBatchId(0)});
  PlanFollower();
  EXPECT_THAT(Feed(StepFailed{MicroBatchId(0), absl::InternalError("the device is lost")}),
              ElementsAre("failed: the device is lost"));
  EXPECT_THAT(Done(1), ElementsAre("failed: the device is lost")) << "once its dense piece is done";
}

TEST_F(DrawnBeforeTest, AStepIsNotEndedByALaterOneWhereTheOneBeforeItRan) {
  RunThirdAhead();
  Refuse(3, 0, /*out_of_memory=*/true);
  EXPECT_THAT(Sampled(2, 1), Contains("finish")) << "nothing has happened to step 2";
}

TEST_F(DrawnBeforeTest, AStepThatFailsBeforeTheOneWhoseDrawsItTakesIsAnsweredForBehindIt) {
  RunThirdAhead();
  EXPECT_THAT(Refuse(3, 0, /*out_of_memory=*/true), IsEmpty()) << "step 2 still draws";
  EXPECT_FALSE(core_.running(MicroBatchId(0)));
  EXPECT_THAT(Sampled(2, 1), ElementsAre("finish", "failed: attention worker 0: full"));
  EXPECT_EQ(finished_.step, StepId(3));
  EXPECT_EQ(finished_.status, proto::StepStatus::kOutOfMemory);
}

TEST_F(DrawnBeforeTest, ATokenThatNobodyDrawsIsRefused) {
  RunToSample();
  EXPECT_THAT(Feed(SampleBegun{MicroBatchId(0)}), IsEmpty());
  EXPECT_THAT(PlanFollower(5), ElementsAre("failed: sequence 1: the step before draws no token at 5"));
  EXPECT_TRUE(core_.running(MicroBatchId(0)));
}

TEST_F(DrawnBeforeTest, APlanThatComesAgainWhileItsStepWaitsIsDropped) {
  RunToSample();
  PlanFollower();
  EXPECT_THAT(PlanFollower(), IsEmpty());
  EXPECT_EQ(Dropped(), 1u);
  EXPECT_THAT(SampledToken(42), ElementsAre("finish", "begin 10 of 1 sequences", "prepare", "dense 0"));
}

TEST_F(DrawnBeforeTest, APlanThatComesAgainWhenItsStepWasRefusedIsDropped) {
  RunToSample();
  Feed(StepFailed{MicroBatchId(0), absl::InternalError("a kernel refused")});
  EXPECT_THAT(PlanFollower(), ElementsAre("failed: a kernel refused"));
  EXPECT_THAT(PlanFollower(), IsEmpty());
}

TEST_F(DrawnBeforeTest, AStepThatIsWithdrawnWhileItWaitsEndsAtOnceAndNeverBegins) {
  RunToSample();
  PlanFollower();
  EXPECT_THAT(Feed(StepWithdrawn{StepId(2), MicroBatchId(1)}),
              ElementsAre("failed: the scheduler has withdrawn the step"));
  EXPECT_EQ(finished_.step, StepId(2));
  EXPECT_THAT(SampledToken(42), ElementsAre("finish"));
  EXPECT_TRUE(core_.idle());
}

TEST_F(DrawnBeforeTest, OneStepWaitsAtATime) {
  RunToSample();
  PlanFollower();
  EXPECT_THAT(Plan(3, {Drawn(2)}, 2), ElementsAre("failed: step 2 already waits for the tokens of another"));
}

TEST_F(ComputeWorkerCoreTest, ALostWorkerEndsTheStepsItHasAPartInAndNoOther) {
  RunToAttention(1, {Entry(1, On(0)), Entry(2, On(1))}, 0);
  RunToAttention(2, {Entry(3, On(2))}, 1);
  EXPECT_THAT(Feed(AttentionWorkerLost{WorkerId(1), Epoch(7)}), IsEmpty()) << "another incarnation";
  EXPECT_THAT(Feed(AttentionWorkerLost{WorkerId(1), kEpoch}), ElementsAre("failed: attention worker 1: lost"));
  EXPECT_EQ(finished_.status, proto::StepStatus::kWorkerUnreachable) << "nothing is wrong with its sequences";
  EXPECT_EQ(finished_.failed_worker, WorkerId(1));
  EXPECT_THAT(Partial(2, 0, 2, 1), ElementsAre("dense 3"));
  EXPECT_THAT(Plan(3, {Entry(2, On(1))}, 0), ElementsAre(HasSubstr("attention worker 1 of epoch 1 is not connected")));
}

}  // namespace
}  // namespace dovetail::compute::testing
