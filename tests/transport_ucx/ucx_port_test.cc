#include "transport/ucx/ucx_port.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "tests/transport_ucx/ucx_nodes.h"
#include "transport/ucx/spent_descriptors.h"

namespace dovetail::transport::ucx {
namespace {

using proto::FrameType;
using ::testing::HasSubstr;

class UcxPortTest : public ::testing::TestWithParam<Way> {
 protected:
  static UcxOptions Options(uint32_t node, uint32_t epoch = 1) { return OptionsFor(node, GetParam(), epoch); }
};

INSTANTIATE_TEST_SUITE_P(Ways, UcxPortTest,
                         ::testing::Values(Way{Lanes::kShm, false}, Way{Lanes::kShm, true}, Way{Lanes::kTcp, false}),
                         [](const auto& info) { return NameOfWay(info.param); });

TEST_P(UcxPortTest, ConnectsOverTheLaneAskedForAndNamesIt) {
  TestNode a(Options(1)), b(Options(2));
  ASSERT_TRUE(Connect(a, b));
  EXPECT_EQ(*a.port->LaneOf(b.id()), GetParam().lanes == Lanes::kShm ? "posix/memory" : "tcp/lo");
  EXPECT_EQ(a.port->LaneOf(NodeId(3)).status().code(), absl::StatusCode::kNotFound);
}

TEST_P(UcxPortTest, FramesOfEverySizeArriveInOrderWithTheirBytes) {
  TestNode a(Options(1)), b(Options(2));
  ASSERT_TRUE(Connect(a, b));
  const std::vector<size_t> sizes = {0,     1,       8,       63, 64,       4096, 8101, 8200,
                                     65536, 100'001, 1 << 20, 3,  16 << 20, 5,    0,    300'000};
  std::vector<std::vector<std::byte>> tensors;
  for (size_t i = 0; i < sizes.size(); ++i) tensors.push_back(Pattern(sizes[i], i));
  for (size_t i = 0; i < sizes.size(); ++i) {
    ASSERT_TRUE(SendTensor(a, b, 2 * i, tensors[i]).ok());
    ASSERT_TRUE(SendMessage(a, b, 2 * i + 1, Pattern(sizes[i], 1000 + i)).ok());
  }
  ASSERT_TRUE(PumpUntil({&a, &b}, [&] { return b.collector.frames.size() == 2 * sizes.size(); }));
  for (size_t i = 0; i < b.collector.frames.size(); ++i) {
    const Received& frame = b.collector.frames[i];
    EXPECT_EQ(frame.from, a.id());
    EXPECT_EQ(frame.header.step, i);
    EXPECT_EQ(frame.bytes, i % 2 == 0 ? tensors[i / 2] : Pattern(sizes[i / 2], 1000 + i / 2)) << "frame " << i;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(frame.payload.data()) % 64, 0u);
  }
}

TEST_P(UcxPortTest, ThreeNodesOnThreadsOfTheirOwnEachSeeEveryOtherInOrder) {
  constexpr int kFrames = 3000;
  std::vector<std::unique_ptr<TestNode>> nodes;
  for (uint32_t i = 0; i < 3; ++i) nodes.push_back(std::make_unique<TestNode>(Options(i)));
  for (auto& node : nodes) {
    for (auto& peer : nodes) {
      if (node != peer) {
        ASSERT_TRUE(Add(*node, *peer).ok());
      }
    }
  }
  std::atomic<int> finished{0};
  const auto run = [&](TestNode& node) {
    std::vector<uint64_t> sent(3, 0);
    size_t received = 0;
    node.collector.then = [&](const Delivery&) { ++received; };
    while (received < 2 * kFrames || sent[(node.id().value() + 1) % 3] < kFrames ||
           sent[(node.id().value() + 2) % 3] < kFrames) {
      for (auto& peer : nodes) {
        uint64_t& next = sent[peer->id().value()];
        if (peer->id() == node.id() || next == kFrames) continue;
        if (SendMessage(node, *peer, next, Pattern(next * 37 % 5000, next)).ok()) ++next;
      }
      if (node.Poll() == 0) node.port->Wait(absl::Milliseconds(1));
    }
    finished.fetch_add(1);
    while (finished.load() < 3) node.port->Wait(absl::Milliseconds(1));  // what the others still need of this one
  };
  std::vector<std::thread> threads;
  for (auto& node : nodes) threads.emplace_back(run, std::ref(*node));
  for (std::thread& thread : threads) thread.join();
  for (auto& node : nodes) {
    std::vector<uint64_t> expected(3, 0);
    for (const Received& frame : node->collector.frames) {
      const uint64_t step = expected[frame.from.value()]++;
      ASSERT_EQ(frame.header.step, step);
      ASSERT_EQ(frame.bytes, Pattern(step * 37 % 5000, step));
    }
  }
}

// A compute worker that attends a long prompt between any two frames.
TEST_P(UcxPortTest, ANodeThatIsAtWorkForLongAfterEachFrameTakesNoPeerForSilent) {
  TestNode busy(Options(1)), talker(Options(2)), quiet(Options(3));
  ASSERT_TRUE(Connect(busy, talker) && Connect(busy, quiet));
  for (uint64_t i = 0; i < 150; ++i) ASSERT_TRUE(SendMessage(talker, busy, i, Pattern(100, i)).ok());
  std::atomic<bool> done{false};
  const auto idle = [&](TestNode& node) {
    while (!done.load()) {
      node.Poll();
      node.port->Wait(absl::Milliseconds(5));
    }
  };
  std::thread talks(idle, std::ref(talker)), is_quiet(idle, std::ref(quiet));
  busy.collector.then = [](const Delivery&) { absl::SleepFor(absl::Milliseconds(10)); };
  while (busy.collector.frames.size() < 150) {
    busy.Poll();
    for (const UcxPort::Silence& silence : busy.port->SilentPeers())
      ADD_FAILURE() << "node " << silence.node.value() << " for " << silence.length << " at "
                    << busy.collector.frames.size() << " frames";
  }
  done.store(true);
  talks.join();
  is_quiet.join();
}

TEST_P(UcxPortTest, FramesSentBeforeThePeerKnowsTheSenderArriveOnceItDoes) {
  TestNode a(Options(1)), b(Options(2));
  ASSERT_TRUE(Add(a, b).ok());
  ASSERT_TRUE(SendMessage(a, b, 7, Pattern(100, 7)).ok());
  ASSERT_TRUE(PumpUntil({&a, &b}, [&] { return b.port->counters().dropped_foreign == 1; }));  // the greeting
  EXPECT_FALSE(a.port->Connected(b.id()));
  ASSERT_TRUE(Add(b, a).ok());
  ASSERT_TRUE(PumpUntil({&a, &b}, [&] { return b.collector.frames.size() == 1; }));
  EXPECT_EQ(b.collector.frames[0].bytes, Pattern(100, 7));
}

// No beat that brings credit along comes meanwhile.
UcxOptions WithoutBeats(UcxOptions options) {
  options.beat = absl::Minutes(10);
  options.silence = absl::Hours(1);
  return options;
}

TEST_P(UcxPortTest, TheFrameBeyondTheCreditIsRefusedUntilThePeerHasReadSome) {
  TestNode a(WithoutBeats(Options(1))), b(WithoutBeats(Options(2)));
  ASSERT_TRUE(Connect(a, b));
  for (int i = 0; i < kMaxFramesInFlight; ++i) ASSERT_TRUE(SendMessage(a, b, i, Pattern(8, i)).ok());
  const absl::Status refused = SendMessage(a, b, 0, Pattern(8, 0));
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("1024 unread frames"));
  ASSERT_TRUE(PumpUntil({&a, &b}, [&] { return b.collector.frames.size() == size_t{kMaxFramesInFlight}; }));
  // All read: credits come back by themselves, in portions.
  ASSERT_TRUE(PumpUntil({&a, &b}, [&] { return SendMessage(a, b, kMaxFramesInFlight, {}).ok(); }));
  ASSERT_TRUE(PumpUntil({&a, &b}, [&] { return b.collector.frames.size() == size_t{kMaxFramesInFlight} + 1; }));
}

