#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/proto/message_samples.h"

// What holds for every message alike. The messages about one field each are in malformed_test.cc.

namespace dovetail::proto::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string Text(const absl::Status& status) { return std::string(status.message()); }

TEST(EveryMessage, ComesBackAsItWasSent) {
  EXPECT_EQ(*DecodeStepPlan(Bytes(FullPlan())), FullPlan());
  EXPECT_EQ(*DecodeStepPlan(Bytes(PlanOfRank())), PlanOfRank());
  EXPECT_EQ(*DecodeStepResult(Bytes(FullResult())), FullResult());
  EXPECT_EQ(*Decode<OpenSequence>(Bytes(FullOpen())), FullOpen());
  EXPECT_EQ(*Decode<StepBegin>(Bytes(FullBegin())), FullBegin());
  EXPECT_EQ(*Decode<StepBegin>(Bytes(BeginOfRank())), BeginOfRank());
  const ForkSequence fork{SequenceId(5), SequenceId(6), 700};
  EXPECT_EQ(*Decode<ForkSequence>(Bytes(fork)), fork);
  const StepRefused refused{true, "why"};
  EXPECT_EQ(*Decode<StepRefused>(Bytes(refused)), refused);
  for (const MessageKind& kind : AllMessages())
    for (const auto& sample : kind.samples) {
      const auto again = kind.decode(sample);
      ASSERT_TRUE(again.ok()) << kind.name << ": " << again.status();
      EXPECT_EQ(*again, sample) << kind.name;
    }
}

TEST(EveryMessage, EncodeReplacesWhatTheBufferHeldAndKeepsItsMemory) {
  std::vector<std::byte> buffer(100000, std::byte{0xee});
  const std::byte* memory = buffer.data();
  Encode(FullPlan(), buffer);
  EXPECT_EQ(buffer, Bytes(FullPlan()));
  EXPECT_EQ(buffer.data(), memory);
}

// The bytes themselves are a contract with other builds and machines.
TEST(EveryMessage, HasLittleEndianFixedWidthFieldsInOrder) {
  const auto bytes = Bytes(ForkSequence{SequenceId(0x0102030405060708u), SequenceId(2), 0x0304, KvGeneration(5)});
  const std::vector<uint8_t> expected = {8, 7, 6, 5, 4, 3, 2, 1, 2, 0, 0, 0, 0, 0, 0, 0,
                                         4, 3, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0};
  ASSERT_EQ(bytes.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(static_cast<uint8_t>(bytes[i]), expected[i]) << i;
  const auto refused = Bytes(StepRefused{true, "no"});
  ASSERT_EQ(refused.size(), 11u);
  EXPECT_EQ(static_cast<uint8_t>(refused[0]), 1);
  EXPECT_EQ(static_cast<uint8_t>(refused[1]), 2) << "a u32 count before the characters";
  EXPECT_EQ(static_cast<char>(refused[5]), 'n');
}

TEST(EveryMessage, CutAtAnyByteIsRefusedByName) {
  for (const MessageKind& kind : AllMessages())
    for (const auto& sample : kind.samples)
      for (size_t size = 0; size < sample.size(); ++size) {
        const std::vector<std::byte> cut(sample.begin(), sample.begin() + size);  // exact: a sanitizer sees an overrun
        const auto decoded = kind.decode(cut);
        ASSERT_FALSE(decoded.ok()) << kind.name << " of " << size << " bytes";
        EXPECT_TRUE(absl::IsInvalidArgument(decoded.status()));
        EXPECT_THAT(Text(decoded.status()), StartsWith(kind.name + ": "));
      }
}

TEST(EveryMessage, WithBytesAfterItsEndIsRefused) {
  for (const MessageKind& kind : AllMessages())
    for (auto sample : kind.samples) {
      sample.push_back(std::byte{0});
      EXPECT_THAT(Text(kind.decode(sample).status()), HasSubstr("message has 1 bytes after its last field"))
          << kind.name;
    }
}

TEST(EveryMessage, ChangedAnywhereIsRefusedOrMeansExactlyItsBytes) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 random(seed);
  int accepted = 0, refused = 0;
  const auto feed = [&](const MessageKind& kind, const std::vector<std::byte>& bytes) {
    const auto again = kind.decode(bytes);
    ++(again.ok() ? accepted : refused);
    if (again.ok()) {
      EXPECT_EQ(*again, bytes) << kind.name << ": two different messages mean the same";
    } else {
      EXPECT_THAT(Text(again.status()), StartsWith(kind.name + ": "));
    }
  };
  for (const MessageKind& kind : AllMessages())
    for (const auto& sample : kind.samples) {
      for (size_t at = 0; at < sample.size(); ++at)
        for (const uint8_t value : {0x00, 0x01, 0x7f, 0x80, 0xff}) {
          auto bytes = sample;
          bytes[at] = std::byte{value};
          feed(kind, bytes);
        }
      for (int i = 0; i < 2000; ++i) {
        auto bytes = sample;
        for (uint64_t changes = 1 + random() % 8; changes > 0; --changes) {
          const size_t at = random() % (bytes.size() + 1);
          switch (random() % 3) {
            case 0: bytes.insert(bytes.begin() + at, std::byte(random())); break;
            case 1:
              if (at < bytes.size()) bytes.erase(bytes.begin() + at);
              break;
            default:
              if (at < bytes.size()) bytes[at] = std::byte(random());
          }
        }
        feed(kind, bytes);
      }
    }
  EXPECT_GT(accepted, 1000) << "the changes are not all absurd";
  EXPECT_GT(refused, 10000);
}

}  // namespace
}  // namespace dovetail::proto::testing
