#pragma once
#include <nmmintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace dovetail::proto {

// CRC-32C, as Crc32c() in frame.h computes it, of the bytes of a header that come before its field `checksum`. They are
// as many for every header of its type, so that nothing loops and nothing is called: a message has four such checksums
// to be made or compared.
// Threads: pure.
template <typename Header>
inline uint32_t ChecksumOfHeader(const Header& header) {
  constexpr size_t kBytes = offsetof(Header, checksum);
  static_assert(kBytes % 8 == 4, "words, and half a word at the end");
  const auto* bytes = reinterpret_cast<const std::byte*>(&header);
  uint64_t crc = 0xffffffffu;
  const auto add = [&](size_t word) {
    uint64_t value;
    std::memcpy(&value, bytes + 8 * word, 8);
    crc = _mm_crc32_u64(crc, value);
  };
  [&]<size_t... kWord>(std::index_sequence<kWord...>) { (add(kWord), ...); }
  (std::make_index_sequence<kBytes / 8>());
  uint32_t tail;
  std::memcpy(&tail, bytes + kBytes - 4, 4);
  return ~_mm_crc32_u32(static_cast<uint32_t>(crc), tail);
}

}  // namespace dovetail::proto
