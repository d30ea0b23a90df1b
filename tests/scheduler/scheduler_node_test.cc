#include "scheduler/scheduler_node.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
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
    if (to == stuck) return ResourceExhausted("node ", to.value(), " reads nothing");
    if (to == narrow) return InvalidArgument("a frame is too long for node ", to.value());
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
  NodeId stuck{99}, narrow{99};
  std::vector<uint64_t> opened;  // sequences, in the order of arrival
};

TEST(SchedulerNode, KnowsHowLongSequencesMayBeAsWorkersComeAndGo) {
  SchedulerOptions options;
  options.attention = SmallTable(1, 1);  // a block for 64 tokens
  options.max_model_len = 1000;
  NarrowPort port;
  port.room = 100;
  SchedulerNode node(
      options, 0, port, SystemClock(), [](GenerationUpdate) {}, [](const proto::StepResult&, int, int) {});
  EXPECT_EQ(node.stats().longest_sequence, 0);
  node.AddAttentionWorker(WorkerId(1), Epoch(1), NodeId(1), 3);
  EXPECT_EQ(node.stats().longest_sequence, 192);
  node.AddAttentionWorker(WorkerId(2), Epoch(1), NodeId(2), 100);
  EXPECT_EQ(node.stats().longest_sequence, 1000);
  node.DrainAttentionWorker(WorkerId(2), Epoch(1));
  EXPECT_EQ(node.stats().longest_sequence, 192);
  node.LoseAttentionWorker(WorkerId(2), Epoch(1));
  EXPECT_EQ(node.stats().longest_sequence, 192);
  node.LoseAttentionWorker(WorkerId(1), Epoch(1));
  EXPECT_EQ(node.stats().longest_sequence, 0);
}

TEST(SchedulerNode, SaysWhichWorkersKvIsDamagedAgainAndAgain) {
  SchedulerOptions options;
  options.attention = SmallTable(1, 1);
  NarrowPort port;
  SchedulerNode node(
      options, 0, port, SystemClock(), [](GenerationUpdate) {}, [](const proto::StepResult&, int, int) {});
  for (const uint32_t worker : {1u, 2u}) node.AddAttentionWorker(WorkerId(worker), Epoch(1), NodeId(worker), 100);
  node.AddComputeWorker(WorkerId(3), NodeId(3));
  std::vector<std::byte> bytes;
  proto::Encode(proto::StepResult{.step = StepId(1),
                                  .status = proto::StepStatus::kDamaged,
                                  .error = "blocks changed",
                                  .failed_worker = WorkerId(2)},
                bytes);
  const auto header =
      proto::MakeHeader(proto::FrameType::kStepResult, Epoch(0), StepId(1), MicroBatchId(0), 0, bytes.size());
  testing::internal::CaptureStderr();
  for (int i = 0; i < 12; ++i) node.OnFrame({NodeId(3), header, bytes});
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(node.DamagedSteps(WorkerId(1)), 0u);
  EXPECT_EQ(node.DamagedSteps(WorkerId(2)), 12u);
  for (const char* steps : {"in 3 steps", "in 6 steps", "in 12 steps"})
    EXPECT_THAT(said, testing::HasSubstr(std::string("attention worker 2: KV was not what was written ") + steps));
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 3);
}

