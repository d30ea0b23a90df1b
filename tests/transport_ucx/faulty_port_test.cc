#include "transport/faulty/faulty_port.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "transport/inproc/inproc_fabric.h"

namespace dovetail::transport {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class HandClock final : public Clock {
 public:
  absl::Time Now() override { return now; }
  absl::Time now = absl::UnixEpoch();
};

class Steps final : public FrameHandler {
 public:
  void OnFrame(const Delivery& delivery) override {
    steps.push_back(delivery.header.step);
    bytes.push_back(delivery.payload.empty() ? -1 : static_cast<int>(delivery.payload[0]));
  }
  std::vector<uint64_t> steps;
  std::vector<int> bytes;
};

class FaultyPortTest : public ::testing::Test {
 protected:
  FaultyPortTest() {
    for (int i = 0; i < 3; ++i) ports_.push_back(fabric_.CreatePort(nullptr));
  }

  absl::Status Send(FaultyPort& port, int to, uint64_t step) {
    const auto header = proto::MakeHeader(proto::FrameType::kStepPlan, Epoch(1), StepId(step), MicroBatchId(0), 0, 1);
    return port.SendMessage(ports_[to]->id(), header, {static_cast<std::byte>(step)});
  }
  std::vector<uint64_t> ReceivedBy(int node) {
    Steps steps;
    while (ports_[node]->Poll(steps, 100) > 0) {
    }
    return steps.steps;
  }
  void Flush(FaultyPort& port) {
    Steps ignored;
    port.Poll(ignored, 1);
  }

