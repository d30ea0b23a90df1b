#include "kernels/cuda/attention/prefill_plan.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <queue>
#include <utility>

#include "kernels/segment_tree.h"

namespace dovetail::kernels::cuda {
namespace {

constexpr int64_t kMaxTiles = int64_t{1} << 24;
constexpr int64_t kL2Bytes = int64_t{24} << 20;  // of keys and values that thread blocks read at a time
// In the time that a tile's products with a KvBlock take: what a tile takes in addition to its products, what a piece
// takes in addition to that, and what joining takes, for all pieces and for each of a tile.
constexpr int64_t kTileCost = 2, kPieceCost = 3, kJoinCost = 4;
constexpr double kJoinPieceCost = 0.25;
constexpr int32_t kLeastPiece = 4;     // KvBlocks
constexpr int64_t kMostOfShare = 107;  // percent, of a tile that is not divided
constexpr double kWorthDividing = 0.95;
constexpr int kMostWaves = 4;       // pieces that a thread block attends one after the other
constexpr int32_t kStepBlocks = 2;  // that are attended at once

int64_t RowsOf(const PlannedItem& item, int group) { return int64_t{item.q_rows} * group; }

SegmentRange SegmentsOfTile(const PlannedItem& item, int group, int window, int64_t row0) {
  const int64_t end = std::min(RowsOf(item, group), row0 + kPrefillRows);
  return SegmentsOfRows(item, window, row0 / group, (end + group - 1) / group);
}

// Blocks [first, first + blocks) of those of a tile, which wait to be dealt out. The first works are those that go
// first.
struct Work {
  int32_t phase = 0;
  int32_t blocks = 0;
  uint32_t tile = 0;
  int32_t first = 0;
  int32_t piece = -1;

  int64_t cost() const { return blocks + kTileCost + (piece >= 0 ? kPieceCost : 0); }
  bool operator<(const Work& other) const {
    if (phase != other.phase) return phase < other.phase;
    if (cost() != other.cost()) return cost() > other.cost();
    if (tile != other.tile) return tile < other.tile;
    return first < other.first;
  }
};

// Work that thread blocks share, and when the last of them ends.
struct Dealt {
  std::vector<Work> work;      // in the order in which it is dealt out
  std::vector<int32_t> taker;  // by work: its thread block
  double end = 0;
  int32_t pieces = 0;
};

int64_t CostOf(std::span<const Work> work) {
  int64_t cost = 0;
  for (const Work& w : work) cost += w.cost();
  return cost;
}

int64_t LongestOf(std::span<const Work> work) {
  int64_t longest = 0;
  for (const Work& w : work) longest = std::max(longest, w.cost());
  return longest;
}

void DealOut(int thread_blocks, Dealt& dealt) {
  std::sort(dealt.work.begin(), dealt.work.end());
  using Load = std::pair<int64_t, int32_t>;  // what a thread block has to do, and which it is
  std::priority_queue<Load, std::vector<Load>, std::greater<>> loads;
  for (int32_t block = 0; block < thread_blocks; ++block) loads.emplace(0, block);
  dealt.taker.resize(dealt.work.size());
  int64_t end = 0;
  for (size_t i = 0; i < dealt.work.size(); ++i) {
    const auto [load, block] = loads.top();
    loads.pop();
    dealt.taker[i] = block;
    end = std::max(end, load + dealt.work[i].cost());
    loads.emplace(load + dealt.work[i].cost(), block);
  }
  dealt.end += static_cast<double>(end);
}

// No work has more than `most` blocks. Pieces of a tile are equal but for the last, and whole steps of the kernel.
// Nothing: there would be more than `most_pieces`.
std::optional<Dealt> Divided(std::span<const Work> tiles, int32_t most, int32_t most_pieces) {
  Dealt dealt;
  int32_t most_of_tile = 0;
  for (const Work& tile : tiles) {
    if (tile.blocks <= most) {
      dealt.work.push_back(tile);
      continue;
    }
    const int32_t count = (tile.blocks + most - 1) / most, each = (tile.blocks + count - 1) / count;
    const int32_t step = (each + kStepBlocks - 1) / kStepBlocks * kStepBlocks;
    const int32_t before = dealt.pieces;
    for (int32_t first = 0; first < tile.blocks; first += step) {
      if (dealt.pieces == most_pieces) return std::nullopt;
      dealt.work.push_back(
          {tile.phase, std::min(step, tile.blocks - first), tile.tile, tile.first + first, dealt.pieces++});
    }
    most_of_tile = std::max(most_of_tile, dealt.pieces - before);
  }
  if (dealt.pieces > 0) dealt.end = kJoinCost + kJoinPieceCost * most_of_tile;
  return dealt;
}

// Divides tiles where thread blocks end together much sooner then.
Dealt DivideAndDealOut(std::vector<Work> tiles, int thread_blocks, int most_pieces) {
  const int64_t share = (CostOf(tiles) / thread_blocks + 1) * kMostOfShare / 100, longest = LongestOf(tiles);
  Dealt best{.work = std::move(tiles), .taker = {}};
  DealOut(thread_blocks, best);
  if (longest <= share) return best;
  const std::vector<Work> whole = best.work;
  for (int waves = 1; waves <= kMostWaves; ++waves) {
    const auto most = static_cast<int32_t>(std::max<int64_t>(share / waves, kLeastPiece));
    std::optional<Dealt> dealt = Divided(whole, (most + kStepBlocks - 1) / kStepBlocks * kStepBlocks, most_pieces);
    if (!dealt) break;  // nor may there be more
    const double worth = best.end * kWorthDividing;
    const auto least = static_cast<double>(std::max(LongestOf(dealt->work), CostOf(dealt->work) / thread_blocks));
    if (dealt->end + least >= worth) continue;
    DealOut(thread_blocks, *dealt);
    if (dealt->end < worth) best = *std::move(dealt);
  }
  return best;
}

// The tiles of an item, for all its KV heads.
absl::Status AddTiles(const PrefillItem& item, int group, int window, int token_bytes, std::vector<PrefillTile>& tiles,
                      std::vector<Work>& work) {
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
      work.push_back({head / heads_at_once, tile.segments, static_cast<uint32_t>(tiles.size())});
      tiles.push_back(tile);
    }
  }
  return absl::OkStatus();
}

