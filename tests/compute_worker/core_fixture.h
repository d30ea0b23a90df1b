#pragma once
#include <string>
#include <vector>

#include "compute_worker/core/compute_worker_core.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

// A core of two layers with three attention workers; what it asks for is written as a line for each action.

namespace dovetail::compute::testing {

inline proto::SoftmaxSpec Spec(int window) {
  proto::SoftmaxSpec spec;
  spec.query_heads = 4;
  spec.kv_heads = 2;
  spec.key_dim = 8;
  spec.value_dim = 4;
  spec.scale = 1;
  spec.window = window;
  return spec;
}

// Two layers: op 0 sees everything (group 0), op 1 the last 100 tokens (group 1).
inline proto::AttentionTable TwoOps() { return *proto::AttentionTable::Build({Spec(0), Spec(100)}); }

// What ProgramOf gives for two layers: dense pieces 0 .. 4 and 5 .. 8, cut twice.
inline StepProgram TwoLayers() {
  return {{StageKind::kDense, 0}, {StageKind::kDense, 1},        {StageKind::kSendQuery, 0},
          {StageKind::kDense, 2}, {StageKind::kSendKeyValue, 0}, {StageKind::kAwaitPartials, 0},
          {StageKind::kDense, 3}, {StageKind::kDense, 4},        {StageKind::kSendQuery, 1},
          {StageKind::kDense, 5}, {StageKind::kSendKeyValue, 1}, {StageKind::kAwaitPartials, 1},
          {StageKind::kDense, 6}};
}

inline constexpr Epoch kEpoch{1};
inline NodeId NodeOf(int worker) { return NodeId(static_cast<uint32_t>(10 + worker)); }

inline proto::Shard ShardOf(int group, int worker, proto::HeadRange heads = {0, 2}, proto::TokenRange tokens = {}) {
  return {LayerGroup(static_cast<uint16_t>(group)), WorkerId(static_cast<uint32_t>(worker)), kEpoch, heads, tokens};
}
inline proto::Placement On(int worker) { return {ShardOf(0, worker), ShardOf(1, worker)}; }

inline proto::StepEntry Entry(uint64_t sequence, proto::Placement placement, int q_len = 1, Position ctx_len = 0) {
  proto::StepEntry entry;
  entry.sequence = SequenceId(sequence);
  entry.ctx_len = ctx_len;
  entry.tokens.assign(static_cast<size_t>(q_len), 7);
  entry.placement = std::move(placement);
  return entry;
}

class ComputeWorkerCoreTest : public ::testing::Test {
 protected:
  ComputeWorkerCoreTest()
      : core_(TwoOps(), TwoLayers(), {.micro_batches = 3, .max_step_tokens = 64, .vocab_size = 100}) {
    for (int worker = 0; worker < 3; ++worker)
      core_.AddAttentionWorker({WorkerId(static_cast<uint32_t>(worker)), kEpoch, NodeOf(worker)});
  }

