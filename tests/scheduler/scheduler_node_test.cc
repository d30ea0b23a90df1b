#include "scheduler/scheduler_node.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "proto/sequence_frames.h"
#include "tests/scheduler/fake_cluster.h"

// The scheduler's shell before a peer that reads slowly.

namespace dovetail::scheduler {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

// Takes as many messages as it has room for.
class NarrowPort final : public transport::Port {
 public:
  NodeId id() const override { return NodeId(0); }
  absl::Status SendMessage(NodeId to, const proto::FrameHeader& header, std::vector<std::byte> payload) override {
    if (room == 0) return ResourceExhausted("node ", to.value(), " reads slowly");
    --room;
    if (header.type == proto::FrameType::kOpenSequence)
      opened.push_back(proto::Decode<proto::OpenSequence>(payload).value().sequence.value());
    return absl::OkStatus();
  }
  absl::Status SendTensor(NodeId, const proto::FrameHeader&, transport::LentBytes) override {
    return Internal("schedulers send no tensors");
  }
  int Poll(transport::FrameHandler&, int) override { return 0; }

  int room = 0;
  std::vector<uint64_t> opened;  // sequences, in the order of arrival
};

TEST(SchedulerNode, SendsInOrderAndLaterWhatAPeerHadNoRoomFor) {
  SchedulerOptions options;
  options.attention = SmallTable(1, 1);
  options.enable_prefix_caching = false;
  NarrowPort port;
  SchedulerNode node(options, 0, port, SystemClock(), [](GenerationUpdate) {},
                     [](const proto::StepResult&, int, int) {});
  node.AddAttentionWorker(WorkerId(0), Epoch(1), NodeId(1), 1000);
  node.AddComputeWorker(WorkerId(0), NodeId(2));
  port.room = 1;
  for (uint64_t i = 1; i <= 4; ++i) {
    auto request = std::make_shared<GenerationRequest>();
    request->id = RequestId(i);
    request->prompt = {1, 2, 3};
    request->max_tokens = 4;
    node.Handle(RequestArrived{std::move(request)});
  }
  EXPECT_THAT(port.opened, ElementsAre(1));
  EXPECT_EQ(node.Poll(), 0) << "there is still no room";
  port.room = 2;
  EXPECT_EQ(node.Poll(), 2);
  EXPECT_THAT(port.opened, ElementsAre(1, 2, 3));
  port.room = 10;
  EXPECT_EQ(node.Poll(), 1);
  EXPECT_THAT(port.opened, ElementsAre(1, 2, 3, 4));
}

}  // namespace
}  // namespace dovetail::scheduler
