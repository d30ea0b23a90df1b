#include "sequence_parallel/run_switch.h"

#include <barrier>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/sequence_parallel/exchange_group.h"
#include "transport/doorbell.h"
#include "transport/inproc/inproc_fabric.h"
#include "transport/ucx/ucx_port.h"

namespace dovetail::sequence_parallel {
namespace {

using ::testing::HasSubstr;
using transport::ucx::Lanes;
using transport::ucx::UcxPort;

// What a rank's thread runs on, over each fabric.
class Rank {
 public:
  virtual ~Rank() = default;
  virtual transport::Port& port() = 0;
  virtual transport::Waiter& waiter() = 0;
  virtual void LookAtPeers(SwitchExchange&) {}
};

class InprocRank final : public Rank {
 public:
  explicit InprocRank(transport::InprocFabric& fabric) : port_(fabric.CreatePort(&bell_)) {}
  transport::Port& port() override { return *port_; }
  transport::Waiter& waiter() override { return bell_; }

 private:
  transport::Doorbell bell_;
  std::unique_ptr<transport::Port> port_;
};

class UcxRank final : public Rank {
 public:
  UcxRank(uint32_t node, Lanes lanes) {
    transport::ucx::UcxOptions options;
    options.node = NodeId(node);
    options.epoch = Epoch(1);
    options.lanes = lanes;
    if (lanes == Lanes::kTcp) options.devices = "lo";
    auto created = UcxPort::Create(options);
    DT_CHECK(created.ok());
    ucx = *std::move(created);
  }
  transport::Port& port() override { return *ucx; }
  transport::Waiter& waiter() override { return *ucx; }
  void LookAtPeers(SwitchExchange& exchange) override {
    for (const auto& failure : ucx->TakeFailures())
      exchange.PeerLost(failure.node, std::string(failure.status.message()));
  }
  std::unique_ptr<UcxPort> ucx;
};

struct Ranks {
  Ranks(const std::string& fabric_name, int count) {
    if (fabric_name == "inproc") {
      for (int rank = 0; rank < count; ++rank) ranks.push_back(std::make_unique<InprocRank>(fabric));
      return;
    }
    std::vector<UcxRank*> all;
    for (int rank = 0; rank < count; ++rank) {
      auto made = std::make_unique<UcxRank>(1 + rank, fabric_name == "shm" ? Lanes::kShm : Lanes::kTcp);
      all.push_back(made.get());
      ranks.push_back(std::move(made));
    }
    for (UcxRank* a : all)
      for (UcxRank* b : all)
        if (a != b) DT_CHECK(a->ucx->AddPeer(b->ucx->id(), b->ucx->local_address(), UcxPort::Version(), Epoch(1)).ok());
  }
  ExchangeOptions OptionsOf(int rank) const {
    ExchangeOptions options;
    for (const auto& one : ranks) options.members.push_back(one->port().id());
    options.rank = rank;
    options.group = Epoch(3);
    options.chunk_bytes = 64 << 10;
    options.stall = absl::Seconds(60);
    return options;
  }

