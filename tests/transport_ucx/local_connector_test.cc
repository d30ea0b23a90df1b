#include "transport/inproc/local_connector.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "control/ucx_connector.h"
#include "tests/support/test_data.h"

// Two nodes of one event loop over UCX: what they send each other goes through memory, and one wait is for both.

namespace dovetail::transport {
namespace {

constexpr absl::Duration kLong = absl::Seconds(30);

std::unique_ptr<Connector> Ucx(uint32_t node) {
  ucx::UcxOptions options;
  options.node = NodeId(node);
  options.epoch = Epoch(node * 10);
  options.lanes = *ucx::ParseLanes("shm");
  auto connector = control::UcxConnector::Create(options);
  EXPECT_TRUE(connector.ok()) << connector.status();
  return *std::move(connector);
}

struct Seen final : FrameHandler {
  void OnFrame(const Delivery& delivery) override {
    froms.push_back(delivery.from);
    payloads.push_back(delivery.payload.data());
    bytes.emplace_back(delivery.payload.begin(), delivery.payload.end());
  }
  std::vector<NodeId> froms;
  std::vector<const std::byte*> payloads;
  std::vector<std::vector<std::byte>> bytes;
};

class LocalConnectorTest : public testing::Test {
 protected:
  LocalConnectorTest() { std::tie(one_, other_) = LocalConnector::Link(Ucx(1), Ucx(2)); }

  void Connect() {
    ASSERT_TRUE(one_->AddPeer(NodeId(2), Epoch(20), other_->address()).ok());
    ASSERT_TRUE(other_->AddPeer(NodeId(1), Epoch(10), one_->address()).ok());
  }

