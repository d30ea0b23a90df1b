#pragma once
#include <cstdint>
#include <string_view>

#include "base/dtype.h"

namespace dovetail {

// How K and V lie in the blocks of a cache. What crosses the wire has the wire's type either way. A value that a cache
// of 8 bits gives back is exact in bfloat16 (E4M3), or rounds to bfloat16 (int8) such that it is stored again as it
// was: what is moved, gathered or computed twice has the same bytes everywhere (kernels/kv_eight_bits.h).
enum class KvStorage : uint8_t {
  kAsSent = 0,  // the wire's type
  kE4M3 = 1,    // 8 bits, one of sign, four of exponent, three of mantissa, rounded to nearest, cut off at 448
  kInt8 = 2,    // 8 bits and a scale for each token and KV head, of K and of V. On CPUs
};

// As --kv-cache-dtype has it; "as sent" for kAsSent.
// Threads: pure.
constexpr std::string_view Name(KvStorage storage) {
  return storage == KvStorage::kE4M3 ? "fp8_e4m3" : storage == KvStorage::kInt8 ? "int8" : "as sent";
}

// Bytes of K and V of a token of one KV head in memory, scales included; what blocks are padded with is not.
// Shapes:  dimensions in elements.
// Threads: pure.
constexpr double KvTokenBytes(DType kv, KvStorage storage, int key_dim, int value_dim) {
  const double elements = key_dim + value_dim;
  if (storage == KvStorage::kAsSent) return elements * static_cast<double>(SizeOf(kv));
  return storage == KvStorage::kInt8 ? elements + 2 * sizeof(BF16) : elements;
}

}  // namespace dovetail
