#include "kernels/cuda/attention/attention_plan.h"

#include <algorithm>
#include <utility>

namespace dovetail::kernels::cuda {
namespace {

constexpr int64_t kMaxBlocks = int64_t{1} << 30;
constexpr int kMaxMultiprocessors = 32767;
constexpr int kMostOfShare = 107;  // percent, of a part that cuts no head

// A KV head of a span ends: blocks and tokens up to there, from the plan's beginning.
struct HeadEnd {
  int32_t block = 0;
  int64_t tokens = 0;
};

// What is read of each KV head of a span: of its last block only what is there.
int64_t TokensOf(const AttentionSpan& span, const PlannedItem& item) {
  if (span.sees_nothing != 0) return 1;
  const int64_t begin = int64_t{span.first_segment} * kSegmentTokens, end = begin + span.segments * kSegmentTokens;
  return std::max<int64_t>(std::min(end, item.token_end) - begin, 1);
}

std::vector<HeadEnd> HeadEnds(const AttentionPlan& plan, std::span<const PlannedItem> items) {
  std::vector<HeadEnd> ends;
  int64_t tokens = 0;
  for (const AttentionSpan& span : plan.spans) {
    const PlannedItem& item = items[span.item];
    const int64_t more = TokensOf(span, item);
    for (int32_t head = 1; head <= item.kv_heads; ++head)
      ends.push_back({span.block_begin + head * span.segments, tokens += more});
  }
  return ends;
}

// Ends of parts that cut no head and have at most so many tokens; empty if more than `grid` of them were needed.
std::vector<int32_t> PartsUpTo(int64_t most, const std::vector<HeadEnd>& heads, int32_t grid) {
  std::vector<int32_t> ends;
  int64_t begin = 0;
  for (size_t i = 0; i < heads.size(); ++i) {
    if (i + 1 < heads.size() && heads[i + 1].tokens - begin <= most) continue;
    if (heads[i].tokens - begin > most || ends.size() == static_cast<size_t>(grid)) return {};
    ends.push_back(heads[i].block);
    begin = heads[i].tokens;
  }
  return ends;
}

// Ends of at most `grid` parts that cut no head, the largest as small as can be; empty if that is much larger than an
// equal share. What no part begins or ends within needs no piece to be stored and joined, and memory is no slower for
// it. Counted in tokens: sequences of 960 and 961 differ by a block that is hardly read.
std::vector<int32_t> WholeHeads(const std::vector<HeadEnd>& heads, int32_t grid) {
  const int64_t share = heads.back().tokens / grid;
  int64_t too_few = share - 1, most = share * kMostOfShare / 100;
  std::vector<int32_t> ends = PartsUpTo(most, heads, grid);
  while (!ends.empty() && most - too_few > 1 + share / 512) {
    const int64_t between = (too_few + most) / 2;
    std::vector<int32_t> smaller = PartsUpTo(between, heads, grid);
    (smaller.empty() ? too_few : most) = between;
    if (!smaller.empty()) ends = std::move(smaller);
  }
  return ends;
}

std::vector<int32_t> EvenParts(int64_t blocks, int32_t grid) {
  const int64_t parts = std::min<int64_t>(blocks, grid);
  std::vector<int32_t> ends;
  for (int64_t part = 1; part <= parts; ++part) ends.push_back(static_cast<int32_t>(part * blocks / parts));
  return ends;
}

void NameParts(const std::vector<HeadEnd>& heads, const std::vector<int32_t>& ends, AttentionPlan& plan) {
  size_t span = 0, head = 0;
  int16_t head_part = 0;  // where the head at hand begins
  int32_t begin = 0;
  for (size_t part = 0; part < ends.size(); ++part) {
    while (plan.spans[span].block_end <= begin) ++span;
    const auto me = static_cast<int16_t>(part);
    if ((head == 0 ? 0 : heads[head - 1].block) == begin) head_part = me;
    plan.parts.push_back(
        {.begin = begin, .end = ends[part], .span = static_cast<int32_t>(span), .first_part = head_part});
    while (heads[head].block < ends[part]) {
      ++head;
      head_part = me;
    }
    size_t last = part;
    while (ends[last] < heads[head].block) ++last;
    plan.parts.back().last_part = static_cast<int16_t>(last);
    if (heads[head].block == ends[part]) ++head;
    begin = ends[part];
  }
}

}  // namespace

SegmentRange SegmentsOfRows(const PlannedItem& item, int window, int64_t row_begin, int64_t row_end) {
  const TokenSpan first = VisibleTokens(item.first_position + row_begin, window, item.token_begin, item.token_end);
  const TokenSpan last = VisibleTokens(item.first_position + row_end - 1, window, item.token_begin, item.token_end);
  if (last.empty() && first.empty()) {
    // A window may slide over a short shard between the two.
    for (int64_t row = row_begin; row < row_end; ++row) {
      const TokenSpan span = VisibleTokens(item.first_position + row, window, item.token_begin, item.token_end);
      if (!span.empty()) return SegmentsOf({item.token_begin, item.token_end});
    }
    return {};
  }
  if (first.empty()) return SegmentsOf({item.token_begin, last.end});
  if (last.empty()) return SegmentsOf({first.begin, item.token_end});
  return SegmentsOf({first.begin, last.end});
}

int32_t RowTiles(std::span<const PlannedItem> items, int group) {
  int64_t rows = 1;
  for (const PlannedItem& item : items) rows = std::max<int64_t>(rows, int64_t{item.q_rows} * group);
  int32_t tiles = 1;
  while (tiles < kConsumerWarps && int64_t{tiles} * kTileRows < rows) tiles *= 2;
  return tiles;
}

PieceBytes PieceBytesOf(int32_t grid, int32_t tiles, int value_dim) {
  const size_t rows = static_cast<size_t>(grid) * 2 * tiles * kTileRows;
  return {.o = rows * value_dim * sizeof(float),
          .ml = rows * 2 * sizeof(float),
          .arrived = static_cast<size_t>(grid) * tiles * sizeof(int32_t)};
}

absl::StatusOr<AttentionPlan> PlanAttention(std::span<const PlannedItem> items, int group, int window,
                                            int multiprocessors) {
  if (items.empty() || multiprocessors < 1 || multiprocessors > kMaxMultiprocessors) {
    return InvalidArgument("attention plan: ", items.size(), " items on ", multiprocessors, " multiprocessors");
  }
  AttentionPlan plan;
  plan.tiles = RowTiles(items, group);
  plan.grid = multiprocessors;
  const int64_t rows_per_group = int64_t{plan.tiles} * kTileRows;
  int64_t blocks = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    const PlannedItem& item = items[i];
    const int64_t rows = int64_t{item.q_rows} * group;
    for (int64_t row = 0, tile_group = 0; row < rows; row += rows_per_group, ++tile_group) {
      const int64_t end = std::min(rows, row + rows_per_group);
      const SegmentRange range = SegmentsOfRows(item, window, row / group, (end + group - 1) / group);
      AttentionSpan span;
      span.item = static_cast<int32_t>(i);
      span.tile_group = static_cast<int32_t>(tile_group);
      span.block_begin = static_cast<int32_t>(blocks);
      span.segments = std::max(range.end - range.begin, 1);
      span.first_segment = range.begin;
      span.sees_nothing = range.empty() ? 1 : 0;
      blocks += int64_t{span.segments} * item.kv_heads;
      if (blocks > kMaxBlocks) {
        return InvalidArgument("attention plan: item ", i, " brings the step to more than ", kMaxBlocks,
                               " KV blocks; give fewer sequences or shorter chunks");
      }
      span.block_end = static_cast<int32_t>(blocks);
      plan.spans.push_back(span);
    }
  }
  const std::vector<HeadEnd> heads = HeadEnds(plan, items);
  std::vector<int32_t> ends = WholeHeads(heads, plan.grid);
  if (ends.empty()) ends = EvenParts(blocks, plan.grid);
  plan.extent = {.blocks = static_cast<int32_t>(blocks), .parts = static_cast<int32_t>(ends.size())};
  NameParts(heads, ends, plan);
  return plan;
}

}  // namespace dovetail::kernels::cuda