TEST(SchedulerNode, SendsInOrderAndLaterWhatAPeerHadNoRoomFor) {
  SchedulerOptions options;
  options.attention = SmallTable(1, 1);
  options.enable_prefix_caching = false;
  NarrowPort port;
  SchedulerNode node(
      options, 0, port, SystemClock(), [](GenerationUpdate) {}, [](const proto::StepResult&, int, int) {});
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

std::shared_ptr<GenerationRequest> Request(uint64_t id) {
  auto request = std::make_shared<GenerationRequest>();
  request->id = RequestId(id);
  request->prompt = {1, 2, 3};
  request->max_tokens = 4;
  return request;
}

TEST(SchedulerNode, APeerThatReadsNothingHoldsUpNoOtherAndMustGoInTheEnd) {
  SchedulerOptions options;
  options.attention = SmallTable(1, 1);
  options.enable_prefix_caching = false;
  options.max_num_seqs = 8;
  NarrowPort port;
  SchedulerNode node(
      options, 0, port, SystemClock(), [](GenerationUpdate) {}, [](const proto::StepResult&, int, int) {});
  node.AddAttentionWorker(WorkerId(0), Epoch(1), NodeId(1), 1000);
  node.AddAttentionWorker(WorkerId(1), Epoch(1), NodeId(2), 1000);
  node.AddComputeWorker(WorkerId(2), NodeId(3));
  port.room = 1 << 30;
  port.stuck = NodeId(1);
  for (uint64_t i = 1; i <= 4; ++i) node.Handle(RequestArrived{Request(i)});
  EXPECT_EQ(port.opened.size(), 2u) << "those of the other attention worker";

  // Each is opened and released somewhere.
  std::vector<SchedulerNode::Dismissal> dismissals;
  for (uint64_t i = 5; i <= 100'000 && dismissals.empty(); ++i) {
    node.Handle(RequestArrived{Request(i)});
    node.Handle(RequestCancelled{RequestId(i)});
    dismissals = node.TakeDismissals();
  }
  ASSERT_EQ(dismissals.size(), 1u);
  EXPECT_EQ(dismissals[0].worker, WorkerId(0));
  EXPECT_EQ(dismissals[0].why, "it has left 16384 orders unread");
  node.LoseAttentionWorker(WorkerId(0), Epoch(1));
  EXPECT_THAT(node.TakeDismissals(), IsEmpty());
}

// Two attention workers and a compute worker; each of the first two is given a sequence to open.
struct TwoAttentionWorkers {
  NarrowPort port;
  std::unique_ptr<SchedulerNode> node;

  explicit TwoAttentionWorkers(NodeId narrow = NodeId(99)) {
    SchedulerOptions options;
    options.attention = SmallTable(1, 1);
    options.enable_prefix_caching = false;
    port.room = 1 << 30;
    port.narrow = narrow;
    node = std::make_unique<SchedulerNode>(
        options, 0, port, SystemClock(), [](GenerationUpdate) {}, [](const proto::StepResult&, int, int) {});
    node->AddAttentionWorker(WorkerId(1), Epoch(1), NodeId(1), 1000);
    node->AddAttentionWorker(WorkerId(2), Epoch(1), NodeId(2), 1000);
    node->AddComputeWorker(WorkerId(3), NodeId(3));
    for (uint64_t i = 1; i <= 2; ++i) node->Handle(RequestArrived{Request(i)});
  }
  // The one dismissal, once the worker has gone: its sequence is opened elsewhere.
  std::string WhyOut(WorkerId worker, size_t opened) {
    const auto dismissals = node->TakeDismissals();
    if (dismissals.size() != 1 || dismissals[0].worker != worker) return "not dismissed";
    node->LoseAttentionWorker(worker, Epoch(1));
    node->Poll();
    EXPECT_EQ(port.opened.size(), opened);
    EXPECT_THAT(node->TakeDismissals(), IsEmpty());
    return dismissals[0].why;
  }
};

TEST(SchedulerNode, AnAttentionWorkerWhoseAnswerCannotBeReadMustGoAndItsSequencesBeginAgain) {
  using proto::FrameType;
  for (const FrameType type : {FrameType::kSequenceOpened, FrameType::kSequenceMoved, FrameType::kPrefixProbed}) {
    TwoAttentionWorkers cluster;
    ASSERT_EQ(cluster.port.opened.size(), 2u);
    const std::vector<std::byte> cut(1);
    for (int i = 0; i < 2; ++i)
      cluster.node->OnFrame(
          {NodeId(2), proto::MakeHeader(type, Epoch(1), StepId(1), MicroBatchId(0), 0, cut.size()), cut});
    EXPECT_THAT(cluster.WhyOut(WorkerId(2), 3), testing::StartsWith("its answer cannot be read: "));
  }
}

TEST(SchedulerNode, AnAttentionWorkerThatCannotBeSentAnOrderMustGoAndItsSequencesBeginAgain) {
  TwoAttentionWorkers cluster(NodeId(2));
  ASSERT_EQ(cluster.port.opened.size(), 1u);
  EXPECT_EQ(cluster.WhyOut(WorkerId(2), 2), "an order to it cannot be sent: a frame is too long for node 2");
}

TEST(SchedulerNode, OrdersThatWaitAreDroppedWithTheWorkerThatCannotBeSentOne) {
  TwoAttentionWorkers cluster;
  cluster.port.stuck = NodeId(2);
  for (uint64_t i = 3; i <= 8; ++i) cluster.node->Handle(RequestArrived{Request(i)});
  const size_t opened = cluster.port.opened.size();
  cluster.port.stuck = NodeId(99);
  cluster.port.narrow = NodeId(2);
  cluster.node->Poll();
  EXPECT_EQ(cluster.port.opened.size(), opened);
  EXPECT_THAT(cluster.WhyOut(WorkerId(2), 2 + 6 + 1), testing::HasSubstr("cannot be sent"));
}

}  // namespace
}  // namespace dovetail::scheduler
