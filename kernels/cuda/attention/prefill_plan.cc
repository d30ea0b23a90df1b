#include "kernels/cuda/attention/prefill_plan.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

#include "kernels/segment_tree.h"

namespace dovetail::kernels::cuda {
namespace {

constexpr int64_t kMaxTiles = int64_t{1} << 24;
constexpr int64_t kL2Bytes = int64_t{24} << 20;  // of keys and values that thread blocks read at a time
constexpr int64_t kTileCost = 2;                 // in KvBlocks: what a tile takes in addition to its products
constexpr int64_t kShortTile = 16;               // KvBlocks that are attended at once, however few the tiles

int64_t RowsOf(const PlannedItem& item, int group) { return int64_t{item.q_rows} * group; }

SegmentRange SegmentsOfTile(const PlannedItem& item, int group, int window, int64_t row0) {
  const int64_t end = std::min(RowsOf(item, group), row0 + kPrefillRows);
  return SegmentsOfRows(item, window, row0 / group, (end + group - 1) / group);
}

int64_t CostOf(const SegmentRange& range) { return std::max(range.end - range.begin, 0) + kTileCost; }

// A tile that waits to be dealt out, the first of which are those that go first.
struct Work {
  int32_t phase = 0;
  int32_t cost = 0;
  uint32_t tile = 0;
  bool operator<(const Work& other) const {
    if (phase != other.phase) return phase < other.phase;
    if (cost != other.cost) return cost > other.cost;
    return tile < other.tile;
  }
};

}  // namespace

std::vector<bool> ChoosePrefill(std::span<const PlannedItem> items, int group, int window, int multiprocessors) {
  std::vector<bool> chosen(items.size());
  std::vector<int64_t> longest(items.size());
  int64_t all = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    const PlannedItem& item = items[i];
    chosen[i] = RowsOf(item, group) >= kLeastPrefillRows;
    for (int64_t row0 = 0; chosen[i] && row0 < RowsOf(item, group); row0 += kPrefillRows) {
      const int64_t cost = CostOf(SegmentsOfTile(item, group, window, row0));
      longest[i] = std::max(longest[i], cost);
      all += cost * item.kv_heads;
    }
  }
  const int64_t most = std::max(2 * all / multiprocessors, kShortTile);
  for (size_t i = 0; i < items.size(); ++i) chosen[i] = chosen[i] && longest[i] <= most;
  return chosen;
}

absl::StatusOr<PrefillPlan> PlanPrefill(std::span<const PrefillItem> items, int group, int window, int multiprocessors,
                                        int token_bytes) {
  if (items.empty() || multiprocessors < 1)
    return InvalidArgument("prefill plan: ", items.size(), " items on ", multiprocessors, " multiprocessors");
  std::vector<PrefillTile> tiles;
  std::vector<Work> work;
  for (const PrefillItem& item : items) {
    const int64_t bytes = std::max<int64_t>(item.rows.token_end - item.rows.token_begin, 1) * token_bytes;
    const auto heads_at_once = static_cast<int32_t>(std::clamp<int64_t>(kL2Bytes / bytes, 1, item.rows.kv_heads));
    for (int64_t row0 = 0; row0 < RowsOf(item.rows, group); row0 += kPrefillRows) {
      const SegmentRange range = SegmentsOfTile(item.rows, group, window, row0);
      PrefillTile tile;
      tile.item = item.item;
      tile.row0 = static_cast<int32_t>(row0);
      tile.first_segment = range.begin;
      tile.segments = std::max(range.end - range.begin, 0);
      const int64_t last = int64_t{range.end} - 1;
      tile.last_tokens =
          static_cast<int32_t>(std::clamp<int64_t>(item.rows.token_end - last * kSegmentTokens, 1, kSegmentTokens));
      if (static_cast<int64_t>(tiles.size()) + item.rows.kv_heads > kMaxTiles)
        return InvalidArgument("prefill plan: item ", item.item, " brings the step to more than ", kMaxTiles,
                               " tiles of 128 rows; give fewer sequences or shorter chunks");
      for (int32_t head = 0; head < item.rows.kv_heads; ++head) {
        tile.head = head;
        if (tile.segments > 0) tile.last_block = item.blocks + head * item.head_step + (last - item.first_segment);
        work.push_back(
            {head / heads_at_once, static_cast<int32_t>(CostOf(range)), static_cast<uint32_t>(tiles.size())});
        tiles.push_back(tile);
      }
    }
  }
  std::sort(work.begin(), work.end());
  PrefillPlan plan;
  plan.grid = multiprocessors;
  using Load = std::pair<int64_t, int32_t>;  // what a thread block has to do, and which it is
  std::priority_queue<Load, std::vector<Load>, std::greater<>> loads;
  for (int32_t block = 0; block < plan.grid; ++block) loads.emplace(0, block);
  std::vector<int32_t> taker(work.size());
  plan.first_tile.assign(plan.grid + 1, 0);
  for (size_t i = 0; i < work.size(); ++i) {
    const auto [load, block] = loads.top();
    loads.pop();
    loads.emplace(load + work[i].cost, block);
    taker[i] = block;
    ++plan.first_tile[block + 1];
  }
  for (int32_t block = 0; block < plan.grid; ++block) plan.first_tile[block + 1] += plan.first_tile[block];
  std::vector<int32_t> next(plan.first_tile.begin(), plan.first_tile.end() - 1);
  plan.tiles.resize(tiles.size());
  for (size_t i = 0; i < work.size(); ++i) plan.tiles[next[taker[i]]++] = tiles[work[i].tile];
  return plan;
}

}  // namespace dovetail::kernels::cuda
