#include "kernels/cuda/attention/attention_plan.h"

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/segment_tree.h"

namespace dovetail::kernels::cuda {
namespace {

AttentionPlan Plan(const std::vector<PlannedItem>& items, int group, int window, int multiprocessors) {
  auto plan = PlanAttention(items, group, window, multiprocessors);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return *plan;
}

// Parts are a partition of all blocks; each names the span that it begins in, and the parts that hold the rest of the
// heads that it begins and ends in.
void CheckParts(const AttentionPlan& plan) {
  int32_t next = 0;
  const auto part_of = [&](int32_t block) {
    int16_t part = 0;
    while (plan.parts[part].end <= block) ++part;
    return part;
  };
  const auto head_of = [&](int32_t block) {  // its first and last block
    for (const AttentionSpan& span : plan.spans) {
      if (block >= span.block_end) continue;
      const int32_t begin = block - (block - span.block_begin) % span.segments;
      return std::pair(begin, begin + span.segments - 1);
    }
    return std::pair(-1, -1);
  };
  for (const AttentionPart& part : plan.parts) {
    ASSERT_EQ(part.begin, next);
    ASSERT_LT(part.begin, part.end);
    ASSERT_LE(plan.spans[part.span].block_begin, part.begin);
    ASSERT_GT(plan.spans[part.span].block_end, part.begin);
    ASSERT_EQ(part.first_part, part_of(head_of(part.begin).first));
    ASSERT_EQ(part.last_part, part_of(head_of(part.end - 1).second));
    next = part.end;
  }
  ASSERT_EQ(next, plan.spans.back().block_end);
  ASSERT_EQ(plan.parts.size(), static_cast<size_t>(plan.extent.parts));
  ASSERT_LE(plan.extent.parts, plan.grid);
}

TEST(AttentionPlan, EveryVisibleBlockLiesInOneSpanAndOnePart) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 200; ++round) {
    std::vector<PlannedItem> items;
    const int count = 1 + static_cast<int>(random() % 20);
    const int group = 1 + static_cast<int>(random() % 9),
              window = random() % 3 == 0 ? static_cast<int>(random() % 500) : 0;
    for (int i = 0; i < count; ++i) {
      PlannedItem item;
      item.q_rows = 1 + static_cast<int>(random() % (round % 4 == 0 ? 300 : 5));
      item.kv_heads = 1 + static_cast<int>(random() % 4);
      item.first_position = static_cast<int64_t>(random() % 5000);
      item.token_begin = static_cast<int64_t>(random() % 3) * 640;
      item.token_end = std::max(item.token_begin, item.first_position + item.q_rows - (random() % 2 ? 0 : 100));
      items.push_back(item);
    }
    const AttentionPlan plan = Plan(items, group, window, 132);
    CheckParts(plan);
    int32_t next = 0;
    size_t span = 0;
    for (size_t i = 0; i < items.size(); ++i) {
      const int64_t rows = int64_t{items[i].q_rows} * group, step = int64_t{plan.tiles} * kTileRows;
      for (int64_t row = 0; row < rows; row += step, ++span) {
        ASSERT_LT(span, plan.spans.size());
        const AttentionSpan& s = plan.spans[span];
        ASSERT_EQ(s.item, static_cast<int32_t>(i));
        ASSERT_EQ(s.block_begin, next);
        ASSERT_EQ(s.block_end - s.block_begin, s.segments * items[i].kv_heads);
        next = s.block_end;
        bool any = false;
        for (int64_t r = row; r < std::min(rows, row + step); ++r) {
          const SegmentRange seen =
              VisibleSegments(items[i].first_position + r / group, window, items[i].token_begin, items[i].token_end);
          if (seen.empty()) continue;
          any = true;
          ASSERT_LE(s.first_segment, seen.begin);
          ASSERT_GE(s.first_segment + s.segments, seen.end);
        }
        ASSERT_EQ(s.sees_nothing, any ? 0 : 1);
      }
    }
    ASSERT_EQ(span, plan.spans.size());
  }
}

TEST(AttentionPlan, PartsAreEqual) {
  const AttentionPlan plan =
      Plan({{.q_rows = 1, .kv_heads = 8, .first_position = 131071, .token_end = 131072}}, 4, 0, 132);
  EXPECT_EQ(plan.extent.parts, 132);
  for (const AttentionPart& part : plan.parts) {
    EXPECT_GE(part.end - part.begin, 124);  // 16384 blocks
    EXPECT_LE(part.end - part.begin, 125);
  }
  CheckParts(plan);
}

