#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

namespace dovetail {

// Whether two secrets of equal length are equal. How long it takes says nothing about where they differ.
// Threads: pure.
template <typename Byte, size_t kBytes>
bool EqualInConstantTime(const std::array<Byte, kBytes>& a, const std::array<Byte, kBytes>& b) {
  volatile uint8_t difference = 0;
  for (size_t i = 0; i < kBytes; ++i)
    difference = difference | (static_cast<uint8_t>(a[i]) ^ static_cast<uint8_t>(b[i]));
  return difference == 0;
}

}  // namespace dovetail
