#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "proto/token_layout.h"

// Between a strided region and the dense stream of its bytes.
// Threads: pure; nothing is checked but by the caller: `at` + bytes <= region.bytes(), and the region lies
// within the part.

namespace dovetail::sequence_parallel {

// Bytes [at, at + out.size()) of the region's stream.
void Pack(const proto::Region& region, const std::byte* part, int64_t at, std::span<std::byte> out);
void Unpack(const proto::Region& region, std::byte* part, int64_t at, std::span<const std::byte> in);

// All of a transfer within one rank.
void Copy(const proto::Transfer& transfer, const std::byte* from, std::byte* to);

}  // namespace dovetail::sequence_parallel
