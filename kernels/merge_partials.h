#pragma once
#include <cstdint>
#include <span>

#include "base/dtype.h"
#include "base/status.h"
#include "kernels/op_context.h"
#include "kernels/segment_tree.h"

namespace dovetail::kernels {

// Joins what the token shards of some heads of one sequence returned (paged_attention.h) into the
// output of the whole sequence: bit for bit what one shard that held everything would have given.
// Partials merge in the tree of segment_tree.h, the sink logit joins once at its root, then o / l
// is rounded to the wire type. One shard, or a shard of which a row sees nothing, are not special.
// A row that sees nothing: o = 0.

// One shard's answer for the item's rows and heads.
struct ShardPartials {
  int64_t token_begin = 0;    // a multiple of 64; shards in ascending order, without gaps or overlaps
  int64_t token_end = 0;      // as the shard itself used it
  const float* o = nullptr;   // [nodes][heads][value_dim], PartialNodes(...) nodes, row by row, each
                              // from left to right
  const float* ml = nullptr;  // [nodes][heads][2]
};

struct MergeItem {
  std::span<const ShardPartials> shards;
  int q_rows = 0;
  int heads = 0;      // query heads of these shards
  int value_dim = 0;  // even, 2..256
  int window = 0;
  int64_t first_position = 0;
  const float* sinks = nullptr;  // [heads] or null
  DType dtype = DType::kBF16;
  void* o = nullptr;       // [q_rows][heads][value_dim]
  int64_t o_row_step = 0;  // elements; 0: dense
};

// Errors:  kInvalidArgument for shards that overlap, leave a gap or do not begin on a segment, and for sizes outside
// the above.
// Threads: runs on the caller and the pool, returns when done.
// Memory:  allocates nothing.
// Cost:    reads each partial once: (value_dim + 2) * 4 bytes and ~3 value_dim FLOP a partial.
absl::Status MergeShardPartials(const OpContext& context, std::span<const MergeItem> items);

}  // namespace dovetail::kernels
