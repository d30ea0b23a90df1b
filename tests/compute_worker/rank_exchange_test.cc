#include "compute_worker/rank_exchange.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "proto/gather_frames.h"
#include "proto/rank_frames.h"
#include "proto/rank_memory.h"
#include "tests/compute_worker/rank_fixture.h"
#include "tests/compute_worker/small_spec.h"
#include "transport/inproc/inproc_fabric.h"

// What ranks send each other where a device computes and copies in its own time: nothing is sent before it is there,
// and nothing is answered, or handed on, before it has been copied.

namespace dovetail::compute {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Rows of op o are bytes of the value 10 o + first row; the device has computed and copied what the test says.
class SlowDevice final : public DenseBackend {
 public:
  std::vector<SequenceId> PendingGrammars(const proto::StepPlan&) override { return {}; }
  absl::Status PrepareStep(const ComputeWorkerCore&, MicroBatchId, const exchange::Seam&) override { return {}; }
  absl::Status Run(const ComputeWorkerCore&, MicroBatchId, int) override { return {}; }
  absl::Status AttendPrompts(const ComputeWorkerCore&, MicroBatchId, int) override { return {}; }
  absl::StatusOr<bool> RankRowsReady(MicroBatchId, int op) override { return op < computed; }
  absl::StatusOr<transport::LentBytes> PackQuery(const ComputeWorkerCore&, MicroBatchId, int, int) override {
    return transport::LentBytes();
  }
  absl::StatusOr<transport::LentBytes> PackKeyValue(const ComputeWorkerCore&, MicroBatchId, int, int) override {
    return transport::LentBytes();
  }
  absl::StatusOr<transport::LentBytes> RankRows(MicroBatchId, int op, int64_t first_row) override {
    const auto rows = std::make_shared<std::vector<std::byte>>(8, static_cast<std::byte>(10 * op + first_row));
    given.push_back(rows);
    return transport::Lend(rows, rows->size());
  }
  // Heads of op o are bytes of the value 10 o + first head, what attention gave 100 and one more each time.
  absl::StatusOr<transport::LentBytes> RankHeads(const ComputeWorkerCore&, MicroBatchId, int op,
                                                 const proto::HeadRange& heads) override {
    return Give(10 * op + heads.begin);
  }
  absl::StatusOr<transport::LentBytes> TakeRankOutputs(const ComputeWorkerCore&, MicroBatchId) override {
    return Give(100 + outputs++);
  }
  absl::StatusOr<bool> GivenReady(std::span<const std::byte> lent) override {
    return filled.contains(static_cast<int>(lent[0]));
  }
  absl::StatusOr<transport::LentBytes> Give(int value) {
    const auto bytes = std::make_shared<std::vector<std::byte>>(8, static_cast<std::byte>(value));
    given.push_back(bytes);
    return transport::Lend(bytes, bytes->size());
  }
  absl::StatusOr<RankTensor> TakeRankRows(std::span<const std::byte> rows) override {
    if (!room) return ResourceExhausted("no memory for rows");
    return DenseBackend::TakeRankRows(rows);
  }
  absl::StatusOr<bool> RankRowsTaken(const RankTensor& rows) override {
    return copied.contains(static_cast<int>(rows.bytes[0]));
  }
  absl::StatusOr<RankTensor> TakeEarlierRows(std::span<const std::byte> rows) override { return TakeRankRows(rows); }
  absl::Status Sample(const proto::StepPlan&, MicroBatchId, proto::StepResult&) override { return {}; }
  RankMemory* rank_memory() override { return memory; }

