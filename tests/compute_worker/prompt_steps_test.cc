#include <memory>
#include <string>
#include <vector>

#include "tests/compute_worker/core_fixture.h"

namespace dovetail::compute::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Prompts: attended here, k and v handed over layer by layer.
class PromptsTest : public ComputeWorkerCoreTest {
 protected:
  explicit PromptsTest(bool hand_over_at_end = false, proto::PrefixExchange exchange = proto::PrefixExchange::kGather,
                       int64_t piece_bytes = kGatherPieceBytes)
      : exchange_(exchange) {
    StepProgram program;
    for (const Stage& stage : TwoLayers()) {
      program.push_back(stage);
      if (stage.kind == StageKind::kSendKeyValue) program.push_back({StageKind::kAttendPrompts, stage.index});
    }
    core_ptr_ = std::make_unique<ComputeWorkerCore>(TwoOps(), program,
                                                    ComputeWorkerOptions{.micro_batches = 3,
                                                                         .max_step_tokens = 512,
                                                                         .vocab_size = 100,
                                                                         .prompt_tokens = 16,
                                                                         .prompt_blocks = 100,
                                                                         .key_values_in_flight = 2,
                                                                         .gather_piece_bytes = piece_bytes,
                                                                         .hand_over_at_end = hand_over_at_end});
    for (int worker = 0; worker < 3; ++worker)
      core_ptr_->AddAttentionWorker({WorkerId(static_cast<uint32_t>(worker)), kEpoch, NodeOf(worker)});
  }
  std::vector<std::string> FeedPrompt(Event event) {
    std::vector<Action> actions;
    core_ptr_->Handle(std::move(event), actions);
    EXPECT_EQ(core_ptr_->CheckInvariants(), absl::OkStatus());
    std::vector<std::string> lines;
    for (const Action& action : actions) {
      if (const auto* begin = std::get_if<SendStepBegin>(&action)) begins_.push_back(begin->message);
      lines.push_back(std::visit([&](const auto& a) { return Line(a); }, action));
    }
    return lines;
  }
  std::vector<std::string> PlanPrompt(uint64_t step, std::vector<proto::StepEntry> entries) {
    for (proto::StepEntry& entry : entries) entry.exchange = exchange_;
    return FeedPrompt(PlanArrived{{StepId(step), MicroBatchId(0), std::move(entries)}});
  }
  std::vector<std::string> DoneHere() { return FeedPrompt(DenseDone{MicroBatchId(0)}); }
  std::vector<std::string> Answer(uint64_t step, int op, int worker, size_t bytes = 0) {
    return FeedPrompt(
        PartialArrived{NodeOf(worker), kEpoch, StepId(step), MicroBatchId(0), op, std::span(bytes_).first(bytes)});
  }
  std::vector<std::string> SampledHere(uint64_t step) {
    proto::StepResult result;
    result.step = StepId(step);
    return FeedPrompt(SampleDone{MicroBatchId(0), result});
  }
  const proto::PrefixExchange exchange_;
  std::unique_ptr<ComputeWorkerCore> core_ptr_;
  std::vector<proto::StepBegin> begins_;
};

TEST_F(PromptsTest, NobodyIsAskedAboutAFreshPromptAndTheStepEndsWhenItsKeysAreInPlace) {
  auto lines = PlanPrompt(1, {Entry(1, On(0), 100)});
  EXPECT_THAT(lines, ElementsAre("begin 10 of 1 sequences", "prepare", "dense 0"));
  EXPECT_EQ(begins_[0].entries[0].attend_end, 0);
  DoneHere();
  EXPECT_THAT(DoneHere(), ElementsAre("q 0", "dense 2")) << "to no worker: there are no query bytes";
  EXPECT_EQ(core_ptr_->PartsOf(MicroBatchId(0))[0].layouts[0].query_bytes, 0);
  EXPECT_THAT(DoneHere(), ElementsAre("kv 0", "prompts 0"));
  EXPECT_THAT(DoneHere(), ElementsAre("dense 3")) << "goes on at once";
  DoneHere(), DoneHere();
  EXPECT_THAT(DoneHere(), ElementsAre("kv 1", "prompts 1"));
  EXPECT_THAT(DoneHere(), IsEmpty()) << "two are on their way: the next must not overwrite the first";
  EXPECT_THAT(Answer(1, 1, 0), IsEmpty()) << "answers come in order";
  EXPECT_THAT(Answer(1, 0, 0), ElementsAre("dense 6"));
  EXPECT_THAT(DoneHere(), ElementsAre("sample"));
  EXPECT_THAT(SampledHere(1), IsEmpty()) << "another compute worker may run the next step";
  EXPECT_THAT(Answer(1, 1, 0), ElementsAre("finish"));
}

