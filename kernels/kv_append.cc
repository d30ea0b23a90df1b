#include "kernels/kv_append.h"

#include <algorithm>
#include <cstring>

#include "kernels/kv_eight_bits.h"

namespace dovetail::kernels {
namespace {

constexpr int64_t kTokensPerLine = 16;  // of a key's elements (kv_block.h)

absl::Status CheckItem(const KvAppendItem& item, size_t index) {
  if (item.rows < 0 || item.kv_heads < 1 || (item.rows > 0 && (item.k == nullptr || item.v == nullptr))) {
    return InvalidArgument("KV append item ", index, ": ", item.rows, " rows of ", item.kv_heads,
                           " heads, k or v missing");
  }
  if (item.rows == 0) return absl::OkStatus();
  const int64_t last = item.first_position + item.rows - 1;
  if (item.first_position < 0 || last >= kMaxPositions) {
    return InvalidArgument("KV append item ", index, ": positions ", item.first_position, "..", last, " leave 0..",
                           kMaxPositions - 1);
  }
  const int64_t table_begin = item.blocks.first_segment;
  const int64_t table_end = table_begin + item.blocks.segments;
  if (item.blocks.blocks == nullptr || item.first_position / kSegmentTokens < table_begin ||
      last / kSegmentTokens >= table_end) {
    return InvalidArgument("KV append item ", index, ": positions ", item.first_position, "..", last,
                           " need segments that the block table (", table_begin, "..", table_end - 1,
                           ") does not name");
  }
  return absl::OkStatus();
}

// Elements of a key go to every `lanes`-th place: T is one element, or a pair of them for bf16.
template <typename T>
void ScatterKey(const std::byte* k, int count, std::byte* out) {
  for (int i = 0; i < count; ++i) std::memcpy(out + i * 16 * sizeof(T), k + i * sizeof(T), sizeof(T));
}

void StoreScale(float scale, std::byte* out) {
  const BF16 stored = ToBF16(scale);  // exact
  std::memcpy(out, &stored, sizeof(stored));
}

void AppendE4M3(const KvBlockLayout& layout, std::span<const BF16> k, std::span<const BF16> v, int t,
                std::byte* block) {
  for (int i = 0; i < layout.key_dim; ++i) block[layout.key_offset(t, i)] = std::byte{ToE4M3(ToFloat(k[i]))};
  std::byte* const out = block + layout.value_offset(t, 0);
  for (int i = 0; i < layout.value_dim; ++i) out[i] = std::byte{ToE4M3(ToFloat(v[i]))};
}

void AppendInt8(const KvBlockLayout& layout, std::span<const BF16> k, std::span<const BF16> v, int t,
                std::byte* block) {
  int8_t codes[256];
  const float key_scale = Int8ScaleOf(k), value_scale = Int8ScaleOf(v);
  StoreScale(key_scale, block + layout.key_scale_offset(t));
  StoreScale(value_scale, block + layout.value_scale_offset(t));
  ToInt8(k, key_scale, codes);
  ScatterKey<uint16_t>(reinterpret_cast<const std::byte*>(codes), layout.key_dim / 2, block + layout.key_offset(t, 0));
  ToInt8(v, value_scale, codes);
  std::byte* const out = block + layout.value_offset(t, 0);
  for (int i = 0; i < layout.value_dim; ++i) out[2 * i] = static_cast<std::byte>(codes[i]);
}

void AppendRow(const KvBlockLayout& layout, const KvAppendItem& item, int64_t row, int head) {
  const int64_t position = item.first_position + row;
  const int t = static_cast<int>(position % kSegmentTokens);
  std::byte* block = item.blocks.block(head, static_cast<int32_t>(position / kSegmentTokens));
  const size_t element = SizeOf(layout.dtype);  // of the rows
  const int64_t k_step = item.k_row_step != 0 ? item.k_row_step : int64_t{item.kv_heads} * layout.key_dim;
  const int64_t v_step = item.v_row_step != 0 ? item.v_row_step : int64_t{item.kv_heads} * layout.value_dim;
  const std::byte* k =
      static_cast<const std::byte*>(item.k) + (row * k_step + int64_t{head} * layout.key_dim) * element;
  const std::byte* v =
      static_cast<const std::byte*>(item.v) + (row * v_step + int64_t{head} * layout.value_dim) * element;
  if (layout.eight_bits()) {
    const std::span<const BF16> key(reinterpret_cast<const BF16*>(k), layout.key_dim);
    const std::span<const BF16> value(reinterpret_cast<const BF16*>(v), layout.value_dim);
    return layout.storage == KvStorage::kInt8 ? AppendInt8(layout, key, value, t, block)
                                              : AppendE4M3(layout, key, value, t, block);
  }
  std::byte* k_out = block + layout.key_offset(t, 0);
  if (layout.dtype == DType::kF16) {
    ScatterKey<uint16_t>(k, layout.key_dim, k_out);
  } else {
    ScatterKey<uint32_t>(k, layout.dtype == DType::kBF16 ? layout.key_dim / 2 : layout.key_dim, k_out);
  }
  std::memcpy(block + layout.value_offset(t, 0), v, layout.value_dim * element);
}

// Blocks of all heads that get rows of the item.
int64_t BlocksOf(const KvAppendItem& item) {
  if (item.rows == 0) return 0;
  const int64_t last = (item.first_position + item.rows - 1) / kSegmentTokens;
  return (last - item.first_position / kSegmentTokens + 1) * item.kv_heads;
}

// `index` counts the item's blocks, those of a head together.
void AppendToBlock(const KvBlockLayout& layout, const KvAppendItem& item, int64_t index) {
  const int64_t segments = BlocksOf(item) / item.kv_heads;
  const int64_t segment = item.first_position / kSegmentTokens + index % segments;
  const int64_t first = segment * kSegmentTokens - item.first_position;  // row
  const int64_t end = std::min<int64_t>(first + kSegmentTokens, item.rows);
  for (int64_t row = std::max<int64_t>(first, 0); row < end; ++row)
    AppendRow(layout, item, row, static_cast<int>(index / segments));
}

}  // namespace

absl::Status KvAppend(const OpContext& context, const KvBlockLayout& layout, std::span<const KvAppendItem> items) {
  DT_RETURN_IF_ERROR(layout.Validate());
  for (size_t i = 0; i < items.size(); ++i) DT_RETURN_IF_ERROR(CheckItem(items[i], i));
  int64_t blocks = 0, most_rows = 0;
  for (const KvAppendItem& item : items) {
    blocks += BlocksOf(item);
    most_rows = std::max<int64_t>(most_rows, std::min<int64_t>(item.rows, kSegmentTokens));
  }
  // A block is written by one thread. However few rows there are, each element of a key lies in a line of its own.
  const int64_t elements = std::max(most_rows, kTokensPerLine) * layout.key_dim + most_rows * layout.value_dim;
  ForRows(context, blocks, elements, [&](int64_t begin, int64_t end) {
    int64_t first = 0;  // of the item's blocks
    for (const KvAppendItem& item : items) {
      const int64_t count = BlocksOf(item);
      for (int64_t i = std::max(begin, first); i < std::min(end, first + count); ++i)
        AppendToBlock(layout, item, i - first);
      first += count;
      if (first >= end) break;
    }
  });
  return absl::OkStatus();
}

}  // namespace dovetail::kernels
