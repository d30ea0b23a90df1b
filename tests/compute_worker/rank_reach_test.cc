#include "compute_worker/rank_reach.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "proto/rank_frames.h"
#include "transport/inproc/inproc_fabric.h"

// Two compute workers that find out whether they read each other's memory, whichever hears of the other first.

namespace dovetail::compute {
namespace {

constexpr WorkerId kFirst(1), kSecond(2);

// Memory that holds one text. Peers read it, or another one, or nothing.
class FakeMemory final : public RankMemory {
 public:
  explicit FakeMemory(std::string text) : text_(std::move(text)) {}
  absl::StatusOr<std::string> Offer() override {
    if (!has_memory) return ResourceExhausted("no memory to offer");
    ++offers;
    return text_;
  }
  absl::StatusOr<std::string> Answer(NodeId, std::string_view offer) override {
    if (!opens) return Internal("not of this machine");
    return misreads ? "something else" : std::string(offer);
  }
  absl::Status Check(std::string_view answer) const override {
    return answer == text_ ? absl::OkStatus() : FailedPrecondition("it reads other bytes");
  }
  void SetReaches(WorkerId peer, bool reaches) override { reached_by[peer] = reaches; }
  std::string NameOf(std::span<const std::byte> given) const override {
    return named.contains(given.data()) ? "name" : "";
  }
  absl::StatusOr<std::span<const std::byte>> Open(NodeId, std::string_view) override { return Internal("unused"); }
  void Lose(NodeId peer) override { lost.insert(peer); }

  bool has_memory = true, opens = true, misreads = false;
  int offers = 0;
  std::map<WorkerId, bool> reached_by;
  std::set<NodeId> lost;
  std::set<const std::byte*> named;

 private:
  const std::string text_;
};

struct Worker : transport::FrameHandler {
  Worker(transport::InprocFabric& fabric, WorkerId id, bool on_gpu)
      : id(id),
        port(fabric.CreatePort(nullptr)),
        memory("text of " + std::to_string(id.value())),
        links(*port, SystemClock(), on_gpu ? &memory : nullptr),
        reach(on_gpu ? &memory : nullptr, links) {}
  void OnFrame(const transport::Delivery& delivery) override {
    if (proto::IsMemoryFrame(delivery.header.type)) return reach.OnFrame(delivery);
    types.push_back(delivery.header.type);
    payload.assign(delivery.payload.begin(), delivery.payload.end());
  }
  void Knows(const Worker& other) {
    links.Add({other.id, Epoch(1), other.port->id()});
    reach.Add({other.id, Epoch(1), other.port->id()});
  }
  void Forgets(const Worker& other) {
    links.Lose(other.id, Epoch(1));
    reach.Lose(other.id, Epoch(1));
  }
  std::string Describe(const Worker& other) const { return reach.Describe(other.port->id()); }

  const WorkerId id;
  std::unique_ptr<transport::Port> port;
  FakeMemory memory;
  RankLinks links;
  RankReach reach;
  std::vector<proto::FrameType> types;
  std::vector<std::byte> payload;
};

class RankReachTest : public ::testing::Test {
 protected:
  void Talk() {
    for (int frames = 1; frames > 0;) frames = first_.port->Poll(first_, 10) + second_.port->Poll(second_, 10);
  }

