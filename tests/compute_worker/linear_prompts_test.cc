#include <memory>
#include <string>
#include <vector>

#include "tests/compute_worker/core_fixture.h"

namespace dovetail::compute::testing {
namespace {

using proto::StateExchange;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Op 0 is a linear state (group 0), op 1 softmax attention (group 1).
proto::AttentionTable HybridOps() {
  proto::LinearSpec state;
  state.heads = 2;
  state.key_dim = state.value_dim = 16;
  proto::LinearConstants decays;
  decays.log_decay.assign(2, -0.1f);
  return *proto::AttentionTable::Build({state, Spec(0)}, {decays, {}});
}

class LinearPromptsTest : public ComputeWorkerCoreTest {
 protected:
  explicit LinearPromptsTest(bool hand_over_at_end = false) {
    StepProgram program = {
        {StageKind::kDense, 0},         {StageKind::kSendQuery, 0},     {StageKind::kDense, 1},
        {StageKind::kAttendPrompts, 0}, {StageKind::kSendKeyValue, 0},  {StageKind::kAwaitPartials, 0},
        {StageKind::kDense, 2},         {StageKind::kSendQuery, 1},     {StageKind::kDense, 3},
        {StageKind::kSendKeyValue, 1},  {StageKind::kAttendPrompts, 1}, {StageKind::kAwaitPartials, 1},
        {StageKind::kDense, 4}};
    hybrid_ = std::make_unique<ComputeWorkerCore>(HybridOps(), program,
                                                  ComputeWorkerOptions{.micro_batches = 3,
                                                                       .max_step_tokens = 512,
                                                                       .vocab_size = 100,
                                                                       .prompt_blocks = 100,
                                                                       .linear_prompts = true,
                                                                       .state_slots = 1,
                                                                       .hand_over_at_end = hand_over_at_end});
    for (int worker = 0; worker < 3; ++worker)
      hybrid_->AddAttentionWorker({WorkerId(static_cast<uint32_t>(worker)), kEpoch, NodeOf(worker)});
  }
  std::vector<std::string> FeedHybrid(Event event) {
    std::vector<Action> actions;
    hybrid_->Handle(std::move(event), actions);
    EXPECT_EQ(hybrid_->CheckInvariants(), absl::OkStatus());
    std::vector<std::string> lines;
    for (const Action& action : actions) {
      if (const auto* begin = std::get_if<SendStepBegin>(&action)) begins_.push_back(begin->message);
      lines.push_back(std::visit([&](const auto& a) { return Line(a); }, action));
    }
    return lines;
  }
  std::vector<std::string> PlanHybrid(uint64_t step, std::vector<proto::StepEntry> entries,
                                      const proto::PrefillPart& part = {}) {
    proto::StepPlan plan{StepId(step), MicroBatchId(0), std::move(entries)};
    plan.part = part;
    return FeedHybrid(PlanArrived{std::move(plan)});
  }
  std::vector<std::string> DoneHere() { return FeedHybrid(DenseDone{MicroBatchId(0)}); }
  std::vector<std::string> Answer(uint64_t step, int op, int worker, int64_t bytes = 0) {
    return FeedHybrid(PartialArrived{NodeOf(worker), kEpoch, StepId(step), MicroBatchId(0), op,
                                     std::span(bytes_).first(static_cast<size_t>(bytes))});
  }
  std::vector<std::string> Finish(uint64_t step) {
    proto::StepResult result;
    result.step = StepId(step);
    return FeedHybrid(SampleDone{MicroBatchId(0), result});
  }
  // A part of a prompt from its plan to its end.
  void RunPart(uint64_t step, Position ctx_len, int q_len, bool more = true) {
    proto::StepEntry entry = Entry(1, On(0), q_len, ctx_len);
    entry.sample = !more;
    PlanHybrid(step, {entry});
    DoneHere(), DoneHere();
    if (Layout().before_bytes > 0) Answer(step, 0, 0, Layout().before_bytes);
    for (int i = 0; i < 5; ++i) DoneHere();
    Answer(step, 0, 0), Answer(step, 1, 0);
    ASSERT_THAT(Finish(step), ElementsAre("finish"));
  }
  const proto::StepLayout& Layout() { return hybrid_->PartsOf(MicroBatchId(0))[0].layouts[0]; }
  StateExchange States() const { return begins_.back().entries[0].states; }