PrefillTile PieceOf(PrefillTile tile, const Work& work) {
  const int32_t behind = tile.segments - work.first - work.blocks;
  if (work.first > 0) tile.absent = 0;
  tile.first_segment += work.first;
  tile.segments = work.blocks;
  tile.last_block -= behind;
  if (behind > 0) tile.last_tokens = kSegmentTokens;
  tile.piece = work.piece;
  return tile;
}

// By piece, in their order.
std::vector<PrefillJoin> JoinsOf(const Dealt& dealt, std::span<const PrefillTile> tiles) {
  std::vector<uint32_t> tile_of(dealt.pieces);
  for (const Work& work : dealt.work)
    if (work.piece >= 0) tile_of[work.piece] = work.tile;
  std::vector<PrefillJoin> joins;
  for (int32_t piece = 0; piece < dealt.pieces; ++piece) {
    const PrefillTile& tile = tiles[tile_of[piece]];
    if (piece == 0 || tile_of[piece] != tile_of[piece - 1]) joins.push_back({tile.item, tile.head, tile.row0, piece});
    ++joins.back().pieces;
  }
  return joins;
}

// Adds what was dealt out as the plan's next pass.
void AddPass(const Dealt& dealt, std::span<const PrefillTile> tiles, std::vector<PrefillJoin> joins,
             PrefillPlan& plan) {
  const auto before = static_cast<int32_t>(plan.tiles.size());
  PrefillPass& pass = plan.passes.emplace_back();
  pass.first_tile = static_cast<int32_t>(plan.first_tile.size());
  pass.first_join = static_cast<int32_t>(plan.joins.size());
  pass.joins = static_cast<int32_t>(joins.size());
  plan.joins.insert(plan.joins.end(), joins.begin(), joins.end());
  plan.pieces = std::max(plan.pieces, dealt.pieces);
  std::vector<int32_t> first(plan.grid + 1, 0);
  for (const int32_t block : dealt.taker) ++first[block + 1];
  first[0] = before;
  for (int32_t block = 0; block < plan.grid; ++block) first[block + 1] += first[block];
  plan.first_tile.insert(plan.first_tile.end(), first.begin(), first.end());
  plan.tiles.resize(before + dealt.work.size());
  for (size_t i = 0; i < dealt.work.size(); ++i)
    plan.tiles[first[dealt.taker[i]]++] = PieceOf(tiles[dealt.work[i].tile], dealt.work[i]);
}

// How many pieces the tile has that are cut at every kFixedPieceBlocks-th segment.
int32_t FixedPiecesOf(const PrefillTile& tile) {
  if (tile.segments == 0) return 1;
  return (tile.first_segment + tile.segments - 1) / kFixedPieceBlocks - tile.first_segment / kFixedPieceBlocks + 1;
}