  transport::InprocFabric fabric_;
  Worker first_{fabric_, kFirst, true}, second_{fabric_, kSecond, true};
};

TEST_F(RankReachTest, EachSaysThatTheOtherReadsItsMemory) {
  first_.Knows(second_);
  EXPECT_EQ(first_.Describe(second_), "host: it has not answered yet");
  second_.Knows(first_);
  Talk();
  EXPECT_EQ(first_.Describe(second_), "device");
  EXPECT_EQ(second_.Describe(first_), "device");
  EXPECT_TRUE(first_.memory.reached_by[kSecond]);
  EXPECT_TRUE(second_.memory.reached_by[kFirst]);
}

TEST_F(RankReachTest, WhatCameBeforeThePeerWasKnownIsSentAgain) {
  first_.Knows(second_);
  Talk();  // the second knows nothing of the first
  EXPECT_FALSE(first_.memory.reached_by[kSecond]);
  second_.Knows(first_);
  Talk();
  EXPECT_EQ(first_.Describe(second_), "device");
  EXPECT_EQ(second_.Describe(first_), "device");
  EXPECT_EQ(first_.memory.offers, 2);
}

TEST_F(RankReachTest, WhyNotIsSaid) {
  second_.memory.opens = false;
  first_.memory.misreads = true;
  first_.Knows(second_);
  second_.Knows(first_);
  Talk();
  EXPECT_EQ(first_.Describe(second_), "host: not of this machine");
  EXPECT_EQ(second_.Describe(first_), "host: it reads other bytes");
  EXPECT_FALSE(first_.memory.reached_by[kSecond]);
  EXPECT_FALSE(second_.memory.reached_by[kFirst]);
}

TEST_F(RankReachTest, OneWithoutMemoryToOfferReadsThatOfTheOther) {
  second_.memory.has_memory = false;
  first_.Knows(second_);
  second_.Knows(first_);
  Talk();
  EXPECT_EQ(first_.Describe(second_), "device");
  EXPECT_EQ(second_.Describe(first_), "host: no memory to offer");
}

TEST_F(RankReachTest, ACpuAnswersThatItReadsNone) {
  Worker cpu(fabric_, WorkerId(3), false);
  first_.Knows(cpu);
  cpu.Knows(first_);
  for (int i = 0; i < 3; ++i) {
    first_.port->Poll(first_, 10);
    cpu.port->Poll(cpu, 10);
  }
  EXPECT_EQ(first_.Describe(cpu), "host: it computes on a CPU, without a prompt scratch, or with --exchange host");
  EXPECT_EQ(cpu.Describe(first_), "");
}

TEST_F(RankReachTest, APeerThatIsLostReachesNothingUntilItHasAnsweredAgain) {
  first_.Knows(second_);
  second_.Knows(first_);
  Talk();
  first_.Forgets(second_);
  EXPECT_FALSE(first_.memory.reached_by[kSecond]);
  EXPECT_TRUE(first_.memory.lost.contains(second_.port->id()));
  EXPECT_EQ(first_.Describe(second_), "");
  first_.Knows(second_);
  EXPECT_FALSE(first_.memory.reached_by[kSecond]);
  Talk();
  EXPECT_TRUE(first_.memory.reached_by[kSecond]);
}

TEST_F(RankReachTest, MemoryIsNamedToAPeerThatReadsItAndNothingIsSentToOneThatDoesNot) {
  const std::vector<std::byte> on_device(100), on_host(100, std::byte{5});
  first_.memory.named = {on_device.data()};
  const proto::RankAddress rank{kSecond, StepId(5), MicroBatchId(2)};
  first_.Knows(second_);
  ASSERT_EQ(first_.links.SendRows(rank, 1, 0, transport::LentBytes(on_device)), absl::OkStatus());
  second_.Knows(first_);
  Talk();
  EXPECT_TRUE(second_.types.empty()) << "it began again since";
  EXPECT_EQ(first_.links.held(), 0u);
  ASSERT_EQ(first_.links.SendRows(rank, 1, 0, transport::LentBytes(on_device)), absl::OkStatus());
  Talk();
  ASSERT_EQ(second_.types, std::vector{proto::kRankMemory});
  EXPECT_EQ(second_.payload.size(), 2 + std::string_view("name").size());
  ASSERT_EQ(first_.links.SendRows(rank, 2, 0, transport::LentBytes(on_host)), absl::OkStatus());
  Talk();
  EXPECT_EQ(second_.types.back(), proto::kRankRows);
  EXPECT_EQ(second_.payload, on_host);
  EXPECT_EQ(first_.links.held(), 2u) << "until they are answered";
}

}  // namespace
}  // namespace dovetail::compute
