#include <gtest/gtest.h>

#include <cstring>

#include "tests/attention_worker/state_moves_fixture.h"
#include "tests/kernels_cuda/cuda_fixture.h"

// Linear states on their way between a GPU's memory and a CPU's: what one worker holds in 16 bits and in logarithms,
// the other holds in f32. Skipped where there is no GPU.

namespace dovetail::attention {
namespace {

using testing::StateMoves;
using testing::Table;

constexpr int kGpu = 0, kCpu = 1, kOtherGpu = 2, kOtherCpu = 3;

class StateMovesToGpus : public StateMoves, public ::testing::WithParamInterface<bool> {
 protected:
  StateMovesToGpus() : StateMoves(Table(DType::kF32, DType::kBF16, /*vector_decay=*/GetParam())) {}
  void SetUp() override {
    auto gpu = kernels::cuda::testing::OpenTestDevice();
    if (!gpu.ok()) GTEST_SKIP() << "needs a GPU: " << gpu.status().message();
    gpu_ = *std::move(gpu);
    AddWorker(*gpu_);
    AddCpuWorker();
    AddWorker(*gpu_);
    AddCpuWorker();
  }
  void TearDown() override { nodes_.clear(); }  // before the device

  void Prefill(int worker, Position end) {
    Open(worker);
    for (Position at = 0; at < end; at += 100) {
      const auto answer = StepOf(worker, ++step_, at, static_cast<int>(std::min<Position>(100, end - at)));
      ASSERT_FALSE(answer.empty());
    }
  }
  void MoveOn(int from, int to, Position end) {
    Open(to);
    Move(end, from, to, step_ += 10);
    step_ += 10;
    ASSERT_TRUE(moved_.moved) << moved_.reason;
  }
  // What the worker answers to the next 70 tokens, which take it over the end of a block.
  std::vector<std::byte> GoOn(int worker, Position end) {
    std::vector<std::byte> all;
    for (Position at = end; at < end + 70; at += 7) {
      const auto answer = StepOf(worker, ++step_, at, 7);
      all.insert(all.end(), answer.begin(), answer.end());
    }
    EXPECT_FALSE(all.empty());
    return all;
  }
  void Release() {
    for (size_t worker = 0; worker < nodes_.size(); ++worker)
      Tell(static_cast<int>(worker), proto::FrameType::kReleaseSequence, proto::ReleaseSequence{SequenceId(1), 0, {}});
    EXPECT_TRUE(refused_.empty()) << refused_[0];
  }

  std::unique_ptr<kernels::cuda::CudaDevice> gpu_;
  uint64_t step_ = 0;
};

// GPU, CPU, GPU: as if the CPU had not been there. Vector decays are logarithms in 16 bits, which the CPU's form gives
// back: then even as if nothing had moved.
TEST_P(StateMovesToGpus, ThroughACpuNoBitIsLost) {
  for (const Position end : {Position{40}, Position{64}, Position{130}, Position{600}}) {
    SCOPED_TRACE(end);
    Prefill(kGpu, end);
    MoveOn(kGpu, kCpu, end);
    MoveOn(kCpu, kOtherGpu, end);
    const auto through_cpu = GoOn(kOtherGpu, end);
    Release();
    Prefill(kGpu, end);
    MoveOn(kGpu, kOtherGpu, end);
    EXPECT_EQ(GoOn(kOtherGpu, end), through_cpu);
    if (GetParam()) {
      EXPECT_EQ(GoOn(kGpu, end), through_cpu);
    }
    Release();
  }
}

// CPU, GPU, CPU: at the end of a block what counts is S, in f32, and the convolution's last inputs, as they came.
TEST_P(StateMovesToGpus, ThroughAGpuAStateAtABoundaryLosesNoBit) {
  for (const Position end : {Position{64}, Position{640}}) {
    SCOPED_TRACE(end);
    Prefill(kCpu, end);
    MoveOn(kCpu, kGpu, end);
    MoveOn(kGpu, kOtherCpu, end);
    EXPECT_EQ(GoOn(kOtherCpu, end), GoOn(kCpu, end));
    Release();
  }
}

// The second rank of a prefill group may begin before the first, which makes room for the state that it goes on from.
TEST_P(StateMovesToGpus, RanksOfAGroupMayBeginInAnyOrder) {
  const auto run = [&](int first) {
    Open(kGpu);
    answer_.clear();
    const uint64_t group = step_ += 10;
    const Position cuts[] = {0, 192, 260};
    const auto begin = [&](int rank) {
      const auto tokens = static_cast<int32_t>(cuts[rank + 1] - cuts[rank]);
      Tell(kGpu, proto::FrameType::kStepBegin,
           proto::StepBegin{{{SequenceId(1), cuts[rank], tokens, {}}}, {StepId(group), 0, 260, rank, 2}}, group + rank,
           static_cast<uint16_t>(rank));
    };
    begin(first), begin(1 - first);
    for (int op = 0; op < table_.op_count(); ++op)
      for (const int rank : {0, 1})
        SendTokens(kGpu, group + rank, op, cuts[rank], static_cast<int>(cuts[rank + 1] - cuts[rank]),
                   static_cast<uint16_t>(rank));
    const auto answer = answer_;
    Release();
    return answer;
  };
  const auto in_order = run(0);
  EXPECT_FALSE(in_order.empty());
  EXPECT_EQ(run(1), in_order);
}

INSTANTIATE_TEST_SUITE_P(Decays, StateMovesToGpus, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Vector" : "Scalar"; });

}  // namespace
}  // namespace dovetail::attention