// Memory of k and v is used anew every two ops, whichever workers the ops between concern.
TEST_F(PromptsTest, KeysWaitForTheOpWhoseMemoryTheyTake) {
  proto::Placement placement = {ShardOf(0, 0), ShardOf(1, 1)};
  PlanPrompt(1, {Entry(1, placement, 100)});
  for (int i = 0; i < 7; ++i) DoneHere();
  EXPECT_THAT(DoneHere(), IsEmpty()) << "each owes one answer, and op 2 would write where op 0's k and v lie";
  EXPECT_THAT(Answer(1, 0, 0), ElementsAre("dense 6"));
}

class AskingTest : public PromptsTest {
 protected:
  AskingTest() : PromptsTest(false, proto::PrefixExchange::kAsk) {}
};

TEST_F(AskingTest, APrefixIsAskedAboutWhereItLives) {
  PlanPrompt(1, {Entry(1, On(0), 100, 128), Entry(2, On(1))});
  ASSERT_EQ(begins_.size(), 2u);
  EXPECT_EQ(begins_[0].entries[0].attend_end, 128);
  EXPECT_EQ(begins_[1].entries[0].attend_end, proto::kOpenEnd) << "one token is no prompt";
  const auto& item = core_ptr_->PartsOf(MicroBatchId(0))[0].layouts[0].items[0];
  EXPECT_EQ(item.rows.q_count, 100);
  EXPECT_EQ(item.attended_end(), 128);
  EXPECT_FALSE(item.finished());
  EXPECT_EQ(item.nodes, 100) << "128 tokens are one subtree";
}

// A prompt of 100 tokens after 128 others, and a decode: times are of both, so the result says how many tokens each
// has.
TEST_F(AskingTest, AStepSaysWhatWasComputedHereAndOnAttentionWorkers) {
  std::vector<std::string> lines = PlanPrompt(1, {Entry(1, On(0), 100, 128), Entry(2, On(1))});
  for (int op = 0; op < 2; ++op) {
    while (!lines.empty()) lines = DoneHere();
    for (const int worker : {0, 1}) {
      const proto::StepLayout& layout = core_ptr_->PartsOf(MicroBatchId(0))[worker].layouts[op];
      lines = Answer(1, op, worker, static_cast<size_t>(layout.partial_bytes));
    }
  }
  EXPECT_THAT(DoneHere(), ElementsAre("sample"));
  EXPECT_THAT(SampledHere(1), ElementsAre("finish"));
  EXPECT_EQ(finished_.work.tokens, 100);
  EXPECT_EQ(finished_.work.step_tokens, 101);
  // 4 heads of 2 x (8 + 4). Row r of op 1 sees the last 100 - (r + 1) of the tokens before.
  EXPECT_EQ(finished_.work.asked_flops, 96.0 * (128 * 100 + 99 * 50));
  EXPECT_EQ(finished_.work.here_flops, 96.0 * (2 * 101 * 50));
}

