#include "proto/frame.h"

#include <nmmintrin.h>

#include <cstring>

#include "proto/gather_frames.h"
#include "proto/header_checksum.h"
#include "proto/rank_frames.h"
#include "proto/switch_frames.h"

namespace dovetail::proto {
namespace {

bool Known(FrameType type) {
  const auto value = static_cast<uint16_t>(type);
  return (value >= 1 && value <= 4) || value == 6 || (value >= 16 && value <= 22) || value == 24 || value == 25 ||
         (value >= 32 && value <= 40) || IsRankFrame(type) || IsMemoryFrame(type) || IsSwitchFrame(type) ||
         IsPieceFrame(type);
}

}  // namespace

uint32_t Crc32c(std::span<const std::byte> bytes) {
  uint64_t crc = 0xffffffffu;
  while (bytes.size() >= 8) {
    uint64_t word;
    std::memcpy(&word, bytes.data(), 8);
    crc = _mm_crc32_u64(crc, word);
    bytes = bytes.subspan(8);
  }
  for (const std::byte byte : bytes) crc = _mm_crc32_u8(static_cast<uint32_t>(crc), static_cast<uint8_t>(byte));
  return ~static_cast<uint32_t>(crc);
}

FrameHeader MakeHeader(FrameType type, Epoch epoch, StepId step, MicroBatchId micro_batch, int op,
                       uint64_t payload_bytes, uint32_t busy_us, uint64_t digest) {
  FrameHeader header;
  header.type = type;
  header.epoch = epoch.value();
  header.step = step.value();
  header.micro_batch = micro_batch.value();
  header.op = static_cast<uint16_t>(op);
  header.payload_bytes = payload_bytes;
  header.busy_us = busy_us;
  header.digest = digest;
  header.checksum = ChecksumOfHeader(header);
  return header;
}

absl::Status Validate(const FrameHeader& header) {
  if (header.magic != kFrameMagic) return InvalidArgument("frame: magic ", header.magic, " is not ", kFrameMagic);
  if (header.version != kFrameVersion)
    return InvalidArgument("frame: version ", header.version, "; this node speaks ", kFrameVersion);
  if (header.checksum != ChecksumOfHeader(header)) return DataLoss("frame: the header's checksum does not match");
  if (!Known(header.type)) return InvalidArgument("frame: type ", static_cast<int>(header.type), " is unknown");
  if (header.payload_bytes > kMaxPayloadBytes)
    return InvalidArgument("frame: payload of ", header.payload_bytes, " bytes; at most ", kMaxPayloadBytes);
  if (header.reserved[0] != 0 || header.reserved[1] != 0) return InvalidArgument("frame: reserved fields are not 0");
  const bool of_rank = header.type != kRankState && IsRankFrame(header.type);
  if (header.digest != 0 && header.type != FrameType::kKeyValue && !of_rank && !IsSwitchFrame(header.type) &&
      !IsPieceFrame(header.type))
    return InvalidArgument("frame: type ", static_cast<int>(header.type), " has no digest, but brings one");
  return absl::OkStatus();
}

}  // namespace dovetail::proto
