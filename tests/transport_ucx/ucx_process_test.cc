#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <time.h>

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
  child.Reap();  // UCX does not see the death of a process that was not reaped
  std::vector<PeerFailure> failures;
  ASSERT_TRUE(PumpUntil({&node}, [&] {
    node.port->Wait(absl::Milliseconds(20));
    return !(failures = node.port->TakeFailures()).empty();
  }));
  ASSERT_EQ(failures.size(), 1u);
  EXPECT_EQ(failures[0].node, child.id());
  EXPECT_EQ(failures[0].epoch, Epoch(1));
  EXPECT_EQ(node.port->SendMessage(child.id(), HeaderOf(FrameType::kStepPlan, 1, 0, 0), {}).code(),
            absl::StatusCode::kUnavailable);
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

// The tensors of one peer, held and compared, while another one that was removed writes.
TEST(UcxRegions, WhatAStoppedPeerStillPutsLandsWhereNobodyReads) {
  TestNode node(OptionsFor(1, Way{Lanes::kShm, true}));
  auto child = std::make_unique<ChildNode>(2, Lanes::kShm);
  ASSERT_EQ(child->Join(node), "");
  constexpr int kPushes = 900;
  child->Push(node, kPushes, 16 << 10);
  ASSERT_TRUE(PumpUntil({&node}, [&] { return node.collector.frames.size() >= 5; }));
  child->Signal(SIGSTOP);
  int status = 0;
  ASSERT_EQ(waitpid(child->pid(), &status, WUNTRACED), child->pid());
  ASSERT_TRUE(WIFSTOPPED(status));
  while (node.Poll() > 0) {
  }
  const size_t before = node.collector.frames.size();
  ASSERT_LT(before, kPushes / 2u);
  ASSERT_TRUE(node.port->RemovePeer(child->id()).ok());
  EXPECT_EQ(node.port->retired_bytes(), UcxOptions().receive_region_bytes);

  // Its successor gets a region at once. The tensors that it puts there are held, since nothing answers them.
  ChildNode next(2, Lanes::kShm, 2);
  ASSERT_EQ(next.Join(node), "");
  constexpr int kHeld = 200;
  node.collector.frames.clear();
  next.Push(node, kHeld, 16 << 10);
  ASSERT_TRUE(PumpUntil({&node}, [&] { return node.collector.frames.size() == kHeld; }));
  ASSERT_TRUE(next.Pushed(absl::Seconds(10)));
  for (const Received& frame : node.collector.frames)
    std::memset(const_cast<std::byte*>(frame.payload.data()), 0x11, frame.payload.size());

  child->Signal(SIGCONT);
  std::string end;
  ASSERT_TRUE(PumpUntil({&node}, [&] { return !(end = child->EndOfPush(absl::ZeroDuration())).empty(); }));
  // UCX 1.23 tells it that it was removed.
  EXPECT_THAT(end, ::testing::AnyOf(std::string(ChildNode::kPushed), ::testing::HasSubstr("the connection broke")));
  while (node.port->Wait(absl::Milliseconds(20))) node.Poll();
  EXPECT_EQ(node.collector.frames.size(), kHeld);  // nor is what it tells of them looked for
  for (const Received& frame : node.collector.frames)
    for (const std::byte byte : frame.payload) ASSERT_EQ(byte, std::byte{0x11});
  EXPECT_EQ(node.port->retired_bytes(), UcxOptions().receive_region_bytes);  // for it could go on

  child->Kill();  // and is not even reaped
  EXPECT_TRUE(PumpUntil({&node}, [&] {
    node.port->Wait(absl::Milliseconds(5));
    return node.port->retired_bytes() == 0;
  }));
  child.reset();
}