// Between GPUs an answer is there as soon as k and v were given: before the prompts of the op have been attended.
TEST_F(PromptsTest, DecodesAreAnsweredWhileThePromptsOfTheirStepAreAttended) {
  PlanPrompt(1, {Entry(1, On(0), 100), Entry(2, On(1)), Entry(3, On(2))});
  const auto answer = [&](int op, int worker) {
    const proto::StepLayout& layout = core_ptr_->PartsOf(MicroBatchId(0))[worker].layouts[op];
    return Answer(1, op, worker, static_cast<size_t>(layout.partial_bytes));
  };
  DoneHere(), DoneHere();
  ASSERT_THAT(DoneHere(), ElementsAre("kv 0", "prompts 0"));
  EXPECT_THAT(answer(0, 1), IsEmpty());
  EXPECT_THAT(answer(0, 2), IsEmpty()) << "the prompts are not attended yet";
  EXPECT_THAT(DoneHere(), ElementsAre("dense 3")) << "all answers have come";
  DoneHere(), DoneHere();
  ASSERT_THAT(DoneHere(), ElementsAre("kv 1", "prompts 1"));
  EXPECT_THAT(answer(1, 2), IsEmpty());
  EXPECT_EQ(core_ptr_->counters().dropped_frames, 0u);
  EXPECT_THAT(answer(1, 2), IsEmpty());
  EXPECT_EQ(core_ptr_->counters().dropped_frames, 1u) << "it came before";
  EXPECT_THAT(DoneHere(), IsEmpty()) << "one worker has not answered";
  EXPECT_THAT(Answer(1, 0, 0), IsEmpty()) << "k and v of the prompt, of the op before";
  EXPECT_THAT(answer(1, 1), ElementsAre("dense 6"));
}

// Devices of workers that exchange layers themselves: nothing is asked for or gathered.
class LinkedPromptsTest : public PromptsTest {
 protected:
  LinkedPromptsTest() { core_ptr_->SetLinked(NodeOf(0), true); }
  void FinishStep(uint64_t step, int worker) {
    for (int i = 0; i < 8; ++i) DoneHere();
    Answer(step, 0, worker), DoneHere(), SampledHere(step);
    ASSERT_THAT(Answer(step, 1, worker), ElementsAre("finish"));
  }
};

TEST_F(LinkedPromptsTest, AFreshPromptIsAttendedHereAndSoIsItsNextPart) {
  PlanPrompt(1, {Entry(1, On(0), 100)});
  EXPECT_EQ(begins_.back().entries[0].attend_end, 0);
  FinishStep(1, 0);
  PlanPrompt(2, {Entry(1, On(0), 60, 100)});
  EXPECT_EQ(begins_.back().entries[0].attend_end, 0);
  EXPECT_EQ(begins_.back().entries[0].gather_begin, proto::kOpenEnd);
  EXPECT_EQ(core_ptr_->counters().prompt_tokens_here, 160u);
}

TEST_F(LinkedPromptsTest, OneWhoseEarlierTokensAreElsewhereIsAttendedThere) {
  PlanPrompt(1, {Entry(1, On(0), 100, 128), Entry(2, On(0), 100, 70), Entry(3, On(1), 100, 130)});
  for (const proto::StepBeginEntry& entry : begins_[0].entries) {
    EXPECT_EQ(entry.attend_end, proto::kOpenEnd);
    EXPECT_EQ(entry.gather_begin, proto::kOpenEnd);
  }
  EXPECT_EQ(begins_[1].entries[0].gather_begin, 0) << "that worker is not linked";
  EXPECT_EQ(core_ptr_->counters().prompt_tokens_here, 100u);
  EXPECT_EQ(core_ptr_->scratch().Find(SequenceId(1)), nullptr);
}