TEST_P(UcxPortTest, BytesOfMessagesCountUntilTheyAreRead) {
  UcxOptions options = WithoutBeats(Options(1)), other = WithoutBeats(Options(2));
  options.max_frame_bytes = other.max_frame_bytes = 64 << 10;
  options.max_bytes_in_flight = other.max_bytes_in_flight = 160 << 10;
  TestNode a(options), b(other);
  ASSERT_TRUE(Connect(a, b));
  ASSERT_TRUE(SendMessage(a, b, 0, Pattern(64 << 10, 0)).ok());
  ASSERT_TRUE(SendMessage(a, b, 1, Pattern(64 << 10, 1)).ok());
  EXPECT_EQ(SendMessage(a, b, 2, Pattern(64 << 10, 2)).code(), absl::StatusCode::kResourceExhausted);
  // Far fewer frames than bring credit by their number: what was read of these bytes is told for their size.
  for (int i = 2; i < 20; ++i)
    ASSERT_TRUE(PumpUntil({&a, &b}, [&] { return SendMessage(a, b, i, Pattern(64 << 10, i)).ok(); })) << i;
  EXPECT_EQ(SendMessage(a, b, 2, Pattern((64 << 10) + 1, 2)).code(), absl::StatusCode::kInvalidArgument);
}