TEST(UcxRegions, APortThatEndsSaysThatItWritesNoMoreThoughItsProcessGoesOn) {
  TestNode node(OptionsFor(1, Way{Lanes::kShm, true}));
  for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
    TestNode peer(OptionsFor(2, Way{Lanes::kShm, true}, epoch));
    ASSERT_TRUE(Add(node, peer, epoch).ok() && Add(peer, node).ok());
    ASSERT_TRUE(
        PumpUntil({&node, &peer}, [&] { return peer.port->Connected(node.id()) && node.port->Connected(peer.id()); }));
    ASSERT_TRUE(node.port->RemovePeer(peer.id()).ok());
    EXPECT_EQ(node.port->retired_bytes(), UcxOptions().receive_region_bytes);
    peer.port.reset();
    EXPECT_TRUE(PumpUntil({&node}, [&] { return node.port->retired_bytes() == 0; })) << "incarnation " << epoch;
  }
}

TEST(UcxRegions, WhatIsKeptForStoppedPeersIsBoundedAndBeyondItTensorsComeAsMessages) {
  UcxOptions options = OptionsFor(1, Way{Lanes::kShm, true});
  options.max_retired_bytes = 2 * options.receive_region_bytes;
  TestNode node(options);
  std::vector<std::unique_ptr<ChildNode>> stopped;
  for (uint32_t i = 0; i < 5; ++i) {
    stopped.push_back(std::make_unique<ChildNode>(10 + i, Lanes::kShm));
    ASSERT_EQ(stopped.back()->Join(node), "");
    ASSERT_TRUE(RoundTrip(node, *stopped.back(), 1, 100'000));
    stopped.back()->Signal(SIGSTOP);
    ASSERT_TRUE(node.port->RemovePeer(stopped.back()->id()).ok());
    EXPECT_EQ(node.port->retired_bytes(), std::min<uint64_t>(i + 1, 2) * options.receive_region_bytes);
  }
}

// Its greeting waits to be read, with the key of a region; then it is not there any more.
TEST(UcxRegions, APeerThatIsGoneWhenItsGreetingIsReadIsLostAndNothingElse) {
  TestNode node(OptionsFor(1, Way{Lanes::kShm, true}));
  ChildNode other(3, Lanes::kShm);
  ASSERT_EQ(other.Join(node), "");
  for (uint32_t epoch = 1; epoch <= 12; ++epoch) {
    ChildNode child(2, Lanes::kShm, epoch);
    ASSERT_EQ(child.Join(node), "");
    child.Turn();
    child.Kill();
    if (epoch % 2 == 0) child.Reap();
    std::vector<PeerFailure> failures;
    ASSERT_TRUE(PumpUntil({&node}, [&] {
      node.port->Wait(absl::Milliseconds(1));
      return !(failures = node.port->TakeFailures()).empty();
    }));
    EXPECT_EQ(failures.at(0).node, child.id());
    EXPECT_THAT(std::string(failures.at(0).status.message()), ::testing::HasSubstr("ended"));
    ASSERT_TRUE(node.port->RemovePeer(child.id()).ok());
    EXPECT_TRUE(RoundTrip(node, other, epoch, 100'000));
  }
  // A process that is about to end gives its memory back first: until it has ended its region is kept.
  EXPECT_TRUE(PumpUntil({&node}, [&] { return node.port->retired_bytes() == 0; }));
}

TEST(UcxRegions, AProcessThatEndsIsReportedAtOnceThoughNobodyReapsIt) {
  UcxOptions options = OptionsFor(1, Lanes::kShm);
  options.keepalive = absl::Hours(1);  // so that UCX cannot have noticed
  TestNode node(options);
  ChildNode child(2, Lanes::kShm);
  ASSERT_EQ(child.Join(node), "");
  ASSERT_TRUE(RoundTrip(node, child, 1, 1000));
  child.Kill();
  std::vector<PeerFailure> failures;
  while (failures.empty()) {
    ASSERT_TRUE(node.port->Wait(absl::Seconds(10)));
    node.Poll();
    failures = node.port->TakeFailures();
  }
  EXPECT_EQ(failures[0].node, child.id());
  EXPECT_EQ(failures[0].status.message(), "its process has ended");
  EXPECT_FALSE(node.port->Wait(absl::Milliseconds(20)));  // once reported, it wakes no waiter any more
}

TEST_P(UcxProcessTest, AStoppedPeerIsSilentAndOneThatOnlyHasNothingToSayIsNot) {
  TestNode node(OptionsFor(1, GetParam()));
  ChildNode quiet(2, GetParam().lanes), stopped(3, GetParam().lanes);
  ASSERT_EQ(quiet.Join(node), "");
  ASSERT_EQ(stopped.Join(node), "");
  ASSERT_TRUE(RoundTrip(node, quiet, 1, 1000) && RoundTrip(node, stopped, 2, 1000));
  EXPECT_TRUE(node.port->SilentPeers().empty());
  stopped.Signal(SIGSTOP);
  const auto silent = [&] {
    node.port->Wait(absl::Milliseconds(10));
    node.Poll();
    return !node.port->SilentPeers().empty();
  };
  ASSERT_TRUE(PumpUntil({&node}, silent));
  ASSERT_EQ(node.port->SilentPeers().size(), 1u);
  EXPECT_EQ(node.port->SilentPeers()[0].node, stopped.id());
  EXPECT_GT(node.port->SilentPeers()[0].length, UcxOptions().silence);
  EXPECT_EQ(node.port->SilentPeers()[0].epoch, Epoch(1));
  stopped.Signal(SIGCONT);
  EXPECT_TRUE(PumpUntil({&node}, [&] { return !silent(); }));
}

// The share of a core that this process takes, UCX's own threads included, while it waits as an idle node does.
double ShareOfACoreWhileIdle(TestNode& node, absl::Duration length) {
  const auto cpu = [] {
    timespec used;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return absl::DurationFromTimespec(used);
  };
  const absl::Time begun = SystemClock().Now();
  const absl::Duration before = cpu();
  while (SystemClock().Now() - begun < length) {
    node.port->Wait(absl::Milliseconds(100));
    node.Poll();
  }
  return absl::FDivDuration(cpu() - before, SystemClock().Now() - begun);
}

// A process that spins takes a whole core, or half of one that it shares; one that sleeps takes some hundredths.
constexpr double kIdleShare = 0.2;

TEST_P(UcxProcessTest, APeerThatIsStoppedBeforeItHearsOfANodeLetsTheNodeSleep) {
  TestNode node(OptionsFor(1, GetParam()));
  ChildNode quiet(2, GetParam().lanes), stopped(3, GetParam().lanes);
  ASSERT_EQ(quiet.Join(node), "");
  ASSERT_TRUE(RoundTrip(node, quiet, 1, 1000));
  stopped.Signal(SIGSTOP);
  ASSERT_EQ(stopped.AddedBy(node), "");
  ASSERT_TRUE(node.port->SendMessage(stopped.id(), HeaderOf(FrameType::kStepPlan, 1, 0, 1000), Pattern(1000, 1)).ok());
  EXPECT_LT(ShareOfACoreWhileIdle(node, absl::Milliseconds(250)), kIdleShare) << "while it is a peer";
  EXPECT_FALSE(node.port->Connected(stopped.id()));
  EXPECT_TRUE(RoundTrip(node, quiet, 2, 100'000));
  ASSERT_TRUE(node.port->RemovePeer(stopped.id()).ok());
  EXPECT_LT(ShareOfACoreWhileIdle(node, absl::Milliseconds(250)), kIdleShare) << "once it was removed";
  EXPECT_TRUE(RoundTrip(node, quiet, 3, 100'000));
  stopped.Signal(SIGCONT);
  EXPECT_LT(ShareOfACoreWhileIdle(node, absl::Milliseconds(250)), kIdleShare) << "once it goes on";
  EXPECT_TRUE(RoundTrip(node, quiet, 4, 100'000));
}

TEST_P(UcxProcessTest, APeerThatIsStoppedAsSoonAsItHasJoinedLetsTheNodeSleep) {
  TestNode node(OptionsFor(1, GetParam()));
  ChildNode quiet(2, GetParam().lanes);
  ASSERT_EQ(quiet.Join(node), "");
  ASSERT_TRUE(RoundTrip(node, quiet, 1, 1000));
  for (const uint32_t id : {3u, 4u, 5u}) {  // at another moment of its greeting each
    ChildNode stopped(id, GetParam().lanes);
    ASSERT_EQ(stopped.Join(node), "");
    stopped.Signal(SIGSTOP);
    for (uint32_t polls = 0; polls < (id - 3) * 20; ++polls) node.Poll();
    EXPECT_LT(ShareOfACoreWhileIdle(node, absl::Milliseconds(150)), kIdleShare) << "node " << id;
    ASSERT_TRUE(node.port->RemovePeer(stopped.id()).ok());
    EXPECT_LT(ShareOfACoreWhileIdle(node, absl::Milliseconds(150)), kIdleShare) << "node " << id << ", removed";
    EXPECT_TRUE(RoundTrip(node, quiet, id, 100'000));
  }
}

TEST_P(UcxProcessTest, APeerThatIsStoppedBeforeItEverAnsweredIsSilentInTheEnd) {
  UcxOptions options = OptionsFor(1, GetParam());
  options.beat = absl::Milliseconds(5);
  options.silence = absl::Milliseconds(20);  // ten times as long for who never answered
  TestNode node(options);
  ChildNode stopped(3, GetParam().lanes);
  stopped.Signal(SIGSTOP);
  ASSERT_EQ(stopped.AddedBy(node), "");
  const absl::Time begun = SystemClock().Now();
  EXPECT_TRUE(PumpUntil({&node}, [&] {
    node.port->Wait(absl::Milliseconds(10));
    return !node.port->SilentPeers().empty();
  }));
  // Up to two beats may be counted before the first look.
  EXPECT_GE(SystemClock().Now() - begun, 10 * options.silence - 2 * options.beat);
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
            absl::FailedPreconditionError(
                "--lanes rc: this host has no usable RDMA device; install or enable RDMA, or start every "
                "node with --lanes tcp"));
}

TEST(UcxLanesTest, NodesWithUnlikeLanesAreRefused) {
  TestNode shm(OptionsFor(1, Lanes::kShm)), tcp(OptionsFor(2, Lanes::kTcp));
  const absl::Status refused = Add(shm, tcp);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(refused.message(),
            "node 2: no lane of --lanes shm leads there: shared memory needs the same --lanes there, one host and one "
            "PID namespace; or use --lanes tcp");
  EXPECT_EQ(Add(tcp, shm).code(), absl::StatusCode::kFailedPrecondition);
}

TEST(UcxLanesTest, AnyLaneOnOneHostIsSharedMemory) {
  TestNode a(OptionsFor(1, Lanes::kAny)), b(OptionsFor(2, Lanes::kAny));
  ASSERT_TRUE(Connect(a, b));
  EXPECT_THAT(*a.port->LaneOf(b.id()),
              ::testing::AnyOf(::testing::HasSubstr("posix/memory"), ::testing::HasSubstr("sysv/memory")));
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
      if (std::sscanf(line.c_str(), " %u: %x:%x %x:%x %x", &slot, &host, &port, &remote, &remote_port, &state) == 6 &&
          state == 10 && port >= 23000 && port <= 23040 && host == 0x0100007f)
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
  EXPECT_THAT(std::string(refused.message()),
              ::testing::HasSubstr("--lanes tcp: this host has no such lane on device nosuch0"));
}

}  // namespace
}  // namespace dovetail::transport::ucx