  RankMemory* memory = nullptr;
  int computed = 0;
  bool room = true;
  int outputs = 0;
  std::set<int> copied, filled;  // by the first byte
  std::vector<std::weak_ptr<std::vector<std::byte>>> given;
};

struct Received : transport::FrameHandler {
  void OnFrame(const transport::Delivery& delivery) override {
    ops.push_back(delivery.header.op);
    types.push_back(delivery.header.type);
    firsts.push_back(delivery.payload.empty() ? -1 : static_cast<int>(delivery.payload[0]));
  }
  std::vector<int> ops, firsts;
  std::vector<proto::FrameType> types;
};

// Rank 0 of three, whose step runs until rank 1 has attended; ranks 1 and 2 are one node.
class RankExchangeTest : public ::testing::Test {
 protected:
  RankExchangeTest() {
    for (const uint32_t worker : {1, 2}) links_.Add({WorkerId(worker), Epoch(3), there_->id()});
    rank_.Feed(PlanArrived{RankPlan(table_, 0, {0, 64, 128, 192}, 10, proto::PrefixExchange::kGatherDirect,
                                    proto::LinearExchange::kStates)});
  }
  static proto::AttentionTable Table() {
    return *proto::AttentionTable::Build(std::vector<proto::AttentionSpec>(8, SmallSpec()));
  }
  SendRankRows Rows(int op, std::vector<int64_t> first_rows) const {
    SendRankRows send{MicroBatchId(0), op, 0, {}};
    const std::vector<proto::RankAddress>& ranks = rank_.core().PlanOf(MicroBatchId(0)).ranks;
    for (size_t i = 0; i < first_rows.size(); ++i) send.receivers.push_back({ranks[i + 1], first_rows[i]});
    return send;
  }
  transport::Delivery Came(proto::FrameType type, int op, const std::vector<std::byte>& bytes) const {
    return {there_->id(), proto::MakeHeader(type, Epoch(3), StepId(10), MicroBatchId(0), op, bytes.size(), 0, 1),
            bytes};
  }
  Received& Arrived() {
    received_ = {};
    there_->Poll(received_, 100);
    return received_;
  }

