#include "model/dequantize.h"

#include <cstring>

#include "base/check.h"
#include "base/dtype.h"

// Block layouts: ggml-org/ggml, src/ggml-common.h. All scales are little-endian f16; there is no padding.

namespace dovetail::model {
namespace {

uint8_t Byte(const std::byte* p, int64_t i) { return static_cast<uint8_t>(p[i]); }

uint16_t LoadU16(const std::byte* p) { return static_cast<uint16_t>(Byte(p, 0) | Byte(p, 1) << 8); }

uint32_t LoadU32(const std::byte* p) { return LoadU16(p) | static_cast<uint32_t>(LoadU16(p + 2)) << 16; }

float LoadF16(const std::byte* p) { return ToFloat(F16{LoadU16(p)}); }

// q in 0..15, element j in the low nibble of byte j, element j + 16 in the high one.
int Nibble(const std::byte* qs, int j) { return j < 16 ? Byte(qs, j) & 15 : Byte(qs, j - 16) >> 4; }

void BlockQ4_0(const std::byte* b, float* out) {
  const float d = LoadF16(b);
  for (int j = 0; j < 32; ++j) out[j] = static_cast<float>(Nibble(b + 2, j) - 8) * d;
}

void BlockQ4_1(const std::byte* b, float* out) {
  const float d = LoadF16(b), m = LoadF16(b + 2);
  for (int j = 0; j < 32; ++j) out[j] = static_cast<float>(Nibble(b + 4, j)) * d + m;
}

void BlockQ5_0(const std::byte* b, float* out) {
  const float d = LoadF16(b);
  const uint32_t high = LoadU32(b + 2);
  for (int j = 0; j < 32; ++j) {
    const int q = Nibble(b + 6, j) | static_cast<int>((high >> j) & 1) << 4;
    out[j] = static_cast<float>(q - 16) * d;
  }
}

void BlockQ5_1(const std::byte* b, float* out) {
  const float d = LoadF16(b), m = LoadF16(b + 2);
  const uint32_t high = LoadU32(b + 4);
  for (int j = 0; j < 32; ++j) {
    const int q = Nibble(b + 8, j) | static_cast<int>((high >> j) & 1) << 4;
    out[j] = static_cast<float>(q) * d + m;
  }
}

void BlockQ8_0(const std::byte* b, float* out) {
  const float d = LoadF16(b);
  for (int j = 0; j < 32; ++j) out[j] = static_cast<float>(static_cast<int8_t>(Byte(b, 2 + j))) * d;
}

// The 6-bit scale and minimum of sub-block s (0..7) out of the 12 packed bytes of Q4_K and Q5_K.
void ScaleAndMin(const std::byte* packed, int s, int& scale, int& minimum) {
  if (s < 4) {
    scale = Byte(packed, s) & 63;
    minimum = Byte(packed, s + 4) & 63;
  } else {
    scale = (Byte(packed, s + 4) & 15) | (Byte(packed, s - 4) >> 6) << 4;
    minimum = (Byte(packed, s + 4) >> 4) | (Byte(packed, s) >> 6) << 4;
  }
}

// Q5_K is Q4_K with a fifth bit per element: bit s of high[l]. `high` is null for Q4_K.
void BlockK(const std::byte* b, const std::byte* high, const std::byte* qs, float* out) {
  const float d = LoadF16(b), dmin = LoadF16(b + 2);
  for (int s = 0; s < 8; ++s) {
    int scale = 0, minimum = 0;
    ScaleAndMin(b + 4, s, scale, minimum);
    const float step = d * static_cast<float>(scale);
    const float offset = dmin * static_cast<float>(minimum);
    for (int l = 0; l < 32; ++l) {
      const uint8_t packed = Byte(qs, 32 * (s / 2) + l);
      int q = s % 2 == 0 ? packed & 15 : packed >> 4;
      if (high != nullptr) q += ((Byte(high, l) >> s) & 1) * 16;
      out[32 * s + l] = step * static_cast<float>(q) - offset;
    }
  }
}

void BlockQ4_K(const std::byte* b, float* out) { BlockK(b, nullptr, b + 16, out); }
void BlockQ5_K(const std::byte* b, float* out) { BlockK(b, b + 16, b + 48, out); }

void BlockQ6_K(const std::byte* b, float* out) {
  const std::byte *low = b, *high = b + 128, *scales = b + 192;
  const float d = LoadF16(b + 208);
  for (int e = 0; e < 256; ++e) {
    const int g = e / 128, k = e % 128 / 32, l = e % 32;
    const uint8_t packed = Byte(low, 64 * g + 32 * (k & 1) + l);
    const int lo = k < 2 ? packed & 15 : packed >> 4;
    const int hi = (Byte(high, 32 * g + l) >> (2 * k)) & 3;
    const auto scale = static_cast<int8_t>(Byte(scales, 8 * g + 2 * k + l / 16));
    out[e] = d * static_cast<float>(scale) * static_cast<float>((lo | hi << 4) - 32);
  }
}

template <void (*Block)(const std::byte*, float*)>
void Blocks(GgmlType type, const std::byte* blocks, int64_t elements, float* out) {
  const int64_t step = BlockElements(type), bytes = BlockBytes(type);
  for (int64_t e = 0; e < elements; e += step, blocks += bytes) Block(blocks, out + e);
}

}  // namespace

void Dequantize(GgmlType type, const std::byte* blocks, int64_t elements, float* out) {
  DT_CHECK(elements % BlockElements(type) == 0, elements, " elements are not whole blocks");
  switch (type) {
    case GgmlType::kF32:
      if (elements > 0) std::memcpy(out, blocks, static_cast<size_t>(elements) * sizeof(float));
      return;
    case GgmlType::kF16:
      for (int64_t i = 0; i < elements; ++i) out[i] = LoadF16(blocks + 2 * i);
      return;
    case GgmlType::kBF16:
      for (int64_t i = 0; i < elements; ++i) out[i] = ToFloat(BF16{LoadU16(blocks + 2 * i)});
      return;
    case GgmlType::kQ4_0:
      return Blocks<BlockQ4_0>(type, blocks, elements, out);
    case GgmlType::kQ4_1:
      return Blocks<BlockQ4_1>(type, blocks, elements, out);
    case GgmlType::kQ5_0:
      return Blocks<BlockQ5_0>(type, blocks, elements, out);
    case GgmlType::kQ5_1:
      return Blocks<BlockQ5_1>(type, blocks, elements, out);
    case GgmlType::kQ8_0:
      return Blocks<BlockQ8_0>(type, blocks, elements, out);
    case GgmlType::kQ4_K:
      return Blocks<BlockQ4_K>(type, blocks, elements, out);
    case GgmlType::kQ5_K:
      return Blocks<BlockQ5_K>(type, blocks, elements, out);
    case GgmlType::kQ6_K:
      return Blocks<BlockQ6_K>(type, blocks, elements, out);
  }
  DT_CHECK(false, "not a GgmlType");
}

}  // namespace dovetail::model
