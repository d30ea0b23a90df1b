#include <string>
#include <vector>

#include "compute_worker/core/compute_worker_core.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/compute_worker/small_spec.h"

// A step that is a rank of a prefill group, and one that the scheduler withdraws.

namespace dovetail::compute {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr Epoch kEpoch{1};
constexpr MicroBatchId kBatch{0};

class PrefillRankTest : public ::testing::Test {
 protected:
  PrefillRankTest()
      : core_(*proto::AttentionTable::Build({SmallSpec()}),
              {{StageKind::kDense, 0},
               {StageKind::kSendQuery, 0},
               {StageKind::kDense, 1},
               {StageKind::kSendKeyValue, 0},
               {StageKind::kAwaitPartials, 0},
               {StageKind::kDense, 2}},
              {.micro_batches = 2, .max_step_tokens = 128, .vocab_size = 100}) {
    for (const uint32_t worker : {0, 1}) core_.AddAttentionWorker({WorkerId(worker), kEpoch, NodeId(10 + worker)});
  }

  static proto::StepPlan Plan(uint64_t step, int q_len, proto::PrefillPart part = {}) {
    const proto::HeadRange heads{0, SmallSpec().kv_heads};
    proto::StepEntry entry;
    entry.sequence = SequenceId(1);
    entry.ctx_len = part.base;
    entry.tokens.assign(static_cast<size_t>(q_len), 7);
    entry.placement = {{LayerGroup(0), WorkerId(0), kEpoch, heads, {0, 64}},
                       {LayerGroup(0), WorkerId(1), kEpoch, heads, {64, proto::kOpenEnd}}};
    return {StepId(step), kBatch, {entry}, part};
  }
  std::vector<Action> Feed(Event event) {
    std::vector<Action> actions;
    core_.Handle(std::move(event), actions);
    EXPECT_EQ(core_.CheckInvariants(), absl::OkStatus());
    return actions;
  }
  static std::vector<std::string> Results(const std::vector<Action>& actions) {
    std::vector<std::string> results;
    for (const Action& action : actions)
      if (const auto* finish = std::get_if<FinishStep>(&action)) results.push_back(finish->result.error);
    return results;
  }

  ComputeWorkerCore core_;
};

// The worker of tokens 64.. gets none of this rank's rows, but a later rank's wait there for this one.
TEST_F(PrefillRankTest, EveryWorkerOfTheSequenceHearsOfARank) {
  const proto::PrefillPart part{StepId(1), 0, 100, 0, 2};
  std::vector<proto::PrefillPart> heard;
  for (const Action& action : Feed(PlanArrived{Plan(1, 64, part)}))
    if (const auto* begin = std::get_if<SendStepBegin>(&action)) heard.push_back(begin->message.part);
  EXPECT_THAT(heard, ElementsAre(part, part));
}

TEST_F(PrefillRankTest, AnExchangeBetweenRanksThatThisWorkerDoesNotHaveIsRefusedByName) {
  const proto::PrefillPart part{StepId(1), 0, 100, 0, 2};
  proto::StepPlan plan = Plan(1, 64, part);
  plan.entries[0].exchange = proto::PrefixExchange::kSwitch;
  EXPECT_THAT(Results(Feed(PlanArrived{plan})),
              ElementsAre("sequence 1: this worker has no exchange by switch with other compute workers"));
  plan = Plan(2, 64, {StepId(2), 0, 100, 0, 2});
  plan.entries[0].linear_exchange = proto::LinearExchange::kScan;
  EXPECT_THAT(Results(Feed(PlanArrived{plan})),
              ElementsAre("sequence 1: this worker has no exchange by scan with other compute workers"));
  EXPECT_TRUE(core_.idle());
}

TEST_F(PrefillRankTest, AWithdrawnStepEndsAtOnceWhileItWaits) {
  Feed(PlanArrived{Plan(1, 64)});
  Feed(DenseDone{kBatch});
  ASSERT_THAT(Results(Feed(DenseDone{kBatch})), IsEmpty());
  EXPECT_THAT(Feed(StepWithdrawn{StepId(2), kBatch}), IsEmpty()) << "another step";
  EXPECT_THAT(Feed(StepWithdrawn{StepId(1), MicroBatchId(1)}), IsEmpty()) << "another micro-batch";
  EXPECT_THAT(Feed(StepWithdrawn{StepId(1), MicroBatchId(7)}), IsEmpty()) << "a micro-batch that there is not";
  EXPECT_THAT(Results(Feed(StepWithdrawn{StepId(1), kBatch})), ElementsAre("the scheduler has withdrawn the step"));
  EXPECT_THAT(Feed(StepWithdrawn{StepId(1), kBatch}), IsEmpty()) << "it has ended";
  EXPECT_THAT(Results(Feed(PlanArrived{Plan(2, 64)})), IsEmpty()) << "the next one may begin";
  EXPECT_TRUE(core_.running(kBatch));
}

TEST_F(PrefillRankTest, AWithdrawnStepEndsWhenTheDensePieceAtHandIsDone) {
  Feed(PlanArrived{Plan(1, 64)});
  EXPECT_THAT(Feed(StepWithdrawn{StepId(1), kBatch}), IsEmpty()) << "its buffers are in use";
  EXPECT_THAT(Feed(StepWithdrawn{StepId(1), kBatch}), IsEmpty());
  EXPECT_THAT(Results(Feed(DenseDone{kBatch})), ElementsAre("the scheduler has withdrawn the step"));
  EXPECT_TRUE(core_.idle());
}

}  // namespace
}  // namespace dovetail::compute
