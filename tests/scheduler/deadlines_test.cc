#include <gtest/gtest.h>

#include <utility>
#include <variant>
#include <vector>

#include "tests/scheduler/small_cluster.h"

// When the core must be asked again though nothing happens.

namespace dovetail::scheduler {
namespace {

template <typename A>
A Only(const std::vector<Action>& actions) {
  for (const Action& action : actions)
    if (const A* const found = std::get_if<A>(&action)) return *found;
  ADD_FAILURE() << "no such action";
  return {};
}

TEST(Deadlines, AGrammarsPauseEndsThoughAProbeIsUnderWay) {
  const absl::Time start = absl::UnixEpoch();
  SchedulerCore core(SmallCluster(2).scheduler, /*seed=*/1);
  std::vector<Action> actions;
  const auto handle = [&](Event event, absl::Duration when) {
    actions.clear();
    core.Handle(event, start + when, actions);
  };
  const auto arrives = [](GenerationRequest request, uint64_t id) {
    request.id = RequestId(id);
    return RequestArrived{std::make_shared<const GenerationRequest>(std::move(request))};
  };
  handle(AttentionWorkerJoined{WorkerId(0), Epoch(1), 1000}, {});
  handle(AttentionWorkerJoined{WorkerId(1), Epoch(1), 1000}, {});
  handle(ComputeWorkerJoined{WorkerId(9)}, {});
  GenerationRequest constrained = Ask(10, 4);
  constrained.sampling.follows_grammar = true;
  constrained.sampling.grammar = {"ra", {1}};
  handle(arrives(std::move(constrained), 1), {});
  const auto opened = Only<OpenSequence>(actions);
  handle(SequenceOpened{opened.worker, opened.epoch, {.sequence = opened.message.sequence, .resumable = {0}}}, {});
  const proto::StepPlan plan = Only<RunStep>(actions).plan;
  proto::StepResult pending{.step = plan.step, .micro_batch = plan.micro_batch};
  pending.status = proto::StepStatus::kGrammarPending;
  pending.pending = {plan.entries[0].sequence};
  handle(StepFinished{WorkerId(9), pending}, {});
  const absl::Time pause_ends = core.NextDeadline();
  EXPECT_EQ(pause_ends, start + absl::Milliseconds(10));
  handle(arrives(Ask(100, 4), 2), absl::Milliseconds(5));
  Only<ProbePrefix>(actions);  // its own deadline is later
  EXPECT_EQ(core.NextDeadline(), pause_ends);
}

}  // namespace
}  // namespace dovetail::scheduler
