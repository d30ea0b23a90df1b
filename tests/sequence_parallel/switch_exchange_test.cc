#include "sequence_parallel/switch_exchange.h"

#include <cstdlib>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/switch_frames.h"
#include "tests/sequence_parallel/exchange_group.h"

namespace dovetail::sequence_parallel {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

uint64_t Seed() {
  if (const char* seed = std::getenv("DOVETAIL_SEED")) return std::strtoull(seed, nullptr, 10);
  return std::random_device{}();
}

std::string Text(const absl::Status& status) { return std::string(status.message()); }

// The parts of one tensor before and after a switch, and what the ranks make of them.
struct Exchange {
  Exchange(const proto::Layout& from, const proto::Layout& to, uint64_t seed = 1)
      : plan(SwitchOf(from, to)), tensor(RandomBytes(from.shape().Bytes(), seed)) {
    for (int rank = 0; rank < from.ranks(); ++rank) {
      before.push_back(PartOf(tensor, from, rank));
      wanted.push_back(PartOf(tensor, to, rank));
      after.emplace_back(wanted.back().size(), std::byte{0xEE});
    }
  }
  absl::Status Begin(Group& group, int rank, SwitchId id) {
    return group[rank].Begin(id, plan, before[rank], after[rank]);
  }

  proto::Switch plan;
  Bytes tensor;
  std::vector<Bytes> before, wanted, after;
};

SwitchId Id(uint64_t step, uint16_t index = 0) { return {StepId(step), index}; }

TEST(SwitchExchange, PutsEveryByteInPlaceForAnyRanksLayoutsAndOrderOfTurns) {
  const uint64_t seed = Seed();
  SCOPED_TRACE(absl::StrCat("DOVETAIL_SEED=", seed));
  std::mt19937_64 random(seed);
  for (int round = 0; round < 40; ++round) {
    const int ranks = 1 + static_cast<int>(random() % 5);
    const proto::TensorShape shape = Hidden(1 + random() % 24, 1 + random() % 24, 32 + random() % 64);
    Group group(ranks);
    const char* axes[] = {"T", "S", "C", "all"};
    std::vector<proto::Layout> layouts;
    for (int i = 0; i < 5; ++i) {
      const std::string axis = axes[random() % 4];
      layouts.push_back(axis == "all" ? *proto::Layout::Replicated(shape, ranks) : EvenCut(shape, axis, ranks));
    }
    for (int i = 0; i + 1 < static_cast<int>(layouts.size()); ++i) {
      Exchange exchange(layouts[i], layouts[i + 1], random());
      SCOPED_TRACE(
          absl::StrCat("round ", round, ": from ", layouts[i].DebugString(), " to ", layouts[i + 1].DebugString()));
      const int64_t sent_before = group[0].counters().bytes_sent;
      for (int rank = 0; rank < ranks; ++rank) ASSERT_EQ(exchange.Begin(group, rank, Id(round, i)), absl::OkStatus());
      ASSERT_TRUE(group.Pump(random));
      for (int rank = 0; rank < ranks; ++rank) {
        ASSERT_EQ(group[rank].status(), absl::OkStatus());
        ASSERT_EQ(exchange.after[rank], exchange.wanted[rank]) << "rank " << rank;
      }
      EXPECT_EQ(group[0].counters().bytes_sent - sent_before, exchange.plan.bytes_sent(0));
    }
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(group[rank].counters().switches, layouts.size() - 1);
      EXPECT_EQ(group[rank].counters().dropped, 0u);
    }
  }
}

