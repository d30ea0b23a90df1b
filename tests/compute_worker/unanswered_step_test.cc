// What becomes of a step whose tokens cannot be drawn because a worker's GPU did not answer.
#include <variant>
#include <vector>

#include "compute_worker/core/compute_worker_core.h"
#include "gmock/gmock.h"
#include "tests/compute_worker/small_spec.h"

namespace dovetail::compute {
namespace {

using ::testing::IsEmpty;

constexpr Epoch kEpoch{1};
constexpr MicroBatchId kFirst{0};

class UnansweredStepTest : public ::testing::Test {
 protected:
  UnansweredStepTest()
      : core_(*proto::AttentionTable::Build({SmallSpec()}), {{StageKind::kDense, 0}},
              {.max_step_tokens = 64, .vocab_size = 100}) {
    for (uint32_t worker = 0; worker < 2; ++worker)
      core_.AddAttentionWorker({WorkerId(worker), kEpoch, NodeId(10 + worker)});
  }
  // A step of one sequence on each of the first `workers` workers, as far as its draw.
  void RunToSample(uint64_t step, uint32_t workers) {
    proto::StepPlan plan{StepId(step), kFirst, {}};
    for (uint32_t worker = 0; worker < workers; ++worker) {
      proto::StepEntry entry;
      entry.sequence = SequenceId(worker + 1);
      entry.tokens = {5};
      entry.sample = true;
      entry.placement = {{LayerGroup(0), WorkerId(worker), kEpoch, {0, 2}, {}}};
      plan.entries.push_back(std::move(entry));
    }
    Handle(PlanArrived{std::move(plan)});
    Handle(DenseDone{kFirst});
    ASSERT_TRUE(std::holds_alternative<Sample>(actions_.back()));
  }
  void Handle(Event event) {
    actions_.clear();
    core_.Handle(std::move(event), actions_);
    EXPECT_EQ(core_.CheckInvariants(), absl::OkStatus());
  }
  const proto::StepResult& result() const { return std::get<FinishStep>(actions_.at(0)).result; }

  ComputeWorkerCore core_;
  std::vector<Action> actions_;
};

TEST_F(UnansweredStepTest, NamesTheWorkerThatDidNotAnswerAndBlamesNobodyElse) {
  RunToSample(1, 2);
  Handle(StepFailed{kFirst, absl::UnavailableError("nothing came"), /*unanswered=*/1});
  EXPECT_EQ(result().status, proto::StepStatus::kWorkerUnreachable);
  EXPECT_EQ(result().failed_worker, WorkerId(1));
  EXPECT_EQ(result().error, "attention worker 1: nothing came");
}

TEST_F(UnansweredStepTest, WhereThereIsOnlyOneItIsThatOne) {
  RunToSample(1, 1);
  Handle(StepFailed{kFirst, absl::UnavailableError("nothing came")});
  EXPECT_EQ(result().status, proto::StepStatus::kWorkerUnreachable);
  EXPECT_EQ(result().failed_worker, WorkerId(0));
}

TEST_F(UnansweredStepTest, OfSeveralNobodyIsNamedByGuess) {
  RunToSample(1, 2);
  Handle(StepFailed{kFirst, absl::UnavailableError("a launch failed")});
  EXPECT_EQ(result().status, proto::StepStatus::kWorkerFailed);
}

TEST_F(UnansweredStepTest, WhatWasRefusedBeforeStaysRefused) {
  RunToSample(1, 2);
  Handle(SampleBegun{kFirst});
  Handle(StepRefused{NodeId(10), kEpoch, StepId(1), kFirst, {/*out_of_memory=*/true, "no blocks"}});
  EXPECT_THAT(actions_, IsEmpty()) << "its draw is still under way";
  Handle(StepFailed{kFirst, absl::UnavailableError("nothing came"), /*unanswered=*/1});
  EXPECT_EQ(result().status, proto::StepStatus::kOutOfMemory);
  EXPECT_EQ(result().failed_worker, WorkerId(0));
}

TEST_F(UnansweredStepTest, AWorkerThatIsLostMeanwhileIsTheReason) {
  RunToSample(1, 2);
  Handle(SampleBegun{kFirst});
  Handle(AttentionWorkerLost{WorkerId(1), kEpoch});
  EXPECT_THAT(actions_, IsEmpty());
  Handle(StepFailed{kFirst, absl::UnavailableError("given up"), /*unanswered=*/1});
  EXPECT_EQ(result().status, proto::StepStatus::kWorkerUnreachable);
  EXPECT_EQ(result().failed_worker, WorkerId(1));
  EXPECT_EQ(result().error, "attention worker 1: lost");
}

}  // namespace
}  // namespace dovetail::compute