  InprocFabric fabric_;
  std::vector<std::unique_ptr<Port>> ports_;
  HandClock clock_;
};

TEST_F(FaultyPortTest, WithoutFaultsEverythingPasses) {
  FaultyPort port(*ports_[0], clock_, 1);
  for (uint64_t step = 0; step < 3; ++step) ASSERT_TRUE(Send(port, 1, step).ok());
  EXPECT_THAT(ReceivedBy(1), ElementsAre(0, 1, 2));
}

TEST_F(FaultyPortTest, DropsAndRepeatsInTheProportionAskedForAndAlikeForOneSeed) {
  const auto run = [&](uint64_t seed) {
    FaultyPort port(*ports_[0], clock_, seed);
    port.Set({.drop = 0.2, .duplicate = 0.1});
    std::vector<uint64_t> received;
    for (uint64_t step = 0; step < 2000; ++step) {
      EXPECT_TRUE(Send(port, 1, step).ok());
      for (const uint64_t s : ReceivedBy(1)) received.push_back(s);
    }
    EXPECT_NEAR(static_cast<double>(port.dropped()), 400, 80);
    EXPECT_NEAR(static_cast<double>(port.duplicated()), 160, 60);
    EXPECT_EQ(received.size(), static_cast<size_t>(2000 - port.dropped() + port.duplicated()));
    return received;
  };
  const auto first = run(7);
  EXPECT_EQ(run(7), first);
  EXPECT_NE(run(8), first);
}

TEST_F(FaultyPortTest, DelayedFramesComeLaterButInOrderPerPeerWhileOthersOvertake) {
  FaultyPort port(*ports_[0], clock_, 3);
  port.Set({.delay = 1, .delay_max = absl::Milliseconds(10)});
  ASSERT_TRUE(Send(port, 1, 1).ok());
  port.Set({});
  ASSERT_TRUE(Send(port, 1, 2).ok());  // waits behind the first
  ASSERT_TRUE(Send(port, 2, 3).ok());
  Flush(port);
  EXPECT_THAT(ReceivedBy(1), IsEmpty());
  EXPECT_THAT(ReceivedBy(2), ElementsAre(3));
  clock_.now += absl::Milliseconds(10);
  Flush(port);
  EXPECT_THAT(ReceivedBy(1), ElementsAre(1, 2));
  EXPECT_EQ(port.delayed(), 2);
}

TEST_F(FaultyPortTest, ADelayedTensorHasTheBytesItHadWhenItWasSent) {
  FaultyPort port(*ports_[0], clock_, 3);
  port.Set({.delay = 1});
  std::vector<std::byte> tensor{std::byte{42}};
  const auto header = proto::MakeHeader(proto::FrameType::kQuery, Epoch(1), StepId(1), MicroBatchId(0), 0, 1);
  ASSERT_TRUE(port.SendTensor(ports_[1]->id(), header, tensor).ok());
  tensor[0] = std::byte{0};
  clock_.now += absl::Seconds(1);
  Flush(port);
  Steps steps;
  ports_[1]->Poll(steps, 10);
  EXPECT_THAT(steps.bytes, ElementsAre(42));
}

TEST_F(FaultyPortTest, AnEchoComesLaterThanItsFrameAndPastOthers) {
  FaultyPort port(*ports_[0], clock_, 3);
  EXPECT_EQ(port.NextDue(), absl::InfiniteFuture());
  port.Set({.echo = 1, .delay_max = absl::Milliseconds(10)});
  ASSERT_TRUE(Send(port, 1, 1).ok());
  port.Set({});
  EXPECT_LE(port.NextDue(), clock_.now + absl::Milliseconds(10));
  ASSERT_TRUE(Send(port, 1, 2).ok());
  EXPECT_THAT(ReceivedBy(1), ElementsAre(1, 2));
  clock_.now += absl::Milliseconds(10);
  Flush(port);
  EXPECT_THAT(ReceivedBy(1), ElementsAre(1));
  EXPECT_EQ(port.echoed(), 1);
}

TEST_F(FaultyPortTest, AnEchoWaitsForItsFrameWhereThatIsLateItself) {
  FaultyPort port(*ports_[0], clock_, 3);
  port.Set({.echo = 1, .delay = 1, .delay_max = absl::Milliseconds(10)});
  for (uint64_t step = 1; step <= 5; ++step) ASSERT_TRUE(Send(port, 1, step).ok());
  std::vector<uint64_t> received;
  for (int i = 0; i < 12; ++i) {
    clock_.now += absl::Milliseconds(1);
    Flush(port);
    for (const uint64_t step : ReceivedBy(1)) received.push_back(step);
  }
  ASSERT_EQ(received.size(), 10u);
  EXPECT_THAT(std::vector<uint64_t>(received.begin(), received.begin() + 5), ElementsAre(1, 2, 3, 4, 5));
}

TEST_F(FaultyPortTest, ACutLosesBothWaysUntilItIsMended) {
  FaultyPort port(*ports_[0], clock_, 3);
  port.Cut(ports_[1]->id());
  ASSERT_TRUE(Send(port, 1, 1).ok());
  ASSERT_TRUE(Send(port, 2, 2).ok());
  FaultyPort back(*ports_[1], clock_, 4);
  ASSERT_TRUE(Send(back, 0, 3).ok());
  Steps steps;
  port.Poll(steps, 10);
  EXPECT_THAT(steps.steps, IsEmpty());
  EXPECT_THAT(ReceivedBy(1), IsEmpty());
  EXPECT_THAT(ReceivedBy(2), ElementsAre(2));
  EXPECT_EQ(port.dropped(), 2);
  port.Mend(ports_[1]->id());
  ASSERT_TRUE(Send(port, 1, 4).ok());
  ASSERT_TRUE(Send(back, 0, 5).ok());
  port.Poll(steps, 10);
  EXPECT_THAT(steps.steps, ElementsAre(5));
  EXPECT_THAT(ReceivedBy(1), ElementsAre(4));
}

TEST_F(FaultyPortTest, ErrorsOfThePortItselfComeThrough) {
  FaultyPort port(*ports_[0], clock_, 3);
  const auto header = proto::MakeHeader(proto::FrameType::kStepPlan, Epoch(1), StepId(1), MicroBatchId(0), 0, 0);
  EXPECT_EQ(port.SendMessage(NodeId(99), header, {}).code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace dovetail::transport