  std::vector<std::string> Feed(Event event) {
    std::vector<Action> actions;
    core_.Handle(std::move(event), actions);
    EXPECT_EQ(core_.CheckInvariants(), absl::OkStatus());
    std::vector<std::string> lines;
    for (const Action& action : actions) lines.push_back(std::visit([&](const auto& a) { return Line(a); }, action));
    return lines;
  }
  std::vector<std::string> Plan(uint64_t step, std::vector<proto::StepEntry> entries, int micro_batch = 0) {
    return Feed(PlanArrived{{StepId(step), MicroBatchId(static_cast<uint16_t>(micro_batch)), std::move(entries)}});
  }
  std::vector<std::string> Done(int micro_batch = 0) {
    return Feed(DenseDone{MicroBatchId(static_cast<uint16_t>(micro_batch))});
  }
  // Partials as a worker would send them, unless told otherwise.
  std::vector<std::string> Partial(uint64_t step, int op, int worker, int micro_batch = 0) {
    const MicroBatchId id(static_cast<uint16_t>(micro_batch));
    size_t bytes = 0;
    for (const WorkerPart& part : core_.PartsOf(id))
      if (part.node == NodeOf(worker)) bytes = static_cast<size_t>(part.layouts[static_cast<size_t>(op)].partial_bytes);
    return Feed(PartialArrived{NodeOf(worker), kEpoch, StepId(step), id, op, std::span(bytes_).first(bytes)});
  }
  std::vector<std::string> Refuse(uint64_t step, int worker, bool out_of_memory, int micro_batch = 0) {
    return Feed(StepRefused{NodeOf(worker),
                            kEpoch,
                            StepId(step),
                            MicroBatchId(static_cast<uint16_t>(micro_batch)),
                            {out_of_memory, out_of_memory ? "full" : "sequence 1 is not open here"}});
  }
  std::vector<std::string> Sampled(uint64_t step, int micro_batch = 0) {
    proto::StepResult result;
    result.step = StepId(step);
    return Feed(SampleDone{MicroBatchId(static_cast<uint16_t>(micro_batch)), result});
  }
  // From the plan to the first wait for partials.
  void RunToAttention(uint64_t step, std::vector<proto::StepEntry> entries, int micro_batch = 0) {
    Plan(step, std::move(entries), micro_batch);
    Done(micro_batch), Done(micro_batch);
    ASSERT_THAT(Done(micro_batch), ::testing::ElementsAre("kv 0"));
  }
  uint64_t Dropped() const { return core_.counters().dropped_frames; }

  static std::string Line(const SendStepBegin& a) {
    return absl::StrCat("begin ", a.to.value(), " of ", a.message.entries.size(), " sequences");
  }
  static std::string Line(const PrepareStep&) { return "prepare"; }
  static std::string Line(const RunDense& a) { return absl::StrCat("dense ", a.index); }
  static std::string Line(const SendQuery& a) { return absl::StrCat("q ", a.op); }
  static std::string Line(const SendKeyValue& a) { return absl::StrCat("kv ", a.op); }
  static std::string Line(const AskRows& a) { return absl::StrCat("ask ", a.op, " piece ", a.piece); }
  static std::string Line(const KeepEarlierRows& a) { return absl::StrCat("keep ", a.op, " piece ", a.piece); }
  static std::string Line(const AttendPrompts& a) { return absl::StrCat("prompts ", a.op); }
  static std::string Line(const SendRankState& a) { return absl::StrCat("state ", a.op, " to ", a.to.worker.value()); }
  static std::string Line(const SendRankRows& a) { return absl::StrCat("rows ", a.op); }
  static std::string Line(const AttendShard& a) { return absl::StrCat("shard ", a.op, " of ", a.rank); }
  static std::string Line(const ForwardRankRows& a) { return absl::StrCat("hand on ", a.op, " of ", a.rank); }
  static std::string Line(const KeepRankRows& a) { return absl::StrCat("keep ", a.op, " of ", a.rank); }
  static std::string Line(const SendRankAttended& a) { return absl::StrCat("attended ", a.op); }
  static std::string Line(const SendRankHeads& a) { return absl::StrCat("heads ", a.op); }
  static std::string Line(const AttendHeads& a) { return absl::StrCat("heads ", a.op, " of ", a.rank); }
  static std::string Line(const SendRankQueries& a) { return absl::StrCat("queries ", a.op); }
  static std::string Line(const AttendQueries& a) { return absl::StrCat("queries ", a.op, " of ", a.rank); }
  static std::string Line(const SendRankOutputs& a) { return absl::StrCat("outputs ", a.op); }
  static std::string Line(const PlaceRankOutputs& a) { return absl::StrCat("outputs ", a.op, " of ", a.rank); }
  static std::string Line(const Sample&) { return "sample"; }
  std::string Line(const FinishStep& a) {
    finished_ = a.result;
    return a.result.status == proto::StepStatus::kOk ? "finish" : absl::StrCat("failed: ", a.result.error);
  }

  ComputeWorkerCore core_;
  std::vector<std::byte> bytes_ = std::vector<std::byte>(1 << 20);
  proto::StepResult finished_;
  uint64_t step_ = 0;
};

}  // namespace dovetail::compute::testing
