#include "kernels/kv_eight_bits.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace dovetail::kernels {
namespace {

constexpr float kMostE4M3 = 448;
constexpr uint8_t kE4M3NaN = 0x7f;
constexpr float kLeastNormalE4M3 = 0x1p-6f, kLeastE4M3 = 0x1p-9f;

constexpr float kLargestCode = 127.4375f;  // before rounding
constexpr float kLeastScale = 0x1p-82f;    // keeps all products of scales normal
constexpr float kMostBF16 = 0x1.fep127f;
constexpr int kDroppedBits = 21;  // of a float's mantissa: two are left

// 1.5 * 2^23: added to a float of less than 2^22, it rounds it to a whole number, ties to even.
constexpr float kRounder = 12582912.0f;

}  // namespace

uint8_t ToE4M3(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const auto sign = static_cast<uint8_t>(bits >> 24 & 0x80);
  const float size = std::fabs(x);
  if (std::isnan(x)) return kE4M3NaN;
  if (size >= kMostE4M3) return sign | 0x7e;
  if (size < kLeastNormalE4M3)  // the code after the last one here is that of the least normal number
    return sign | static_cast<uint8_t>(size / kLeastE4M3 + kRounder - kRounder);
  uint32_t u = std::bit_cast<uint32_t>(size);
  u += (1u << 19) - 1 + (u >> 20 & 1);
  return sign | static_cast<uint8_t>((u >> 20) - ((127 - 7) << 3));
}

float FromE4M3(uint8_t code) {
  const int size = code & 0x7f;
  if (size == kE4M3NaN) return std::numeric_limits<float>::quiet_NaN();
  const float value = size < 8 ? static_cast<float>(size) * kLeastE4M3
                               : std::bit_cast<float>(static_cast<uint32_t>(size + ((127 - 7) << 3)) << 20);
  return (code & 0x80) != 0 ? -value : value;
}

float Int8ScaleOf(std::span<const BF16> x) {
  uint32_t most = 0;  // sizes of floats are in the order of their bits, infinity and NaN last
  for (const BF16 element : x) most = std::max<uint32_t>(most, element.bits & 0x7fff);
  if (most >= 0x7f80) return std::numeric_limits<float>::quiet_NaN();
  const float largest = ToFloat(BF16{static_cast<uint16_t>(most)});
  const uint32_t u = std::bit_cast<uint32_t>(largest * (1 / kLargestCode));
  return std::max(kLeastScale, std::bit_cast<float>((u + (1u << kDroppedBits) - 1) >> kDroppedBits << kDroppedBits));
}

void ToInt8(std::span<const BF16> x, float scale, int8_t* out) {
  const float factor = scale > 0 ? 1 / scale : 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const float code = ToFloat(x[i]) * factor + kRounder;
    const int32_t rounded = std::bit_cast<int32_t>(code) - std::bit_cast<int32_t>(kRounder);
    out[i] = static_cast<int8_t>(factor == 0 ? 0 : rounded);
  }
}

BF16 FromInt8(int8_t code, float scale) {
  const float value = static_cast<float>(code) * scale;
  return ToBF16(std::isnan(scale) ? scale : std::clamp(value, -kMostBF16, kMostBF16));
}

}  // namespace dovetail::kernels