TEST(SwitchExchange, KeepsWhatAFasterRankSendsOfTheNextSwitchUntilItBegins) {
  const proto::TensorShape shape = Hidden(8, 8, 2048);  // 64 KiB to each other rank
  const proto::Layout t = EvenCut(shape, "T", 2), s = EvenCut(shape, "S", 2),
                      all = *proto::Layout::Replicated(shape, 2);
  Group group(2);
  // A gather to rank 1 alone, so that rank 0 is done with it as soon as rank 1 has taken it.
  const std::vector<proto::AxisRange> only{{}, {0, 8}};
  Exchange first(t, *proto::Layout::Of(shape, "T", only), 1), second(t, s, 2);
  ASSERT_TRUE(first.Begin(group, 0, Id(1, 0)).ok());
  ASSERT_TRUE(first.Begin(group, 1, Id(1, 0)).ok());
  while (!group[0].done()) {
    group.Turn(1);
    group.Turn(0);
  }
  ASSERT_TRUE(second.Begin(group, 0, Id(1, 1)).ok());
  for (int turn = 0; turn < 50; ++turn) {
    group.Turn(0);
    group.Turn(1);
  }
  EXPECT_FALSE(group[0].done());
  EXPECT_EQ(first.after[1], first.wanted[1]);
  EXPECT_EQ(group[0].counters().pieces_sent, first.plan.bytes_sent(0) / kMinChunkBytes + 2)
      << "two pieces in flight, and no more until they are answered";
  ASSERT_TRUE(second.Begin(group, 1, Id(1, 1)).ok());
  std::mt19937_64 random(3);
  ASSERT_TRUE(group.Pump(random));
  for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(second.after[rank], second.wanted[rank]);
}

TEST(SwitchExchange, StagesNoMoreThanItsLimitAndLendsWhatLiesInOneRunAndHasAnOwner) {
  const proto::TensorShape shape = Hidden(64, 64, 64);  // 512 KiB
  const proto::Layout t = EvenCut(shape, "T", 4), s = EvenCut(shape, "S", 4);
  const int64_t limit = 4 * 2 * kMinChunkBytes;
  Group group(4, [&](ExchangeOptions& options) {
    options.chunk_bytes = 1 << 20;
    options.max_staging_bytes = limit;
  });
  Exchange packed(t, s), lent(s, t);
  std::mt19937_64 random(5);
  for (int rank = 0; rank < 4; ++rank) ASSERT_TRUE(packed.Begin(group, rank, Id(1)).ok());
  ASSERT_TRUE(group.Pump(random));
  EXPECT_LE(group[0].staging_bytes(), limit);
  EXPECT_GT(group[0].staging_bytes(), limit / 2);
  EXPECT_EQ(group[0].counters().bytes_packed, packed.plan.bytes_sent(0));
  const int64_t before = group[0].staging_bytes();
  for (int rank = 0; rank < 4; ++rank) {
    const auto owner = std::make_shared<Bytes>(lent.before[rank]);
    ASSERT_TRUE(group[rank].Begin(Id(2), lent.plan, transport::Lend(owner, owner->size()), lent.after[rank]).ok());
  }
  ASSERT_TRUE(group.Pump(random));
  EXPECT_EQ(group[0].counters().bytes_packed, packed.plan.bytes_sent(0)) << "nothing was packed in the second";
  EXPECT_EQ(group[0].counters().bytes_sent, packed.plan.bytes_sent(0) + lent.plan.bytes_sent(0));
  EXPECT_EQ(group[0].staging_bytes(), before);
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(lent.after[rank], lent.wanted[rank]);
}

TEST(SwitchExchange, AnIdentitySendsNothing) {
  const proto::TensorShape shape = Hidden(4, 4, 8);
  const proto::Layout t = EvenCut(shape, "T", 2);
  Group group(2);
  Exchange same(t, t);
  ASSERT_TRUE(same.Begin(group, 0, Id(1)).ok());
  EXPECT_TRUE(group[0].done());
  EXPECT_EQ(same.after[0], same.wanted[0]);
  ASSERT_TRUE(group[0].Begin(Id(2), same.plan, same.before[0], same.before[0]).ok()) << "in place";
  EXPECT_EQ(group[0].counters().bytes_sent, 0);
}

// A rank played by the test, at node 1 of two, against a true rank 0.
struct Impostor {
  explicit Impostor(const proto::TensorShape& shape = Hidden(4, 4, 1024))
      : exchange(EvenCut(shape, "T", 2), EvenCut(shape, "S", 2)) {}

