#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace dovetail::attention {

// CRC-64 (ECMA-182, reflected) of the bytes, continued from `before`: the digest of several pieces is that of all their
// bytes in order.
// Cost:    bound by the rate at which one core reads memory.
// Threads: pure.
// Source:  ISA-L (crc64_ecma_refl).
uint64_t Digest(std::span<const std::byte> bytes, uint64_t before = 0);

}  // namespace dovetail::attention
