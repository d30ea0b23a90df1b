#include "kernels/merge_partials.h"

#include <cstring>

#include "kernels/paged_attention.h"
#include "kernels/tree_fold.h"

namespace dovetail::kernels {
namespace {

constexpr int kMaxShards = 256;

absl::Status CheckItem(const MergeItem& item, size_t index) {
  const auto bad = [&](const auto&... parts) { return InvalidArgument("merge item ", index, ": ", parts...); };
  if (item.value_dim < 2 || item.value_dim > 256 || item.value_dim % 2 != 0) {
    return bad("value_dim ", item.value_dim, " must be even and lie in 2..256");
  }
  if (item.q_rows < 1 || item.heads < 1) return bad(item.q_rows, " rows of ", item.heads, " heads");
  if (item.first_position < 0 || item.first_position + item.q_rows > kMaxPositions) {
    return bad("first_position ", item.first_position, " leaves 0..", kMaxPositions - 1);
  }
  if (item.window < 0) return bad("window ", item.window, " is negative; 0 means none");
  if (item.shards.empty() || item.shards.size() > kMaxShards) {
    return bad(item.shards.size(), " shards; 1..", kMaxShards, " are supported");
  }
  for (size_t i = 0; i < item.shards.size(); ++i) {
    const ShardPartials& shard = item.shards[i];
    if (shard.token_begin % kSegmentTokens != 0 || shard.token_end < shard.token_begin ||
        (i > 0 && item.shards[i - 1].token_end != shard.token_begin)) {
      return bad("shard ", i, " holds tokens ", shard.token_begin, "..", shard.token_end,
                 "; shards begin on multiples of 64 where the one before ended");
    }
  }
  return absl::OkStatus();
}

void MergeRow(const OpsTable& table, const MergeItem& item, int64_t row, const int64_t* first_node, float* slots) {
  const int stride = PartialStride(item.value_dim), floats = PartialFloats(item.value_dim);
  const int64_t position = item.first_position + row;
  const int64_t step = item.o_row_step != 0 ? item.o_row_step : int64_t{item.heads} * item.value_dim;
  for (int head = 0; head < item.heads; ++head) {
    TreeFold fold(table, stride);
    for (size_t s = 0; s < item.shards.size(); ++s) {
      const ShardPartials& shard = item.shards[s];
      int64_t node = first_node[s];
      ForEachSubtree(VisibleSegments(position, item.window, shard.token_begin, shard.token_end),
                     [&](SegmentNode subtree) {
                       float* slot = slots + fold.MakeRoom(subtree) * floats;
                       const int64_t at = node++ * item.heads + head;
                       std::memcpy(slot, shard.o + at * item.value_dim, item.value_dim * sizeof(float));
                       std::memcpy(slot + stride, shard.ml + at * 2, 2 * sizeof(float));
                       fold.Push(slot);
                     });
    }
    const float* root = fold.Finish();
    if (root == nullptr) {
      std::memset(slots, 0, floats * sizeof(float));
      slots[stride] = -__builtin_inff();
      root = slots;
    }
    std::byte* out =
        static_cast<std::byte*>(item.o) + (row * step + int64_t{head} * item.value_dim) * SizeOf(item.dtype);
    table.finish_partial(root, item.value_dim, item.sinks != nullptr ? item.sinks + head : nullptr, item.dtype, out);
  }
}

void MergeRows(const OpsTable& table, const MergeItem& item, int64_t begin, int64_t end) {
  alignas(64) float slots[TreeFold::kMaxDepth * PartialFloats(256)];
  std::memset(slots, 0,
              TreeFold::kMaxDepth * PartialFloats(item.value_dim) * sizeof(float));  // the padding must hold numbers
  int64_t node[kMaxShards];
  for (size_t s = 0; s < item.shards.size(); ++s) {
    const ShardPartials& shard = item.shards[s];
    node[s] =
        PartialNodes(item.first_position, static_cast<int>(begin), item.window, shard.token_begin, shard.token_end);
  }
  for (int64_t row = begin; row < end; ++row) {
    MergeRow(table, item, row, node, slots);
    for (size_t s = 0; s < item.shards.size(); ++s) {
      const ShardPartials& shard = item.shards[s];
      node[s] +=
          CountSubtrees(VisibleSegments(item.first_position + row, item.window, shard.token_begin, shard.token_end));
    }
  }
}

}  // namespace

absl::Status MergeShardPartials(const OpContext& context, std::span<const MergeItem> items) {
  for (size_t i = 0; i < items.size(); ++i) DT_RETURN_IF_ERROR(CheckItem(items[i], i));
  for (const MergeItem& item : items) {
    const int64_t elements = int64_t{item.heads} * item.value_dim * 4 * static_cast<int64_t>(item.shards.size());
    ForRows(context, item.q_rows, elements,
            [&](int64_t begin, int64_t end) { MergeRows(*context.table, item, begin, end); });
  }
  return absl::OkStatus();
}

}  // namespace dovetail::kernels
