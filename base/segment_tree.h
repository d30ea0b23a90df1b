#pragma once
#include <bit>
#include <cstdint>

// The order in which attention is summed (docs/ARCHITECTURE.md, Determinism). Tokens are cut into aligned segments of
// 64 absolute positions; a segment is summed in token order; segments merge in the full binary tree over absolute
// segment numbers whose missing leaves (beyond the end, before a window, or not visible) are the identity. So the bits
// of a row depend on what it sees and on nothing else: a shard that holds some of the segments returns the maximal
// aligned subtrees of its range, and the node that joins shards folds them in the same tree.
//
// Both ends of the wire derive the structure of a row's partials from its position, window and the shard's range.
// Threads: pure.

namespace dovetail {

inline constexpr int kSegmentTokens = 64;
inline constexpr int64_t kMaxPositions = int64_t{1} << 30;

// The aligned subtree of segments [begin, begin + 2^level); begin is a multiple of 2^level.
struct SegmentNode {
  int32_t begin = 0;
  int32_t level = 0;
  friend bool operator==(const SegmentNode&, const SegmentNode&) = default;
};

struct SegmentRange {
  int32_t begin = 0;
  int32_t end = 0;  // begin == end: sees nothing
  bool empty() const { return begin >= end; }
};

struct TokenSpan {
  int64_t begin = 0;
  int64_t end = 0;
  bool empty() const { return begin >= end; }
};

// What a row at `position` sees of tokens [token_begin, token_end): t <= position, and position - t < window if window
// > 0.
inline TokenSpan VisibleTokens(int64_t position, int64_t window, int64_t token_begin, int64_t token_end) {
  TokenSpan span{token_begin, token_end < position + 1 ? token_end : position + 1};
  if (window > 0 && position - window + 1 > span.begin) span.begin = position - window + 1;
  if (span.begin >= span.end) span = {span.begin, span.begin};
  return span;
}

inline SegmentRange SegmentsOf(TokenSpan span) {
  if (span.empty()) return {};
  return {static_cast<int32_t>(span.begin / kSegmentTokens),
          static_cast<int32_t>((span.end + kSegmentTokens - 1) / kSegmentTokens)};
}

inline SegmentRange VisibleSegments(int64_t position, int64_t window, int64_t token_begin, int64_t token_end) {
  return SegmentsOf(VisibleTokens(position, window, token_begin, token_end));
}

// The largest aligned subtree that begins at `begin` and ends at or before `end`.
inline SegmentNode FirstSubtree(int32_t begin, int32_t end) {
  int level = std::bit_width(static_cast<uint32_t>(end - begin)) - 1;
  if (begin != 0) {
    const int alignment = std::countr_zero(static_cast<uint32_t>(begin));
    if (alignment < level) level = alignment;
  }
  return {begin, level};
}

// Calls visit(SegmentNode) for the maximal aligned subtrees of a range, in order. At most 2 * bit_width(length).
template <typename Visit>
void ForEachSubtree(SegmentRange range, Visit&& visit) {
  for (int32_t begin = range.begin; begin < range.end;) {
    const SegmentNode node = FirstSubtree(begin, range.end);
    visit(node);
    begin += int32_t{1} << node.level;
  }
}

inline int CountSubtrees(SegmentRange range) {
  int count = 0;
  ForEachSubtree(range, [&](SegmentNode) { ++count; });
  return count;
}

// True when a and b are the left and the right child of one node.
inline bool AreSiblings(SegmentNode a, SegmentNode b) {
  return a.level == b.level && (a.begin >> a.level) % 2 == 0 && a.begin + (int32_t{1} << a.level) == b.begin;
}

// The level of the lowest node above both; a lies left of b.
inline int JoinLevel(SegmentNode a, SegmentNode b) {
  const int32_t a_last = a.begin + (int32_t{1} << a.level) - 1;
  return std::bit_width(static_cast<uint32_t>(a_last ^ b.begin));
}

// The most nodes a stack of partials of `segments` consecutive segments ever holds: while it grows by one leaf, and at
// rest.
inline int MaxStackNodes(int32_t segments, bool begins_at_zero) {
  const int levels = std::bit_width(static_cast<uint32_t>(segments > 0 ? segments : 1));
  return begins_at_zero ? levels + 1 : 2 * levels + 1;
}

}  // namespace dovetail
