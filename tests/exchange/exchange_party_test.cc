#include "exchange/exchange_party.h"

#include <cstring>

#include "gmock/gmock.h"

namespace dovetail::exchange {
namespace {

using ::testing::SizeIs;

std::string OfferOf(const ExchangeRoom& room) {
  return std::string(reinterpret_cast<const char*>(&room), sizeof(room)) + std::string(32, 'g') + "link";
}

TEST(ExchangeRoom, IsThatOfTheLargestRowsOfAllGroups) {
  proto::AttentionTable table;
  proto::SoftmaxSpec full, windowed;
  full.query_heads = 32;
  full.kv_heads = 8;
  full.key_dim = full.value_dim = 128;
  windowed = full;
  windowed.kv_heads = 16;
  windowed.value_dim = 64;
  table.views = {full, windowed};
  const ExchangeRoom room = ExchangeRoom::Of(table, 2, 64);
  EXPECT_EQ(room.query_bytes, 32u * 128 * 2);
  EXPECT_EQ(room.key_value_bytes, 16u * 192 * 2);
  EXPECT_EQ(room.partial_bytes, 32u * 128 * 2);
  EXPECT_GE(room.slot_bytes(), 64u * (room.query_bytes + room.key_value_bytes));
  EXPECT_TRUE(room.Validate().ok());
}

TEST(ExchangeRoom, HasThatOfTheGatesOfLinearStates) {
  proto::LinearSpec state;
  state.heads = 4;
  state.key_dim = 32;
  state.value_dim = 16;
  state.delta = state.token_decay = state.vector_decay = state.token_rate = true;
  const auto table = proto::AttentionTable::Build({state}, {{}});
  ASSERT_TRUE(table.ok()) << table.status();
  EXPECT_EQ(ExchangeRoom::Of(*table, 1, 64).key_value_bytes, 4u * (48 * 2 + 33 * 4));
}

TEST(ExchangeRoom, OutsideTheLimitsIsRefusedBeforeMemoryIsTaken) {
  for (const ExchangeRoom& room : {ExchangeRoom{17, 1, 2, 2, 2}, ExchangeRoom{1, 0, 2, 2, 2},
                                   ExchangeRoom{1, 70000, 2, 2, 2}, ExchangeRoom{1, 1, 2, uint32_t{1} << 30, 2}})
    EXPECT_TRUE(absl::IsInvalidArgument(GpuExchange::RoomOf(OfferOf(room)).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(GpuExchange::RoomOf("short").status()));
}

GpuExchangeMeans Without(const std::string& why, bool on_cpu) {
  GpuExchangeMeans means;
  means.why_not = why;
  means.on_cpu = on_cpu;
  return means;
}

TEST(ExchangeParty, AWorkerWithoutLinksRefusesAnOfferAndSaysWhy) {
  for (const bool on_cpu : {true, false}) {
    ExchangeParty party(Without("the attention worker runs elsewhere", on_cpu));
    std::vector<ExchangeParty::Frame> out;
    party.OnFrame(NodeId(3), Epoch(7), proto::kLinkOffer, OfferOf({1, 8, 2, 2, 2}), out);
    ASSERT_THAT(out, SizeIs(1));
    EXPECT_EQ(out[0].to, NodeId(3));
    EXPECT_EQ(out[0].epoch, Epoch(7));
    EXPECT_EQ(out[0].type, proto::kLinkAnswer);
    EXPECT_EQ(out[0].bytes.front(), on_cpu ? proto::kLinkOnCpu : proto::kLinkRefused);
    EXPECT_EQ(out[0].bytes.substr(1), "the attention worker runs elsewhere");
    EXPECT_EQ(party.With(NodeId(3)), nullptr);
    EXPECT_EQ(party.Describe(NodeId(3)), "host: the attention worker runs elsewhere");
    EXPECT_EQ(party.Refused(NodeId(3)), !on_cpu);
    EXPECT_FALSE(party.Progress(out));
    party.Lose(NodeId(3));
    EXPECT_EQ(party.Describe(NodeId(3)), "");
  }
}

TEST(ExchangeParty, WhatAnotherProcessSaysBecomesOneShortLine) {
  ExchangeParty party(Without("", false));
  party.Decline(NodeId(3), FailedPrecondition("a\nb\x1b[31m\xff", std::string(1000, 'x')));
  const std::string said = party.Describe(NodeId(3));
  EXPECT_EQ(said.substr(0, 14), "host: a b [31m");
  EXPECT_LT(said.size(), 400u);
  for (const char c : said) EXPECT_TRUE(c >= 0x20 && c <= 0x7e);
}

TEST(ExchangeParty, OffersNothingWithoutAGpuAndIgnoresAnswersToWhatItNeverOffered) {
  ExchangeParty party({});
  std::vector<ExchangeParty::Frame> out;
  party.Offer(NodeId(3), Epoch(7), {1, 8, 2, 2, 2}, out);
  EXPECT_EQ(party.With(NodeId(3)), nullptr);
  party.OnFrame(NodeId(3), Epoch(7), proto::kLinkAnswer, "y", out);
  party.OnFrame(NodeId(3), Epoch(7), proto::kLinkThere, "", out);
  party.Lose(NodeId(3));
  EXPECT_TRUE(out.empty());
}

TEST(LinkFrames, PassTheCheckOfHeaders) {
  for (const proto::FrameType type :
       {proto::kStepBeginOnDevice, proto::kLinkOffer, proto::kLinkAnswer, proto::kLinkThere})
    EXPECT_TRUE(proto::Validate(proto::MakeHeader(type, Epoch(1), StepId(), MicroBatchId(), 0, 0)).ok());
}

}  // namespace
}  // namespace dovetail::exchange