  proto::FrameHeader header_;
  std::unique_ptr<LocalConnector> one_, other_;
};

TEST_F(LocalConnectorTest, AreConnectedOnceBothHaveAddedEachOther) {
  EXPECT_EQ(one_->LanesTo(NodeId(2)), "");
  ASSERT_TRUE(one_->AddPeer(NodeId(2), Epoch(20), other_->address()).ok());
  EXPECT_FALSE(one_->Connected(NodeId(2)));
  EXPECT_EQ(one_->AddPeer(NodeId(2), Epoch(20), "").code(), absl::StatusCode::kAlreadyExists);
  ASSERT_TRUE(other_->AddPeer(NodeId(1), Epoch(10), one_->address()).ok());
  EXPECT_TRUE(one_->Connected(NodeId(2)));
  EXPECT_TRUE(other_->Connected(NodeId(1)));
  EXPECT_EQ(one_->LanesTo(NodeId(2)), "memory");
  other_->RemovePeer(NodeId(1));
  EXPECT_FALSE(one_->Connected(NodeId(2)));
}

TEST_F(LocalConnectorTest, TensorsAreNotCopiedAndFramesKeepTheirOrder) {
  Connect();
  const std::vector<std::byte> tensor(100, std::byte{7});
  ASSERT_TRUE(one_->SendTensor(NodeId(2), header_, tensor).ok());
  ASSERT_TRUE(one_->SendMessage(NodeId(2), header_, std::vector<std::byte>(3, std::byte{1})).ok());
  Seen seen;
  EXPECT_EQ(other_->Poll(seen, 1), 1);
  EXPECT_EQ(other_->Poll(seen, 8), 1);
  ASSERT_EQ(seen.bytes.size(), 2u);
  EXPECT_EQ(seen.payloads[0], tensor.data());
  EXPECT_EQ(seen.bytes[1].size(), 3u);
  EXPECT_EQ(seen.froms[0], NodeId(1));
  EXPECT_EQ(one_->BytesTo(NodeId(2)).tensors, 100u);
  EXPECT_EQ(one_->BytesTo(NodeId(2)).messages, 3u);
}

TEST_F(LocalConnectorTest, WhatWasSentEarlyIsDeliveredOnceThePeerIsKnown) {
  ASSERT_TRUE(one_->AddPeer(NodeId(2), Epoch(20), other_->address()).ok());
  ASSERT_TRUE(one_->SendMessage(NodeId(2), header_, std::vector<std::byte>(1)).ok());
  Seen seen;
  EXPECT_EQ(other_->Poll(seen, 8), 0);
  ASSERT_TRUE(other_->AddPeer(NodeId(1), Epoch(10), one_->address()).ok());
  EXPECT_EQ(other_->Poll(seen, 8), 1);
}

TEST_F(LocalConnectorTest, UnreadFramesAreBoundedAndARemovedPeerGetsNone) {
  Connect();
  for (int i = 0; i < kMaxFramesInFlight; ++i)
    ASSERT_TRUE(one_->SendMessage(NodeId(2), header_, std::vector<std::byte>(1)).ok());
  EXPECT_EQ(one_->SendMessage(NodeId(2), header_, {}).code(), absl::StatusCode::kResourceExhausted);
  other_->RemovePeer(NodeId(1));
  Seen seen;
  EXPECT_EQ(other_->Poll(seen, kMaxFramesInFlight), 0);
  one_->RemovePeer(NodeId(2));
  EXPECT_EQ(one_->SendMessage(NodeId(2), header_, {}).code(), absl::StatusCode::kNotFound);
}

TEST_F(LocalConnectorTest, APartnerThatHasEndedIsUnavailable) {
  Connect();
  other_.reset();
  EXPECT_EQ(one_->SendMessage(NodeId(2), header_, {}).code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(one_->Connected(NodeId(3)));
}

// A stranger in another thread sends to the second of the two while the thread of both sleeps.
TEST_F(LocalConnectorTest, OneWaitIsForBoth) {
  Connect();
  std::unique_ptr<Connector> stranger = Ucx(3);
  ASSERT_TRUE(stranger->AddPeer(NodeId(2), Epoch(20), other_->address()).ok());
  ASSERT_TRUE(other_->AddPeer(NodeId(3), Epoch(30), stranger->address()).ok());
  const proto::FrameHeader of_nine_bytes =
      proto::MakeHeader(proto::FrameType::kStepPlan, Epoch(1), StepId(1), MicroBatchId(0), 0, 9);
  Seen seen;
  while (!other_->Connected(NodeId(3)) || !stranger->Connected(NodeId(2))) {
    stranger->Poll(seen, 8);
    one_->Poll(seen, 8);
    other_->Poll(seen, 8);
  }
  for (int round = 0; round < 20; ++round) {
    Seen got;
    std::atomic<bool> received{false};
    std::thread sends([&] {
      absl::SleepFor(absl::Milliseconds(5));  // the others sleep by then, mostly; either way they are to see it
      ASSERT_TRUE(stranger->SendMessage(NodeId(2), of_nine_bytes, std::vector<std::byte>(9)).ok());
      while (!received) stranger->Poll(seen, 8);
    });
    const absl::Time begun = absl::Now();
    while (got.bytes.empty() && absl::Now() - begun < kLong)
      if (one_->Poll(got, 8) + other_->Poll(got, 8) == 0) one_->WaitTogether(*other_, kLong);
    received = true;
    sends.join();
    ASSERT_EQ(got.bytes.size(), 1u);
    ASSERT_LT(absl::Now() - begun, kLong / 2) << "the wait ended by its time only";
  }
}

TEST_F(LocalConnectorTest, AWaitForBothEndsWhenOneIsWoken) {
  for (LocalConnector* const woken : {one_.get(), other_.get()}) {
    std::thread wakes([&] { woken->Wake(); });
    const absl::Time begun = absl::Now();
    one_->WaitTogether(*other_, kLong);
    EXPECT_LT(absl::Now() - begun, kLong / 2);
    wakes.join();
  }
}

TEST_F(LocalConnectorTest, AWaitForBothEndsAtOnceWhenThePartnerHasSent) {
  Connect();
  for (auto [from, to, id] : {std::tuple(one_.get(), other_.get(), 2), std::tuple(other_.get(), one_.get(), 1)}) {
    ASSERT_TRUE(from->SendMessage(NodeId(static_cast<uint32_t>(id)), header_, std::vector<std::byte>(1)).ok());
    const absl::Time begun = absl::Now();
    one_->WaitTogether(*other_, kLong);
    EXPECT_LT(absl::Now() - begun, kLong / 2);
    Seen seen;
    EXPECT_EQ(to->Poll(seen, 8), 1);
  }
}

}  // namespace
}  // namespace dovetail::transport
