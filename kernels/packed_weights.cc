#include "kernels/packed_weights.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "base/dtype.h"
#include "kernels/thread_pool.h"

namespace dovetail::kernels {
namespace {

constexpr int64_t kMaxDim = int64_t{1} << 31;

const PackedTraits& TraitsOf(PackedFormat format) { return kPackedTraits[static_cast<int>(format)]; }

size_t RoundUp64(size_t n) { return (n + 63) / 64 * 64; }

PackedView Describe(PackedFormat format, int64_t rows, int64_t cols) {
  PackedView view{.format = format, .rows = rows, .cols = cols};
  const size_t elements = static_cast<size_t>(kTileRows) * cols;
  if (format == PackedFormat::kF32) {
    view.tile_bytes = elements * sizeof(float);
  } else if (format == PackedFormat::kBF16) {
    view.tile_bytes = static_cast<size_t>(kTileRows) * (cols + cols % 2) * sizeof(uint16_t);
  } else {
    const PackedTraits& traits = TraitsOf(format);
    const size_t scales = elements / traits.group * traits.scale_bytes;
    view.scales_at = RoundUp64(elements * traits.code_bits / 8);
    view.offsets_at = view.scales_at + scales;
    view.tile_bytes = RoundUp64(view.offsets_at + (traits.affine ? scales : 0));
  }
  return view;
}

// What one thread needs to take rows apart.
struct RowScratch {
  std::vector<float> values;           // float formats, [cols]
  std::vector<uint8_t> codes;          // [cols]
  std::vector<float> scales, offsets;  // [groups]
};

void PackFloatRow(const PackedView& view, const float* values, int lane, std::byte* tile) {
  if (view.format == PackedFormat::kF32) {
    auto* out = reinterpret_cast<float*>(tile);
    for (int64_t k = 0; k < view.cols; ++k) out[k * kTileRows + lane] = values[k];
  } else {
    auto* out = reinterpret_cast<uint16_t*>(tile);
    for (int64_t k = 0; k < view.cols; ++k) out[(k / 2 * kTileRows + lane) * 2 + k % 2] = ToBF16(values[k]).bits;
  }
}

void PackCodes(int bits, int64_t cols, const uint8_t* codes, int lane, std::byte* tile) {
  auto* out = reinterpret_cast<uint8_t*>(tile);
  const int64_t steps = cols / 4;
  if (bits == 8) {
    for (int64_t s = 0; s < steps; ++s) std::memcpy(out + (s * kTileRows + lane) * 4, codes + 4 * s, 4);
    return;
  }
  for (int64_t pair = 0; pair < steps / 2; ++pair) {
    for (int j = 0; j < 4; ++j) {
      const uint8_t low = codes[8 * pair + j], high = codes[8 * pair + 4 + j];
      out[(pair * kTileRows + lane) * 4 + j] = static_cast<uint8_t>(low | high << 4);
    }
  }
}

// The 4-bit code of each 16 + kFp4Doubled[code].
constexpr std::array<uint8_t, 32> kFp4OfCode = [] {
  std::array<uint8_t, 32> inverse{};
  for (int code = 15; code >= 0; --code) inverse[kFp4Zero + kFp4Doubled[code]] = static_cast<uint8_t>(code);
  return inverse;
}();

void PackGroupValues(int bytes, int64_t groups, const std::vector<float>& values, int lane, std::byte* at) {
  for (int64_t g = 0; g < groups; ++g) {
    std::byte* out = at + (g * kTileRows + lane) * bytes;
    if (bytes == 1) {
      uint32_t bits;
      std::memcpy(&bits, &values[g], 4);
      *out = static_cast<std::byte>(bits >> 23);  // a power of two; denormal: 0
    } else if (bytes == 2) {
      const F16 half = ToF16(values[g]);  // exact: it was an f16 in the file
      std::memcpy(out, &half, 2);
    } else {
      std::memcpy(out, &values[g], 4);
    }
  }
}

void PackQuantizedRow(const PackedView& view, RowScratch& row, int lane, std::byte* tile) {
  const PackedTraits& traits = TraitsOf(view.format);
  if (traits.table)
    for (uint8_t& code : row.codes) code = kFp4OfCode[code];
  const int64_t groups = view.cols / traits.group;
  PackCodes(traits.code_bits, view.cols, row.codes.data(), lane, tile);
  PackGroupValues(traits.scale_bytes, groups, row.scales, lane, tile + view.scales_at);
  if (traits.affine) PackGroupValues(traits.scale_bytes, groups, row.offsets, lane, tile + view.offsets_at);
}

void PackTile(const PackedView& view, const RowSource& source, int64_t t, std::byte* tile) {
  RowScratch scratch;
  if (IsQuantized(view.format)) {
    scratch.codes.resize(view.cols);
    scratch.scales.resize(view.cols / 16);
    scratch.offsets.resize(view.cols / 16);
  } else {
    scratch.values.resize(view.cols);
  }
  const int lanes = static_cast<int>(std::min<int64_t>(kTileRows, view.rows - t * kTileRows));
  for (int lane = 0; lane < lanes; ++lane) {
    const std::byte* row = source.row_at(t * kTileRows + lane);
    if (IsQuantized(view.format)) {
      UnpackGroups(source.format, row, view.cols,
                   {scratch.codes.data(), scratch.scales.data(), scratch.offsets.data()});
      PackQuantizedRow(view, scratch, lane, tile);
    } else {
      DequantizeRow(source.format, row, view.cols, scratch.values.data());
      PackFloatRow(view, scratch.values.data(), lane, tile);
    }
  }
}

absl::Status CheckSource(const RowSource& source) {
  if (source.rows < 0 || source.cols < 0 || source.rows > kMaxDim || source.cols > kMaxDim) {
    return InvalidArgument("a weight matrix of ", source.rows, " x ", source.cols, " is outside 0..", kMaxDim,
                           " each way");
  }
  const RowFormatInfo& info = Info(source.format);
  if (source.cols % info.block_elements != 0) {
    return InvalidArgument(info.name, " rows of ", source.cols, " elements are no whole number of blocks of ",
                           info.block_elements);
  }
  return absl::OkStatus();
}

}  // namespace

const char* Name(PackedFormat format) {
  static constexpr const char* kNames[kPackedFormats] = {
      "f32",          "bf16",      "u4-symmetric",  "u4-affine",        "u4-affine-f32",
      "u8-symmetric", "u8-affine", "u8-affine-f32", "u8-symmetric-g16", "fp4"};
  return kNames[static_cast<int>(format)];
}

PackedFormat DirectFormat(RowFormat format) {
  switch (format) {
    case RowFormat::kF32:
    case RowFormat::kF16: return PackedFormat::kF32;
    case RowFormat::kBF16: return PackedFormat::kBF16;
    case RowFormat::kQ4_0: return PackedFormat::kU4Symmetric;
    case RowFormat::kQ4_1: return PackedFormat::kU4Affine;
    case RowFormat::kQ4_K: return PackedFormat::kU4AffineF32;
    case RowFormat::kQ5_0:
    case RowFormat::kQ8_0: return PackedFormat::kU8Symmetric;
    case RowFormat::kQ5_1: return PackedFormat::kU8Affine;
    case RowFormat::kQ5_K: return PackedFormat::kU8AffineF32;
    case RowFormat::kQ6_K: return PackedFormat::kU8SymmetricG16;
    case RowFormat::kMXFP4: return PackedFormat::kFp4;
  }
  return PackedFormat::kF32;
}

absl::StatusOr<PackedWeights> PackWeights(PackedFormat format, const RowSource& source, ThreadPool* pool) {
  DT_RETURN_IF_ERROR(CheckSource(source));
  if (IsQuantized(format) && DirectFormat(source.format) != format) {
    return InvalidArgument(Info(source.format).name, " rows cannot be packed as ", Name(format), ": only f32, bf16 or ",
                           Name(DirectFormat(source.format)));
  }
  PackedWeights packed;
  packed.view_ = Describe(format, source.rows, source.cols);
  DT_ASSIGN_OR_RETURN(packed.memory_, AlignedBuffer::Create(packed.size_bytes()));
  packed.view_.data = packed.memory_.data();
  const auto pack = [&](int t) {
    PackTile(packed.view_, source, t, packed.memory_.data() + static_cast<size_t>(t) * packed.tile_bytes());
  };
  const int64_t tiles = packed.tiles();
  for (int64_t begin = 0; begin < tiles; begin += ThreadPool::kMaxTasks - 1) {
    const int count = static_cast<int>(std::min<int64_t>(tiles - begin, ThreadPool::kMaxTasks - 1));
    const auto task = [&](int i) { pack(static_cast<int>(begin) + i); };
    if (pool != nullptr) {
      pool->Run(count, task);
    } else {
      for (int i = 0; i < count; ++i) task(i);
    }
  }
  return packed;
}

absl::Status EmbedRows(const RowSource& table, std::span<const int32_t> ids, float* y, int64_t y_stride) {
  DT_RETURN_IF_ERROR(CheckSource(table));
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= table.rows) {
      return InvalidArgument("token id ", ids[i], " at position ", i, " is outside the vocabulary 0..", table.rows - 1);
    }
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    DequantizeRow(table.format, table.row_at(ids[i]), table.cols, y + static_cast<int64_t>(i) * y_stride);
  }
  return absl::OkStatus();
}

}  // namespace dovetail::kernels
