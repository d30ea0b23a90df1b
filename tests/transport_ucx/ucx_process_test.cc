#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "tests/transport_ucx/child_node.h"
#include "transport/ucx/ucx_port.h"

namespace dovetail::transport::ucx {
namespace {

using proto::FrameType;

class UcxProcessTest : public ::testing::TestWithParam<Way> {};

INSTANTIATE_TEST_SUITE_P(Ways, UcxProcessTest,
                         ::testing::Values(Way{Lanes::kShm, false}, Way{Lanes::kShm, true}, Way{Lanes::kTcp, false}),
                         [](const auto& info) { return NameOfWay(info.param); });

// Names in /dev/shm and System V segments: what a process could leave behind.
std::set<std::string> SharedMemory() {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) names.insert(entry.path().string());
  std::ifstream segments("/proc/sysvipc/shm");
  for (std::string line; std::getline(segments, line);) {
    std::istringstream fields(line);
    std::string key, id;
    fields >> key >> id;
    names.insert("sysv " + id);
  }
  return names;
}

bool RoundTrip(TestNode& node, const ChildNode& child, uint64_t step, size_t bytes) {
  const auto tensor = Pattern(bytes, static_cast<uint32_t>(step));
  if (!node.port->SendTensor(child.id(), HeaderOf(FrameType::kQuery, step, 0, bytes), tensor).ok()) return false;
  const size_t before = node.collector.frames.size();
  if (!PumpUntil({&node}, [&] { return node.collector.frames.size() > before; })) return false;
  const Received& answer = node.collector.frames.back();
  return answer.from == child.id() && answer.header.step == step && answer.bytes == tensor;
}

TEST_P(UcxProcessTest, TensorsGoToAnotherProcessAndBack) {
  TestNode node(OptionsFor(1, GetParam()));
  ChildNode child(2, GetParam().lanes);
  ASSERT_EQ(child.Join(node), "");
  uint64_t step = 0;
  for (const size_t bytes : {0ul, 1ul, 64ul, 4096ul, 12288ul, 65536ul, 786432ul, 16ul << 20})
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(RoundTrip(node, child, ++step, bytes)) << bytes;
}

TEST_P(UcxProcessTest, AKilledPeerIsRemovedAtOnceAndItsNextIncarnationServes) {
  TestNode node(OptionsFor(1, GetParam()));
  ChildNode other(3, GetParam().lanes);
  ASSERT_EQ(other.Join(node), "");
  const auto tensor = Pattern(1 << 20, 1);
  for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
    ChildNode child(2, GetParam().lanes, epoch);
    ASSERT_EQ(child.Join(node), "");
    ASSERT_TRUE(RoundTrip(node, child, epoch, 100'000));
    child.Kill();
    // Sends fail, or run out of credit, and never block; the node does not have to wait for UCX to notice.
    absl::Status sent;
    for (uint64_t step = 0; sent.ok() && step < 2000; ++step) {
      sent = node.port->SendTensor(child.id(), HeaderOf(FrameType::kQuery, step, 0, tensor.size()), tensor);
      node.Poll();
    }
    EXPECT_TRUE(absl::IsUnavailable(sent) || absl::IsResourceExhausted(sent)) << sent;
    const absl::Time begun = SystemClock().Now();
    ASSERT_TRUE(node.port->RemovePeer(child.id()).ok());
    EXPECT_LT(SystemClock().Now() - begun, absl::Seconds(2));
    child.Reap();
    EXPECT_TRUE(RoundTrip(node, other, 100 + epoch, 100'000));
  }
}

TEST_P(UcxProcessTest, APeerThatDiesIsReportedOnceByUcxOrOursToRemove) {
  TestNode node(OptionsFor(1, GetParam()));
  ChildNode child(2, GetParam().lanes);
  ASSERT_EQ(child.Join(node), "");
  ASSERT_TRUE(RoundTrip(node, child, 1, 1000));
  child.Kill();
  child.Reap();  // UCX does not see the death of a process that nobody has reaped
  std::vector<PeerFailure> failures;
  ASSERT_TRUE(PumpUntil({&node}, [&] {
    node.port->Wait(absl::Milliseconds(20));
    return !(failures = node.port->TakeFailures()).empty();
  }));
  ASSERT_EQ(failures.size(), 1u);
  EXPECT_EQ(failures[0].node, child.id());
  EXPECT_EQ(failures[0].epoch, Epoch(1));
  EXPECT_EQ(node.port->SendMessage(child.id(), HeaderOf(FrameType::kStepPlan, 1, 0, 0), {}).code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(node.port->RemovePeer(child.id()).ok());
  EXPECT_TRUE(node.port->TakeFailures().empty());
}

TEST_P(UcxProcessTest, AStoppedPeerHoldsNobodyUpAndSpeaksInVainOnceItHasBeenReplaced) {
  TestNode node(OptionsFor(1, GetParam()));
  ChildNode child(2, GetParam().lanes, 1);
  ASSERT_EQ(child.Join(node), "");
  ASSERT_TRUE(RoundTrip(node, child, 1, 1000));
  child.Signal(SIGSTOP);
  const auto tensor = Pattern(1 << 20, 1);
  absl::Status sent;
  const absl::Time begun = SystemClock().Now();
  for (uint64_t step = 2; sent.ok() && step < 2000; ++step) {
    sent = node.port->SendTensor(child.id(), HeaderOf(FrameType::kQuery, step, 0, tensor.size()), tensor);
    node.Poll();
  }
  EXPECT_TRUE(absl::IsResourceExhausted(sent)) << sent;  // 512 MiB, none of it read
  EXPECT_FALSE(node.port->Wait(absl::Milliseconds(50)));
  ASSERT_TRUE(node.port->RemovePeer(child.id()).ok());
  EXPECT_LT(SystemClock().Now() - begun, absl::Seconds(10));

  ChildNode next(2, GetParam().lanes, 2);
  ASSERT_EQ(next.Join(node), "");
  ASSERT_TRUE(RoundTrip(node, next, 5000, 1000));
  const uint64_t received = node.port->counters().frames_received;
  child.Signal(SIGCONT);
  // The first incarnation answers what it finds; none of that is handed over.
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(RoundTrip(node, next, 6000 + i, 200'000));
  EXPECT_EQ(node.port->counters().frames_received, received + 20);
}

TEST_P(UcxProcessTest, NothingIsLeftInSharedMemoryByNodesThatEndOrAreKilled) {
  const std::set<std::string> before = SharedMemory();
  {
    TestNode node(OptionsFor(1, GetParam()));
    ChildNode killed(2, GetParam().lanes), ended(3, GetParam().lanes);
    ASSERT_EQ(killed.Join(node), "");
    ASSERT_EQ(ended.Join(node), "");
    ASSERT_TRUE(RoundTrip(node, killed, 1, 1 << 20));
    ASSERT_TRUE(RoundTrip(node, ended, 1, 1 << 20));
    killed.Kill();
    killed.Reap();
    EXPECT_EQ(ended.Finish(), 0);
  }
  EXPECT_EQ(SharedMemory(), before);
}

TEST(UcxLanesTest, RdmaWithoutTheHardwareIsRefusedInOneLine) {
  for (const auto& entry : {std::filesystem::path("/sys/class/infiniband")})
    if (std::filesystem::exists(entry) && !std::filesystem::is_empty(entry)) GTEST_SKIP() << "this host has RDMA";
  UcxOptions options;
  options.lanes = Lanes::kRc;
  EXPECT_EQ(UcxPort::Create(options).status(),
            absl::FailedPreconditionError("--lanes rc: this host has no usable RDMA device; install or enable RDMA, or start every "
                                          "node with --lanes tcp"));
}

TEST(UcxLanesTest, NodesWithUnlikeLanesAreRefused) {
  TestNode shm(OptionsFor(1, Lanes::kShm)), tcp(OptionsFor(2, Lanes::kTcp));
  const absl::Status refused = Add(shm, tcp);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(refused.message(), "node 2: no lane of --lanes shm leads there: shared memory needs one host and one PID namespace; use "
                               "--lanes tcp");
  EXPECT_EQ(Add(tcp, shm).code(), absl::StatusCode::kFailedPrecondition);
}

TEST(UcxLanesTest, AnyLaneOnOneHostIsSharedMemory) {
  TestNode a(OptionsFor(1, Lanes::kAny)), b(OptionsFor(2, Lanes::kAny));
  ASSERT_TRUE(Connect(a, b));
  EXPECT_THAT(*a.port->LaneOf(b.id()), ::testing::AnyOf(::testing::HasSubstr("posix/memory"), ::testing::HasSubstr("sysv/memory")));
}

TEST(UcxLanesTest, TcpListensWithinTheRangeGivenAndOnTheDeviceGiven) {
  UcxOptions options = OptionsFor(1, Lanes::kTcp);
  options.first_port = 23000;
  options.last_port = 23040;
  const auto listening = [] {
    int found = 0;
    std::ifstream sockets("/proc/self/net/tcp");
    for (std::string line; std::getline(sockets, line);) {
      unsigned slot = 0, host = 0, port = 0, remote = 0, remote_port = 0, state = 0;
      if (std::sscanf(line.c_str(), " %u: %x:%x %x:%x %x", &slot, &host, &port, &remote, &remote_port, &state) == 6 && state == 10 &&
          port >= 23000 && port <= 23040 && host == 0x0100007f)
        ++found;
    }
    return found;
  };
  ASSERT_EQ(listening(), 0);
  {
    TestNode node(options);
    EXPECT_EQ(listening(), 1);
  }
  EXPECT_EQ(listening(), 0);
}

TEST(UcxLanesTest, ADeviceThatIsNotThereIsNamed) {
  UcxOptions options = OptionsFor(1, Lanes::kTcp);
  options.devices = "nosuch0";
  const absl::Status refused = UcxPort::Create(options).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr("--lanes tcp: this host has no such lane on device nosuch0"));
}

}  // namespace
}  // namespace dovetail::transport::ucx
