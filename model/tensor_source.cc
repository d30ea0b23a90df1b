#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/check.h"
#include "base/dtype.h"
#include "kernels/quant_format.h"
#include "model/checkpoint.h"
#include "model/formats/dequantize.h"

namespace dovetail::model {
namespace {

// transformers keeps elements 2i and 2i + 1 of a block in byte i, ggml elements i and i + 16.
void CopyMxfp4Row(const std::byte* codes, const std::byte* scales, int64_t blocks, std::byte* out) {
  for (int64_t b = 0; b < blocks; ++b) {
    uint8_t pairs[16], elements[32];
    std::memcpy(pairs, codes + 16 * b, sizeof(pairs));
    for (int i = 0; i < 16; ++i) {
      elements[2 * i] = pairs[i] & 15;
      elements[2 * i + 1] = pairs[i] >> 4;
    }
    kernels::BlockMXFP4 block;
    block.e = static_cast<uint8_t>(scales[b]);
    for (int i = 0; i < 16; ++i) block.qs[i] = static_cast<uint8_t>(elements[i] | elements[i + 16] << 4);
    std::memcpy(out + static_cast<int64_t>(sizeof(block)) * b, &block, sizeof(block));
  }
}

// OCP 8-bit floating point: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity.
float FromE4M3(uint8_t code) {
  if ((code & 0x7f) == 0x7f) return std::numeric_limits<float>::quiet_NaN();
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                   : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return (code & 0x80) != 0 ? -size : size;
}

void CopyE4M3Row(std::span<const std::byte> codes, float scale, std::byte* out) {
  static const std::array<float, 256> kValues = [] {
    std::array<float, 256> values;
    for (int code = 0; code < 256; ++code) values[code] = FromE4M3(static_cast<uint8_t>(code));
    return values;
  }();
  for (size_t i = 0; i < codes.size(); ++i) {
    const BF16 value = ToBF16(kValues[static_cast<uint8_t>(codes[i])] * scale);
    std::memcpy(out + 2 * i, &value, sizeof(value));
  }
}

// One element of a block for each of the stored rows, which are whole blocks.
void CopyBlocksColumn(const TensorSource& source, int64_t column, std::byte* out) {
  const int64_t block = BlockElements(source.stored_type), bytes = BlockBytes(source.stored_type);
  std::vector<float> values(static_cast<size_t>(block));
  for (int64_t c = 0; c < source.cols; ++c) {
    const int64_t at = c * source.stored_cols + column;
    Dequantize(source.stored_type, source.bytes.data() + at / block * bytes, block, values.data());
    std::memcpy(out + static_cast<size_t>(c) * sizeof(float), &values[static_cast<size_t>(at % block)], sizeof(float));
  }
}

}  // namespace

std::span<const std::byte> TensorSource::E4M3Row(int64_t r, float& scale) const {
  const auto source = static_cast<size_t>(SourceRow(r));
  scale = scales[scales.size() == 1 ? 0 : source];
  return bytes.subspan(source * static_cast<size_t>(cols), static_cast<size_t>(cols));
}

int64_t TensorSource::SourceRow(int64_t r) const {
  if (pattern.rows > 0) return pattern.SourceRow(r);
  if (interleaved_head_rows == 0) return r;
  const int64_t d = interleaved_head_rows, in_head = r % d;
  return r - in_head + 2 * (in_head % (d / 2)) + in_head / (d / 2);
}

std::vector<int32_t> TensorSource::RowOrder() const {
  std::vector<int32_t> order;
  if (interleaved_head_rows == 0 && pattern.rows == 0) return order;
  order.resize(static_cast<size_t>(rows));
  for (int64_t r = 0; r < rows; ++r) order[static_cast<size_t>(r)] = static_cast<int32_t>(SourceRow(r));
  return order;
}

void TensorSource::CopyRow(int64_t r, std::byte* out) const {
  const int64_t source = SourceRow(r);
  switch (layout) {
    case TensorLayout::kRows:
      std::memcpy(out, bytes.data() + source * row_bytes, static_cast<size_t>(row_bytes));
      return;
    case TensorLayout::kJoined: {
      int64_t at = source * row_bytes;
      std::span<const std::byte> part = bytes;
      for (size_t i = 0; at >= static_cast<int64_t>(part.size()); ++i) {
        at -= static_cast<int64_t>(part.size());
        part = more[i];
      }
      std::memcpy(out, part.data() + at, static_cast<size_t>(row_bytes));
      return;
    }
    case TensorLayout::kColumns: {
      if (IsQuantized(stored_type)) return CopyBlocksColumn(*this, source, out);
      const auto element = static_cast<size_t>(row_bytes / cols);
      for (int64_t c = 0; c < cols; ++c)
        std::memcpy(out + static_cast<size_t>(c) * element,
                    bytes.data() + static_cast<size_t>(c * stored_cols + source) * element, element);
      return;
    }
    case TensorLayout::kE4M3: {
      float scale;
      const std::span<const std::byte> codes = E4M3Row(r, scale);
      return CopyE4M3Row(codes, scale, out);
    }
    case TensorLayout::kMxfp4: {
      const int64_t blocks = cols / BlockElements(type);
      return CopyMxfp4Row(bytes.data() + source * blocks * 16, more[0].data() + source * blocks, blocks, out);
    }
  }
}

std::vector<std::byte> TensorSource::CopyRows() const {
  std::vector<std::byte> all(static_cast<size_t>(rows * row_bytes));
  for (int64_t r = 0; r < rows; ++r) CopyRow(r, all.data() + r * row_bytes);
  return all;
}

void TensorSource::ReadRows(int64_t first, int64_t count, std::span<float> out) const {
  DT_CHECK(first >= 0 && count >= 0 && first + count <= rows && static_cast<int64_t>(out.size()) == count * cols);
  if (has_rows() && interleaved_head_rows == 0 && pattern.rows == 0) {
    Dequantize(type, bytes.data() + first * row_bytes, count * cols, out.data());
  } else {
    std::vector<std::byte> row(static_cast<size_t>(row_bytes));
    for (int64_t r = 0; r < count; ++r) {
      CopyRow(first + r, row.data());
      Dequantize(type, row.data(), cols, out.data() + r * cols);
    }
  }
  if (add != 0) {
    for (float& value : out) value += add;
  }
}

std::vector<float> TensorSource::ReadAll() const {
  std::vector<float> values(static_cast<size_t>(rows * cols));
  ReadRows(0, rows, values);
  return values;
}

}  // namespace dovetail::model
