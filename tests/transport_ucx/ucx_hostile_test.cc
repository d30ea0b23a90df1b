// What arrives at a port that no honest node has sent: through UCX itself, from a worker of our own.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <random>

#include "absl/strings/match.h"
#include "tests/support/test_data.h"
#include "tests/transport_ucx/ucx_nodes.h"
#include "transport/ucx/region.h"
#include "transport/ucx/ucx_worker.h"

namespace dovetail::transport::ucx {
namespace {

using proto::FrameType;
using ::testing::HasSubstr;

constexpr uint64_t kOwnKey = 99;

class Rogue {
 public:
  explicit Rogue(TestNode& victim) : victim_(victim), target_(*DecodeNodeAddress(victim.port->local_address())) {
    auto worker = UcxWorker::Create({Lanes::kShm, "", 0, 0, absl::Seconds(1)});
    DT_CHECK(worker.ok());
    worker_ = *std::move(worker);
    ucp_am_handler_param_t deaf{};  // UCX 1.13 crashes on a message for which there is no handler
    deaf.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    deaf.id = kActiveMessageId;
    deaf.arg = this;
    deaf.cb = [](void* argument, const void*, size_t, void* data, size_t bytes, const ucp_am_recv_param_t*) {
      if (bytes > 0) static_cast<Rogue*>(argument)->greeting_.assign(static_cast<const char*>(data), bytes);
      return UCS_OK;
    };
    DT_CHECK(ucp_worker_set_am_recv_handler(worker_->get(), &deaf) == UCS_OK);
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
    params.address = reinterpret_cast<const ucp_address_t*>(target_.worker.data());
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    DT_CHECK(ucp_ep_create(worker_->get(), &params, &endpoint_) == UCS_OK);
  }
  ~Rogue() {
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
    const ucs_status_ptr_t request = ucp_ep_close_nbx(endpoint_, &param);
    for (int i = 0; i < 1000; ++i) worker_->Progress();
    if (UCS_PTR_IS_PTR(request)) ucp_request_free(request);
  }

  ProcessIdentity process = ThisProcess();  // that it says it is

  // Is added, and greets with these bytes as the key of a region.
  void Join(const std::string& region_key = "") {
    const std::string address = Encode(NodeAddress{
        .node = NodeId(9), .epoch = Epoch(1), .key = kOwnKey, .process = process, .worker = *worker_->Address()});
    ASSERT_TRUE(victim_.port->AddPeer(NodeId(9), address, UcxPort::Version(), Epoch(1)).ok());
    WireHeader hello = HeaderFor(WireKind::kHello);
    hello.sequence = UcxOptions().max_frame_bytes;
    hello.offset = UcxOptions().max_bytes_in_flight;
    const auto key = std::as_bytes(std::span(region_key));
    Send(hello, {key.begin(), key.end()});
    if (!region_key.empty()) return;
    ASSERT_TRUE(PumpUntil({&victim_}, [&] { return victim_.port->Connected(NodeId(9)); }));
  }

  WireHeader HeaderFor(WireKind kind) const {
    WireHeader header;
    header.kind = kind;
    header.from = 9;
    header.from_epoch = 1;
    header.key = target_.key;
    return header;
  }
  WireHeader Frame(uint64_t sequence, size_t bytes, WireKind kind = WireKind::kMessage) const {
    WireHeader header = HeaderFor(kind);
    header.sequence = sequence;
    header.frame = HeaderOf(FrameType::kStepPlan, sequence, 0, bytes);
    return header;
  }

  // The region that the victim made for it, once it has been greeted.
  std::unique_ptr<RemoteRegion> OpenRegion() {
    DT_CHECK(PumpUntil({&victim_}, [&] { return worker_->Progress() == 0 && !greeting_.empty(); }));
    const RegionKey key = *DecodeRegionKey(greeting_);
    return *RemoteRegion::Open(ThisProcess(), key.descriptor, key.bytes, key.token);
  }

