#include "proto/frame.h"

#include <cstring>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/cache_frames.h"
#include "proto/gather_frames.h"
#include "proto/link_frames.h"
#include "proto/rank_frames.h"
#include "proto/switch_frames.h"
#include "proto/trace_frame.h"

namespace dovetail::proto {
namespace {

using ::testing::HasSubstr;

constexpr FrameType kAllTypes[] = {FrameType::kStepPlan,
                                   FrameType::kStepResult,
                                   FrameType::kWithdrawStep,
                                   FrameType::kOpenSequence,
                                   FrameType::kSequenceOpened,
                                   FrameType::kForkSequence,
                                   FrameType::kReleaseSequence,
                                   FrameType::kPrefixProbe,
                                   FrameType::kPrefixProbed,
                                   FrameType::kUnpin,
                                   kTraceSequence,
                                   kCacheChanged,
                                   FrameType::kMoveSequence,
                                   FrameType::kSequenceMoved,
                                   FrameType::kStepBegin,
                                   FrameType::kStepRefused,
                                   FrameType::kQuery,
                                   FrameType::kKeyValue,
                                   FrameType::kPartial,
                                   kStepBeginOnDevice,
                                   kLinkOffer,
                                   kLinkAnswer,
                                   kLinkThere,
                                   kSwitchPart,
                                   kSwitchVoid,
                                   kSwitchTaken,
                                   kRankState,
                                   kRankRows,
                                   kRankAttended,
                                   kRankHeads,
                                   kRankOutputs,
                                   kRankTaken,
                                   kRankMemory,
                                   kMemoryOffer,
                                   kMemoryAnswer,
                                   kAskRows,
                                   kEarlierRows};

FrameHeader Good() { return MakeHeader(FrameType::kQuery, Epoch(3), StepId(99), MicroBatchId(1), 17, 4096); }

// As a peer with other ideas would send it: the checksum is right.
FrameHeader Sealed(FrameHeader header) {
  header.checksum = Crc32c(std::as_bytes(std::span(&header, 1)).first(60));
  return header;
}

std::string Verdict(const FrameHeader& header) {
  const absl::Status status = Validate(header);
  return status.ok() ? "accepted" : std::string(status.message());
}

TEST(FrameHeader, CarriesWhatItWasMadeOf) {
  const FrameHeader header = Good();
  EXPECT_EQ(Verdict(header), "accepted");
  EXPECT_EQ(header.type, FrameType::kQuery);
  EXPECT_EQ(header.epoch, 3u);
  EXPECT_EQ(header.step, 99u);
  EXPECT_EQ(header.micro_batch, 1u);
  EXPECT_EQ(header.op, 17u);
  EXPECT_EQ(header.payload_bytes, 4096u);
}

TEST(FrameHeader, LiesInMemoryAsItCrossesTheWire) {
  const FrameHeader header = Good();
  uint8_t bytes[64];
  std::memcpy(bytes, &header, 64);
  EXPECT_EQ(std::memcmp(bytes, "DVTL", 4), 0);
  EXPECT_EQ(bytes[4], 15) << "version";
  EXPECT_EQ(bytes[6], 34) << "type";
  EXPECT_EQ(bytes[8], 3) << "epoch";
  EXPECT_EQ(bytes[12], 1) << "micro-batch";
  EXPECT_EQ(bytes[14], 17) << "op";
  EXPECT_EQ(bytes[16], 99) << "step";
  EXPECT_EQ(bytes[25], 0x10) << "payload size";
  const FrameHeader moved = MakeHeader(FrameType::kKeyValue, Epoch(3), StepId(99), MicroBatchId(1), 17, 8, 0, 0xab);
  std::memcpy(bytes, &moved, 64);
  EXPECT_EQ(bytes[32], 0xab) << "digest";
}

TEST(FrameHeader, EveryTypeIsKnownAndNoOther) {
  int known = 0;
  for (int type = 0; type < 65536; ++type)
    known += Validate(MakeHeader(static_cast<FrameType>(type), Epoch(0), StepId(0), MicroBatchId(0), 0, 0)).ok();
  EXPECT_EQ(known, static_cast<int>(std::size(kAllTypes)));
  for (const FrameType type : kAllTypes)
    EXPECT_EQ(Verdict(MakeHeader(type, Epoch(0), StepId(0), MicroBatchId(0), 0, 0)), "accepted")
        << static_cast<int>(type);
  EXPECT_THAT(Verdict(MakeHeader(FrameType(5), Epoch(0), StepId(0), MicroBatchId(0), 0, 0)),
              HasSubstr("type 5 is unknown"));
}

TEST(FrameHeader, WrongMagicVersionSizeOrReservedBytesAreNamed) {
  FrameHeader header = Good();
  header.magic = 0x47475546;
  EXPECT_THAT(Verdict(Sealed(header)), HasSubstr("frame: magic 1195857222 is not"));
  header = Good();
  header.version = 1;
  EXPECT_THAT(Verdict(Sealed(header)), HasSubstr("frame: version 1; this node speaks 15"));
  header = Good();
  header.payload_bytes = kMaxPayloadBytes;
  EXPECT_EQ(Verdict(Sealed(header)), "accepted");
  header.payload_bytes = kMaxPayloadBytes + 1;
  EXPECT_THAT(Verdict(Sealed(header)), HasSubstr("frame: payload of 4294967297 bytes; at most 4294967296"));
  for (uint64_t& field : header.reserved) {
    header = Good();
    field = 1;
    EXPECT_THAT(Verdict(Sealed(header)), HasSubstr("reserved fields are not 0"));
  }
  header = Good();
  header.digest = 1;
  EXPECT_THAT(Verdict(Sealed(header)), HasSubstr("frame: type 34 has no digest"));
  EXPECT_EQ(Verdict(MakeHeader(kSwitchPart, Epoch(1), StepId(2), MicroBatchId(0), 0, 8, 0, 0xab)), "accepted");
  EXPECT_EQ(MakeHeader(FrameType::kPartial, Epoch(1), StepId(2), MicroBatchId(0), 0, 0, 77).busy_us, 77u);
}

TEST(FrameHeader, AnyChangedBitIsNoticed) {
  const FrameHeader good = Good();
  for (int bit = 0; bit < 512; ++bit) {
    uint8_t bytes[64];
    std::memcpy(bytes, &good, 64);
    bytes[bit / 8] ^= static_cast<uint8_t>(1u << bit % 8);
    FrameHeader changed;
    std::memcpy(&changed, bytes, 64);
    EXPECT_FALSE(Validate(changed).ok()) << "bit " << bit;
  }
}

TEST(FrameHeader, RandomBytesAreNeverAFrame) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 random(seed);
  for (int i = 0; i < 20000; ++i) {
    uint64_t words[8];
    for (uint64_t& word : words) word = random();
    FrameHeader header;
    std::memcpy(&header, words, 64);
    if (i % 2 == 0) header.magic = kFrameMagic;
    if (i % 4 == 0) header.version = kFrameVersion;
    EXPECT_FALSE(Validate(header).ok());
  }
}

TEST(Crc32c, IsCastagnolis) {
  const auto of = [](std::string_view text) { return Crc32c(std::as_bytes(std::span(text.data(), text.size()))); };
  EXPECT_EQ(of(""), 0u);
  EXPECT_EQ(of("123456789"), 0xe3069283u) << "the check value of RFC 3720's polynomial";
  EXPECT_EQ(of("The quick brown fox jumps over the lazy dog"), 0x22620404u);
  EXPECT_EQ(of(std::string_view("\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 32)), 0x8a9136aau);
}

}  // namespace
}  // namespace dovetail::proto
