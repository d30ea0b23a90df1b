#pragma once
#include <algorithm>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "base/dtype.h"
#include "kernels/cuda/products/quant_pack.h"
#include "kernels/packed_weights.h"

// Rows of quantised files, and what a GPU is given of them.

namespace dovetail::kernels::cuda::testing {

inline constexpr RowFormat kQuantFormats[] = {RowFormat::kQ4_0, RowFormat::kQ4_1, RowFormat::kQ5_0,
                                              RowFormat::kQ5_1, RowFormat::kQ8_0, RowFormat::kQ4_K,
                                              RowFormat::kQ5_K, RowFormat::kQ6_K, RowFormat::kMXFP4};

// A file's rows with any codes, and scales of the size that models have.
class QuantRows {
 public:
  QuantRows(RowFormat format, int64_t rows, int64_t cols, int seed) : format_(format), rows_(rows), cols_(cols) {
    row_bytes_ = RowBytes(format, cols);
    bytes_.resize(rows * row_bytes_);
    std::mt19937_64 random(seed * 31 + static_cast<int>(format));
    for (std::byte& b : bytes_) b = static_cast<std::byte>(random());
    std::uniform_real_distribution<float> size(0.001f, 0.02f);
    const RowFormatInfo& info = Info(format);
    for (int64_t block = 0; block < rows * cols / info.block_elements; ++block) {
      std::byte* const at = bytes_.data() + block * info.block_bytes;
      if (format == RowFormat::kMXFP4) {
        *at = static_cast<std::byte>(118 + random() % 8);
        continue;
      }
      const bool last = format == RowFormat::kQ6_K;
      const bool two = format == RowFormat::kQ4_1 || format == RowFormat::kQ5_1 || format == RowFormat::kQ4_K ||
                       format == RowFormat::kQ5_K;
      const float shrink = info.block_elements == 256 ? 1.0f / 32 : 1;
      for (int i = 0; i < (two ? 2 : 1); ++i) {
        const bool negative = i == 1 && (format == RowFormat::kQ4_1 || format == RowFormat::kQ5_1);
        const F16 half = ToF16((negative ? -8 : 1) * shrink * size(random));
        std::memcpy(at + (last ? info.block_bytes - 2 : 2 * i), &half, 2);
      }
    }
    row_at_ = [this](int64_t row) -> const std::byte* { return this->row(row); };
  }

  QuantRows(const QuantRows&) = delete;  // row_at_ names this one
  QuantRows& operator=(const QuantRows&) = delete;

  const std::byte* row(int64_t row) const { return bytes_.data() + row * row_bytes_; }
  RowSource source() const { return {.format = format_, .rows = rows_, .cols = cols_, .row_at = row_at_}; }

 private:
  RowFormat format_;
  int64_t rows_, cols_, row_bytes_;
  std::vector<std::byte> bytes_;
  std::function<const std::byte*(int64_t)> row_at_;
};

inline QuantRows QuantRowsOf(RowFormat format, int64_t rows, int64_t cols, int seed) {
  return QuantRows(format, rows, cols, seed);
}

// A matrix in a GPU's order, in host memory.
class PackedOnHost {
 public:
  explicit PackedOnHost(const RowSource& source)
      : kind_(*QuantKindOf(source.format)), traits_(TraitsOf(kind_)), steps_((source.cols + 127) / 128) {
    const QuantBytes all = QuantBytesOf(kind_, source.rows, source.cols);
    const QuantBytes tile = QuantBytesOf(kind_, kQuantTileRows, source.cols);
    codes_.resize(all.codes);
    scales_.resize(all.scales);
    factors_.resize(all.factors / sizeof(float));
    for (int64_t t = 0; t * kQuantTileRows < source.rows; ++t) {
      std::vector<const std::byte*> rows;
      for (int64_t r = t * kQuantTileRows; r < std::min(source.rows, (t + 1) * kQuantTileRows); ++r)
        rows.push_back(source.row_at(r));
      PackQuantTile(source.format, source.cols, rows,
                    {codes_.data() + t * tile.codes, scales_.data() + t * tile.scales, factors_.data() + t * 16});
    }
  }

  QuantKind kind() const { return kind_; }
  int CodeAt(int64_t row, int64_t column) const {
    const QuantSlot slot = SlotOf(traits_, static_cast<int>(row % 16), static_cast<int>(column % 128));
    const auto byte = static_cast<int>(codes_[StepOf(row, column) * traits_.code_bytes() + slot.byte]);
    return byte >> slot.bit & ((1 << traits_.bits) - 1);
  }
  // The element as quant_args.h defines it, in double.
  double At(int64_t row, int64_t column) const {
    const int at = ScaleSlotOf(traits_, static_cast<int>(row % 16), static_cast<int>(column % 128));
    const auto half = [&](int slot) {
      F16 x;
      std::memcpy(&x, scales_.data() + StepOf(row, column) * traits_.scale_bytes() + 2 * slot, 2);
      return double{ToFloat(x)};
    };
    const int code = CodeAt(row, column);
    const double value = kind_ == QuantKind::kFp4 ? kFp4Doubled[code] / 2.0 : code - traits_.zero;
    const double offset = traits_.values > 1 ? half(at + 2) / OffsetFactor(kind_, static_cast<int>(row)) : 0;
    return factors_[row] * (half(at) * value + offset);
  }

 private:
  int64_t StepOf(int64_t row, int64_t column) const { return row / 16 * steps_ + column / 128; }
  QuantKind kind_;
  QuantTraits traits_;
  int64_t steps_;
  std::vector<std::byte> codes_, scales_;
  std::vector<float> factors_;
};

}  // namespace dovetail::kernels::cuda::testing