  void Send(uint64_t piece, int64_t bytes, std::function<void(proto::FrameHeader&)> change = {}) {
    proto::FrameHeader header =
        proto::MakeHeader(proto::kSwitchPart, Epoch(5), StepId(7), MicroBatchId(2), 1, bytes, 0,
                          (exchange.plan.fingerprint() & ~(proto::kMaxSwitchPieces - 1)) | piece);
    if (change) {
      change(header);
      header.checksum = proto::Crc32c(std::as_bytes(std::span(&header, 1)).first(60));
    }
    sent.push_back(Bytes(bytes, std::byte{0x11}));
    DT_CHECK(group.ports[1]->SendTensor(NodeId(0), header, sent.back()).ok());
    group.Turn(0);
  }

  Group group{2};
  Exchange exchange;
  std::deque<Bytes> sent;
};

TEST(SwitchExchange, TakesNothingOfAnotherStepGroupLaneOrTypeNorWhatIsDamaged) {
  Impostor other;
  Group& group = other.group;
  ASSERT_TRUE(other.exchange.Begin(group, 0, Id(7, 1)).ok());
  using H = proto::FrameHeader;
  const std::vector<std::function<void(H&)>> changes = {
      [](H& h) { h.step = 6; },
      [](H& h) { h.op = 0; },
      [](H& h) { h.epoch = 4; },
      [](H& h) { h.epoch = 6; },
      [](H& h) { h.micro_batch = 1; },
      [](H& h) { h.payload_bytes += 1; },
      [](H& h) {
        h.type = proto::FrameType::kQuery;
        h.digest = 0;
      },
  };
  for (size_t i = 0; i < changes.size(); ++i) {
    other.Send(0, 4096, changes[i]);
    EXPECT_EQ(group[0].counters().dropped, i + 1) << "change " << i;
    EXPECT_EQ(group[0].counters().bytes_received, 0) << "change " << i;
    EXPECT_EQ(group[0].status(), absl::OkStatus());
  }
  const proto::FrameHeader good = proto::MakeHeader(proto::kSwitchPart, Epoch(5), StepId(7), MicroBatchId(2), 1, 8, 0,
                                                    other.exchange.plan.fingerprint() & ~(proto::kMaxSwitchPieces - 1));
  proto::FrameHeader damaged = good;
  damaged.busy_us ^= 1;  // the rest is as it should be, but for the checksum
  const Bytes eight(8);
  ASSERT_TRUE(group.ports[1]->SendTensor(NodeId(0), damaged, eight).ok());
  group.Turn(0);
  EXPECT_EQ(group[0].counters().dropped, changes.size() + 1);
  group[0].OnFrame({NodeId(9), good, eight});
  EXPECT_EQ(group[0].counters().dropped, changes.size() + 2) << "of no member";
  EXPECT_EQ(group[0].counters().bytes_received, 0);
  other.Send(0, 4096);
  EXPECT_EQ(group[0].counters().bytes_received, 4096) << "the fences let the right one through";
  other.Send(0, 4096);
  EXPECT_EQ(group[0].counters().bytes_received, 4096) << "but once";
  EXPECT_EQ(group[0].status(), absl::OkStatus());
}

