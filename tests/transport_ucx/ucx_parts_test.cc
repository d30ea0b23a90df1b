#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "transport/ucx/frame_ring.h"
#include "transport/ucx/lanes.h"
#include "transport/ucx/process.h"
#include "transport/ucx/receive_window.h"
#include "transport/ucx/region.h"
#include "transport/ucx/send_window.h"
#include "transport/ucx/slot_allocator.h"
#include "transport/ucx/ucx_version.h"
#include "transport/ucx/wait_spin.h"
#include "transport/ucx/wire.h"

namespace dovetail::transport::ucx {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Lanes, AreParsedAndAnythingElseIsNamed) {
  EXPECT_EQ(*ParseLanes("shm"), Lanes::kShm);
  EXPECT_EQ(*ParseLanes("tcp"), Lanes::kTcp);
  EXPECT_EQ(*ParseLanes("rc"), Lanes::kRc);
  EXPECT_EQ(*ParseLanes("any"), Lanes::kAny);
  EXPECT_EQ(ParseLanes("cuda_ipc").status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(ParseLanes("ib").status(),
            absl::InvalidArgumentError("--lanes ib: is none of shm, tcp, rc, cuda_ipc, any"));
}

TEST(Lanes, AreReadFromUcxsTextAboutAnEndpoint) {
  const char* text =
      "# UCP endpoint\n#   lane[0]:  1:sysv/memory.0 md[1]  -> md[1]/sysv/sysdev[255] am am_bw#0 keepalive\n"
      "#   lane[1]:  2:posix/memory.0 md[2]  -> md[2]\n#   lane[2]:  3:tcp/eth0.12.0 md[2]  -> md[2]\n#   lane[3]: "
      "2:posix/memory.0 m\n";
  EXPECT_THAT(TransportsIn(text), ElementsAre("sysv/memory", "posix/memory", "tcp/eth0.12"));
  EXPECT_TRUE(TransportsIn("lane[").empty());
  EXPECT_TRUE(TransportsIn("").empty());
}

TEST(Lanes, OnesThatWereNotAskedForAreRefused) {
  EXPECT_TRUE(CheckLanes(Lanes::kShm, {"posix/memory"}).ok());
  EXPECT_TRUE(CheckLanes(Lanes::kRc, {"rc_mlx5/mlx5_0:1", "ud_mlx5/mlx5_0:1"}).ok());
  EXPECT_EQ(CheckLanes(Lanes::kRc, {"tcp/eth0"}),
            absl::FailedPreconditionError(
                "UCX chose tcp/eth0, but --lanes asked for rc: install or enable RDMA on both hosts, or start "
                "every node with --lanes tcp"));
  EXPECT_THAT(std::string(CheckLanes(Lanes::kShm, {"posix/memory", "tcp/lo"}).message()),
              HasSubstr("UCX chose posix/memory, tcp/lo, but --lanes asked for shm"));
  EXPECT_FALSE(CheckLanes(Lanes::kAny, {}).ok());
}

TEST(Wire, AHeaderWithAnyBitTurnedIsRefused) {
  WireHeader header;
  header.kind = WireKind::kTensor;
  header.key = 77;
  Seal(header);
  EXPECT_EQ(header.checksum, proto::Crc32c(std::as_bytes(std::span(&header, 1)).first(116)));
  ASSERT_TRUE(Check(header).ok());
  for (size_t bit = 0; bit < sizeof(header) * 8; ++bit) {
    WireHeader damaged = header;
    reinterpret_cast<unsigned char*>(&damaged)[bit / 8] ^= static_cast<unsigned char>(1u << (bit % 8));
    EXPECT_FALSE(Check(damaged).ok()) << bit;
  }
  for (const uint16_t kind : {0, 8, 65535}) {
    header.kind = static_cast<WireKind>(kind);
    Seal(header);
    EXPECT_FALSE(Check(header).ok());
  }
}

TEST(Wire, AddressesAndKeysComeBackAsTheyWereAndDamagedOnesDoNot) {
  const Ticket ticket = RandomTicket();
  const std::vector<SocketAddress> listeners = {*SocketAddress::FromBytes("123456"),
                                                *SocketAddress::FromBytes("123456789012345678")};
  const std::string address =
      Encode(NodeAddress{NodeId(3), Epoch(4), 0x123456789abcdef0, {77, 88}, ticket, listeners, "worker"});
  const NodeAddress decoded = *DecodeNodeAddress(address);
  EXPECT_EQ(decoded.node, NodeId(3));
  EXPECT_EQ(decoded.epoch, Epoch(4));
  EXPECT_EQ(decoded.key, 0x123456789abcdef0u);
  EXPECT_EQ(decoded.process, (ProcessIdentity{77, 88}));
  EXPECT_EQ(decoded.ticket, ticket);
  EXPECT_EQ(decoded.listeners, listeners);
  EXPECT_EQ(decoded.worker, "worker");
  const std::string key = Encode(RegionKey{NodeId(1), Epoch(2), NodeId(3), 17, 8192, 99});
  const RegionKey region = *DecodeRegionKey(key);
  EXPECT_EQ(region.owner, NodeId(1));
  EXPECT_EQ(region.owner_epoch, Epoch(2));
  EXPECT_EQ(region.writer, NodeId(3));
  EXPECT_EQ(region.descriptor, 17u);
  EXPECT_EQ(region.bytes, 8192u);
  EXPECT_EQ(region.token, 99u);
  EXPECT_FALSE(DecodeNodeAddress(key).ok());
  EXPECT_FALSE(DecodeRegionKey(address).ok());
  for (size_t i = 0; i < address.size(); ++i) EXPECT_FALSE(DecodeNodeAddress(address.substr(0, i)).ok());
  for (size_t i = 0; i < key.size(); ++i) EXPECT_FALSE(DecodeRegionKey(key.substr(0, i)).ok());
}

TEST(ProcessWatch, AProcessHasEndedOnceItIsKilledThoughNobodyReapedIt) {
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  ProcessIdentity identity{static_cast<uint32_t>(child), 0};
  EXPECT_FALSE(ProcessWatch(identity).Ended());  // without its start time it is not known which process is meant
  std::ifstream stat(absl::StrCat("/proc/", child, "/stat"));
  std::string field;
  for (int i = 0; i < 22; ++i) stat >> field;
  identity.start = std::stoull(field);
  ProcessWatch watch(identity);
  EXPECT_FALSE(watch.Ended());
  EXPECT_TRUE(ProcessWatch(ProcessIdentity{identity.pid, identity.start + 1}).Ended());  // the number is another's now
  kill(child, SIGKILL);
  pollfd ended{watch.fd(), POLLIN, 0};
  EXPECT_EQ(poll(&ended, 1, 10'000), 1);
  EXPECT_TRUE(watch.Ended());
  ProcessWatch moved = std::move(watch);
  EXPECT_TRUE(moved.Ended());
  waitpid(child, nullptr, 0);
  EXPECT_TRUE(ProcessWatch(identity).Ended());  // no process has the number
  EXPECT_FALSE(ProcessWatch(ThisProcess()).Ended());
  EXPECT_FALSE(ProcessWatch().Ended());
}

// A region as its owner and as its writer see it.
struct RingEnds {
  std::unique_ptr<ReceiveRegion> region = *ReceiveRegion::Create(1 << 20);
  std::unique_ptr<RemoteRegion> remote =
      *RemoteRegion::Open(ThisProcess(), region->descriptor(), region->size_bytes(), region->token());
  RingReader reader{region->front()};
  RingWriter writer{remote->front()};
  uint64_t pushed = 0, popped = 0;

  bool Push() {
    WireHeader header;
    header.kind = WireKind::kPlaced;
    header.sequence = pushed++;
    Seal(header);
    return writer.Push(header);
  }
  void PopAndCompare() {
    WireHeader header;
    reader.Pop(header);
    EXPECT_TRUE(Check(header).ok());
    EXPECT_EQ(header.sequence, popped++);
  }
};

TEST(FrameRing, HeadersComeOutOnceAndInOrderHoweverOftenItWraps) {
  RingEnds ends;
  for (const uint64_t burst : {uint64_t{1}, uint64_t{7}, kRingEntries, kRingEntries - 1, uint64_t{3}, kRingEntries}) {
    EXPECT_FALSE(ends.reader.Ready());
    for (uint64_t i = 0; i < burst; ++i) EXPECT_FALSE(ends.Push());
    for (uint64_t i = 0; i < burst; ++i) {
      ASSERT_TRUE(ends.reader.Ready());
      ends.PopAndCompare();
    }
  }
  EXPECT_FALSE(ends.reader.Ready());
  EXPECT_EQ(ends.popped, 3 * kRingEntries + 10);
}

TEST(FrameRing, OnlyTheFirstPushToAnOwnerThatSleepsIsToWakeIt) {
  RingEnds ends;
  ends.reader.SetAsleep(true);
  EXPECT_TRUE(ends.Push());
  EXPECT_FALSE(ends.Push());
  ends.reader.SetAsleep(true);
  ends.reader.SetAsleep(false);
  EXPECT_FALSE(ends.Push());
}

// A call may come late: that for the frame before, which the owner saw without it, ends the next sleep in vain.
TEST(FrameRing, AnOwnerThatFallsAsleepAtTheSameMomentIsWoken) {
  RingEnds ends;
  constexpr int kFrames = 20000;
  std::atomic<int> calls{0}, taken{0};
  std::thread writer([&] {
    for (int i = 0; i < kFrames; ++i) {
      if (ends.Push()) ++calls;
      while (taken <= i) std::this_thread::yield();
    }
  });
  int heard = 0, sleeps = 0;
  for (int i = 0; i < kFrames; ++i) {
    for (bool there = false; !there;) {
      ends.reader.SetAsleep(true);
      ++sleeps;
      there = ends.reader.Ready();
      const absl::Time deadline = absl::Now() + absl::Seconds(20);
      while (!there && calls == heard && !HasFailure()) {
        std::this_thread::yield();
        if (absl::Now() < deadline) continue;
        ADD_FAILURE() << "sleeps for ever before frame " << i;
      }
      if (!there) heard = calls;
      ends.reader.SetAsleep(false);
      there = there || ends.reader.Ready() || HasFailure();
    }
    while (!ends.reader.Ready()) std::this_thread::yield();
    ends.PopAndCompare();
    ++taken;
  }
  writer.join();
  EXPECT_LE(calls, sleeps) << "a sleep was ended twice";
}

TEST(SendWindow, AnAnswerFreesOnlyWhatItsSenderHadBeenHanded) {
  SendWindow window(1 << 20, nullptr);
  const std::vector<std::byte> bytes(100);
  for (int i = 0; i < 3; ++i) {
    SendWindow::Frame* frame = window.Next(bytes.size(), /*tensor=*/true);
    ASSERT_NE(frame, nullptr);
    frame->header.kind = WireKind::kTensor;
    frame->header.frame.micro_batch = i == 1 ? 9 : 3;
    frame->payload = bytes;
    window.Push(*frame);
  }
  std::vector<uint64_t> freed;
  const auto note = [&](const SendWindow::Tensor& tensor) { freed.push_back(tensor.sequence); };
  window.Answered(3, /*delivered=*/2, note);
  EXPECT_THAT(freed, ElementsAre(0)) << "1 is of another micro-batch, 2 was still under way";
  EXPECT_EQ(window.bytes(), 200u);
  window.Answered(3, /*delivered=*/3, note);
  EXPECT_THAT(freed, ElementsAre(0, 2));
  EXPECT_EQ(window.bytes(), 100u);
}

TEST(SendWindow, AFrameIsFreeForTheNextOneOnceItIsSentThoughThePeerHasNotReadIt) {
  SendWindow window(1 << 20, nullptr);
  const std::vector<std::byte> bytes(100);
  const auto push = [&] {
    SendWindow::Frame* frame = window.Next(bytes.size(), /*tensor=*/false);
    if (frame == nullptr) return frame;
    frame->header.kind = WireKind::kMessage;
    frame->payload = bytes;
    window.Push(*frame);
    return frame;
  };
  SendWindow::Frame* first = push();
  EXPECT_EQ(&window.At(0), first);
  SendWindow::Frame* second = push();
  EXPECT_NE(second, first) << "the fabric still reads it";
  window.Sent(*second);
  EXPECT_EQ(push(), second) << "the last that was read, which is in the cache";
  window.Sent(*first);
  for (int i = 3; i < kMaxFramesInFlight; ++i) ASSERT_NE(push(), nullptr) << i;
  EXPECT_EQ(push(), nullptr) << "as many are unread as may be";
  EXPECT_EQ(window.bytes(), 100u * kMaxFramesInFlight);
  ASSERT_TRUE(window.Delivered(3));
  EXPECT_EQ(window.bytes(), 100u * (kMaxFramesInFlight - 3)) << "whose frames they were does not matter any more";
  EXPECT_FALSE(window.Delivered(kMaxFramesInFlight + 1));
}

TEST(ReceiveWindow, AFrameIsTakenOnceHoweverLateItComesAgainAndNoneBeyondTheCredit) {
  using Verdict = ReceiveWindow::Verdict;
  ReceiveWindow window(1 << 20);
  ReceiveWindow::Frame* frame = nullptr;
  EXPECT_EQ(window.Accept(0, 10, frame), Verdict::kTaken);
  EXPECT_EQ(window.Accept(0, 10, frame), Verdict::kRepeated);
  ReceiveWindow::Frame& popped = window.Pop();
  EXPECT_EQ(&popped, frame);
  EXPECT_EQ(window.Accept(0, 10, frame), Verdict::kRepeated);
  EXPECT_EQ(window.Accept(kMaxFramesInFlight + 1, 10, frame), Verdict::kBeyondCredit);
  EXPECT_EQ(window.Accept(kMaxFramesInFlight, 10, frame), Verdict::kTaken);
  EXPECT_NE(frame, &popped) << "that one is still the caller's";
  EXPECT_FALSE(window.HasNext()) << "1 is missing";
  EXPECT_EQ(window.bytes(), 20u);
  window.Release(popped);
  EXPECT_EQ(window.bytes(), 10u);
}

TEST(ReceiveWindow, HoldsAsManyTensorsAsAPeerMayHaveUnansweredBesidesAsManyMessagesAsItMayHaveUnread) {
  using Verdict = ReceiveWindow::Verdict;
  ReceiveWindow window(1 << 20);
  ReceiveWindow::Frame* frame = nullptr;
  uint64_t sequence = 0;
  for (int i = 0; i < kMaxFramesInFlight; ++i) {
    ASSERT_EQ(window.Accept(sequence++, 1, frame), Verdict::kTaken) << i;
    frame->header.micro_batch = static_cast<uint16_t>(i % 2);
    window.Hold(window.Pop());
  }
  for (int i = 0; i < kMaxFramesInFlight; ++i) ASSERT_EQ(window.Accept(sequence++, 1, frame), Verdict::kTaken) << i;
  window.Hold(window.Pop());
  EXPECT_EQ(window.Accept(sequence, 1, frame), Verdict::kBeyondCredit) << "one more tensor than may be unanswered";
  int released = 0;
  window.Answer(1, [&](const ReceiveWindow::Frame& held) { released += held.header.micro_batch == 1; });
  EXPECT_EQ(released, kMaxFramesInFlight / 2);
  EXPECT_EQ(window.Accept(sequence, 1, frame), Verdict::kTaken);
}

TEST(WaitSpin, IsLongWhileWaitsAreShortAndShortOnceOneIsLong) {
  constexpr absl::Duration kLeast = absl::Microseconds(50), kMost = absl::Milliseconds(1);
  WaitSpin spin(kLeast, kMost);
  EXPECT_EQ(spin.now(), kLeast);
  spin.Came(kMost);
  EXPECT_EQ(spin.now(), kMost);
  spin.Came(kMost + absl::Microseconds(1));
  EXPECT_EQ(spin.now(), kLeast) << "it slept most of the wait";
  spin.Came(absl::Microseconds(70));
  EXPECT_EQ(spin.now(), kMost);
  spin.TimedOut();
  EXPECT_EQ(spin.now(), kLeast);
}

TEST(SlotAllocator, SlotsNeverOverlapAndEverythingComesBackWhole) {
  constexpr uint64_t kBytes = 4 << 20;
  SlotAllocator slots(kBytes);
  std::mt19937 random(5);
  std::map<uint64_t, uint64_t> used;  // offset -> bytes
  int refused = 0;
  for (int i = 0; i < 20'000; ++i) {
    if (random() % 2 == 0 && !used.empty()) {
      auto it = std::next(used.begin(), random() % used.size());
      slots.Free(it->first);
      used.erase(it);
      continue;
    }
    const uint64_t bytes = random() % 200'000;
    const uint64_t offset = slots.Allocate(bytes);
    if (offset == SlotAllocator::kNone) {
      ++refused;
      continue;
    }
    ASSERT_LE(offset + bytes, kBytes);
    const auto next = used.lower_bound(offset);
    if (next != used.end()) {
      ASSERT_LE(offset + bytes, next->first);
    }
    if (next != used.begin()) {
      ASSERT_LE(std::prev(next)->first + std::prev(next)->second, offset);
    }
    used[offset] = std::max<uint64_t>(bytes, 1);
  }
  EXPECT_GT(refused, 0);
  for (const auto& [offset, bytes] : used) slots.Free(offset);
  EXPECT_EQ(slots.bytes_used(), 0u);
  EXPECT_EQ(slots.Allocate(kBytes), 0u);  // merged again
  EXPECT_EQ(slots.Allocate(1), SlotAllocator::kNone);
}

TEST(SlotAllocator, TheSlotLastFreedIsUsedNextAndTooLargeIsRefused) {
  SlotAllocator slots(1 << 20);
  const uint64_t a = slots.Allocate(16 << 10), b = slots.Allocate(16 << 10);
  EXPECT_NE(a, b);
  slots.Free(a);
  EXPECT_EQ(slots.Allocate(10 << 10), a);
  EXPECT_EQ(slots.Allocate((1 << 20) + 1), SlotAllocator::kNone);
  EXPECT_EQ(SlotAllocator(100).Allocate(1), SlotAllocator::kNone);
}

TEST(UcxVersionTest, ALibraryOfAnotherMajorOrAnOlderOneIsRefusedByName) {
  EXPECT_TRUE(CheckUcxVersion({1, 13}, {1, 13}).ok());
  EXPECT_TRUE(CheckUcxVersion({1, 13}, {1, 22}).ok());
  for (const auto& [built, loaded] : {std::pair<UcxVersion, UcxVersion>{{1, 22}, {1, 13}}, {{1, 13}, {2, 13}}}) {
    const absl::Status status = CheckUcxVersion(built, loaded);
    EXPECT_TRUE(absl::IsFailedPrecondition(status));
    for (const UcxVersion& named : {built, loaded})
      EXPECT_THAT(std::string(status.message()), testing::HasSubstr(absl::StrCat(named.major, ".", named.minor)));
  }
}
TEST(UcxVersionTest, TheOneThatThisProgramLoadedFits) { EXPECT_TRUE(CheckLoadedUcx().ok()); }

}  // namespace
}  // namespace dovetail::transport::ucx
