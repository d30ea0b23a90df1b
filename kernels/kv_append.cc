#include "kernels/kv_append.h"

#include <algorithm>
#include <cstring>

namespace dovetail::kernels {
namespace {

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

}  // namespace

absl::Status KvAppend(const OpContext& context, const KvBlockLayout& layout, std::span<const KvAppendItem> items) {
  DT_RETURN_IF_ERROR(layout.Validate());
  for (size_t i = 0; i < items.size(); ++i) DT_RETURN_IF_ERROR(CheckItem(items[i], i));
  for (const KvAppendItem& item : items) {
    if (item.rows == 0) continue;
    // A unit of work is one block: its lines are written by one thread.
    const int64_t first_segment = item.first_position / kSegmentTokens;
    const int64_t segments = (item.first_position + item.rows - 1) / kSegmentTokens - first_segment + 1;
    const int64_t elements = int64_t{std::min(item.rows, kSegmentTokens)} * (layout.key_dim + layout.value_dim);
    ForRows(context, segments * item.kv_heads, elements, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t first = (first_segment + i % segments) * kSegmentTokens - item.first_position;
        for (int64_t row = std::max<int64_t>(first, 0); row < std::min<int64_t>(first + kSegmentTokens, item.rows);
             ++row) {
          AppendRow(layout, item, row, static_cast<int>(i / segments));
        }
      }
    });
  }
  return absl::OkStatus();
}

}  // namespace dovetail::kernels
