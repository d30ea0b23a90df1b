#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/ids.h"
#include "base/status.h"

// What a Fabric moves: a header of 64 bytes and a payload. Tensors are raw payloads whose layout both ends compute
// (step_layout.h); every other payload is an encoded message (sequence_frames.h, step_plan.h).
// Threads: plain values and pure functions.

namespace dovetail::proto {

enum class FrameType : uint16_t {
  // scheduler <-> compute worker
  kStepPlan = 1,
  kStepResult = 2,
  kWithdrawStep = 3,  // scheduler: ends the step of the header, which has a result all the same; no payload
  // scheduler <-> attention worker
  kOpenSequence = 16,
  kSequenceOpened = 17,
  kForkSequence = 18,
  kReleaseSequence = 19,
  kPrefixProbe = 20,
  kPrefixProbed = 21,
  kUnpin = 22,
  kMoveSequence = 24,
  kSequenceMoved = 25,
  // compute worker <-> attention worker, within a step; attention worker -> attention worker, moving a sequence
  kStepBegin = 32,
  kStepRefused = 33,
  kQuery = 34,     // payload: q rows of every entry and shard
  kKeyValue = 35,  // payload: k, then v rows of every entry and shard that appends
  kPartial = 36,   // payload: what attention over the shards gave, and k and v of earlier tokens that were asked for,
                   // unless they came before in pieces (gather_frames.h); nothing if neither was: k and v are in place
};

inline constexpr uint32_t kFrameMagic = 0x4c545644;  // "DVTL"
inline constexpr uint16_t kFrameVersion = 15;
inline constexpr uint64_t kMaxPayloadBytes = uint64_t{1} << 32;

// Little-endian, fixed size. `epoch` is that of the attention worker concerned (the receiver's on the way there, the
// sender's on the way back): a frame of another incarnation is dropped. What comes twice is acted on once: `step` is
// the step's number, which no second step has, and what the scheduler tells an attention worker about sequences is
// numbered in it from 1 (0: not numbered).
struct FrameHeader {
  uint32_t magic = kFrameMagic;
  uint16_t version = kFrameVersion;
  FrameType type{};
  uint32_t epoch = 0;
  uint16_t micro_batch = 0;
  uint16_t op = 0;  // attention op, for tensors
  uint64_t step = 0;
  uint64_t payload_bytes = 0;
  uint64_t digest = 0;  // of kKeyValue in a move: CRC-64 of the payload; 0: none was taken; switch_frames.h: the piece;
                        // rank_frames.h: the rank;
                        // gather_frames.h: the piece
  uint64_t reserved[2] = {0, 0};
  uint32_t busy_us = 0;   // of kPartial: how long this op kept the attention worker busy
  uint32_t checksum = 0;  // CRC-32C of the 60 bytes before it
};
static_assert(sizeof(FrameHeader) == 64);

// Fills in magic, version, payload size and checksum.
FrameHeader MakeHeader(FrameType type, Epoch epoch, StepId step, MicroBatchId micro_batch, int op,
                       uint64_t payload_bytes, uint32_t busy_us = 0, uint64_t digest = 0);

// kInvalidArgument names the first field that is wrong. Reserved fields must be 0.
absl::Status Validate(const FrameHeader& header);

uint32_t Crc32c(std::span<const std::byte> bytes);

}  // namespace dovetail::proto
