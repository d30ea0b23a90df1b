#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace dovetail {

using Sha256Digest = std::array<uint8_t, 32>;

// SHA-256 of the bytes (libcrypto).
// Threads: pure.
Sha256Digest Sha256(std::span<const std::byte> bytes);

}  // namespace dovetail