TEST_P(UcxPortTest, TensorsStayAsTheyAreAndCountUntilTheyAreAnswered) {
  UcxOptions options = Options(1), other = Options(2);
  options.max_frame_bytes = other.max_frame_bytes = 64 << 10;
  options.max_bytes_in_flight = other.max_bytes_in_flight = 160 << 10;
  TestNode a(options), b(other);
  ASSERT_TRUE(Connect(a, b));
  const auto query = Pattern(64 << 10, 1), key_value = Pattern(64 << 10, 2), third = Pattern(64 << 10, 3);
  ASSERT_TRUE(SendTensor(a, b, 1, query, FrameType::kQuery, 3).ok());
  ASSERT_TRUE(SendTensor(a, b, 1, key_value, FrameType::kKeyValue, 4).ok());
  ASSERT_TRUE(PumpUntil({&a, &b}, [&] { return b.collector.frames.size() == 2; }));
  // Read, acknowledged by traffic, but not answered.
  ASSERT_TRUE(SendMessage(b, a, 0, {}).ok());
  ASSERT_TRUE(PumpUntil({&a, &b}, [&] { return a.collector.frames.size() == 1; }));
  EXPECT_EQ(SendTensor(a, b, 1, third, FrameType::kQuery, 5).code(), absl::StatusCode::kResourceExhausted);
  for (int i = 0; i < 200; ++i) ASSERT_TRUE(SendMessage(a, b, i, Pattern(100, i)).ok());
  ASSERT_TRUE(PumpUntil({&a, &b}, [&] { return b.collector.frames.size() == 202; }));
  EXPECT_TRUE(std::ranges::equal(b.collector.frames[0].payload, query));
  EXPECT_TRUE(std::ranges::equal(b.collector.frames[1].payload, key_value));

  // An answer in micro-batch 3 frees the first alone.
  const auto partial = Pattern(16, 9);
  ASSERT_TRUE(SendTensor(b, a, 1, partial, FrameType::kPartial, 3).ok());
  ASSERT_TRUE(PumpUntil({&a, &b}, [&] { return a.collector.frames.size() == 2; }));
  EXPECT_TRUE(SendTensor(a, b, 1, third, FrameType::kQuery, 5).ok());
  EXPECT_EQ(SendTensor(a, b, 1, third, FrameType::kQuery, 5).code(), absl::StatusCode::kResourceExhausted);
  ASSERT_TRUE(PumpUntil({&a, &b}, [&] { return b.collector.frames.size() == 203; }));
  EXPECT_TRUE(std::ranges::equal(b.collector.frames[1].payload, key_value));
  EXPECT_TRUE(std::ranges::equal(b.collector.frames[202].payload, third));
}

