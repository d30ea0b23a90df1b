#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "proto/placement.h"
#include "proto/step_layout.h"

// How linear states travel between attention workers (proto::MoveSequence): where K and V would be, the blocks of one
// op and one shard go as they lie in memory, after a header that says what they are.
// Threads: pure.

namespace dovetail::attention {

// Fixed size, little-endian. The blocks follow, [block][head][piece][block_bytes].
struct StateSnapshot {
  static constexpr uint32_t kMagic = 0x53535644;  // "DVSS"
  static constexpr uint32_t kVersion = 1;

  uint32_t magic = kMagic;
  uint32_t version = kVersion;
  uint64_t model = 0;  // digest of model, KV type and attention table
  uint32_t op = 0;
  int32_t head_begin = 0, head_end = 0;
  uint32_t pieces = 0;      // KvBlocks of a head and block
  int64_t first_block = 0;  // of 64 tokens
  int64_t blocks = 0;
  uint64_t block_bytes = 0;  // of a KvBlock

  bool operator==(const StateSnapshot&) const = default;
  uint64_t payload_bytes() const {
    return sizeof(*this) + static_cast<uint64_t>(blocks) * (head_end - head_begin) * pieces * block_bytes;
  }
};
static_assert(sizeof(StateSnapshot) == 56);

// What an item of a move's layout carries for a linear op.
StateSnapshot SnapshotOf(const proto::ShardStep& item, uint64_t model, int op, int pieces, uint64_t block_bytes);

// kInvalidArgument, naming what differs: `bytes` do not begin with the header of `expected`, or are of another size.
absl::Status CheckSnapshot(std::span<const std::byte> bytes, const StateSnapshot& expected);

}  // namespace dovetail::attention