TEST(AttentionPlan, AStepOfLikeSequencesCutsNoHead) {
  for (const int sequences : {16, 64, 256}) {
    std::vector<PlannedItem> items;
    for (int i = 0; i < sequences; ++i) {
      const int64_t tokens = 1000 + i % 60;  // 16 or 17 blocks
      items.push_back({.q_rows = 1, .kv_heads = 8, .first_position = tokens - 1, .token_end = tokens});
    }
    const AttentionPlan plan = Plan(items, 4, 0, 132);
    CheckParts(plan);
    const int64_t share = plan.extent.blocks / 132;
    for (size_t i = 0; i < plan.parts.size(); ++i) {
      EXPECT_EQ(plan.parts[i].first_part, static_cast<int>(i)) << sequences << " sequences";
      EXPECT_EQ(plan.parts[i].last_part, static_cast<int>(i)) << sequences << " sequences";
      EXPECT_LE(plan.parts[i].end - plan.parts[i].begin, share * 108 / 100 + 1) << sequences << " sequences";
    }
  }
}

// 256 sequences of 920 tokens that began one after the other, 2048 tokens of prompts a step, `steps` after the last.
std::vector<PlannedItem> AfterPrompts(int steps) {
  std::vector<PlannedItem> items;
  for (int i = 0; i < 256; ++i) {
    const int64_t tokens = 920 + (255 - i) * 920 / 2048 + steps;
    items.push_back({.q_rows = 1, .kv_heads = 8, .first_position = tokens - 1, .token_end = tokens});
  }
  return items;
}

int64_t LargestPartTokens(const AttentionPlan& plan, const std::vector<PlannedItem>& items) {
  int64_t largest = 0;
  for (const AttentionPart& part : plan.parts) {
    int64_t tokens = 0;
    for (const AttentionSpan& span : plan.spans) {
      const int32_t begin = std::max(span.block_begin, part.begin), end = std::min(span.block_end, part.end);
      if (begin < end) tokens += (end - begin) / span.segments * items[span.item].token_end;
    }
    largest = std::max(largest, tokens);
  }
  return largest;
}

// 15 or 16 of their heads are a share: 1.031 of it is the least that the largest part can have.
TEST(AttentionPlan, PartsOfWholeHeadsAreEqualInTokens) {
  for (int steps = 0; steps < 128; ++steps) {
    const std::vector<PlannedItem> items = AfterPrompts(steps);
    const AttentionPlan plan = Plan(items, 4, 0, 132);
    CheckParts(plan);
    int64_t tokens = 0;
    for (const PlannedItem& item : items) tokens += 8 * item.token_end;
    for (size_t i = 0; i < plan.parts.size(); ++i)
      ASSERT_EQ(plan.parts[i].first_part, static_cast<int>(i)) << steps << " steps";
    ASSERT_LE(LargestPartTokens(plan, items), tokens * 1.04 / 132) << steps << " steps";
  }
}

TEST(AttentionPlan, SmallStepsHaveAPartForEachBlock) {
  const AttentionPlan plan = Plan({{.q_rows = 1, .kv_heads = 2, .first_position = 100, .token_end = 101}}, 4, 0, 132);
  EXPECT_EQ(plan.extent.parts, 4);
  CheckParts(plan);
}

TEST(AttentionPlan, RowTilesHoldTheLargestItem) {
  const auto tiles = [](int rows, int group) {
    const PlannedItem item{.q_rows = rows, .kv_heads = 1};
    return RowTiles({&item, 1}, group);
  };
  EXPECT_EQ(tiles(1, 4), 1);
  EXPECT_EQ(tiles(4, 4), 1);
  EXPECT_EQ(tiles(5, 4), 2);
  EXPECT_EQ(tiles(16, 4), 4);
  EXPECT_EQ(tiles(1, 17), 2);
  EXPECT_EQ(tiles(4096, 8), 8);
}

TEST(AttentionPlan, RefusesNothingAndTooMuch) {
  EXPECT_EQ(PlanAttention({}, 1, 0, 132).status().code(), absl::StatusCode::kInvalidArgument);
  const PlannedItem huge{.q_rows = 1 << 20, .kv_heads = 65536, .first_position = 1 << 20, .token_end = 1 << 21};
  EXPECT_EQ(PlanAttention({&huge, 1}, 16, 0, 132).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace dovetail::kernels::cuda