// A decode in the same step counts in the tokens, not in the attention.
TEST_F(LinkedPromptsTest, AStepSaysWhatAttentionWorkersComputedOfPromptsThatAreNotAttendedHere) {
  PlanPrompt(1, {Entry(1, On(0), 100, 128), Entry(2, On(0))});
  for (int op = 0; op < 2; ++op) {
    DoneHere(), DoneHere();
    EXPECT_THAT(DoneHere(), ElementsAre(absl::StrCat("kv ", op)));
    const proto::StepLayout& layout = core_ptr_->PartsOf(MicroBatchId(0))[0].layouts[op];
    Answer(1, op, 0, static_cast<size_t>(layout.partial_bytes));
  }
  EXPECT_THAT(DoneHere(), ElementsAre("sample"));
  EXPECT_THAT(SampledHere(1), ElementsAre("finish"));
  EXPECT_EQ(finished_.work.tokens, 100);
  EXPECT_EQ(finished_.work.step_tokens, 101);
  EXPECT_EQ(finished_.work.here_flops, 0);
  // 4 heads of 2 x (8 + 4). Op 0 sees 129 .. 228 tokens; op 1 the last 100.
  EXPECT_EQ(finished_.work.asked_flops, 96.0 * ((129 + 228) * 50 + 100 * 100));
}

// 100 blocks are 25 segments of two ops and two heads.
TEST_F(LinkedPromptsTest, OneThatOutgrowsTheScratchGoesOnWhereItsEarlierPartsAre) {
  for (int part = 0; part < 3; ++part) {
    PlanPrompt(part + 1, {Entry(1, On(0), 512, 512 * part)});
    EXPECT_EQ(begins_.back().entries[0].attend_end, 0);
    FinishStep(part + 1, 0);
  }
  ASSERT_NE(core_ptr_->scratch().Find(SequenceId(1)), nullptr);
  PlanPrompt(4, {Entry(1, On(0), 512, 3 * 512)});
  EXPECT_EQ(begins_.back().entries[0].attend_end, proto::kOpenEnd);
  EXPECT_EQ(core_ptr_->scratch().Find(SequenceId(1)), nullptr) << "nor is it kept";
  EXPECT_EQ(core_ptr_->scratch().free_blocks(), 100u);
}

TEST_F(LinkedPromptsTest, AWorkerThatIsLinkedNoMoreIsAskedAsOthersAre) {
  core_ptr_->SetLinked(NodeOf(0), false);
  PlanPrompt(1, {Entry(1, On(0), 100, 130)});
  EXPECT_EQ(begins_[0].entries[0].gather_begin, 0);
}

TEST_F(LinkedPromptsTest, ASequenceThatIsDividedIsAttendedAsWithoutLinks) {
  for (int worker = 1; worker < 3; ++worker) core_ptr_->SetLinked(NodeOf(worker), true);
  PlanPrompt(1, {Entry(1, {ShardOf(0, 0), ShardOf(1, 1)}, 100, 130)});
  EXPECT_EQ(begins_[0].entries[0].gather_begin, 0);
}

TEST_F(PromptsTest, APrefixIsAttendedHereWhenItsKeysHaveCome) {
  PlanPrompt(1, {Entry(1, On(0), 100, 130)});
  EXPECT_EQ(begins_[0].entries[0].attend_end, 0);
  EXPECT_EQ(begins_[0].entries[0].gather_begin, 0);
  const proto::StepLayout& layout = core_ptr_->PartsOf(MicroBatchId(0))[0].layouts[0];
  EXPECT_EQ(layout.query_bytes, 0);
  EXPECT_EQ(layout.items[0].gather_count, 130);
  const auto bytes = static_cast<size_t>(layout.partial_bytes);
  ASSERT_EQ(layout.gather_bytes, layout.partial_bytes);
  DoneHere();
  EXPECT_THAT(DoneHere(), ElementsAre("q 0", "dense 2"));
  EXPECT_THAT(DoneHere(), ElementsAre("kv 0")) << "prompts wait for the answer";
  EXPECT_THAT(Answer(1, 0, 0, bytes), ElementsAre("prompts 0"));
  EXPECT_THAT(DoneHere(), ElementsAre("dense 3")) << "nothing else is due";
  DoneHere(), DoneHere();
  EXPECT_THAT(DoneHere(), ElementsAre("kv 1"));
  EXPECT_THAT(Answer(1, 1, 0, bytes), ElementsAre("prompts 1"));
  DoneHere(), DoneHere();
  EXPECT_THAT(SampledHere(1), ElementsAre("finish"));
  EXPECT_EQ(finished_.prefix.asked_bytes, 0);
  EXPECT_EQ(finished_.prefix.gathered_bytes, 2 * layout.gather_bytes) << "of two ops";
  EXPECT_EQ(finished_.work.tokens, 100);
  EXPECT_EQ(finished_.work.scratch_blocks, 100);
  EXPECT_EQ(finished_.work.asked_flops, 0);
  // 4 heads of 2 x (8 + 4). Op 0 sees 131 .. 230 tokens; op 1 the last 100, of tokens from 0 on.
  EXPECT_EQ(finished_.work.here_flops, 96.0 * ((131 + 230) * 50 + 100 * 100));
}