TEST_P(UcxPortTest, ALayerLoopOfAnswersNeedsNoOtherTrafficAndNeverRunsOut) {
  UcxOptions options = Options(1), other = Options(2);
  options.max_frame_bytes = other.max_frame_bytes = 64 << 10;
  options.max_bytes_in_flight = other.max_bytes_in_flight = 160 << 10;
  TestNode compute(options), attention(other);
  ASSERT_TRUE(Connect(compute, attention));
  const auto query = Pattern(40'000, 1), key_value = Pattern(20'000, 2);
  auto partial = Pattern(40'000, 3);
  attention.collector.then = [&](const Delivery& delivery) {
    if (delivery.header.type != FrameType::kKeyValue) return;
    partial[0] = delivery.payload[19'999];
    ASSERT_TRUE(SendTensor(attention, compute, delivery.header.step, partial, FrameType::kPartial).ok());
  };
  for (int layer = 0; layer < 1500; ++layer) {
    ASSERT_TRUE(SendTensor(compute, attention, layer, query, FrameType::kQuery).ok()) << layer;
    ASSERT_TRUE(SendTensor(compute, attention, layer, key_value, FrameType::kKeyValue).ok()) << layer;
    ASSERT_TRUE(PumpUntil({&compute, &attention}, [&] { return compute.collector.frames.size() == 1; })) << layer;
    ASSERT_EQ(compute.collector.frames[0].bytes, partial);
    compute.collector.frames.clear();
    attention.collector.frames.clear();
  }
}

TEST_P(UcxPortTest, ARegionThatIsFullOrTooSmallIsNoObstacle) {
  UcxOptions options = Options(1), other = Options(2);
  options.receive_region_bytes = other.receive_region_bytes = 64 << 10;
  TestNode a(options), b(other);
  ASSERT_TRUE(Connect(a, b));
  std::vector<std::vector<std::byte>> tensors;
  for (int i = 0; i < 40; ++i) {
    tensors.push_back(Pattern(i % 3 == 0 ? 100'000 : 9'000, i));
    ASSERT_TRUE(SendTensor(a, b, i, tensors.back()).ok());
  }
  ASSERT_TRUE(PumpUntil({&a, &b}, [&] { return b.collector.frames.size() == 40; }));
  for (int i = 0; i < 40; ++i) {
    EXPECT_EQ(b.collector.frames[i].bytes, tensors[i]) << i;
    EXPECT_TRUE(std::ranges::equal(b.collector.frames[i].payload, tensors[i]))
        << i;  // none is answered: all are still there
  }
}

TEST_P(UcxPortTest, RefusesAnotherVersionOfUcxInOneLine) {
  TestNode a(Options(1)), b(Options(2));
  const absl::Status refused = a.port->AddPeer(b.id(), b.port->local_address(), "1.21.0", Epoch(1));
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(refused.message(), "node 2: runs UCX 1.21.0, this node " + UcxPort::Version() +
                                   "; versions do not talk to each other: use one build for every role");
}

TEST_P(UcxPortTest, RefusesAddressesThatAreDamagedOrOfSomeoneElse) {
  TestNode a(Options(1)), b(Options(2));
  const std::string address = b.port->local_address();
  for (size_t i = 0; i < address.size(); ++i) {
    std::string damaged = address;
    damaged[i] ^= 0x10;
    EXPECT_FALSE(a.port->AddPeer(b.id(), damaged, UcxPort::Version(), Epoch(1)).ok()) << "byte " << i;
    EXPECT_FALSE(a.port->AddPeer(b.id(), address.substr(0, i), UcxPort::Version(), Epoch(1)).ok()) << "length " << i;
  }
  EXPECT_EQ(a.port->AddPeer(NodeId(5), address, UcxPort::Version(), Epoch(1)).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(a.port->AddPeer(b.id(), address, UcxPort::Version(), Epoch(2)).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(a.port->AddPeer(a.id(), a.port->local_address(), UcxPort::Version(), Epoch(1)).code(),
            absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(Add(a, b).ok());
  EXPECT_EQ(Add(a, b).code(), absl::StatusCode::kAlreadyExists);
}

TEST_P(UcxPortTest, NodesWithUnlikeLimitsFailToConnectAndSayWhy) {
  UcxOptions other = Options(2);
  other.max_frame_bytes = 1 << 20;
  TestNode a(Options(1)), b(other);
  ASSERT_TRUE(Add(a, b).ok());
  ASSERT_TRUE(Add(b, a).ok());
  std::vector<PeerFailure> failures;
  ASSERT_TRUE(PumpUntil({&a, &b}, [&] { return !(failures = a.port->TakeFailures()).empty(); }));
  EXPECT_EQ(failures[0].node, b.id());
  EXPECT_THAT(std::string(failures[0].status.message()), HasSubstr("start every node with the same limits"));
}

TEST_P(UcxPortTest, AFrameHeaderThatIsNotValidIsDroppedAndTheNextOneArrives) {
  TestNode a(Options(1)), b(Options(2));
  ASSERT_TRUE(Connect(a, b));
  auto header = HeaderOf(FrameType::kStepPlan, 1, 0, 4);
  header.step = 2;  // the checksum is of step 1
  ASSERT_TRUE(a.port->SendMessage(b.id(), header, Pattern(4, 0)).ok());
  auto wrong_size = HeaderOf(FrameType::kStepPlan, 1, 0, 5);
  ASSERT_TRUE(a.port->SendMessage(b.id(), wrong_size, Pattern(4, 0)).ok());
  ASSERT_TRUE(SendMessage(a, b, 3, Pattern(4, 3)).ok());
  ASSERT_TRUE(PumpUntil({&a, &b}, [&] { return !b.collector.frames.empty(); }));
  EXPECT_EQ(b.collector.frames[0].header.step, 3u);
  EXPECT_EQ(b.port->counters().dropped_refused, 2u);
  EXPECT_EQ(b.port->counters().frames_received, 1u);
}

TEST_P(UcxPortTest, ARemovedPeerIsUnknownAndItsNextIncarnationStartsAfresh) {
  TestNode a(Options(1));
  {
    TestNode first(Options(2, 1));
    ASSERT_TRUE(Connect(a, first));
    for (int i = 0; i < 5; ++i) ASSERT_TRUE(SendMessage(first, a, i, Pattern(10, i)).ok());
    ASSERT_TRUE(PumpUntil({&a, &first}, [&] { return a.collector.frames.size() == 5; }));
    ASSERT_TRUE(a.port->RemovePeer(first.id()).ok());
    EXPECT_EQ(a.port->RemovePeer(first.id()).code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(SendMessage(a, first, 0, {}).code(), absl::StatusCode::kNotFound);
  }
  TestNode second(Options(2, 2));
  ASSERT_TRUE(Add(a, second, 2).ok());
  ASSERT_TRUE(Add(second, a).ok());
  ASSERT_TRUE(SendMessage(second, a, 100, Pattern(10, 100)).ok());
  ASSERT_TRUE(PumpUntil({&a, &second}, [&] { return a.collector.frames.size() == 6; }));
  EXPECT_EQ(a.collector.frames[5].header.step, 100u);
}

TEST_P(UcxPortTest, TeardownWithUnsentFramesToAPeerThatReadsNothingIsBounded) {
  auto a = std::make_unique<TestNode>(Options(1));
  TestNode b(Options(2));
  ASSERT_TRUE(Connect(*a, b));
  const auto tensor = Pattern(16 << 20, 1);
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(SendTensor(*a, b, i, tensor).ok());
  const absl::Time begun = SystemClock().Now();
  a.reset();
  EXPECT_LT(SystemClock().Now() - begun, absl::Seconds(2));
  EXPECT_LE(b.Poll(), 10);  // whatever came of it, the other side lives
}

TEST_P(UcxPortTest, RemovingAPeerWithUnsentFramesReturnsAtOnceAndLeavesTheOthersAlone) {
  const auto tensor = Pattern(16 << 20, 1);  // outlives the ports: what is half sent is still read
  TestNode a(Options(1)), b(Options(2)), c(Options(3));
  ASSERT_TRUE(Connect(a, b));
  ASSERT_TRUE(Connect(a, c));
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(SendTensor(a, b, i, tensor).ok());
  const absl::Time begun = SystemClock().Now();
  ASSERT_TRUE(a.port->RemovePeer(b.id()).ok());
  EXPECT_LT(SystemClock().Now() - begun, absl::Seconds(2));
  ASSERT_TRUE(SendMessage(a, c, 1, Pattern(10, 1)).ok());
  ASSERT_TRUE(PumpUntil({&a, &c}, [&] { return c.collector.frames.size() == 1; }));
}

absl::Duration CpuTimeOfThread() {
  rusage usage;
  getrusage(RUSAGE_THREAD, &usage);
  return absl::DurationFromTimeval(usage.ru_utime) + absl::DurationFromTimeval(usage.ru_stime);
}

TEST_P(UcxPortTest, AnIdleNodeSleepsAndAFrameWakesIt) {
  TestNode a(Options(1)), b(Options(2));
  ASSERT_TRUE(Connect(a, b));
  while (a.Poll() + b.Poll() > 0) {
  }
  EXPECT_FALSE(b.port->Wait(absl::Milliseconds(50)));
  const absl::Duration used = CpuTimeOfThread();
  EXPECT_FALSE(b.port->Wait(absl::Milliseconds(300)));
  EXPECT_LT(CpuTimeOfThread() - used, absl::Milliseconds(60));

  std::thread sender([&] {
    ASSERT_TRUE(SendMessage(a, b, 1, Pattern(10, 1)).ok());
    a.Poll();
  });
  EXPECT_TRUE(b.port->Wait(absl::Seconds(10)));
  sender.join();
  EXPECT_EQ(b.Poll(), 1);
}

// Node 1 is told of one that no lane leads to, so that it leaves its UCX worker behind. Before that closed its sockets,
// a node that was connecting to it never heard anything, and never slept again.
TEST(UcxLeftBehind, WhoWaitsForAPortThatIsLeftBehindHearsThatItIsGoneAndSleeps) {
  UcxOptions options = OptionsFor(1, Lanes::kTcp);
  options.close_timeout = absl::ZeroDuration();
  auto gone = std::make_unique<TestNode>(options);
  TestNode waiting(OptionsFor(2, Lanes::kTcp)), unreachable(OptionsFor(3, Lanes::kShm));
  ASSERT_TRUE(Add(waiting, *gone).ok());
  EXPECT_FALSE(waiting.port->Wait(absl::Milliseconds(50)));  // the kernel connects them, node 1 does not answer
  ASSERT_EQ(Add(*gone, unreachable).code(), absl::StatusCode::kFailedPrecondition);
  gone.reset();

  std::vector<PeerFailure> failures;
  ASSERT_TRUE(PumpUntil({&waiting}, [&] { return !(failures = waiting.port->TakeFailures()).empty(); }));
  EXPECT_EQ(failures[0].node, NodeId(1));
  EXPECT_EQ(failures[0].status.code(), absl::StatusCode::kUnavailable);
  ASSERT_TRUE(waiting.port->RemovePeer(NodeId(1)).ok());
  EXPECT_FALSE(waiting.port->Wait(absl::Milliseconds(50)));
  const absl::Duration used = CpuTimeOfThread();
  EXPECT_FALSE(waiting.port->Wait(absl::Milliseconds(300)));
  EXPECT_LT(CpuTimeOfThread() - used, absl::Milliseconds(60));
  TestNode another(OptionsFor(4, Lanes::kTcp));  // what was left behind disturbs no other port
  EXPECT_TRUE(Connect(waiting, another));
}

// UCX answers greetings of its own accord. It aborts the process of a worker that goes while such an answer waits.
TEST(UcxLeftBehind, APortEndsWhileUcxAnswersTheGreetingOfANodeThatItWasNotTold) {
  for (int polls = 0; polls < 12; ++polls) {
    TestNode greets(OptionsFor(1, Lanes::kTcp));
    auto ends = std::make_unique<TestNode>(OptionsFor(2, Lanes::kTcp));
    ASSERT_TRUE(Add(greets, *ends).ok());
    for (int i = 0; i < polls; ++i) {
      absl::SleepFor(absl::Microseconds(500));  // UCX accepts connections on a thread of its own
      greets.Poll();
      ends->Poll();
    }
    ends.reset();
    ASSERT_TRUE(PumpUntil({&greets}, [&] { return !greets.port->TakeFailures().empty(); })) << polls << " polls";
  }
}

// UCX's shared memory is named by numbers of descriptors. Were they used again, an address of before would lead to what
// a later incarnation makes, and UCX aborts on that while it is half made.
TEST(UcxSpent, AnAddressOfBeforeLeadsToNoLaterIncarnationOfTheSameProcess) {
  TestNode reader(OptionsFor(2, Lanes::kShm));
  const std::vector<int> others = SharedMemoryDescriptors();
  auto before = std::make_unique<TestNode>(OptionsFor(1, Lanes::kShm, 1));
  const std::string address = before->port->local_address();
  const std::vector<int> used = SharedMemoryDescriptors();
  ASSERT_GT(used.size(), others.size());
  ASSERT_TRUE(Add(*before, reader).ok());  // its greeting lies there, with its address, until the reader looks
  before->Poll();
  before.reset();
  ASSERT_EQ(SharedMemoryDescriptors(), others);
  TestNode after(OptionsFor(1, Lanes::kShm, 2));
  for (const int number : SharedMemoryDescriptors())
    EXPECT_TRUE(std::ranges::binary_search(others, number) || !std::ranges::binary_search(used, number)) << number;

  EXPECT_FALSE(reader.port->AddPeer(NodeId(1), address, UcxPort::Version(), Epoch(1)).ok());
  for (int i = 0; i < 1000; ++i) {
    reader.Poll();
    after.Poll();
  }
  EXPECT_EQ(after.port->counters().dropped_foreign, 0u);
  EXPECT_TRUE(Add(reader, after, 2).ok() && Add(after, reader).ok());
  EXPECT_TRUE(PumpUntil({&reader, &after}, [&] { return reader.port->Connected(NodeId(1)); }));
}

// No beat and no spinning helps them.
TEST_P(UcxPortTest, NodesThatSleepBetweenTensorsMissNone) {
  const auto options = [&](uint32_t node) {
    UcxOptions sleepy = Options(node);
    sleepy.spin = sleepy.most_spin = absl::ZeroDuration();
    sleepy.beat = absl::Minutes(2);
    sleepy.silence = absl::Minutes(8);
    return sleepy;
  };
  TestNode a(options(1)), b(options(2));
  ASSERT_TRUE(Connect(a, b));
  constexpr uint64_t kTurns = 2000;
  const std::vector<std::byte> tensor = Pattern(1000, 7);
  const auto play = [&](TestNode& self, TestNode& other, bool begins) {
    for (uint64_t turn = 0; turn < kTurns; ++turn) {
      const std::span<const std::byte> payload = std::span(tensor).first(turn % 3 == 0 ? 0 : tensor.size());
      if (begins) {
        ASSERT_TRUE(SendTensor(self, other, turn, payload).ok());
      }
      while (self.Poll() == 0) ASSERT_TRUE(self.port->Wait(absl::Seconds(20))) << "turn " << turn;
      ASSERT_EQ(self.collector.frames.size(), turn + 1);
      ASSERT_EQ(self.collector.frames.back().bytes.size(), payload.size());
      if (!begins) {
        ASSERT_TRUE(SendTensor(self, other, turn, payload, proto::FrameType::kPartial).ok());
      }
    }
  };
  std::thread responder([&] { play(b, a, false); });
  play(a, b, true);
  responder.join();
}

TEST_P(UcxPortTest, RingWakesAWaiterAndARingBeforeTheWaitIsNotLost) {
  TestNode a(Options(1));
  a.port->Ring();
  EXPECT_TRUE(a.port->Wait(absl::Seconds(10)));
  EXPECT_FALSE(a.port->Wait(absl::Milliseconds(1)));
  for (int i = 0; i < 200; ++i) {
    std::atomic<bool> rung{false};
    std::thread ringer([&] {
      rung = true;
      a.port->Ring();
    });
    ASSERT_TRUE(a.port->Wait(absl::Seconds(10)));
    ASSERT_TRUE(rung);
    ringer.join();
  }
}

TEST_P(UcxPortTest, OptionsOutOfRangeAreNamed) {
  UcxOptions options = Options(1);
  options.first_port = 5000;
  options.last_port = 4000;
  EXPECT_THAT(std::string(UcxPort::Create(options).status().message()), HasSubstr("data-plane ports 5000-4000"));
  options = Options(1);
  options.max_bytes_in_flight = options.max_frame_bytes;
  EXPECT_THAT(std::string(UcxPort::Create(options).status().message()), HasSubstr("max_bytes_in_flight"));
}

}  // namespace
}  // namespace dovetail::transport::ucx
