#pragma once
#include <cstdint>
#include <utility>
#include <vector>

#include "compute_worker/core/compute_worker_core.h"
#include "gtest/gtest.h"
#include "tests/compute_worker/small_spec.h"

namespace dovetail::compute {

// A step whose entries lie on up to three attention workers as a test says, in two layer groups: full and windowed, of
// 4 query and 2 KV heads each, unless the test has others.
class PlacedStepTest : public ::testing::Test {
 protected:
  static constexpr Epoch kEpoch{1};
  static constexpr MicroBatchId kFirst{0};

  explicit PlacedStepTest(const proto::AttentionTable& table = TwoGroups(), uint32_t prompt_blocks = 64)
      : core_(table, {{StageKind::kDense, 0}},
              {.max_step_tokens = 64, .vocab_size = 100, .prompt_tokens = 16, .prompt_blocks = prompt_blocks}) {
    for (uint32_t worker = 0; worker < 3; ++worker)
      core_.AddAttentionWorker({WorkerId(worker), kEpoch, NodeId(10 + worker)});
  }
  static proto::AttentionTable TwoGroups() {
    proto::SoftmaxSpec windowed = SmallSpec();
    windowed.window = 32;
    return *proto::AttentionTable::Build({SmallSpec(), windowed});
  }
  static proto::Shard ShardOf(uint16_t group, uint32_t worker, proto::HeadRange heads = {0, 2},
                              proto::TokenRange tokens = {}) {
    return {LayerGroup(group), WorkerId(worker), kEpoch, heads, tokens};
  }
  // The next entry: `q_len` new tokens behind `ctx_len`.
  void Add(int q_len, const std::vector<proto::Shard>& placement, Position ctx_len = 0) {
    proto::StepEntry entry;
    entry.sequence = SequenceId(plan_.entries.size() + 1);
    entry.ctx_len = ctx_len;
    entry.tokens.assign(q_len, 5);
    entry.placement.assign(placement.begin(), placement.end());
    plan_.entries.push_back(std::move(entry));
  }
  // What `ask` says while the core runs a step of the entries that were added. The next step begins without them.
  template <typename Ask>
  auto WhileItRuns(Ask ask) {
    plan_.step = StepId(++steps_);
    plan_.micro_batch = kFirst;
    std::vector<Action> actions;
    core_.Handle(PlanArrived{std::exchange(plan_, {})}, actions);
    EXPECT_TRUE(core_.running(kFirst));
    auto said = ask();
    core_.Handle(StepFailed{kFirst, absl::CancelledError()}, actions);
    return said;
  }

  ComputeWorkerCore core_;
  proto::StepPlan plan_;
  uint64_t steps_ = 0;
};

}  // namespace dovetail::compute
