#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "proto/drawn_token.h"
#include "scheduler/core/limits.h"
#include "tests/scheduler/core_parts.h"

// What a compute worker is told about a sequence in a step, without a scheduler.

namespace dovetail::scheduler {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class StepWriterTest : public ::testing::Test {
 protected:
  StepWriterTest() {
    parts_.AddAttentionWorker(0, 100000);
    parts_.writer.Begin(WorkerId(7));
  }

  proto::StepEntry Write(Sequence& sequence, int tokens, StepWriter::Chunk chunk) {
    proto::StepEntry entry;
    sequence.planned = tokens;
    parts_.writer.Write(sequence, chunk, entry, planned_);
    return entry;
  }

  CoreParts parts_;
  PlannedEntry planned_;
};

TEST_F(StepWriterTest, APieceOfAPromptHasItsTokensAndDrawsNothing) {
  Sequence& sequence = parts_.AddReady(100);
  const proto::StepEntry entry = Write(sequence, 40, {.ctx_len = 10, .named_until = 10});
  EXPECT_EQ(entry.ctx_len, 10);
  const auto prompt = sequence.params().prompt.begin();
  EXPECT_THAT(entry.tokens, ElementsAreArray(prompt + 10, prompt + 50));
  EXPECT_FALSE(entry.sample);
  EXPECT_EQ(entry.prompt_tokens, 40);
  EXPECT_EQ(planned_.q_len, 40);
  EXPECT_FALSE(planned_.may_follow);
  EXPECT_EQ(sequence.in_flight, 1);
  EXPECT_EQ(sequence.flying, 40);
  EXPECT_EQ(sequence.planned, 0);
  EXPECT_EQ(sequence.request->tenant->served, 40u);
  EXPECT_THAT(sequence.compute_workers, ElementsAre(WorkerId(7)));
}

TEST_F(StepWriterTest, TheLastPieceDrawsAndNamesTheBlocksBefore) {
  Sequence& sequence = parts_.AddReady(200);
  const proto::StepEntry entry = Write(sequence, 50, {.ctx_len = 150, .named_until = 150});
  EXPECT_TRUE(entry.sample);
  EXPECT_TRUE(planned_.may_follow);
  EXPECT_THAT(entry.block_hashes, SizeIs(2));
}

TEST_F(StepWriterTest, AStepAheadHasATokenThatIsStillBeingDrawn) {
  Sequence& sequence = parts_.AddReady(10);
  Write(sequence, 10, {.ctx_len = 0, .named_until = 0});
  const proto::StepEntry ahead = Write(sequence, 1, {.ctx_len = 10, .named_until = 10, .ahead = true});
  EXPECT_THAT(ahead.tokens, ElementsAre(proto::kDrawnBefore));
  EXPECT_TRUE(ahead.sample);
  EXPECT_EQ(sequence.in_flight, 2);
}

TEST_F(StepWriterTest, HistoryIsGivenOnceToEachWorker) {
  GenerationRequest request = Ask(10, 10);
  request.sampling.repetition_penalty = 1.5F;
  Sequence& sequence = parts_.AddRequest(std::move(request));
  parts_.MakeReady(sequence);
  const proto::StepEntry first = Write(sequence, 1, {.ctx_len = 9, .named_until = 9});
  EXPECT_THAT(first.history, SizeIs(9));
  EXPECT_FALSE(planned_.may_follow) << "the next step needs what this one draws";
  sequence.output.Record(0, 5);
  EXPECT_THAT(Write(sequence, 1, {.ctx_len = 10, .named_until = 10}).history, IsEmpty());
  parts_.writer.Begin(WorkerId(8));
  EXPECT_THAT(Write(sequence, 1, {.ctx_len = 10, .named_until = 10}).history, SizeIs(10));
}

TEST_F(StepWriterTest, AStepGivesNoMoreThanItsPartUnlessToOneAlone) {
  GenerationRequest request = Ask(10, 10);
  request.sampling.repetition_penalty = 1.5F;
  request.prompt.assign(kMaxBytesGiven / sizeof(TokenId) + 1, 1);
  Sequence& large = parts_.AddRequest(request);
  Sequence& other = parts_.AddRequest(request);
  EXPECT_TRUE(parts_.writer.MayGive(large));
  EXPECT_FALSE(parts_.writer.MayGive(other)) << "in a step to come";
  parts_.writer.Begin(WorkerId(7));
  EXPECT_TRUE(parts_.writer.MayGive(other));
}

TEST_F(StepWriterTest, PromptOutputsAreAskedForUntilTheyWereDelivered) {
  GenerationRequest request = Ask(100, 10);
  request.prompt_logprobs = 2;
  request.logits_last = 30;
  Sequence& sequence = parts_.AddRequest(std::move(request));
  parts_.MakeReady(sequence);
  const proto::StepEntry piece = Write(sequence, 80, {.ctx_len = 0, .named_until = 0});
  EXPECT_EQ(piece.prompt_logprobs, 2);
  EXPECT_EQ(piece.next_prompt_token, sequence.params().prompt[80]);
  EXPECT_EQ(piece.logits_rows, 10);
  sequence.request->prompt_logprobs_next = 100;
  sequence.request->prompt_logits_done = true;
  const proto::StepEntry again = Write(sequence, 80, {.ctx_len = 0, .named_until = 0});
  EXPECT_LT(again.prompt_logprobs, 0);
  EXPECT_EQ(again.logits_rows, 0);
}

}  // namespace
}  // namespace dovetail::scheduler
