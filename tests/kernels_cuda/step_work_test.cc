#include "kernels/cuda/step_work.h"

#include <algorithm>
#include <vector>

#include "tests/kernels_cuda/cuda_fixture.h"

namespace dovetail::kernels::cuda {
namespace {

class StepWorkTest : public testing::CudaTest {
 protected:
  // Sets the first `count` bytes of what `to` names.
  absl::Status AddFill(std::byte* to, uint8_t value, size_t count) {
    return work_.Add(stream(), {StepWork::Word(to), value, count}, [=, this](CudaStream& s) {
      ++enqueued_;
      return s.Fill(to, value, count);
    });
  }
  uint8_t First(Buffer& buffer) { return Download<uint8_t>(buffer)[0]; }

  StepWork work_;
  int enqueued_ = 0;
};

TEST_F(StepWorkTest, NothingRunsBeforeTheLaunchAndTheThirdStepOfAKindIsOneGraph) {
  const auto memory = Empty(64);
  for (int step = 0; step < 4; ++step) {
    ASSERT_TRUE(stream().Fill(memory->data(), 0, 64).ok());
    work_.Begin();
    ASSERT_TRUE(AddFill(memory->data(), 7, 64).ok());
    EXPECT_EQ(First(*memory), 0);
    ASSERT_TRUE(work_.Launch(stream()).ok());
    EXPECT_EQ(First(*memory), 7);
    EXPECT_EQ(enqueued_, std::min(step + 1, 2)) << "run, then recorded, then only launched";
  }
  work_.Begin();
  ASSERT_TRUE(AddFill(memory->data(), 8, 64).ok());
  ASSERT_TRUE(work_.Launch(stream()).ok());
  EXPECT_EQ(First(*memory), 8) << "another kind of step";
}

TEST_F(StepWorkTest, AnImmediateStepEnqueuesWhatWasAddedAndWhatFollows) {
  const auto memory = Empty(64);
  work_.Begin();
  ASSERT_TRUE(AddFill(memory->data(), 1, 64).ok());
  ASSERT_TRUE(work_.BeImmediate(stream()).ok());
  EXPECT_EQ(First(*memory), 1);
  ASSERT_TRUE(AddFill(memory->data(), 2, 64).ok());
  EXPECT_EQ(First(*memory), 2);
  ASSERT_TRUE(work_.Launch(stream()).ok());
  EXPECT_EQ(enqueued_, 2) << "nothing runs twice";
}

TEST_F(StepWorkTest, WhatWasNotLaunchedIsVoid) {
  const auto memory = Empty(64);
  work_.Begin();
  ASSERT_TRUE(AddFill(memory->data(), 1, 64).ok());
  work_.SetAppendTarget(3, {});
  EXPECT_NE(work_.AppendTarget(3), nullptr);
  work_.Begin();
  EXPECT_EQ(work_.AppendTarget(3), nullptr);
  ASSERT_TRUE(work_.Launch(stream()).ok());
  EXPECT_EQ(First(*memory), 0xff);
}

}  // namespace
}  // namespace dovetail::kernels::cuda
