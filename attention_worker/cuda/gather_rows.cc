#include "attention_worker/cuda/gather_rows.h"

#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/dtype.h"

namespace dovetail::attention {
namespace {

constexpr int kElement = 2;  // bytes of the wire types of a GPU

// E4M3 as 16 bits of the wire's type, exactly.
uint16_t Widened(uint8_t x, bool bf16) {
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                              : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  if (exponent == 15 && mantissa == 7) value = std::nanf("");
  if (x & 0x80) value = -value;
  return bf16 ? ToBF16(value).bits : ToF16(value).bits;
}

void CopyElement(const std::byte* from, const HeadRows& out, std::byte* to) {
  if (out.layout.type != kernels::cuda::KvType::kE4M3) {
    std::memcpy(to, from, kElement);
    return;
  }
  const uint16_t wide = Widened(static_cast<uint8_t>(*from), out.bf16);
  std::memcpy(to, &wide, kElement);
}

}  // namespace

void GatherBlock(const std::byte* block, const HeadRows& out) {
  for (int row = 0; row < out.rows; ++row) {
    std::byte* k = out.k + row * out.k_step;
    std::byte* v = out.v + row * out.v_step;
    for (int i = 0; i < out.layout.key_dim; ++i)
      CopyElement(block + out.layout.key_offset(out.token + row, i), out, k + i * kElement);
    for (int i = 0; i < out.layout.value_dim; ++i)
      CopyElement(block + out.layout.value_offset(out.token + row, i), out, v + i * kElement);
  }
}

}  // namespace dovetail::attention
