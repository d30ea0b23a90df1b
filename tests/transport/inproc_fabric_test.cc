#include "transport/inproc/inproc_fabric.h"

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dovetail::transport {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

proto::FrameHeader Header(uint64_t step, size_t payload_bytes = 0) {
  return proto::MakeHeader(proto::FrameType::kQuery, Epoch(1), StepId(step), MicroBatchId(0), 0, payload_bytes);
}

std::vector<std::byte> Bytes(const std::string& text) {
  std::vector<std::byte> bytes(text.size());
  std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

// Notes what arrives: "from:step" or "from:step=text"; then does what it is told.
class Recorder final : public FrameHandler {
 public:
  void OnFrame(const Delivery& delivery) override {
    std::string line = absl::StrCat(delivery.from.value(), ":", delivery.header.step);
    if (!delivery.payload.empty())
      absl::StrAppend(&line, "=",
                      std::string(reinterpret_cast<const char*>(delivery.payload.data()), delivery.payload.size()));
    seen.push_back(line);
    last_payload = delivery.payload.data();
    if (then) then(delivery);
  }
  std::vector<std::string> seen;
  const std::byte* last_payload = nullptr;
  std::function<void(const Delivery&)> then;
};

class InprocFabricTest : public ::testing::Test {
 protected:
  InprocFabricTest() {
    for (int i = 0; i < 3; ++i) ports_.push_back(fabric_.CreatePort(nullptr));
  }
  absl::Status Send(int from, int to, uint64_t step) {
    return ports_[from]->SendMessage(NodeId(static_cast<uint32_t>(to)), Header(step), {});
  }
  std::vector<std::string> Poll(int node, int max_frames = 1000) {
    Recorder recorder;
    const int handled = ports_[node]->Poll(recorder, max_frames);
    EXPECT_EQ(handled, static_cast<int>(recorder.seen.size()));
    return recorder.seen;
  }

  InprocFabric fabric_;
  std::vector<std::unique_ptr<Port>> ports_;
};

TEST_F(InprocFabricTest, NodesAreNumberedFromZero) {
  for (uint32_t i = 0; i < 3; ++i) EXPECT_EQ(ports_[i]->id(), NodeId(i));
}

TEST_F(InprocFabricTest, FramesArriveOnceAndInTheOrderTheyWereSent) {
  for (uint64_t step = 0; step < 5; ++step) ASSERT_TRUE(Send(0, 1, step).ok());
  EXPECT_THAT(Poll(1), ElementsAre("0:0", "0:1", "0:2", "0:3", "0:4"));
  EXPECT_THAT(Poll(1), ElementsAre());
  EXPECT_THAT(Poll(2), ElementsAre()) << "no other node's";
}

TEST_F(InprocFabricTest, MessagesAndTensorsKeepTheirCommonOrder) {
  const auto tensor = Bytes("tensor");
  ASSERT_TRUE(ports_[0]->SendMessage(NodeId(1), Header(1, 5), Bytes("first")).ok());
  ASSERT_TRUE(ports_[0]->SendTensor(NodeId(1), Header(2, 6), tensor).ok());
  ASSERT_TRUE(ports_[0]->SendMessage(NodeId(1), Header(3, 4), Bytes("last")).ok());
  EXPECT_THAT(Poll(1), ElementsAre("0:1=first", "0:2=tensor", "0:3=last"));
}

TEST_F(InprocFabricTest, ATensorIsTheSendersOwnMemory) {
  const auto tensor = Bytes("q");
  Recorder recorder;
  ASSERT_TRUE(ports_[0]->SendTensor(NodeId(1), Header(1, 1), tensor).ok());
  ports_[1]->Poll(recorder, 1);
  EXPECT_EQ(recorder.last_payload, tensor.data()) << "nothing is copied";
}

TEST_F(InprocFabricTest, ANodeMaySendToItself) {
  ASSERT_TRUE(Send(1, 1, 7).ok());
  EXPECT_THAT(Poll(1), ElementsAre("1:7"));
}

TEST_F(InprocFabricTest, NamesANodeThatIsNotThere) {
  const absl::Status sent = Send(0, 3, 1);
  EXPECT_TRUE(absl::IsNotFound(sent));
  EXPECT_THAT(std::string(sent.message()), HasSubstr("node 3 is not on this fabric"));
}

TEST_F(InprocFabricTest, RefusesWhatAPeerDoesNotReadAndTakesItAgainOnceItDoes) {
  for (int i = 0; i < kMaxFramesInFlight; ++i) ASSERT_TRUE(Send(0, 1, static_cast<uint64_t>(i)).ok()) << i;
  const absl::Status sent = Send(0, 1, 9999);
  EXPECT_TRUE(absl::IsResourceExhausted(sent));
  EXPECT_THAT(std::string(sent.message()), HasSubstr("node 1 has 1024 unread frames from node 0"));
  EXPECT_TRUE(absl::IsResourceExhausted(ports_[0]->SendTensor(NodeId(1), Header(1), {})));
  EXPECT_TRUE(Send(2, 1, 1).ok()) << "other nodes have credits of their own";
  EXPECT_TRUE(Send(1, 0, 1).ok()) << "and so has the way back";

  EXPECT_THAT(Poll(1, 1), ElementsAre("0:0"));
  EXPECT_TRUE(Send(0, 1, 5000).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(Send(0, 1, 5001)));
  const auto rest = Poll(1, 5000);
  EXPECT_EQ(rest.size(), 1u + kMaxFramesInFlight) << "one of node 2; what was refused never arrives";
  EXPECT_EQ(rest.back(), "0:5000");
}

TEST_F(InprocFabricTest, TakesFramesOfAllPeersInTurn) {
  for (uint64_t step = 0; step < 3; ++step) {
    ASSERT_TRUE(Send(0, 2, step).ok());
    ASSERT_TRUE(Send(1, 2, step).ok());
  }
  EXPECT_THAT(Poll(2), ElementsAre("0:0", "1:0", "0:1", "1:1", "0:2", "1:2"));
}

TEST_F(InprocFabricTest, APeerThatFloodsDoesNotStarveAnotherHoweverFewFramesAPollTakes) {
  for (uint64_t step = 0; step < 100; ++step) ASSERT_TRUE(Send(0, 2, step).ok());
  ASSERT_TRUE(Send(1, 2, 1).ok());
  EXPECT_THAT(Poll(2, 1), ElementsAre("0:0"));
  EXPECT_THAT(Poll(2, 1), ElementsAre("1:1"));
  EXPECT_THAT(Poll(2, 1), ElementsAre("0:1"));
}

TEST_F(InprocFabricTest, AHandlerMaySendEvenToTheNodeThatItReads) {
  Recorder recorder;
  recorder.then = [&](const Delivery& delivery) {
    EXPECT_TRUE(delivery.header.step >= 5 || Send(0, 1, delivery.header.step + 1).ok());
    EXPECT_TRUE(Send(1, 0, delivery.header.step).ok());
  };
  ASSERT_TRUE(Send(0, 1, 0).ok());
  EXPECT_EQ(ports_[1]->Poll(recorder, 100), 6);
  EXPECT_THAT(Poll(0), ElementsAre("1:0", "1:1", "1:2", "1:3", "1:4", "1:5"));
}

TEST_F(InprocFabricTest, APollTakesNoMoreThanItWasAskedFor) {
  for (uint64_t step = 0; step < 5; ++step) ASSERT_TRUE(Send(0, 1, step).ok());
  EXPECT_THAT(Poll(1, 2), ElementsAre("0:0", "0:1"));
  EXPECT_THAT(Poll(1, 0), ElementsAre());
  EXPECT_THAT(Poll(1, 2), ElementsAre("0:2", "0:3"));
}

TEST_F(InprocFabricTest, ANodeThatHasLeftIsUnavailableAndItsLastFramesStillArrive) {
  ASSERT_TRUE(Send(1, 0, 1).ok());
  ASSERT_TRUE(Send(0, 1, 2).ok()) << "never read: freed with the fabric";
  ports_[1].reset();
  const absl::Status sent = Send(0, 1, 3);
  EXPECT_TRUE(absl::IsUnavailable(sent));
  EXPECT_THAT(std::string(sent.message()), HasSubstr("node 1 has left"));
  EXPECT_THAT(Poll(0), ElementsAre("1:1"));
  EXPECT_TRUE(Send(0, 2, 4).ok()) << "the others go on";
}

TEST_F(InprocFabricTest, RingsTheDoorbellOfTheReceiverOnly) {
  Doorbell first, second;
  InprocFabric fabric;
  const auto a = fabric.CreatePort(&first);
  const auto b = fabric.CreatePort(&second);
  ASSERT_TRUE(a->SendMessage(NodeId(1), Header(1), {}).ok());
  EXPECT_TRUE(second.Wait(absl::ZeroDuration()));
  EXPECT_FALSE(first.Wait(absl::ZeroDuration()));
}

}  // namespace
}  // namespace dovetail::transport
