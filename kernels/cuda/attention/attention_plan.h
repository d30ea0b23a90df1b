#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "kernels/cuda/attention/attention_args.h"
#include "kernels/segment_tree.h"

namespace dovetail::kernels::cuda {

// How one step's attention is cut into ranges of KV blocks, one a thread block: such that no head is cut, if they are
// nearly equal in tokens that way, else equal in blocks (small ranges, left for the thread block that ends first, cost
// more, in pieces to be joined, than uneven multiprocessors do: bench/results/). Made on the host once a step from
// lengths alone; all layers whose window is the same use it.

struct PlannedItem {
  int32_t q_rows = 0;
  int32_t kv_heads = 0;
  int64_t first_position = 0;
  int64_t token_begin = 0;
  int64_t token_end = 0;
};

struct AttentionPlan {
  std::vector<AttentionSpan> spans;
  std::vector<AttentionPart> parts;  // [extent.parts]
  AttentionExtent extent;
  int32_t grid = 0;
  int32_t tiles = 1;
};

// The segments that rows [row_begin, row_end) of an item see together.
SegmentRange SegmentsOfRows(const PlannedItem& item, int window, int64_t row_begin, int64_t row_end);

// Row tiles that share a pass over the KV: the least power of two that holds the largest item's q_rows * group rows,
// at most 8.
int32_t RowTiles(std::span<const PlannedItem> items, int group);

// Bytes of the device memory that a plan's launches share (piece_o, piece_ml, arrived): AttentionLaunch.
struct PieceBytes {
  size_t o = 0, ml = 0, arrived = 0;
};
PieceBytes PieceBytesOf(int32_t grid, int32_t tiles, int value_dim);

// Every block that some row of an item sees is in exactly one span per group of row tiles; a group that sees nothing
// has one pretended block. kInvalidArgument for more than 2^30 blocks, or without items.
// Threads: pure.
absl::StatusOr<AttentionPlan> PlanAttention(std::span<const PlannedItem> items, int group, int window,
                                            int multiprocessors);

}  // namespace dovetail::kernels::cuda
