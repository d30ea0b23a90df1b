#include "kernels/cuda/runtime/step_work.h"

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

  // Work for some tens of milliseconds; the event is recorded behind it.
  void BeBusy(CudaEvent& done) {
    constexpr size_t kBytes = size_t{256} << 20;
    if (large_ == nullptr) large_ = Empty(kBytes);
    for (int i = 0; i < 400; ++i) ASSERT_TRUE(stream().Fill(large_->data(), 1, kBytes).ok());
    ASSERT_TRUE(stream().Record(done).ok());
  }

  StepWork work_;
  std::unique_ptr<Buffer> large_;
  int enqueued_ = 0;
};

TEST_F(StepWorkTest, NothingRunsBeforeTheLaunchAndTheThirdStepOfAKindIsOneGraph) {
  const auto memory = Empty(64);
  for (int step = 0; step < 4; ++step) {
    ASSERT_TRUE(stream().Fill(memory->data(), 0, 64).ok());
    ASSERT_TRUE(work_.Begin(stream()).ok());
    ASSERT_TRUE(AddFill(memory->data(), 7, 64).ok());
    EXPECT_EQ(First(*memory), 0);
    ASSERT_TRUE(work_.Launch(stream()).ok());
    EXPECT_EQ(First(*memory), 7);
    EXPECT_EQ(enqueued_, std::min(step + 1, 2)) << "run, then recorded, then only launched";
  }
  ASSERT_TRUE(work_.Begin(stream()).ok());
  ASSERT_TRUE(AddFill(memory->data(), 8, 64).ok());
  ASSERT_TRUE(work_.Launch(stream()).ok());
  EXPECT_EQ(First(*memory), 8) << "another kind of step";
}

struct FillRecord {
  std::byte* to = nullptr;
  uint64_t value = 0, count = 0;
};

absl::Status StartFill(CudaStream& stream, const FillRecord& record) {
  return stream.Fill(record.to, static_cast<int>(record.value), record.count);
}

// Each kind of step comes three times, so that it is run, recorded and launched; any field tells kinds apart.
TEST_F(StepWorkTest, TheGraphOfARecordIsReplayedForTheSameRecordOnly) {
  const auto memory = Empty(64), other = Empty(64);
  const FillRecord record{memory->data(), 7, 64};
  const FillRecord records[] = {record, {memory->data(), 8, 64}, {memory->data(), 7, 32}, {other->data(), 7, 64}};
  for (int times = 0; times < 3; ++times) {
    for (const FillRecord& each : records) {
      ASSERT_TRUE(stream().Fill(memory->data(), 0, 64).ok());
      ASSERT_TRUE(stream().Fill(other->data(), 0, 64).ok());
      ASSERT_TRUE(work_.Begin(stream()).ok());
      ASSERT_TRUE(work_.Add(stream(), each, StartFill).ok());
      ASSERT_TRUE(work_.Launch(stream()).ok());
      std::vector<uint8_t> expected(64, 0);
      std::fill_n(expected.begin(), each.count, static_cast<uint8_t>(each.value));
      EXPECT_EQ(Download<uint8_t>(each.to == memory->data() ? *memory : *other), expected);
      EXPECT_EQ(First(each.to == memory->data() ? *other : *memory), 0);
    }
  }
}

TEST_F(StepWorkTest, AnImmediateStepEnqueuesWhatWasAddedAndWhatFollows) {
  const auto memory = Empty(64);
  ASSERT_TRUE(work_.Begin(stream()).ok());
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
  ASSERT_TRUE(work_.Begin(stream()).ok());
  ASSERT_TRUE(AddFill(memory->data(), 1, 64).ok());
  ASSERT_TRUE(work_.Begin(stream()).ok());
  ASSERT_TRUE(work_.Launch(stream()).ok());
  EXPECT_EQ(First(*memory), 0xff);
}

// While a step of another micro-batch runs. What this micro-batch's last step reads is not touched before that is over.
TEST_F(StepWorkTest, UploadsGoBesideWhatStillRunsAndBeforeTheLaunch) {
  const auto memory = Empty(64), seen = Empty(64);
  auto pinned = device().AllocatePinned(64);
  auto busy = device().CreateEvent(), copied = device().CreateEvent();
  ASSERT_TRUE(pinned.ok() && busy.ok() && copied.ok());
  const auto read = [&](CudaStream& s) { return s.Copy(seen->data(), memory->data(), 64); };
  const auto upload = [&](std::byte value) {
    (*pinned)->data()[0] = value;
    ASSERT_TRUE(stream().Upload(memory->data(), (*pinned)->data(), 64, &*copied).ok());
  };
  ASSERT_TRUE(work_.Begin(stream()).ok());
  ASSERT_TRUE(work_.Launch(stream()).ok());
  BeBusy(*busy);
  ASSERT_TRUE(work_.Begin(stream()).ok());
  upload(std::byte{5});
  ASSERT_TRUE(copied->Synchronize().ok());
  EXPECT_FALSE(*busy->Done()) << "the upload did not wait";
  ASSERT_TRUE(work_.Add(stream(), {1}, read).ok());
  ASSERT_TRUE(work_.Launch(stream()).ok());
  EXPECT_EQ(First(*seen), 5);

  ASSERT_TRUE(work_.Begin(stream()).ok());  // a step that fails: it is not launched
  BeBusy(*busy);
  ASSERT_TRUE(work_.Begin(stream()).ok());
  upload(std::byte{6});
  ASSERT_TRUE(copied->Synchronize().ok());
  EXPECT_TRUE(*busy->Done()) << "what the failed step enqueued may read the memory";
  ASSERT_TRUE(work_.Add(stream(), {1}, read).ok());
  ASSERT_TRUE(work_.BeImmediate(stream()).ok());
  EXPECT_EQ(First(*seen), 6);
  ASSERT_TRUE(stream().Upload(memory->data(), (*pinned)->data(), 64, nullptr).ok()) << "a copy like others";
  ASSERT_TRUE(work_.Launch(stream()).ok());
}

// An immediate step uploads again and again to the memory that its launches before still read.
TEST_F(StepWorkTest, NoUploadGoesBesideAnImmediateStep) {
  const auto memory = Empty(64), first = Empty(64), second = Empty(64);
  auto pinned = device().AllocatePinned(128);
  auto busy = device().CreateEvent();
  ASSERT_TRUE(pinned.ok() && busy.ok());
  const auto upload = [&](std::byte value) {
    std::byte* const from = (*pinned)->data() + (value == std::byte{1} ? 0 : 64);
    *from = value;
    ASSERT_TRUE(stream().Upload(memory->data(), from, 64, nullptr).ok());
  };
  StepWork other;
  ASSERT_TRUE(other.Begin(stream()).ok());
  ASSERT_TRUE(other.Launch(stream()).ok());
  ASSERT_TRUE(work_.Begin(stream()).ok());
  ASSERT_TRUE(work_.BeImmediate(stream()).ok());
  BeBusy(*busy);
  ASSERT_TRUE(other.Begin(stream()).ok());  // of another micro-batch
  for (const auto& [value, to] : {std::pair{std::byte{1}, &first}, {std::byte{2}, &second}}) {
    upload(value);
    ASSERT_TRUE(
        work_.Add(stream(), {}, [&, to = to](CudaStream& s) { return s.Copy((*to)->data(), memory->data(), 64); })
            .ok());
  }
  EXPECT_EQ(First(*first), 1);
  EXPECT_EQ(First(*second), 2);
  ASSERT_TRUE(work_.Launch(stream()).ok());
}

}  // namespace
}  // namespace dovetail::kernels::cuda
