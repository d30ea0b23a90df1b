#include "compute_worker/rank_links.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "proto/rank_frames.h"
#include "transport/inproc/inproc_fabric.h"

// What a compute worker sends to another one, for which there may be no room yet, and what it must keep meanwhile.

namespace dovetail::compute {
namespace {

struct Received : transport::FrameHandler {
  void OnFrame(const transport::Delivery& delivery) override {
    headers.push_back(delivery.header);
    payloads.emplace_back(delivery.payload.begin(), delivery.payload.end());
  }
  std::vector<proto::FrameHeader> headers;
  std::vector<std::vector<std::byte>> payloads;
};

struct HandClock final : Clock {
  absl::Time Now() override { return now; }
  absl::Time now = absl::UnixEpoch();
};

class RankLinksTest : public ::testing::Test {
 protected:
  RankLinksTest() { links_.Add({WorkerId(7), Epoch(3), there_->id()}); }
  static proto::RankAddress Rank(uint64_t step) { return {WorkerId(7), StepId(step), MicroBatchId(2)}; }
  static std::vector<std::byte> State(int value) { return std::vector<std::byte>(100, static_cast<std::byte>(value)); }
  proto::FrameHeader Taken(const proto::FrameHeader& state) {
    return proto::MakeHeader(proto::kRankTaken, Epoch(state.epoch), StepId(state.step), MicroBatchId(state.micro_batch),
                             state.op, 0, 0, state.digest);
  }