  std::unique_ptr<ComputeWorkerCore> hybrid_;
  std::vector<proto::StepBegin> begins_;
};

TEST_F(LinearPromptsTest, AFreshPromptAsksNothingAndLeavesItsState) {
  EXPECT_THAT(PlanHybrid(1, {Entry(1, On(0), 100)}), ElementsAre("begin 10 of 1 sequences", "prepare", "dense 0"));
  EXPECT_EQ(States(), StateExchange::kLeave);
  EXPECT_THAT(DoneHere(), ElementsAre("q 0", "dense 1"));
  EXPECT_THAT(DoneHere(), ElementsAre("prompts 0"));
  EXPECT_THAT(DoneHere(), ElementsAre("kv 0", "dense 2")) << "what it leaves follows; the step goes on";
  EXPECT_THAT(DoneHere(), ElementsAre("q 1", "dense 3"));
  EXPECT_THAT(DoneHere(), ElementsAre("kv 1", "prompts 1"));
  EXPECT_THAT(DoneHere(), ElementsAre("dense 4"));
  EXPECT_THAT(DoneHere(), ElementsAre("sample"));
  Answer(1, 0, 0);
  EXPECT_THAT(Finish(1), IsEmpty());
  EXPECT_THAT(Answer(1, 1, 0), ElementsAre("finish"));
  EXPECT_EQ(finished_.prefix.state_bytes, Layout().key_value_bytes);
  EXPECT_EQ(finished_.prefix.asked_bytes, 0);
}

// Its state goes through the hosts, so what it sees of softmax layers may come through them, too.
TEST_F(LinearPromptsTest, APromptOnALinkedWorkerIsAttendedAsWithoutLinks) {
  hybrid_->SetLinked(NodeOf(0), true);
  proto::StepEntry entry = Entry(1, On(0), 100, 70);
  entry.exchange = proto::PrefixExchange::kGather;
  PlanHybrid(1, {entry});
  EXPECT_EQ(States(), StateExchange::kFetch);
  ASSERT_EQ(hybrid_->PromptsOf(MicroBatchId(0)).size(), 1u) << "attended here, though its earlier tokens are not";
  EXPECT_LT(hybrid_->PromptsOf(MicroBatchId(0))[0].gather_begin, 70) << "they are asked for";
}

TEST_F(LinearPromptsTest, AStateThatIsElsewhereIsAwaitedBeforeTheOpRuns) {
  PlanHybrid(1, {Entry(1, On(0), 100, 70), Entry(2, On(0), 1, 5), Entry(3, On(1), 1, 5)});
  EXPECT_EQ(begins_[0].entries[0].states, StateExchange::kFetch);
  EXPECT_EQ(begins_[0].entries[1].states, StateExchange::kTokens) << "one token is no prompt";
  DoneHere();
  EXPECT_THAT(DoneHere(), IsEmpty()) << "the state before is not there";
  const int64_t before = Layout().before_bytes, partial = Layout().partial_bytes;
  ASSERT_NE(before, partial);
  EXPECT_THAT(Answer(1, 0, 0, partial), IsEmpty()) << "that is not it";
  EXPECT_THAT(Answer(1, 0, 0, before), ElementsAre("prompts 0")) << "worker 1 will answer k and v";
  EXPECT_THAT(DoneHere(), ElementsAre("kv 0"));
  EXPECT_THAT(Answer(1, 0, 0, before), IsEmpty()) << "it came before";
  EXPECT_THAT(Answer(1, 0, 0, partial), IsEmpty());
  EXPECT_THAT(Answer(1, 0, 1, hybrid_->PartsOf(MicroBatchId(0))[1].layouts[0].partial_bytes), ElementsAre("dense 2"));
  EXPECT_EQ(hybrid_->counters().dropped_frames, 2u);
}

TEST_F(LinearPromptsTest, TheNextPartFindsTheStateHere) {
  RunPart(1, 0, 100);
  RunPart(2, 100, 50);
  EXPECT_EQ(States(), StateExchange::kLeave);
  PlanHybrid(3, {Entry(2, On(0), 100, 64)});
  EXPECT_EQ(States(), StateExchange::kFetch) << "of another sequence";
}

TEST_F(LinearPromptsTest, AStateIsAskedForWhereTheOneHereIsAnotherOrGone) {
  RunPart(1, 0, 100);
  RunPart(2, 64, 50);
  EXPECT_EQ(States(), StateExchange::kFetch) << "the sequence began again at 64";
  RunPart(3, 114, 50, /*more=*/false);
  EXPECT_EQ(States(), StateExchange::kLeave);
  RunPart(4, 164, 50);
  EXPECT_EQ(States(), StateExchange::kFetch) << "the prompt had ended";
  PlanHybrid(5, {Entry(1, On(0), 50, 214)});
  EXPECT_EQ(States(), StateExchange::kLeave);
  FeedHybrid(AttentionWorkerLost{WorkerId(0), kEpoch});
  DoneHere();
  PlanHybrid(6, {Entry(1, On(1), 50, 214)});
  EXPECT_EQ(States(), StateExchange::kFetch) << "the failed step may have written the slot";
}

TEST_F(LinearPromptsTest, ARankOfAGroupAsksForTheStateOfTheRankBefore) {
  RunPart(1, 0, 128);
  proto::PrefillPart part{StepId(2), 128, 256, 0, 2};
  PlanHybrid(2, {Entry(1, On(0), 64, 128)}, part);
  EXPECT_EQ(States(), StateExchange::kFetch) << "others may have gone on meanwhile";
}

class LinearPromptsAtEndTest : public LinearPromptsTest {
 protected:
  LinearPromptsAtEndTest() : LinearPromptsTest(true) {}
};

TEST_F(LinearPromptsAtEndTest, StatesGoAfterTheLastLayerUnlessAnAnswerIsDueBefore) {
  PlanHybrid(1, {Entry(1, On(0), 100)});
  std::vector<std::string> all;
  for (int i = 0; i < 7; ++i)
    for (const std::string& line : DoneHere())
      if (line.rfind("dense", 0) != 0) all.push_back(line);
  EXPECT_THAT(all, ElementsAre("q 0", "prompts 0", "q 1", "prompts 1", "kv 0", "kv 1", "sample"));
  Answer(1, 0, 0), Answer(1, 1, 0), Finish(1);
  PlanHybrid(2, {Entry(2, On(0), 100), Entry(3, On(0), 1, 5)});
  DoneHere(), DoneHere();
  EXPECT_THAT(DoneHere(), ElementsAre("kv 0")) << "the second waits for what attention gives";
}

TEST(StateSlots, TheOneUsedLongestAgoGoesFirstAndNoneThatAStepUses) {
  StateSlots slots(2);
  EXPECT_EQ(slots.Begin(SequenceId(1)), 0);
  EXPECT_EQ(slots.Begin(SequenceId(2)), 1);
  EXPECT_EQ(slots.Begin(SequenceId(3)), StateSlots::kNone);
  slots.End(SequenceId(1), true, false, 100);
  slots.End(SequenceId(2), true, false, 200);
  EXPECT_EQ(slots.Find(SequenceId(1), 100), 0);
  EXPECT_EQ(slots.Find(SequenceId(1), 99), StateSlots::kNone);
  EXPECT_EQ(slots.Begin(SequenceId(3)), 0);
  EXPECT_EQ(slots.Find(SequenceId(1), 100), StateSlots::kNone);
  EXPECT_EQ(slots.Find(SequenceId(2), 200), 1);
  slots.End(SequenceId(3), false, false, 300);
  EXPECT_EQ(slots.Find(SequenceId(3), 300), StateSlots::kNone);
  EXPECT_EQ(StateSlots(0).Begin(SequenceId(1)), StateSlots::kNone);
}

}  // namespace
}  // namespace dovetail::compute::testing