  void Send(WireHeader header, const std::vector<std::byte>& payload) {
    Seal(header);
    SendRaw({reinterpret_cast<const std::byte*>(&header), sizeof(header)}, payload);
  }
  void SendRaw(std::span<const std::byte> header, const std::vector<std::byte>& payload) {
    const ucp_request_param_t param{};
    const ucs_status_ptr_t request = ucp_am_send_nbx(endpoint_, kActiveMessageId, header.data(), header.size(),
                                                     payload.data(), payload.size(), &param);
    ASSERT_FALSE(UCS_PTR_IS_ERR(request));
    if (!UCS_PTR_IS_PTR(request)) return;
    ASSERT_TRUE(PumpUntil({&victim_}, [&] {
      worker_->Progress();
      return ucp_request_check_status(request) != UCS_INPROGRESS;
    }));
    ucp_request_free(request);
  }

 private:
  TestNode& victim_;
  const NodeAddress target_;
  std::unique_ptr<UcxWorker> worker_;
  ucp_ep_h endpoint_ = nullptr;
  std::string greeting_;  // the last payload that came
};

std::string FailureOf(TestNode& node) {
  std::vector<PeerFailure> failures;
  if (!PumpUntil({&node}, [&] { return !(failures = node.port->TakeFailures()).empty(); })) return "none";
  EXPECT_EQ(failures[0].node, NodeId(9));
  return std::string(failures[0].status.message());
}

TEST(UcxHostile, WhatHasNoValidHeaderIsDroppedAndCountedAndMembersGoOn) {
  TestNode victim(OptionsFor(1, Lanes::kShm)), member(OptionsFor(2, Lanes::kShm));
  ASSERT_TRUE(Connect(victim, member));
  Rogue rogue(victim);
  std::mt19937 random(11);
  for (int i = 0; i < 500; ++i) {
    std::vector<std::byte> header(random() % 300), payload(random() % 20'000);
    for (std::byte& byte : header) byte = static_cast<std::byte>(random());
    rogue.SendRaw(header, payload);
    victim.Poll();
  }
  WireHeader unsealed = rogue.Frame(0, 4);
  rogue.SendRaw({reinterpret_cast<const std::byte*>(&unsealed), sizeof(unsealed)}, Pattern(4, 0));
  ASSERT_TRUE(PumpUntil({&victim}, [&] { return victim.port->counters().dropped_malformed == 501; }));
  ASSERT_TRUE(SendMessage(member, victim, 1, Pattern(10, 1)).ok());
  ASSERT_TRUE(PumpUntil({&victim, &member}, [&] { return victim.collector.frames.size() == 1; }));
  EXPECT_EQ(victim.collector.frames[0].from, member.id());
}

TEST(UcxHostile, FramesOfStrangersOfOtherIncarnationsAndWithoutTheKeyAreDropped) {
  TestNode victim(OptionsFor(1, Lanes::kShm));
  Rogue rogue(victim);
  rogue.Send(rogue.Frame(0, 4), Pattern(4, 0));  // not added
  ASSERT_TRUE(PumpUntil({&victim}, [&] { return victim.port->counters().dropped_foreign == 1; }));
  rogue.Join();
  WireHeader header = rogue.Frame(0, 4);
  header.from_epoch = 2;
  rogue.Send(header, Pattern(4, 0));
  header = rogue.Frame(0, 4);
  header.key ^= 1;
  rogue.Send(header, Pattern(4, 0));
  header = rogue.Frame(0, 4);
  header.from = 8;
  rogue.Send(header, Pattern(4, 0));
  ASSERT_TRUE(PumpUntil({&victim}, [&] { return victim.port->counters().dropped_foreign == 4; }));
  EXPECT_TRUE(victim.collector.frames.empty());
  rogue.Send(rogue.Frame(0, 4), Pattern(4, 0));
  ASSERT_TRUE(PumpUntil({&victim}, [&] { return victim.collector.frames.size() == 1; }));
}

TEST(UcxHostile, FramesThatArriveOutOfOrderOrTwiceAreHandedOverInOrderAndOnce) {
  TestNode victim(OptionsFor(1, Lanes::kShm));
  Rogue rogue(victim);
  rogue.Join();
  for (const uint64_t sequence : {2, 1, 2, 3, 0, 0, 1}) rogue.Send(rogue.Frame(sequence, 4), Pattern(4, 0));
  ASSERT_TRUE(PumpUntil({&victim}, [&] { return victim.port->counters().dropped_repeated == 3; }));
  victim.Poll();
  ASSERT_EQ(victim.collector.frames.size(), 4u);
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(victim.collector.frames[i].header.step, i);
}

class UcxBreach : public ::testing::Test {
 protected:
  UcxBreach() : victim_(OptionsFor(1, Lanes::kShm)), rogue_(victim_) { rogue_.Join(); }
  TestNode victim_;
  Rogue rogue_;
};

TEST_F(UcxBreach, MoreFramesThanCredit) {
  rogue_.Send(rogue_.Frame(kMaxFramesInFlight, 4), Pattern(4, 0));
  EXPECT_THAT(FailureOf(victim_), HasSubstr("more than 1024 unread frames"));
}

TEST_F(UcxBreach, AnAcknowledgementOfFramesThatWereNotSent) {
  WireHeader credit = rogue_.HeaderFor(WireKind::kCredit);
  credit.delivered = 1;
  rogue_.Send(credit, {});
  EXPECT_EQ(FailureOf(victim_), "it acknowledges 1 frames, but was sent 0");
}

TEST_F(UcxBreach, APlaceOutsideTheRegion) {
  WireHeader inside = rogue_.Frame(0, 4096, WireKind::kPlaced);
  rogue_.Send(inside, {});
  ASSERT_TRUE(PumpUntil({&victim_}, [&] { return victim_.collector.frames.size() == 1; }));
  WireHeader outside = rogue_.Frame(1, 4096, WireKind::kPlaced);
  outside.offset = UcxOptions().receive_region_bytes - 4096 + 64;
  rogue_.Send(outside, {});
  EXPECT_THAT(FailureOf(victim_), HasSubstr("outside its receive region"));
}

TEST_F(UcxBreach, WhatARingTellsIsCheckedAsWhatAMessageTellsIs) {
  const std::unique_ptr<RemoteRegion> region = rogue_.OpenRegion();
  RingWriter ring(region->front());
  const auto sealed = [](WireHeader header) {
    Seal(header);
    return header;
  };
  WireHeader damaged = sealed(rogue_.Frame(0, 64, WireKind::kPlaced));
  damaged.offset = 64;
  ring.Push(damaged);
  WireHeader spoofed = rogue_.Frame(0, 64, WireKind::kPlaced);
  spoofed.from = 7;
  ring.Push(sealed(spoofed));
  for (const WireKind kind :
       {WireKind::kHello, WireKind::kWelcome, WireKind::kCredit, WireKind::kMessage, WireKind::kGoodbye})
    ring.Push(sealed(rogue_.Frame(0, 0, kind)));
  WireHeader stale = rogue_.Frame(0, 64, WireKind::kPlaced);
  stale.from_epoch = 3;
  ring.Push(sealed(stale));
  std::memset(region->data() + 4096, 0x5A, 64);
  WireHeader good = rogue_.Frame(0, 64, WireKind::kPlaced);
  good.offset = 4096;
  ring.Push(sealed(good));
  ring.Push(sealed(good));
  ASSERT_TRUE(PumpUntil({&victim_}, [&] { return victim_.port->counters().dropped_repeated == 1; }));
  EXPECT_EQ(victim_.port->counters().dropped_malformed, 1u);
  EXPECT_EQ(victim_.port->counters().dropped_foreign, 7u);
  ASSERT_EQ(victim_.collector.frames.size(), 1u);
  EXPECT_EQ(victim_.collector.frames[0].bytes, std::vector<std::byte>(64, std::byte{0x5A}));

  WireHeader outside = rogue_.Frame(1, 4096, WireKind::kPlaced);
  outside.offset = UcxOptions().receive_region_bytes;
  ring.Push(sealed(outside));
  EXPECT_THAT(FailureOf(victim_), HasSubstr("outside its receive region"));
}

TEST_F(UcxBreach, AFrameInARingThatNamesAnotherMemberIsNotTakenForThatMembers) {
  TestNode member(OptionsFor(2, Lanes::kShm));
  ASSERT_TRUE(Connect(victim_, member));
  const std::unique_ptr<RemoteRegion> region = rogue_.OpenRegion();
  RingWriter ring(region->front());
  WireHeader forged = rogue_.Frame(0, 0, WireKind::kTensor);  // valid in all, had it come from the member
  forged.from = member.id().value();
  Seal(forged);
  ring.Push(forged);
  ASSERT_TRUE(PumpUntil({&victim_, &member}, [&] { return victim_.port->counters().dropped_foreign == 1; }));
  EXPECT_TRUE(victim_.collector.frames.empty());
  // The member's own first frame has that number, and is handed over.
  ASSERT_TRUE(SendMessage(member, victim_, 41, Pattern(10, 1)).ok());
  ASSERT_TRUE(PumpUntil({&victim_, &member}, [&] { return victim_.collector.frames.size() == 1; }));
  EXPECT_EQ(victim_.collector.frames[0].from, member.id());
  EXPECT_EQ(victim_.collector.frames[0].header.step, 41u);
  EXPECT_EQ(victim_.collector.frames[0].bytes, Pattern(10, 1));
}

TEST_F(UcxBreach, APlaceWhoseEndWrapsAround) {
  WireHeader wrapped = rogue_.Frame(0, 4096, WireKind::kPlaced);
  wrapped.offset = ~uint64_t{63};
  rogue_.Send(wrapped, {});
  EXPECT_THAT(FailureOf(victim_), HasSubstr("outside its receive region"));
}

TEST(UcxHostile, APlaceInARegionThatWasNotMadeDropsThePeer) {
  UcxOptions options = OptionsFor(1, Lanes::kShm);
  options.receive_region_bytes = 0;
  TestNode victim(options);
  Rogue rogue(victim);
  rogue.Join();
  rogue.Send(rogue.Frame(0, 4096, WireKind::kPlaced), {});
  EXPECT_THAT(FailureOf(victim), HasSubstr("outside its receive region"));
}

TEST(UcxHostile, AGreetingWithAKeyForSomeoneElseOrNoneAtAllDropsThePeer) {
  const std::string other = Encode(RegionKey{NodeId(9), Epoch(1), NodeId(5), 3, 4096, 1});
  for (const std::string& key : {other, other.substr(1), std::string("nonsense")}) {
    TestNode victim(OptionsFor(1, Lanes::kShm));
    Rogue rogue(victim);
    rogue.Join(key);
    EXPECT_THAT(FailureOf(victim), HasSubstr("region key"));
    EXPECT_FALSE(victim.port->Connected(NodeId(9)));
  }
}

TEST(UcxHostile, AKeyThatOpensAnotherRegionThanItWasMadeForDropsThePeer) {
  auto region = ReceiveRegion::Create(1 << 20);
  ASSERT_TRUE(region.ok());
  for (const bool stale : {true, false}) {
    TestNode victim(OptionsFor(1, Lanes::kShm));
    Rogue rogue(victim);
    rogue.Join(Encode(
        RegionKey{NodeId(9), Epoch(1), NodeId(1), (*region)->descriptor(), 1 << 20, (*region)->token() + stale}));
    if (stale) {
      EXPECT_EQ(FailureOf(victim), "region key: the region is gone");
    } else {
      EXPECT_TRUE(PumpUntil({&victim}, [&] { return victim.port->Connected(NodeId(9)); }));
    }
  }
}

// What a peer's key may name by the time it is opened, or by malice: UCX 1.13 crashes when a key of its own names
// nothing any more (ucp_ep_rkey_unpack releases what it never opened).
TEST(UcxHostile, AKeyThatNamesNoRegionDropsThePeerAndNothingElse) {
  auto kept = ReceiveRegion::Create(1 << 20);
  ASSERT_TRUE(kept.ok());
  const uint64_t token = (*kept)->token();
  int pipe_ends[2];
  ASSERT_EQ(pipe2(pipe_ends, O_CLOEXEC), 0);
  const std::string path = (test::TempFolder() / "file").string();
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  ASSERT_EQ(ftruncate(file, 2 << 20), 0);
  const pid_t child = fork();
  if (child == 0) _exit(0);
  waitpid(child, nullptr, 0);
  const ProcessIdentity here = ThisProcess(), none{}, dead{static_cast<uint32_t>(child), 1};

  struct Case {
    ProcessIdentity process;
    uint32_t descriptor;
    uint64_t bytes;
    const char* why;
  };
  for (const Case& test :
       std::initializer_list<Case>{{here, 999'999, 1 << 20, "has given the region up"},
                                   {dead, (*kept)->descriptor(), 1 << 20, "has ended"},
                                   {none, (*kept)->descriptor(), 1 << 20, "did not say which process it is"},
                                   {here, static_cast<uint32_t>(pipe_ends[0]), 1 << 20, "is no memory"},
                                   {here, static_cast<uint32_t>(file), 1 << 20, "the region is gone"},
                                   {here, (*kept)->descriptor(), 2 << 20, "more than the region has"},
                                   {here, (*kept)->descriptor(), uint64_t{1} << 62, "outside 1.."}}) {
    TestNode victim(OptionsFor(1, Lanes::kShm));
    Rogue rogue(victim);
    rogue.process = test.process;
    rogue.Join(Encode(RegionKey{NodeId(9), Epoch(1), NodeId(1), test.descriptor, test.bytes, token}));
    const std::string failure = FailureOf(victim);
    // Of a process that has ended the port may hear first that it has.
    EXPECT_TRUE(absl::StrContains(failure, test.why) || (test.process == dead && absl::StrContains(failure, "ended")))
        << failure << "; expected: " << test.why;
    EXPECT_FALSE(victim.port->Connected(NodeId(9)));
  }
  close(file);
  close(pipe_ends[0]);
  close(pipe_ends[1]);
}

TEST(UcxHostile, APayloadBeyondTheLimitDropsThePeerAndOnlyIt) {
  UcxOptions options = OptionsFor(1, Lanes::kShm), other = OptionsFor(2, Lanes::kShm);
  options.max_frame_bytes = other.max_frame_bytes = 1 << 20;
  TestNode victim(options), member(other);
  ASSERT_TRUE(Connect(victim, member));
  Rogue rogue(victim);
  const std::string address = Encode(NodeAddress{.node = NodeId(9),
                                                 .epoch = Epoch(1),
                                                 .key = kOwnKey,
                                                 .worker = DecodeNodeAddress(member.port->local_address())->worker});
  ASSERT_TRUE(victim.port->AddPeer(NodeId(9), address, UcxPort::Version(), Epoch(1)).ok());
  rogue.Send(rogue.Frame(0, (1 << 20) + 1), Pattern((1 << 20) + 1, 0));
  EXPECT_EQ(FailureOf(victim), "it sent a frame of 1048577 bytes; at most 1048576");
  ASSERT_TRUE(SendMessage(member, victim, 1, Pattern(1 << 20, 1)).ok());
  ASSERT_TRUE(PumpUntil({&victim, &member}, [&] { return victim.collector.frames.size() == 1; }));
}

}  // namespace
}  // namespace dovetail::transport::ucx