TEST(SwitchExchange, EndsTheGroupWithTheRanksNameWhenItMeansAnotherSwitch) {
  const auto verdict = [](std::function<void(Impostor&)> act, SwitchId id = Id(7, 1)) {
    Impostor other;
    EXPECT_TRUE(other.exchange.Begin(other.group, 0, id).ok());
    act(other);
    EXPECT_EQ(other.exchange.Begin(other.group, 0, Id(8)), other.group[0].status()) << "it stays void";
    EXPECT_FALSE(other.group[0].done());
    return other.group[0].status();
  };
  const absl::Status unlike = verdict([](Impostor& o) { o.Send(0, 4096, [](auto& h) { h.digest ^= 1ull << 40; }); });
  EXPECT_EQ(unlike.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Text(unlike), HasSubstr("rank 1 (node 1) means another switch 1 of step 7"));
  const absl::Status gap = verdict([](Impostor& o) { o.Send(2, 4096); });
  EXPECT_EQ(gap.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(Text(gap), HasSubstr("sent piece 2 of switch 1 of step 7, but piece 0 never came"));
  EXPECT_THAT(Text(verdict([](Impostor& o) { o.Send(0, 1 << 20); })),
              HasSubstr("sent 1048576 bytes of switch 1 of step 7, of which 8192 are missing"));
  EXPECT_THAT(Text(verdict([](Impostor& o) { o.Send(0, 0); })), HasSubstr("sent 0 bytes"));
  const absl::Status flood = verdict([](Impostor& o) {
    for (int i = 0; i <= kMaxChunksInFlight; ++i) o.Send(i, 8, [](auto& h) { h.step = 9; });
  });
  EXPECT_THAT(Text(flood), HasSubstr("has sent 64 pieces of switches that have not begun here"));
}

TEST(SwitchExchange, APassedOverSwitchEndsTheGroup) {
  Impostor other;
  other.Send(0, 8);  // of switch 1 of step 7, before any has begun
  const absl::Status begun = other.exchange.Begin(other.group, 0, Id(8));
  EXPECT_THAT(Text(begun),
              HasSubstr("rank 1 (node 1) sent a part of switch 1 of step 7, which rank 0 has passed over"));
}

TEST(SwitchExchange, NamesTheRankThatIsLostAndTellsTheOthers) {
  const proto::TensorShape shape = Hidden(6, 6, 512);
  Group group(3);
  Exchange exchange(EvenCut(shape, "T", 3), EvenCut(shape, "S", 3));
  for (int rank : {0, 1}) ASSERT_TRUE(exchange.Begin(group, rank, Id(1)).ok());
  group[0].PeerLost(NodeId(9), "a stranger");
  EXPECT_EQ(group[0].status(), absl::OkStatus());
  group[0].PeerLost(NodeId(2), "its process ended");
  EXPECT_EQ(group[0].status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Text(group[0].status()), HasSubstr("rank 2 (node 2) is lost: its process ended"));
  group.Turn(1);
  EXPECT_EQ(group[1].status().code(), absl::StatusCode::kAborted);
  EXPECT_THAT(Text(group[1].status()), AllOf(HasSubstr("rank 0 (node 0) has ended the group"),
                                             HasSubstr("rank 2 (node 2) is lost: its process ended")));
}

TEST(SwitchExchange, EndsAfterAStallAndSaysWhoOwesWhat) {
  const proto::TensorShape shape = Hidden(6, 6, 2048);  // 16 KiB for each other rank
  Group group(3, [](ExchangeOptions& options) { options.stall = absl::Seconds(2); });
  Exchange exchange(EvenCut(shape, "T", 3), EvenCut(shape, "S", 3));
  for (int rank : {0, 1}) ASSERT_TRUE(exchange.Begin(group, rank, Id(4)).ok());
  for (int turn = 0; turn < 100; ++turn) group.Turn(turn % 2);
  group.clock.now += absl::Milliseconds(1999);
  group.Turn(0);
  EXPECT_EQ(group[0].status(), absl::OkStatus());
  group.clock.now += absl::Milliseconds(2);
  group.Turn(0);
  EXPECT_EQ(group[0].status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(Text(group[0].status()),
              HasSubstr("switch 0 of step 4: nothing came for 2.001s: rank 2 (node 2) has sent 0 of 16384 bytes and "
                        "has not taken 2 pieces"));
}

TEST(SwitchExchange, GoesOnWhenFramesAreRepeatedAndLateAndEndsWhenOneIsLost) {
  const uint64_t seed = Seed();
  SCOPED_TRACE(absl::StrCat("DOVETAIL_SEED=", seed));
  std::mt19937_64 random(seed);
  const proto::TensorShape shape = Hidden(12, 12, 256);
  const proto::Layout t = EvenCut(shape, "T", 3), s = EvenCut(shape, "S", 3);
  transport::Faults faults;
  faults.duplicate = faults.echo = faults.delay = 0.2;
  Group group(3, {}, /*faulty=*/true);
  for (auto& port : group.faulty_ports) port->Set(faults);
  for (uint16_t i = 0; i < 20; ++i) {
    Exchange exchange(i % 2 == 0 ? t : s, i % 2 == 0 ? s : t, i);
    for (int rank = 0; rank < 3; ++rank) ASSERT_TRUE(exchange.Begin(group, rank, Id(1, i)).ok());
    ASSERT_TRUE(group.Pump(random));
    for (int rank = 0; rank < 3; ++rank) {
      ASSERT_EQ(group[rank].status(), absl::OkStatus());
      ASSERT_EQ(exchange.after[rank], exchange.wanted[rank]);
    }
  }
  uint64_t dropped = 0;
  for (int rank = 0; rank < 3; ++rank) dropped += group[rank].counters().dropped;
  EXPECT_GT(dropped, 0u);
  EXPECT_GT(group.faulty_ports[0]->echoed() + group.faulty_ports[0]->duplicated(), 0);

  group.faulty_ports[1]->Cut(NodeId(2));
  Exchange exchange(t, s);
  for (int rank = 0; rank < 3; ++rank) ASSERT_TRUE(exchange.Begin(group, rank, Id(2)).ok());
  for (int turn = 0; turn < 2000 && group[1].status().ok(); ++turn) {
    for (int rank = 0; rank < 3; ++rank) group.Turn(rank);
    group.clock.now += absl::Milliseconds(100);
  }
  EXPECT_FALSE(group[1].status().ok());
  EXPECT_THAT(Text(group[1].status()), HasSubstr("rank 2 (node 2)"));
}

TEST(SwitchExchange, RefusesWhatDoesNotFitAndOptionsOutOfRangeByName) {
  const proto::TensorShape shape = Hidden(4, 4, 8);
  Group group(2);
  Exchange exchange(EvenCut(shape, "T", 2), EvenCut(shape, "S", 2));
  Bytes wrong(3);
  EXPECT_THAT(Text(group[0].Begin(Id(1), exchange.plan, wrong, exchange.after[0])),
              HasSubstr("switch 0 of step 1: rank 0 has 128 bytes before and 128 after, but gives 3 and 128"));
  const proto::Layout three = EvenCut(shape, "T", 3);
  EXPECT_THAT(Text(group[0].Begin(Id(1), SwitchOf(three, EvenCut(shape, "S", 3)), wrong, wrong)),
              HasSubstr("is of 3 ranks, the group of 2"));
  ASSERT_TRUE(exchange.Begin(group, 0, Id(3)).ok());
  EXPECT_THAT(Text(exchange.Begin(group, 0, Id(4))), HasSubstr("switch 0 of step 3 has not ended"));
  ASSERT_TRUE(exchange.Begin(group, 1, Id(3)).ok());
  std::mt19937_64 random(1);
  ASSERT_TRUE(group.Pump(random));
  EXPECT_THAT(Text(exchange.Begin(group, 0, Id(3))), HasSubstr("numbers grow"));

  const auto refusal = [&](std::function<void(ExchangeOptions&)> change) {
    ExchangeOptions options;
    options.members = {NodeId(0), NodeId(1)};
    change(options);
    return Text(SwitchExchange::Create(options, *group.ports[0], group.clock).status());
  };
  EXPECT_THAT(refusal([](auto& o) { o.members.clear(); }), HasSubstr("0 members"));
  EXPECT_THAT(refusal([](auto& o) { o.members = {NodeId(0), NodeId(0)}; }), HasSubstr("node 0 is a member twice"));
  EXPECT_THAT(refusal([](auto& o) { o.rank = 2; }), HasSubstr("rank 2 is outside 0..1"));
  EXPECT_THAT(refusal([](auto& o) { o.rank = 1; }), HasSubstr("rank 1 is node 1, but the port is node 0"));
  EXPECT_THAT(refusal([](auto& o) { o.chunk_bytes = 1; }), HasSubstr("chunk_bytes 1"));
  EXPECT_THAT(refusal([](auto& o) { o.chunks_in_flight = 65; }), HasSubstr("chunks_in_flight 65"));
  EXPECT_THAT(refusal([](auto& o) { o.max_staging_bytes = 4096; }), HasSubstr("max_staging_bytes 4096 is below 32768"));
  EXPECT_THAT(refusal([](auto& o) { o.stall = absl::ZeroDuration(); }), HasSubstr("stall"));
}

}  // namespace
}  // namespace dovetail::sequence_parallel
