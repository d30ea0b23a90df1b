#include "attention_worker/cuda/gather_rows.h"

#include <cmath>
#include <cstring>

#include "base/dtype.h"

namespace dovetail::attention {
namespace {

using kernels::cuda::CudaKvLayout;
using kernels::cuda::KvType;

constexpr int kRun = CudaKvLayout::kChunk / static_cast<int>(kWireElement);  // elements of 16 bits that lie together

// E4M3 as 16 bits of the wire's type, exactly.
uint16_t Widened(uint8_t x, bool bf16) {
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                              : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  if (exponent == 15 && mantissa == 7) value = std::nanf("");
  if (x & 0x80) value = -value;
  return bf16 ? ToBF16(value).bits : ToF16(value).bits;
}

void CopyWidened(const std::byte* from, bool bf16, std::byte* to) {
  const uint16_t wide = Widened(static_cast<uint8_t>(*from), bf16);
  std::memcpy(to, &wide, kWireElement);
}

}  // namespace

void GatherBlock(const std::byte* block, const GpuHeadRows& out) {
  const CudaKvLayout& layout = out.layout;
  for (int row = 0; row < out.rows; ++row) {
    const int token = out.token + row;
    std::byte* k = out.k + row * out.k_step;
    std::byte* v = out.v + row * out.v_step;
    if (layout.type == KvType::kE4M3) {
      for (int i = 0; i < layout.key_dim; ++i)
        CopyWidened(block + layout.key_offset(token, i), out.bf16, k + i * kWireElement);
      for (int i = 0; i < layout.value_dim; ++i)
        CopyWidened(block + layout.value_offset(token, i), out.bf16, v + i * kWireElement);
      continue;
    }
    for (int i = 0; i < layout.key_dim; i += kRun)
      std::memcpy(k + i * kWireElement, block + layout.key_offset(token, i), CudaKvLayout::kChunk);
    for (int i = 0; i < layout.value_dim; i += kRun)
      std::memcpy(v + i * kWireElement, block + layout.value_offset(token, i), CudaKvLayout::kChunk);
  }
}

}  // namespace dovetail::attention
