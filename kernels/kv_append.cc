#include "kernels/kv_append.h"

#include <algorithm>
#include <cstring>

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

void AppendRow(const KvBlockLayout& layout, const KvAppendItem& item, int64_t row, int head) {
  const int64_t position = item.first_position + row;
  const int t = static_cast<int>(position % kSegmentTokens);
  std::byte* block = item.blocks.block(head, static_cast<int32_t>(position / kSegmentTokens));
  const size_t element = SizeOf(layout.dtype);
  const int64_t k_step = item.k_row_step != 0 ? item.k_row_step : int64_t{item.kv_heads} * layout.key_dim;
  const int64_t v_step = item.v_row_step != 0 ? item.v_row_step : int64_t{item.kv_heads} * layout.value_dim;
  const std::byte* k =
      static_cast<const std::byte*>(item.k) + (row * k_step + int64_t{head} * layout.key_dim) * element;
  const std::byte* v =
      static_cast<const std::byte*>(item.v) + (row * v_step + int64_t{head} * layout.value_dim) * element;
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