  const proto::AttentionTable table_ = Table();
  mutable FakeRank rank_{0, table_, 100};
  transport::InprocFabric fabric_;
  std::unique_ptr<transport::Port> here_ = fabric_.CreatePort(nullptr), there_ = fabric_.CreatePort(nullptr);
  RankLinks links_{*here_, SystemClock()};
  SlowDevice device_;
  RankExchange exchange_{rank_.core(), device_, links_};
  Received received_;
};

TEST_F(RankExchangeTest, RowsAreSentInOrderOnceTheDeviceHasThem) {
  ASSERT_TRUE(rank_.core().running(MicroBatchId(0)));
  ASSERT_EQ(exchange_.SendRows(Rows(0, {0, 0})), absl::OkStatus());
  ASSERT_EQ(exchange_.SendRows(Rows(1, {0, 5})), absl::OkStatus());
  EXPECT_EQ(device_.given.size(), 3u) << "ranks that need the same rows share them";
  EXPECT_THAT(Arrived().ops, IsEmpty());
  EXPECT_TRUE(exchange_.HasLate(MicroBatchId(0)));
  device_.computed = 1;
  EXPECT_EQ(exchange_.SendLate(MicroBatchId(0)).value(), 2);
  EXPECT_THAT(Arrived().firsts, ElementsAre(0, 0));
  device_.computed = 2;
  EXPECT_EQ(exchange_.SendLate(MicroBatchId(0)).value(), 0);
  EXPECT_THAT(Arrived().firsts, ElementsAre(10, 15));
  EXPECT_FALSE(exchange_.HasLate(MicroBatchId(0)));
  EXPECT_FALSE(device_.given[2].expired()) << "lent until it is answered";
}

TEST_F(RankExchangeTest, RowsOfAStepThatFailedAreNotSent) {
  ASSERT_EQ(exchange_.SendRows(Rows(0, {0, 0})), absl::OkStatus());
  rank_.Feed(StepFailed{MicroBatchId(0), Internal("a kernel")});
  device_.computed = 8;
  EXPECT_EQ(exchange_.SendLate(MicroBatchId(0)).value(), 0);
  EXPECT_THAT(Arrived().ops, IsEmpty());
  EXPECT_TRUE(device_.given[0].expired());
}

TEST_F(RankExchangeTest, WhatCameIsAnsweredAndHandedOnInOrderOnceItHasBeenCopied) {
  const std::vector<std::byte> first(8, std::byte{1}), second(8, std::byte{2}), state(8, std::byte{3});
  exchange_.Take(Came(proto::kRankRows, 0, first));
  exchange_.Take(Came(proto::kRankState, 1, state));
  exchange_.Take(Came(proto::kRankRows, 2, second));
  device_.copied = {2};
  EXPECT_FALSE(exchange_.Next().value().has_value());
  EXPECT_TRUE(exchange_.copies());
  EXPECT_THAT(Arrived().ops, IsEmpty());
  device_.copied = {1, 2};
  for (const int op : {0, 1, 2}) {
    const auto next = exchange_.Next();
    ASSERT_TRUE(next.ok() && next->has_value());
    EXPECT_EQ((*next)->header.op, op);
    EXPECT_EQ((*next)->tensor.size(), 8u);
  }
  EXPECT_FALSE(exchange_.Next().value().has_value());
  EXPECT_FALSE(exchange_.copies());
  EXPECT_THAT(Arrived().types, ElementsAre(proto::kRankTaken, proto::kRankTaken, proto::kRankTaken));
}

// Of a head switch: in order, each as soon as it is there and all before it.
TEST_F(RankExchangeTest, HeadsAndWhatTheyGaveAreSentOnceTheDeviceHasThem) {
  const MicroBatchId id(0);
  const std::vector<proto::RankAddress>& ranks = rank_.core().PlanOf(id).ranks;
  ASSERT_EQ(exchange_.SendHeads({id, 2, 0, {{ranks[1], {1, 2}}, {ranks[2], {2, 3}}}}), absl::OkStatus());
  ASSERT_EQ(exchange_.SendOutputs({id, 2, 0, ranks[1]}), absl::OkStatus());
  ASSERT_EQ(exchange_.SendOutputs({id, 2, 0, ranks[2]}), absl::OkStatus());
  EXPECT_THAT(Arrived().ops, IsEmpty());
  EXPECT_TRUE(exchange_.HasLate(id));
  device_.filled = {22, 100};
  EXPECT_EQ(exchange_.SendLate(id).value(), 4) << "the first is not there";
  device_.filled = {21, 22, 100};
  EXPECT_EQ(exchange_.SendLate(id).value(), 1);
  const Received first = Arrived();
  EXPECT_THAT(first.firsts, ElementsAre(21, 22, 100));
  EXPECT_THAT(first.types, ElementsAre(proto::kRankHeads, proto::kRankHeads, proto::kRankOutputs));
  EXPECT_FALSE(device_.given[2].expired()) << "lent until it is answered";
  rank_.Feed(StepFailed{id, Internal("a kernel")});
  device_.filled.insert(101);
  EXPECT_EQ(exchange_.SendLate(id).value(), 0);
  EXPECT_THAT(Arrived().ops, IsEmpty());
  EXPECT_TRUE(device_.given[3].expired());
}

TEST_F(RankExchangeTest, HeadsAndWhatTheyGaveAreAnsweredOnceTheyHaveBeenCopied) {
  const std::vector<std::byte> heads(8, std::byte{1}), outputs(8, std::byte{2});
  exchange_.Take(Came(proto::kRankHeads, 0, heads));
  exchange_.Take(Came(proto::kRankOutputs, 0, outputs));
  EXPECT_FALSE(exchange_.Next().value().has_value());
  EXPECT_THAT(Arrived().types, IsEmpty());
  device_.copied = {1};
  EXPECT_TRUE(exchange_.Next().value().has_value());
  EXPECT_FALSE(exchange_.Next().value().has_value());
  EXPECT_THAT(Arrived().types, ElementsAre(proto::kRankTaken));
  device_.copied = {1, 2};
  EXPECT_TRUE(exchange_.Next().value().has_value());
  EXPECT_THAT(Arrived().types, ElementsAre(proto::kRankTaken));
}

TEST_F(RankExchangeTest, WhatCameFromAWorkerThatIsLostMeanwhileIsDropped) {
  const std::vector<std::byte> rows(8, std::byte{1});
  exchange_.Take(Came(proto::kRankRows, 0, rows));
  for (const uint32_t worker : {1, 2}) links_.Lose(WorkerId(worker), Epoch(3));
  device_.copied = {1};
  EXPECT_FALSE(exchange_.Next().value().has_value());
  EXPECT_FALSE(exchange_.copies());
}

// What asks for more pieces frees the memory of all that came.
TEST_F(RankExchangeTest, PiecesOfEarlierTokensAreHandedOnOnceAllThatCameHaveBeenCopied) {
  const std::vector<std::byte> first(8, std::byte{1}), second(8, std::byte{2}), other(8, std::byte{3});
  exchange_.Take(Came(proto::kEarlierRows, 4, first));
  exchange_.Take(Came(proto::kEarlierRows, 4, second));
  exchange_.Take(Came(proto::kRankRows, 5, other));
  device_.copied = {1};
  EXPECT_FALSE(exchange_.Next().value().has_value());
  device_.copied = {1, 2};
  for (const int value : {1, 2}) {
    const auto next = exchange_.Next();
    ASSERT_TRUE(next.ok() && next->has_value());
    EXPECT_EQ(static_cast<int>((*next)->tensor.bytes[0]), value);
    const Event event = RankExchange::EventOf(*std::move(*next));
    ASSERT_TRUE(std::holds_alternative<EarlierRowsArrived>(event));
    EXPECT_EQ(std::get<EarlierRowsArrived>(event).from, there_->id());
    EXPECT_EQ(std::get<EarlierRowsArrived>(event).op, 4);
    EXPECT_EQ(std::get<EarlierRowsArrived>(event).piece, 1);
  }
  EXPECT_FALSE(exchange_.Next().value().has_value()) << "rows of a rank, which are still copied";
  EXPECT_THAT(Arrived().ops, IsEmpty()) << "nothing else answers pieces";
}

TEST_F(RankExchangeTest, WithoutMemoryForRowsTheyAreAnsweredAndTheirStepFails) {
  device_.room = false;
  const std::vector<std::byte> rows(8, std::byte{1});
  exchange_.Take(Came(proto::kRankRows, 0, rows));
  const auto next = exchange_.Next();
  ASSERT_TRUE(next.ok() && next->has_value());
  EXPECT_TRUE(absl::IsResourceExhausted((*next)->taken));
  EXPECT_THAT(Arrived().types, ElementsAre(proto::kRankTaken)) << "its sender keeps it no longer";
  EXPECT_FALSE(exchange_.copies());
}

// What lies at that address, if the test says so.
class FakeMemory final : public RankMemory {
 public:
  absl::StatusOr<std::string> Offer() override { return "offer"; }
  absl::StatusOr<std::string> Answer(NodeId, std::string_view offer) override { return std::string(offer); }
  absl::Status Check(std::string_view) const override { return {}; }
  void SetReaches(WorkerId, bool) override {}
  std::string NameOf(std::span<const std::byte>) const override { return ""; }
  absl::StatusOr<std::span<const std::byte>> Open(NodeId, std::string_view name) override {
    if (name != "here") return InvalidArgument("no memory has this name");
    return std::span<const std::byte>(bytes);
  }
  void Lose(NodeId) override {}
  std::vector<std::byte> bytes = std::vector<std::byte>(8, std::byte{7});
};

TEST_F(RankExchangeTest, WhatWasNamedIsTakenFromWhereItLies) {
  FakeMemory memory;
  device_.memory = &memory;
  exchange_.Take(Came(proto::kRankMemory, 3, proto::EncodeRankMemory(proto::kRankRows, "here")));
  EXPECT_FALSE(exchange_.Next().value().has_value()) << "it is being copied";
  device_.copied = {7};
  const auto next = exchange_.Next();
  ASSERT_TRUE(next.ok() && next->has_value());
  EXPECT_EQ((*next)->taken, absl::OkStatus());
  EXPECT_EQ((*next)->header.type, proto::kRankRows);
  EXPECT_EQ((*next)->tensor.bytes[0], std::byte{7});
  EXPECT_THAT(Arrived().types, ElementsAre(proto::kRankTaken));
}

TEST_F(RankExchangeTest, ANameThatIsNoneFailsItsStepAndIsAnswered) {
  FakeMemory memory;
  for (const bool offered : {true, false}) {
    device_.memory = offered ? &memory : nullptr;
    for (const std::vector<std::byte>& payload :
         {proto::EncodeRankMemory(proto::kRankRows, "elsewhere"), proto::EncodeRankMemory(proto::kRankState, "here"),
          std::vector<std::byte>(1), std::vector<std::byte>()}) {
      exchange_.Take(Came(proto::kRankMemory, 3, payload));
      const auto next = exchange_.Next();
      ASSERT_TRUE(next.ok() && next->has_value());
      EXPECT_FALSE((*next)->taken.ok());
      EXPECT_THAT(Arrived().types, ElementsAre(proto::kRankTaken));
    }
  }
}

}  // namespace
}  // namespace dovetail::compute