void AddFixedPieces(const Work& tile, const PrefillTile& of, Dealt& dealt) {
  for (int32_t first = 0; first < tile.blocks;) {
    const int32_t cut = ((of.first_segment + first) / kFixedPieceBlocks + 1) * kFixedPieceBlocks - of.first_segment;
    const int32_t end = std::min(cut, tile.blocks);
    // Thread blocks go through the same keys at the same time: they find them in the L2.
    const int32_t phase = (of.first_segment + first) / kFixedPieceBlocks;
    dealt.work.push_back({phase, end - first, tile.tile, first, dealt.pieces++});
    first = end;
  }
}

// Launches are recorded with how many joins they have: few such numbers, with joins of nothing.
std::vector<PrefillJoin> Padded(std::vector<PrefillJoin> joins) {
  size_t count = joins.empty() ? 0 : 1;
  while (count < joins.size()) count *= 2;
  joins.resize(count);
  return joins;
}

absl::Status CheckPlan(std::span<const PrefillItem> items, int multiprocessors, int most_pieces) {
  if (items.empty() || multiprocessors < 1 || most_pieces < 0 || most_pieces > kMostPieces)
    return InvalidArgument("prefill plan: ", items.size(), " items on ", multiprocessors, " multiprocessors, ",
                           most_pieces, " pieces for each");
  return absl::OkStatus();
}

}  // namespace

std::vector<bool> ChoosePrefill(std::span<const PlannedItem> items, int group) {
  std::vector<bool> chosen(items.size());
  for (size_t i = 0; i < items.size(); ++i) chosen[i] = RowsOf(items[i], group) >= kLeastPrefillRows;
  return chosen;
}

absl::StatusOr<PrefillPlan> PlanPrefill(std::span<const PrefillItem> items, int group, int window, int multiprocessors,
                                        int token_bytes, int most_pieces) {
  DT_RETURN_IF_ERROR(CheckPlan(items, multiprocessors, most_pieces));
  std::vector<PrefillTile> tiles;
  std::vector<Work> work;
  for (const PrefillItem& item : items) DT_RETURN_IF_ERROR(AddTiles(item, group, window, token_bytes, tiles, work));
  const Dealt dealt = DivideAndDealOut(std::move(work), multiprocessors, most_pieces * multiprocessors);
  PrefillPlan plan;
  plan.grid = multiprocessors;
  AddPass(dealt, tiles, JoinsOf(dealt, tiles), plan);
  return plan;
}

absl::StatusOr<PrefillPlan> PlanFixedPrefill(std::span<const PrefillItem> items, int group, int window,
                                             int multiprocessors, int token_bytes, int step_blocks) {
  DT_RETURN_IF_ERROR(CheckPlan(items, multiprocessors, 0));
  std::vector<PrefillTile> tiles;
  std::vector<Work> work;
  for (const PrefillItem& item : items) {
    const size_t before = tiles.size();
    DT_RETURN_IF_ERROR(AddTiles(item, group, window, token_bytes, tiles, work));
    // What a shard of tokens lacks at its beginning is no window's: the kernel would take it for tokens.
    if (item.rows.token_begin > 0) continue;
    for (PrefillTile& tile : std::span(tiles).subspan(before))
      if (tile.segments > 0) tile.absent = tile.first_segment % step_blocks;
  }
  const int64_t share = (CostOf(work) / multiprocessors + 1) * kMostOfShare / 100;
  const int32_t most = kFixedPieces * multiprocessors;
  PrefillPlan plan;
  plan.grid = multiprocessors;
  Dealt dealt;
  const auto end_pass = [&] {
    DealOut(multiprocessors, dealt);
    AddPass(dealt, tiles, Padded(JoinsOf(dealt, tiles)), plan);
    dealt = {};
  };
  for (const Work& tile : work) {
    const PrefillTile& of = tiles[tile.tile];
    if (tile.cost() <= share || FixedPiecesOf(of) == 1) {
      dealt.work.push_back(tile);
      continue;
    }
    if (!dealt.work.empty() && dealt.pieces + FixedPiecesOf(of) > most) end_pass();
    AddFixedPieces(tile, of, dealt);
  }
  end_pass();
  return plan;
}

bool HasFixedPieces(const PrefillPlan& plan) {
  return std::any_of(plan.tiles.begin(), plan.tiles.end(),
                     [](const PrefillTile& tile) { return tile.piece >= 0 || FixedPiecesOf(tile) > 1; });
}

}  // namespace dovetail::kernels::cuda
