#include "kernels/cuda/attention/prefill_plan.h"

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/segment_tree.h"

namespace dovetail::kernels::cuda {
namespace {

constexpr int kTokenBytes = 512;

// Items whose tables lie one behind the other, from `table` on.
std::vector<PrefillItem> ItemsOf(const std::vector<PlannedItem>& rows, const std::byte* const* table) {
  std::vector<PrefillItem> items;
  for (const PlannedItem& item : rows) {
    PrefillItem& out = items.emplace_back();
    out.rows = item;
    out.blocks = table;
    out.head_step = (item.token_end + kSegmentTokens - 1) / kSegmentTokens - item.token_begin / kSegmentTokens;
    out.first_segment = static_cast<int32_t>(item.token_begin / kSegmentTokens);
    out.item = static_cast<int32_t>(items.size()) - 1;
    table += out.head_step * item.kv_heads;
  }
  return items;
}

PrefillPlan Plan(const std::vector<PrefillItem>& items, int group, int window, int multiprocessors) {
  auto plan = PlanPrefill(items, group, window, multiprocessors, kTokenBytes);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return *plan;
}

// The tile that these are: one that has all, or the pieces that a join has, whose blocks follow each other and of which
// all but the last have whole ones. Nothing: they are not that.
std::optional<PrefillTile> WholeTile(std::vector<PrefillTile> parts, const PrefillPlan& plan) {
  std::sort(parts.begin(), parts.end(),
            [](const PrefillTile& a, const PrefillTile& b) { return a.first_segment < b.first_segment; });
  PrefillTile whole = parts[0];
  if (whole.piece < 0) return parts.size() == 1 ? std::optional(whole) : std::nullopt;
  const auto join = std::find_if(plan.joins.begin(), plan.joins.end(),
                                 [&](const PrefillJoin& j) { return j.first_piece == whole.piece; });
  if (join == plan.joins.end() || join->pieces != static_cast<int32_t>(parts.size()) || join->item != whole.item ||
      join->head != whole.head || join->row0 != whole.row0)
    return std::nullopt;
  for (size_t i = 1; i < parts.size(); ++i) {
    if (parts[i].piece != whole.piece + static_cast<int32_t>(i) || whole.last_tokens != kSegmentTokens ||
        parts[i].first_segment != whole.first_segment + whole.segments)
      return std::nullopt;
    whole.segments += parts[i].segments;
    whole.last_tokens = parts[i].last_tokens;
  }
  return whole;
}

TEST(PrefillPlan, EveryRowOfEveryHeadHasOneTileWithAllThatItSees) {
  const uint64_t seed = 3;
  std::mt19937_64 random(seed);
  const std::vector<const std::byte*> table(1 << 16);
  int rounds_divided = 0;
  for (int round = 0; round < 200; ++round) {
    const int group = 1 + static_cast<int>(random() % 9), multiprocessors = 1 + static_cast<int>(random() % 140);
    const int window = random() % 3 == 0 ? 1 + static_cast<int>(random() % 500) : 0;
    std::vector<PlannedItem> rows;
    for (uint64_t count = 1 + random() % 10; count > 0; --count) {
      PlannedItem& item = rows.emplace_back();
      item.q_rows = 1 + static_cast<int32_t>(random() % 300);
      item.kv_heads = 1 + static_cast<int32_t>(random() % 4);
      item.first_position = static_cast<int64_t>(random() % 3000);
      item.token_begin = random() % 3 == 0 ? static_cast<int64_t>(random() % 20) * kSegmentTokens : 0;
      item.token_end = std::max<int64_t>(item.token_begin, item.first_position + item.q_rows);
    }
    const std::vector<PrefillItem> items = ItemsOf(rows, table.data());
    const PrefillPlan plan = Plan(items, group, window, multiprocessors);
    ASSERT_EQ(plan.grid, multiprocessors);
    ASSERT_EQ(plan.first_tile.size(), static_cast<size_t>(multiprocessors) + 1);
    ASSERT_EQ(plan.first_tile.front(), 0);
    ASSERT_EQ(plan.first_tile.back(), static_cast<int32_t>(plan.tiles.size()));
    ASSERT_TRUE(std::is_sorted(plan.first_tile.begin(), plan.first_tile.end()));
    ASSERT_LE(plan.pieces, kMostPieces * multiprocessors);
    std::map<std::tuple<int, int, int>, std::vector<PrefillTile>> seen;
    for (const PrefillTile& tile : plan.tiles) {
      const PrefillItem& item = items[tile.item];
      seen[std::tuple(tile.item, tile.head, tile.row0)].push_back(tile);
      if (tile.segments == 0) continue;
      const int64_t last = tile.first_segment + tile.segments - 1;
      ASSERT_EQ(tile.last_block, item.blocks + tile.head * item.head_step + (last - item.first_segment));
      ASSERT_LE(last * kSegmentTokens + tile.last_tokens, item.rows.token_end);
    }
    size_t tiles = 0, divided = 0;
    for (const PlannedItem& item : rows)
      tiles += static_cast<size_t>((int64_t{item.q_rows} * group + kPrefillRows - 1) / kPrefillRows * item.kv_heads);
    ASSERT_EQ(seen.size(), tiles);
    int32_t pieces = 0;
    for (const auto& [where, parts] : seen) {
      const auto whole = WholeTile(parts, plan);
      ASSERT_TRUE(whole.has_value()) << "seed " << seed << " round " << round;
      divided += whole->piece >= 0 ? 1 : 0;
      pieces += whole->piece >= 0 ? static_cast<int32_t>(parts.size()) : 0;
      const PrefillItem& item = items[whole->item];
      const int64_t end = std::min<int64_t>(whole->row0 + kPrefillRows, int64_t{item.rows.q_rows} * group);
      for (int64_t row = whole->row0; row < end; ++row) {
        const TokenSpan span =
            VisibleTokens(item.rows.first_position + row / group, window, item.rows.token_begin, item.rows.token_end);
        if (span.empty()) continue;
        ASSERT_LE(int64_t{whole->first_segment} * kSegmentTokens, span.begin);
        ASSERT_GE(int64_t{whole->first_segment + whole->segments - 1} * kSegmentTokens + whole->last_tokens, span.end);
      }
    }
    ASSERT_EQ(divided, plan.joins.size());
    ASSERT_EQ(pieces, plan.pieces);
    rounds_divided += divided > 0 ? 1 : 0;
  }
  EXPECT_GT(rounds_divided, 20) << "of 200";
}

TEST(PrefillPlan, ThreadBlocksEndTogetherAndTheLongestTilesComeFirst) {
  const std::vector<const std::byte*> table(1 << 12);
  const std::vector<PrefillItem> items = ItemsOf({{8192, 8, 0, 0, 8192}, {1000, 8, 0, 0, 1000}}, table.data());
  const PrefillPlan plan = Plan(items, 4, 0, 132);
  int64_t least = 1 << 30, most = 0;
  for (int block = 0; block < plan.grid; ++block) {
    int64_t segments = 0;
    for (int32_t i = plan.first_tile[block]; i < plan.first_tile[block + 1]; ++i)
      segments += plan.tiles[i].segments + 2;
    least = std::min(least, segments);
    most = std::max(most, segments);
    ASSERT_LT(plan.first_tile[block], plan.first_tile[block + 1]);
    ASSERT_GE(plan.tiles[plan.first_tile[block]].segments, 118) << "of 128";
  }
  EXPECT_LE(most - least, 8);
}

TEST(PrefillPlan, HeadsWhoseKeysFillTheL2ComeOneAfterTheOther) {
  const std::vector<const std::byte*> table(1 << 16);
  const std::vector<PrefillItem> items = ItemsOf({{1024, 8, 97280, 0, 98304}}, table.data());  // 48 MiB a head
  const PrefillPlan plan = Plan(items, 4, 0, 16);
  for (int block = 0; block < plan.grid; ++block) {
    for (int32_t i = plan.first_tile[block]; i + 1 < plan.first_tile[block + 1]; ++i)
      ASSERT_LE(plan.tiles[i].head, plan.tiles[i + 1].head);
  }
}

TEST(PrefillPlan, ItemsOfMoreThanHalfATileAreChosen) {
  const auto choose = [](std::vector<PlannedItem> items) { return ChoosePrefill(items, 4); };
  EXPECT_EQ(choose({{1, 8, 5000, 0, 5001}}), std::vector<bool>{false}) << "a decode";
  EXPECT_EQ(choose({{16, 8, 0, 0, 16}}), std::vector<bool>{false}) << "64 rows";
  EXPECT_EQ(choose({{17, 8, 0, 0, 17}}), std::vector<bool>{true});
  EXPECT_EQ(choose({{256, 8, 7936, 0, 8192}}), std::vector<bool>{true}) << "64 tiles for 132 multiprocessors";
  EXPECT_EQ(choose({{2048, 8, 129024, 0, 131072}}), std::vector<bool>{true});
  EXPECT_EQ(choose({{8192, 8, 0, 0, 8192}, {40, 8, 8000, 0, 8040}}), (std::vector<bool>{true, true}));
}

// In blocks that a thread block attends, with what tiles and pieces take besides.
int64_t LongestShare(const PrefillPlan& plan) {
  int64_t longest = 0;
  for (int block = 0; block < plan.grid; ++block) {
    int64_t cost = 0;
    for (int32_t i = plan.first_tile[block]; i < plan.first_tile[block + 1]; ++i)
      cost += plan.tiles[i].segments + (plan.tiles[i].piece >= 0 ? 5 : 2);
    longest = std::max(longest, cost);
  }
  return longest;
}

TEST(PrefillPlan, AShortPartBehindManyTokensIsSharedByAllThreadBlocks) {
  const std::vector<const std::byte*> table(1 << 16);
  for (const int earlier : {2048, 8192, 32768, 131072}) {
    for (const int rows : {64, 128, 192, 256}) {
      const std::vector<PrefillItem> items = ItemsOf({{rows, 8, earlier, 0, earlier + rows}}, table.data());
      const PrefillPlan plan = Plan(items, 4, 0, 132);
      const int64_t tiles = rows / 32 * 8, blocks = earlier / kSegmentTokens;
      EXPECT_EQ(plan.joins.size(), static_cast<size_t>(tiles)) << rows << " rows behind " << earlier;
      // Of what each would have if it could be divided as one likes.
      EXPECT_LE(LongestShare(plan), 12 + blocks * tiles * 5 / 4 / 132) << rows << " rows behind " << earlier;
    }
  }
}

TEST(PrefillPlan, PromptsThatFillTheGpuAreNotDivided) {
  const std::vector<const std::byte*> table(1 << 17);
  const auto pieces = [&](const std::vector<PlannedItem>& rows) {
    return Plan(ItemsOf(rows, table.data()), 4, 0, 132).pieces;
  };
  for (const int tokens : {100, 512, 1000, 2048, 8192, 32768})
    EXPECT_EQ(pieces({{tokens, 8, 0, 0, tokens}}), 0) << tokens;
  for (const int earlier : {8192, 32768, 129024}) {
    EXPECT_EQ(pieces({{2048, 8, earlier, 0, earlier + 2048}}), 0) << earlier;
    EXPECT_EQ(pieces({{8192, 8, earlier, 0, earlier + 8192}}), 0) << earlier;
    EXPECT_EQ(pieces({{512, 8, earlier, 0, earlier + 512}}), 0) << "128 tiles for 132 multiprocessors";
  }
  EXPECT_EQ(pieces({{8192, 8, 0, 0, 8192}, {40, 8, 8000, 0, 8040}}), 0)
      << "a long tile does not matter among many others";
}

TEST(PrefillPlan, WithoutItemsIsRefused) {
  EXPECT_EQ(PlanPrefill({}, 4, 0, 132, kTokenBytes).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(PrefillPlan, NoTileIsDividedWithoutPieces) {
  const std::vector<const std::byte*> table(1 << 14);
  const std::vector<PrefillItem> items = ItemsOf({{64, 8, 32768, 0, 32832}}, table.data());
  const auto plan = PlanPrefill(items, 4, 0, 132, kTokenBytes, 0);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->pieces, 0);
  EXPECT_EQ(plan->tiles.size(), 16u);
  EXPECT_EQ(PlanPrefill(items, 4, 0, 132, kTokenBytes, kMostPieces + 1).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// Pieces of a plan by tile, each with its pass.
using PiecesOfTile = std::map<std::tuple<int, int, int>, std::vector<std::pair<int32_t, PrefillTile>>>;
PiecesOfTile PiecesOf(const PrefillPlan& plan) {
  PiecesOfTile pieces;
  for (size_t pass = 0; pass < plan.passes.size(); ++pass) {
    const int32_t* const first = plan.first_tile.data() + plan.passes[pass].first_tile;
    for (int32_t i = first[0]; i < first[plan.grid]; ++i) {
      const PrefillTile& tile = plan.tiles[i];
      pieces[std::tuple(tile.item, tile.head, tile.row0)].emplace_back(static_cast<int32_t>(pass), tile);
    }
  }
  return pieces;
}

// A tile is whole, or cut at fixed tokens whatever the step; its pieces are joined in one pass in the order of their
// keys, and a pass has no more of them than memory for them.
TEST(FixedPrefillPlan, CutsKeysAtFixedTokens) {
  std::mt19937_64 random(9);
  const std::vector<const std::byte*> table(1 << 18);
  size_t most_passes = 0;
  for (int round = 0; round < 100; ++round) {
    const int group = 1 + static_cast<int>(random() % 9), multiprocessors = 1 + static_cast<int>(random() % 140);
    const int window = random() % 3 == 0 ? 1 + static_cast<int>(random() % 5000) : 0;
    const int step_blocks = 1 + static_cast<int>(random() % 2);
    std::vector<PlannedItem> rows;
    for (uint64_t count = 1 + random() % 6; count > 0; --count) {
      PlannedItem& item = rows.emplace_back();
      item.q_rows = 1 + static_cast<int32_t>(random() % 300);
      item.kv_heads = 1 + static_cast<int32_t>(random() % 4);
      item.first_position = static_cast<int64_t>(random() % (round % 4 == 0 ? 100000 : 9000));
      item.token_end = item.first_position + item.q_rows;
    }
    const std::vector<PrefillItem> items = ItemsOf(rows, table.data());
    const auto plan = PlanFixedPrefill(items, group, window, multiprocessors, kTokenBytes, step_blocks);
    ASSERT_TRUE(plan.ok()) << plan.status();
    ASSERT_EQ(plan->first_tile.size(), plan->passes.size() * (multiprocessors + 1));
    most_passes = std::max(most_passes, plan->passes.size());
    std::vector<int32_t> pieces_of_pass(plan->passes.size()), joins_of_pass(plan->passes.size());
    size_t tiles = 0;
    for (const PlannedItem& item : rows)
      tiles += static_cast<size_t>((int64_t{item.q_rows} * group + kPrefillRows - 1) / kPrefillRows * item.kv_heads);
    PiecesOfTile all = PiecesOf(*plan);
    ASSERT_EQ(all.size(), tiles);
    for (auto& [which, pieces] : all) {
      const auto [number, head, row0] = which;
      const PrefillItem& item = items[number];
      std::sort(pieces.begin(), pieces.end(),
                [](const auto& a, const auto& b) { return a.second.first_segment < b.second.first_segment; });
      const auto& [pass, first] = pieces.front();
      EXPECT_EQ(first.absent, first.first_segment % step_blocks);
      int32_t next = first.first_segment;
      for (size_t i = 0; i < pieces.size(); ++i) {
        const PrefillTile& piece = pieces[i].second;
        ASSERT_EQ(pieces[i].first, pass);
        ASSERT_EQ(piece.piece, pieces.size() == 1 ? -1 : first.piece + static_cast<int32_t>(i));
        ASSERT_EQ(piece.first_segment, next);
        if (pieces.size() > 1)
          ASSERT_EQ(piece.first_segment / kFixedPieceBlocks,
                    (piece.first_segment + piece.segments - 1) / kFixedPieceBlocks);
        if (i > 0) {
          ASSERT_EQ(piece.first_segment % kFixedPieceBlocks, 0);
          ASSERT_EQ(piece.absent, 0);
        }
        next += piece.segments;
        ASSERT_EQ(piece.last_block, item.blocks + head * item.head_step + next - 1);
        ASSERT_EQ(piece.last_tokens,
                  std::min<int64_t>(item.rows.token_end - int64_t{next - 1} * kSegmentTokens, kSegmentTokens));
      }
      const int64_t last_row = std::min<int64_t>(row0 + kPrefillRows, int64_t{item.rows.q_rows} * group) - 1;
      ASSERT_EQ(next, (item.rows.first_position + last_row / group) / kSegmentTokens + 1);
      if (pieces.size() == 1) continue;
      pieces_of_pass[pass] += static_cast<int32_t>(pieces.size());
      ++joins_of_pass[pass];
      const PrefillPass& of = plan->passes[pass];
      const auto begin = plan->joins.begin() + of.first_join;
      ASSERT_EQ(std::count_if(begin, begin + of.joins,
                              [&](const PrefillJoin& join) {
                                return join.item == first.item && join.head == first.head && join.row0 == first.row0 &&
                                       join.first_piece == first.piece &&
                                       join.pieces == static_cast<int32_t>(pieces.size());
                              }),
                1);
    }
    for (size_t pass = 0; pass < plan->passes.size(); ++pass) {
      ASSERT_LE(pieces_of_pass[pass], plan->pieces);
      ASSERT_LE(plan->pieces, std::max(kFixedPieces * multiprocessors, 101000 / 2048 + 1));
      ASSERT_GE(plan->passes[pass].joins, joins_of_pass[pass]);
    }
  }
  EXPECT_GT(most_passes, 1u);
}

TEST(FixedPrefillPlan, ATileWithMorePiecesThanAPassHasIsOnePass) {
  const std::vector<const std::byte*> table(1 << 14);
  const auto plan = PlanFixedPrefill(ItemsOf({{1, 1, 262143, 0, 262144}}, table.data()), 4, 0, 2, kTokenBytes, 2);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->passes.size(), 1u);
  EXPECT_EQ(plan->pieces, 128);
}

TEST(FixedPrefillPlan, TilesAreDividedWhereThreadBlocksHadNoWork) {
  const std::vector<const std::byte*> table(1 << 18);
  const auto plan = [&](const std::vector<PlannedItem>& rows) {
    const auto made = PlanFixedPrefill(ItemsOf(rows, table.data()), 4, 0, 132, kTokenBytes, 2);
    EXPECT_TRUE(made.ok()) << made.status();
    return *made;
  };
  EXPECT_EQ(plan({{1, 8, 32767, 0, 32768}}).pieces, 8 * 16) << "a stream alone";
  const PrefillPlan prompt = plan({{8192, 8, 0, 0, 8192}});
  EXPECT_EQ(prompt.pieces, 0);
  EXPECT_TRUE(HasFixedPieces(prompt));
  EXPECT_EQ(plan({{2048, 8, 30720, 0, 32768}}).pieces, 0);
  EXPECT_FALSE(HasFixedPieces(plan({{2048, 8, 0, 0, 2048}})));
  std::vector<PlannedItem> streams(64, {1, 8, 4095, 0, 4096});
  EXPECT_EQ(plan(streams).pieces, 0) << "512 tiles for 132 multiprocessors";
}

}  // namespace
}  // namespace dovetail::kernels::cuda