TEST_F(PromptsTest, OnlyWhatOthersComputedMeanwhileIsGathered) {
  PlanPrompt(1, {Entry(1, On(0), 100)});
  for (int i = 0; i < 8; ++i) DoneHere();
  Answer(1, 0, 0), DoneHere(), SampledHere(1);
  ASSERT_THAT(Answer(1, 1, 0), ElementsAre("finish"));
  PlanPrompt(2, {Entry(1, On(0), 60, 192)});
  EXPECT_EQ(begins_.back().entries[0].attend_end, 0);
  EXPECT_EQ(begins_.back().entries[0].gather_begin, 100);
}

TEST_F(PromptsTest, AWorkerThatIsLostBeforeItsKeysComeEndsTheStep) {
  PlanPrompt(1, {Entry(1, On(0), 100, 130)});
  DoneHere(), DoneHere(), DoneHere();
  EXPECT_THAT(FeedPrompt(AttentionWorkerLost{WorkerId(0), kEpoch}), ElementsAre("failed: attention worker 0: lost"));
  PlanPrompt(2, {Entry(1, On(1), 100, 130)});
  EXPECT_EQ(begins_.back().entries[0].gather_begin, 0) << "nothing of the failed step is kept";
}

// 64 tokens a piece: 2 KV heads of 8 + 4 elements of 2 bytes. 400 tokens are seven; op 1 sees the last 99 of them.
class PiecesTest : public PromptsTest {
 protected:
  PiecesTest() : PromptsTest(false, proto::PrefixExchange::kGather, 64 * 48) {
    PlanPrompt(1, {Entry(1, On(0), 100, 400)});
    DoneHere(), DoneHere();
  }
  std::vector<std::string> Piece(int piece, int op = 0, size_t tokens = 64, int worker = 0, uint64_t step = 1) {
    return FeedPrompt(EarlierRowsArrived{NodeOf(worker), kEpoch, StepId(step), MicroBatchId(0), op, piece,
                                         RankTensor(std::vector<std::byte>(tokens * 48))});
  }
  uint64_t DroppedHere() const { return core_ptr_->counters().dropped_frames; }
};

TEST_F(PiecesTest, EachIsPutAwayAsItComesAndThePromptIsAttendedBehindTheLast) {
  EXPECT_EQ(begins_[0].gather_piece_bytes, 64 * 48);
  EXPECT_THAT(DoneHere(), ElementsAre("kv 0", "ask 0 piece 0", "ask 0 piece 1", "ask 0 piece 2", "ask 0 piece 3"));
  EXPECT_THAT(Piece(0), ElementsAre("keep 0 piece 0", "ask 0 piece 4"));
  EXPECT_THAT(Piece(1), ElementsAre("keep 0 piece 1", "ask 0 piece 5"));
  EXPECT_THAT(Piece(2), ElementsAre("keep 0 piece 2", "ask 0 piece 6"));
  EXPECT_THAT(Piece(3), ElementsAre("keep 0 piece 3"));
  EXPECT_THAT(Piece(4), ElementsAre("keep 0 piece 4"));
  EXPECT_THAT(Piece(5), ElementsAre("keep 0 piece 5"));
  EXPECT_THAT(Piece(6, 0, 16), ElementsAre("keep 0 piece 6"));
  EXPECT_THAT(Answer(1, 0, 0), ElementsAre("prompts 0"));
  DoneHere(), DoneHere(), DoneHere();
  EXPECT_THAT(DoneHere(), ElementsAre("kv 1", "ask 1 piece 0", "ask 1 piece 1", "ask 1 piece 2"))
      << "from token 256 on";
  Piece(0, 1), Piece(1, 1);
  EXPECT_THAT(Answer(1, 1, 0), IsEmpty()) << "a device may still copy the last one";
  EXPECT_THAT(Piece(2, 1, 16), ElementsAre("keep 1 piece 2", "prompts 1"));
  EXPECT_EQ(DroppedHere(), 0u);
}

