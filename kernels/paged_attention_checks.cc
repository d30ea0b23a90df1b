#include "kernels/paged_attention_checks.h"

#include <algorithm>

namespace dovetail::kernels {

int64_t PartialNodes(int64_t first_position, int q_rows, int window, int64_t token_begin, int64_t token_end) {
  int64_t nodes = 0;
  for (int r = 0; r < q_rows; ++r) {
    nodes += CountSubtrees(VisibleSegments(first_position + r, window, token_begin, token_end));
  }
  return nodes;
}

// Rows in the middle see what neither the first nor the last does when a window slides off a shard.
SegmentRange SegmentsOfItem(const AttentionShape& shape, const AttentionItem& item) {
  const auto of_row = [&](int row) {
    return VisibleSegments(item.first_position + row, shape.window, item.token_begin, item.token_end);
  };
  if (shape.window == 0) return of_row(item.q_rows - 1);
  SegmentRange range;
  for (int r = 0; r < item.q_rows; ++r) {
    const SegmentRange row = of_row(r);
    if (row.empty()) continue;
    if (range.empty()) range = row;
    range = {std::min(range.begin, row.begin), std::max(range.end, row.end)};
  }
  return range;
}

absl::Status CheckAttentionShape(const AttentionShape& shape) {
  DT_RETURN_IF_ERROR(shape.layout().Validate());
  if (shape.group < 1 || shape.group > 256) {
    return InvalidArgument("attention: ", shape.group, " query heads per KV head is outside 1..256");
  }
  if (shape.window < 0) return InvalidArgument("attention: window ", shape.window, " is negative; 0 means none");
  return absl::OkStatus();
}

absl::Status CheckAttentionItem(const AttentionShape& shape, const AttentionItem& item, int index) {
  const auto bad = [&](const auto&... parts) { return InvalidArgument("attention item ", index, ": ", parts...); };
  if (item.q == nullptr) return bad("q is null");
  if (item.q_rows < 1) return bad("q_rows ", item.q_rows, " is below 1");
  if (item.kv_heads < 1 || item.kv_heads > 65536) return bad("kv_heads ", item.kv_heads, " is outside 1..65536");
  if (item.first_position < 0 || item.first_position + item.q_rows > kMaxPositions) {
    return bad("rows at positions ", item.first_position, "..", item.first_position + item.q_rows - 1, " leave 0..",
               kMaxPositions - 1);
  }
  if (item.token_begin < 0 || item.token_begin % kSegmentTokens != 0) {
    return bad("token_begin ", item.token_begin, " is not a multiple of ", kSegmentTokens);
  }
  if (item.token_end < item.token_begin || item.token_end > kMaxPositions) {
    return bad("token_end ", item.token_end, " is outside ", item.token_begin, "..", kMaxPositions);
  }
  const bool whole = item.o != nullptr;
  if (whole == (item.partial_o != nullptr) || (item.partial_o != nullptr) != (item.partial_ml != nullptr)) {
    return bad("give either o, or partial_o and partial_ml");
  }
  if (item.sinks != nullptr && !whole) return bad("sinks belong to the merge of a token shard's partials");
  const SegmentRange range = SegmentsOfItem(shape, item);
  if (range.empty()) return absl::OkStatus();
  if (item.blocks.blocks == nullptr || range.begin < item.blocks.first_segment ||
      range.end > item.blocks.first_segment + item.blocks.segments) {
    return bad("sees segments ", range.begin, "..", range.end - 1, ", its block table names ",
               item.blocks.first_segment, "..", item.blocks.first_segment + item.blocks.segments - 1);
  }
  return absl::OkStatus();
}

}  // namespace dovetail::kernels