  transport::InprocFabric fabric_;
  std::unique_ptr<transport::Port> here_ = fabric_.CreatePort(nullptr), there_ = fabric_.CreatePort(nullptr);
  HandClock clock_;
  RankLinks links_{*here_, clock_};
  Received received_;
};

TEST_F(RankLinksTest, AStateIsKeptUntilItsAnswerComes) {
  ASSERT_EQ(links_.SendState(Rank(5), 1, State(1)), absl::OkStatus());
  ASSERT_EQ(links_.SendState(Rank(5), 4, State(4)), absl::OkStatus());
  there_->Poll(received_, 10);
  ASSERT_EQ(received_.headers.size(), 2u);
  EXPECT_EQ(received_.headers[1].type, proto::kRankState);
  EXPECT_EQ(received_.headers[1].epoch, 3u);
  EXPECT_EQ(received_.headers[1].step, 5u);
  EXPECT_EQ(received_.headers[1].micro_batch, 2u);
  EXPECT_EQ(received_.headers[1].op, 4u);
  EXPECT_EQ(received_.payloads[1], State(4));
  EXPECT_EQ(links_.held(), 2u);
  links_.OnTaken(there_->id(), Taken(received_.headers[1]));
  EXPECT_EQ(links_.held(), 1u);
  links_.OnTaken(there_->id(), Taken(received_.headers[1]));
  EXPECT_EQ(links_.held(), 1u) << "it came before";
  links_.OnTaken(here_->id(), Taken(received_.headers[0]));
  EXPECT_EQ(links_.held(), 1u) << "from a node that is no peer";
  links_.OnTaken(there_->id(), Taken(received_.headers[0]));
  EXPECT_EQ(links_.held(), 0u);
}

TEST_F(RankLinksTest, RowsGoToSeveralRanksFromOneCopyAndSayWhoseTheyAre) {
  const auto rows = std::make_shared<const std::vector<std::byte>>(State(7));
  ASSERT_EQ(links_.SendRows(Rank(5), 3, /*rank=*/2, transport::Lend(rows, rows->size())), absl::OkStatus());
  ASSERT_EQ(links_.SendRows(Rank(6), 3, 2, transport::Lend(rows, rows->size())), absl::OkStatus());
  EXPECT_EQ(rows.use_count(), 3);
  ASSERT_EQ(links_.SendAttended(Rank(8), 1, 2), absl::OkStatus());
  EXPECT_EQ(links_.held(), 2u) << "a message needs no answer";
  there_->Poll(received_, 10);
  ASSERT_EQ(received_.headers.size(), 3u);
  for (const proto::FrameHeader& header : received_.headers) EXPECT_EQ(proto::Validate(header), absl::OkStatus());
  EXPECT_EQ(received_.headers[1].type, proto::kRankRows);
  EXPECT_EQ(received_.headers[1].digest, 2u);
  EXPECT_EQ(received_.headers[1].step, 6u);
  EXPECT_EQ(received_.payloads[1], State(7));
  EXPECT_EQ(received_.headers[2].type, proto::kRankAttended);
  EXPECT_EQ(received_.headers[2].digest, 2u);
  EXPECT_EQ(received_.headers[2].op, 1u);
  for (int i : {0, 1}) links_.OnTaken(there_->id(), Taken(received_.headers[i]));
  EXPECT_EQ(rows.use_count(), 1);
}

TEST_F(RankLinksTest, WhatAPeerHasNoRoomForGoesLaterAndInOrder) {
  constexpr int kFrames = transport::kMaxFramesInFlight + 20;
  for (int i = 0; i < kFrames; ++i) ASSERT_EQ(links_.SendState(Rank(5), i, State(i)), absl::OkStatus());
  EXPECT_EQ(links_.SendWaiting(), 0);
  there_->Poll(received_, 10);
  EXPECT_EQ(links_.SendWaiting(), 10);
  while (there_->Poll(received_, 1000) > 0) links_.SendWaiting();
  ASSERT_EQ(received_.headers.size(), static_cast<size_t>(kFrames));
  for (int i = 0; i < kFrames; ++i) {
    ASSERT_EQ(received_.headers[i].op, i);
    ASSERT_EQ(received_.payloads[i], State(i));
  }
}

TEST_F(RankLinksTest, AStateIsAnsweredToItsSenderOnly) {
  const auto state = proto::MakeHeader(proto::kRankState, Epoch(9), StepId(11), MicroBatchId(1), 6, 100);
  EXPECT_FALSE(links_.AnswerTensor(here_->id(), state)) << "no peer";
  EXPECT_TRUE(links_.AnswerTensor(there_->id(), state));
  there_->Poll(received_, 10);
  ASSERT_EQ(received_.headers.size(), 1u);
  EXPECT_EQ(received_.headers[0].type, proto::kRankTaken);
  EXPECT_EQ(received_.headers[0].step, 11u);
  EXPECT_EQ(received_.headers[0].op, 6u);
  EXPECT_EQ(links_.held(), 0u) << "an answer is not answered";
}

// A peer may wait for the answer before it makes room.
TEST_F(RankLinksTest, AnAnswerGoesBeforeTensorsThatWaitForRoom) {
  constexpr int kFrames = transport::kMaxFramesInFlight + 5;
  for (int i = 0; i < kFrames; ++i) ASSERT_EQ(links_.SendState(Rank(5), i, State(i)), absl::OkStatus());
  const auto state = proto::MakeHeader(proto::kRankState, Epoch(9), StepId(11), MicroBatchId(1), 6, 100);
  EXPECT_TRUE(links_.AnswerTensor(there_->id(), state));
  there_->Poll(received_, 1);
  links_.SendWaiting();
  while (there_->Poll(received_, 1000) > 0 && received_.headers.size() < kFrames) continue;
  ASSERT_EQ(received_.headers.size(), static_cast<size_t>(transport::kMaxFramesInFlight + 1));
  EXPECT_EQ(received_.headers.back().type, proto::kRankTaken);
}

// Both are of one op and rank, and their answers say which is meant.
TEST_F(RankLinksTest, QueriesAndOutputsOfAnOpAreAnsweredApart) {
  const auto rows = std::make_shared<const std::vector<std::byte>>(State(7));
  ASSERT_EQ(links_.SendHeads(Rank(5), 3, /*rank=*/2, transport::Lend(rows, rows->size())), absl::OkStatus());
  const auto outputs = std::make_shared<const std::vector<std::byte>>(State(8));
  ASSERT_EQ(links_.SendOutputs(Rank(5), 3, 2, transport::Lend(outputs, outputs->size())), absl::OkStatus());
  there_->Poll(received_, 10);
  ASSERT_EQ(received_.headers.size(), 2u);
  for (const proto::FrameHeader& header : received_.headers) EXPECT_EQ(proto::Validate(header), absl::OkStatus());
  EXPECT_EQ(received_.headers[0].type, proto::kRankHeads);
  EXPECT_EQ(received_.headers[0].digest, 2u);
  EXPECT_EQ(received_.headers[1].type, proto::kRankOutputs);
  EXPECT_EQ(received_.headers[1].digest, 2u + proto::kMaxPrefillRanks);
  links_.OnTaken(there_->id(), Taken(received_.headers[1]));
  links_.OnTaken(there_->id(), Taken(received_.headers[1]));
  EXPECT_EQ(links_.held(), 1u);
  EXPECT_EQ(rows.use_count(), 2);
  links_.OnTaken(there_->id(), Taken(received_.headers[0]));
  EXPECT_EQ(links_.held(), 0u);
}

TEST_F(RankLinksTest, NothingIsKeptForAPeerThatIsLost) {
  ASSERT_EQ(links_.SendState(Rank(5), 1, State(1)), absl::OkStatus());
  links_.Lose(WorkerId(7), Epoch(2));
  EXPECT_EQ(links_.held(), 1u) << "an earlier incarnation";
  links_.Lose(WorkerId(7), Epoch(3));
  EXPECT_EQ(links_.held(), 0u);
  EXPECT_EQ(links_.SendState(Rank(6), 1, State(1)), absl::OkStatus()) << "the scheduler voids that group";
  EXPECT_EQ(links_.held(), 0u);
}

TEST_F(RankLinksTest, AFrameForAPeerWhosePortIsGoneIsDropped) {
  there_.reset();
  EXPECT_EQ(links_.SendState(Rank(5), 1, State(1)), absl::OkStatus());
  EXPECT_EQ(links_.held(), 0u);
}

TEST_F(RankLinksTest, TheFastestTransferCounts) {
  EXPECT_TRUE(links_.TakeTransfers().empty());
  ASSERT_EQ(links_.SendState(Rank(5), 1, State(1)), absl::OkStatus());
  clock_.now += absl::Microseconds(30);
  ASSERT_EQ(links_.SendState(Rank(5), 4, State(4)), absl::OkStatus());
  there_->Poll(received_, 10);
  EXPECT_TRUE(links_.TakeTransfers().empty()) << "none was answered";
  clock_.now += absl::Microseconds(20);
  links_.OnTaken(there_->id(), Taken(received_.headers[0]));
  using Transfers = std::vector<proto::RankTransfer>;
  EXPECT_EQ(links_.TakeTransfers(), (Transfers{{WorkerId(7), 100, 50}}));
  clock_.now += absl::Seconds(5);  // the receiver computes
  links_.OnTaken(there_->id(), Taken(received_.headers[1]));
  clock_.now += absl::Seconds(1);
  ASSERT_EQ(links_.SendState(Rank(6), 1, State(1)), absl::OkStatus());
  clock_.now += absl::Microseconds(7);
  there_->Poll(received_, 10);
  links_.OnTaken(there_->id(), Taken(received_.headers[2]));
  EXPECT_EQ(links_.TakeTransfers(), (Transfers{{WorkerId(7), 100, 7}}));
}

}  // namespace
}  // namespace dovetail::compute
