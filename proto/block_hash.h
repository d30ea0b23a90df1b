#pragma once
#include <array>
#include <cstdint>

namespace dovetail::proto {

// Names the content of one KV block and of everything before it: SHA-256, cut to 128 bits, of (previous hash, the
// block's tokens). The first is seeded with the salt of the tenants that may share it (scheduler/core/block_hasher.h).
// Little-endian on the wire.
// Threads: plain values.
using BlockHash = std::array<uint64_t, 2>;

}  // namespace dovetail::proto
