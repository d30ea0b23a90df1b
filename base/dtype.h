#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace dovetail {

// Element types of activations, KV and wire tensors. Quantised weight blocks are model::GgmlType.
// Threads: plain values and pure functions.
enum class DType : uint8_t { kF32 = 0, kF16 = 1, kBF16 = 2 };

constexpr size_t SizeOf(DType type) { return type == DType::kF32 ? 4 : 2; }
std::string_view Name(DType type);  // "float32", "float16", "bfloat16", as in vLLM's flags

// Scalar conversions, round to nearest even; NaN stays NaN. Kernels have vector forms with the same results.
struct BF16 {
  uint16_t bits = 0;
};
struct F16 {
  uint16_t bits = 0;
};

inline float ToFloat(BF16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
inline BF16 ToBF16(float x) {
  uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return BF16{static_cast<uint16_t>((u >> 16) | 0x40)};
  u += 0x7fffu + ((u >> 16) & 1);
  return BF16{static_cast<uint16_t>(u >> 16)};
}
float ToFloat(F16 x);
F16 ToF16(float x);

}  // namespace dovetail