TEST_F(PiecesTest, WrongOnesAreDropped) {
  EXPECT_THAT(Piece(0), IsEmpty()) << "before it is asked for";
  DoneHere();
  EXPECT_THAT(Piece(1), IsEmpty()) << "out of order";
  EXPECT_THAT(Piece(0, 0, 63), IsEmpty()) << "short";
  EXPECT_THAT(Piece(0, 0, 65), IsEmpty()) << "long";
  EXPECT_THAT(Piece(0, 1), IsEmpty()) << "of another op";
  EXPECT_THAT(Piece(0, 0, 64, 1), IsEmpty()) << "from another worker";
  EXPECT_THAT(Piece(0, 0, 64, 0, 2), IsEmpty()) << "of another step";
  EXPECT_EQ(DroppedHere(), 7u);
  EXPECT_THAT(Piece(0), ElementsAre("keep 0 piece 0", "ask 0 piece 4"));
  EXPECT_THAT(Piece(0), IsEmpty()) << "it came before";
}

TEST_F(PiecesTest, AWorkerThatIsLostBetweenTwoEndsTheStepAndNothingIsKept) {
  DoneHere();
  Piece(0), Piece(1);
  EXPECT_THAT(FeedPrompt(AttentionWorkerLost{WorkerId(0), kEpoch}), ElementsAre("failed: attention worker 0: lost"));
  EXPECT_THAT(Piece(2), IsEmpty());
  PlanPrompt(2, {Entry(1, On(1), 100, 400)});
  EXPECT_EQ(begins_.back().entries[0].gather_begin, 0);
  DoneHere(), DoneHere(), DoneHere();
  EXPECT_THAT(Piece(0, 0, 64, 1, 2), ElementsAre("keep 0 piece 0", "ask 0 piece 4"));
}

TEST_F(PromptsTest, TheNextPartFindsTheFormerOneHere) {
  PlanPrompt(1, {Entry(1, On(0), 100)});
  FeedPrompt(AttentionWorkerLost{WorkerId(2), kEpoch});
  for (int i = 0; i < 8; ++i) DoneHere();
  Answer(1, 0, 0);
  DoneHere(), SampledHere(1);
  ASSERT_THAT(Answer(1, 1, 0), ElementsAre("finish"));
  PlanPrompt(2, {Entry(1, On(0), 60, 100)});
  EXPECT_EQ(begins_.back().entries[0].attend_end, 0);
}

class AtEndTest : public PromptsTest {
 protected:
  AtEndTest() : PromptsTest(true) {}
};

TEST_F(AtEndTest, AllKeysAndValuesGoAfterTheLastLayer) {
  PlanPrompt(1, {Entry(1, On(0), 100)});
  std::vector<std::string> all;
  for (int i = 0; i < 9; ++i)
    for (const std::string& line : DoneHere())
      if (line.rfind("dense", 0) != 0) all.push_back(line);
  EXPECT_THAT(all, ElementsAre("q 0", "prompts 0", "q 1", "prompts 1", "kv 0", "kv 1", "sample"));
}

}  // namespace
}  // namespace dovetail::compute::testing