  transport::InprocFabric fabric;
  std::vector<std::unique_ptr<Rank>> ranks;
};

class RunSwitchOver : public ::testing::TestWithParam<std::string> {};

// There and back, so often that nothing that a switch left behind would stay unnoticed: 40 MiB through each link.
TEST_P(RunSwitchOver, CutsATensorByTimeAndBySpaceInTurnWithRanksOfUnlikeSpeed) {
  constexpr int kRanks = 3, kRounds = 120;
  const proto::TensorShape shape = Hidden(20, 31, 1152);
  const proto::Layout t = EvenCut(shape, "T", kRanks), s = EvenCut(shape, "S", kRanks);
  const proto::Switch there = SwitchOf(t, s), back = SwitchOf(s, t);
  const Bytes tensor = RandomBytes(shape.Bytes(), 11);
  Ranks group(GetParam(), kRanks);
  std::vector<std::unique_ptr<SwitchExchange>> exchanges(kRanks);
  std::vector<absl::Status> verdicts(kRanks);
  std::vector<Bytes> ends(kRanks);
  std::barrier all_done(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank)
    threads.emplace_back([&, rank] {
      Rank& own = *group.ranks[rank];
      auto created = SwitchExchange::Create(group.OptionsOf(rank), own.port(), SystemClock());
      DT_CHECK(created.ok());
      exchanges[rank] = *std::move(created);
      Bytes by_time = PartOf(tensor, t, rank);
      const auto by_space = std::make_shared<Bytes>(s.PartBytes(rank));
      const auto look = [&](SwitchExchange& exchange) { own.LookAtPeers(exchange); };
      absl::Status& status = verdicts[rank];
      for (int round = 0; round < kRounds && status.ok(); ++round) {
        status =
            RunSwitch(*exchanges[rank], own.port(), own.waiter(), look, {StepId(round), 0}, there, by_time, *by_space);
        std::fill(by_time.begin(), by_time.end(), std::byte{0xEE});
        if (rank == round % kRanks) std::this_thread::yield();
        if (status.ok())
          status = RunSwitch(*exchanges[rank], own.port(), own.waiter(), look, {StepId(round), 1}, back,
                             transport::Lend(by_space, by_space->size()), by_time);
        std::fill(by_space->begin(), by_space->end(), std::byte{0xDD});
      }
      ends[rank] = by_time;
      all_done.arrive_and_wait();
    });
  for (std::thread& thread : threads) thread.join();
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(verdicts[rank], absl::OkStatus());
    EXPECT_TRUE(ends[rank] == PartOf(tensor, t, rank)) << "rank " << rank;
    EXPECT_EQ(exchanges[rank]->counters().bytes_sent, kRounds * (there.bytes_sent(rank) + back.bytes_sent(rank)));
    EXPECT_EQ(exchanges[rank]->counters().dropped, 0u);
  }
}

INSTANTIATE_TEST_SUITE_P(Fabrics, RunSwitchOver, ::testing::Values("inproc", "shm", "tcp"),
                         [](const auto& info) { return info.param; });

class RunSwitchOverUcx : public ::testing::TestWithParam<std::string> {};

TEST_P(RunSwitchOverUcx, EndsWithTheRanksNameAndReasonWhenItLeaves) {
  const proto::TensorShape shape = Hidden(16, 16, 4096);
  const proto::Switch plan = SwitchOf(EvenCut(shape, "T", 3), EvenCut(shape, "S", 3));
  Ranks group(GetParam(), 3);
  std::vector<std::unique_ptr<SwitchExchange>> exchanges(3);
  std::vector<absl::Status> verdicts(3);
  std::vector<std::thread> threads;
  std::barrier connected(3);
  for (int rank = 0; rank < 3; ++rank)
    threads.emplace_back([&, rank] {
      Rank& own = *group.ranks[rank];
      auto created = SwitchExchange::Create(group.OptionsOf(rank), own.port(), SystemClock());
      DT_CHECK(created.ok());
      exchanges[rank] = *std::move(created);
      const Bytes before(plan.from().PartBytes(rank));
      Bytes after(plan.to().PartBytes(rank));
      const auto look = [&](SwitchExchange& exchange) { own.LookAtPeers(exchange); };
      verdicts[rank] = RunSwitch(*exchanges[rank], own.port(), own.waiter(), look, {StepId(1), 0}, plan, before, after);
      connected.arrive_and_wait();
      if (rank == 2) {
        exchanges[2]->Void(absl::CancelledError("it was asked to end"));
        exchanges[2].reset();
        group.ranks[2].reset();  // closes its port, having sent that
        return;
      }
      if (!verdicts[rank].ok()) return;
      verdicts[rank] = RunSwitch(*exchanges[rank], own.port(), own.waiter(), look, {StepId(2), 0}, plan, before, after);
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(verdicts[2], absl::OkStatus());
  for (int rank : {0, 1}) {
    EXPECT_FALSE(verdicts[rank].ok());
    EXPECT_FALSE(absl::IsDeadlineExceeded(verdicts[rank])) << "noticed, not waited for: " << verdicts[rank];
    EXPECT_THAT(std::string(verdicts[rank].message()),
                HasSubstr("rank 2 (node 3) has ended the group: it was asked to end"));
  }
}

INSTANTIATE_TEST_SUITE_P(Lanes, RunSwitchOverUcx, ::testing::Values("shm", "tcp"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace dovetail::sequence_parallel
