#include "attention_worker/core/frame_arrived.h"

#include <gtest/gtest.h>

#include <array>

#include "proto/gather_frames.h"
#include "proto/link_frames.h"

namespace dovetail::attention {
namespace {

using proto::FrameType;

FrameArrived Read(FrameType type, const std::vector<std::byte>& payload, size_t said) {
  return ReadFrame(NodeId(4), proto::MakeHeader(type, Epoch(3), StepId(9), MicroBatchId(1), 2, said), payload);
}
FrameArrived Read(FrameType type, const std::vector<std::byte>& payload) { return Read(type, payload, payload.size()); }

std::vector<std::byte> BytesOf(const auto& message) {
  std::vector<std::byte> bytes;
  proto::Encode(message, bytes);
  return bytes;
}

TEST(FrameArrived, KeepsWhoSentItAndItsHeader) {
  const FrameArrived frame = Read(FrameType::kUnpin, BytesOf(proto::Unpin{77}));
  EXPECT_EQ(frame.from, NodeId(4));
  EXPECT_EQ(frame.header.step, 9u);
  EXPECT_EQ(frame.header.micro_batch, 1);
  ASSERT_TRUE(std::holds_alternative<proto::Unpin>(frame.body));
  EXPECT_EQ(std::get<proto::Unpin>(frame.body).pin_id, 77u);
}

TEST(FrameArrived, HasTheMessageOfItsType) {
  const proto::ForkSequence fork{.parent = SequenceId(5), .child = SequenceId(6), .ctx_len = 128};
  const FrameArrived frame = Read(FrameType::kForkSequence, BytesOf(fork));
  ASSERT_TRUE(std::holds_alternative<proto::ForkSequence>(frame.body));
  EXPECT_EQ(std::get<proto::ForkSequence>(frame.body).child, SequenceId(6));
  EXPECT_EQ(std::get<proto::ForkSequence>(frame.body).ctx_len, 128);
  const auto refused = BytesOf(proto::StepRefused{.reason = "no room"});
  ASSERT_TRUE(std::holds_alternative<proto::StepRefused>(Read(FrameType::kStepRefused, refused).body));
  EXPECT_TRUE(std::holds_alternative<Unreadable>(Read(FrameType::kPrefixProbe, refused).body));
}

TEST(FrameArrived, SaysWhyAMessageCannotBeRead) {
  for (const FrameType type : {FrameType::kOpenSequence, FrameType::kForkSequence, FrameType::kReleaseSequence,
                               FrameType::kMoveSequence, FrameType::kPrefixProbe, FrameType::kUnpin,
                               FrameType::kStepBegin, FrameType::kStepRefused, proto::kStepBeginOnDevice}) {
    const FrameArrived frame = Read(type, std::vector<std::byte>(1));
    ASSERT_TRUE(std::holds_alternative<Unreadable>(frame.body)) << static_cast<int>(type);
    EXPECT_NE(std::get<Unreadable>(frame.body).why, "");
  }
}

TEST(FrameArrived, LeavesTensorsWhereTheyLie) {
  const std::vector<std::byte> payload(48);
  for (const FrameType type : {FrameType::kQuery, FrameType::kKeyValue}) {
    const FrameArrived frame = Read(type, payload);
    ASSERT_TRUE(std::holds_alternative<TensorBytes>(frame.body));
    EXPECT_EQ(std::get<TensorBytes>(frame.body).bytes.data(), payload.data());
    EXPECT_EQ(std::get<TensorBytes>(frame.body).bytes.size(), payload.size());
  }
}

TEST(FrameArrived, TakesNoOtherTypesSizesAndAnswers) {
  const std::vector<std::byte> payload(8);
  EXPECT_TRUE(std::holds_alternative<WrongSize>(Read(FrameType::kQuery, payload, 7).body));
  EXPECT_TRUE(std::holds_alternative<WrongSize>(Read(FrameType::kStepBegin, payload, 9).body));
  EXPECT_TRUE(std::holds_alternative<NotTaken>(Read(FrameType::kStepPlan, payload).body));
  EXPECT_TRUE(std::holds_alternative<NotTaken>(Read(FrameType::kPartial, payload).body));
  EXPECT_TRUE(std::holds_alternative<NoMessage>(Read(FrameType::kPartial, {}).body));
  EXPECT_TRUE(std::holds_alternative<NoMessage>(Read(proto::kAskRows, {}).body));
}

}  // namespace
}  // namespace dovetail::attention
