#include "proto/step_layout.h"

#include <algorithm>
#include <random>
#include <utility>

#include "gtest/gtest.h"

namespace dovetail::proto {
namespace {

SoftmaxSpec Spec() {
  SoftmaxSpec spec;
  spec.query_heads = 6;
  spec.kv_heads = 3;
  spec.key_dim = 8;
  spec.value_dim = 4;
  spec.scale = 1;
  spec.kv = DType::kBF16;
  return spec;
}

TEST(StepLayout, AWholeShardsPayloadsAreTheTensorsThemselves) {
  StepLayout layout;
  layout.Add(0, 0, {0, 3}, {}, /*ctx_len=*/10, /*q_len=*/2, Spec());
  layout.Add(1, 0, {0, 3}, {}, 0, 5, Spec());
  layout.Finish(Spec());
  ASSERT_EQ(layout.items.size(), 2u);
  EXPECT_EQ(layout.query_bytes, 7 * 6 * 8 * 2);
  EXPECT_EQ(layout.key_value_bytes, 7 * 3 * (8 + 4) * 2);
  EXPECT_EQ(layout.partial_bytes, 7 * 6 * 4 * 2);
  EXPECT_EQ(layout.items[1].query_offset, 2 * 6 * 8 * 2);
  EXPECT_EQ(layout.items[1].key_offset, 2 * 3 * 8 * 2);
  EXPECT_EQ(layout.items[0].value_offset, 7 * 3 * 8 * 2) << "values follow all keys";
  EXPECT_EQ(layout.items[1].value_offset, 7 * 3 * 8 * 2 + 2 * 3 * 4 * 2);
  EXPECT_EQ(layout.items[1].partial_offset, 2 * 6 * 4 * 2);
}

TEST(StepLayout, ATokenShardReturnsItsSubtreesInFloatWithMaximaAndDenominators) {
  StepLayout layout;
  layout.Add(0, 0, {0, 1}, {0, 192}, /*ctx_len=*/200, /*q_len=*/1, Spec());  // three segments: subtrees of 2 and 1
  layout.Finish(Spec());
  ASSERT_EQ(layout.items.size(), 1u);
  EXPECT_EQ(layout.items[0].nodes, 2);
  EXPECT_EQ(layout.items[0].query_heads, 2);
  EXPECT_EQ(layout.items[0].rows.kv_count, 0) << "its tokens are all there already";
  EXPECT_EQ(layout.key_value_bytes, 0);
  EXPECT_EQ(layout.partial_bytes, 4 * 2 * 2 * (4 + 2));
}

TEST(StepLayout, EarlierTokensComeWithTheAnswerOfTheShardThatHoldsThem) {
  StepLayout layout;
  layout.Add(0, 0, {0, 3}, {0, 64}, /*ctx_len=*/100, /*q_len=*/9, Spec(), {.attend_end = 0, .gather_begin = 10});
  layout.Add(0, 1, {0, 3}, {64, kOpenEnd}, 100, 9, Spec(), {.attend_end = 0, .gather_begin = 10});
  layout.Finish(Spec());
  ASSERT_EQ(layout.items.size(), 2u);
  EXPECT_EQ(layout.query_bytes, 0);
  EXPECT_TRUE(layout.asks());
  EXPECT_EQ(layout.items[0].gather_first, 10);
  EXPECT_EQ(layout.items[0].gather_count, 54);
  EXPECT_EQ(layout.items[1].gather_first, 64);
  EXPECT_EQ(layout.items[1].gather_count, 36);
  EXPECT_EQ(layout.items[1].rows.kv_count, 9);
  EXPECT_EQ(layout.gather_bytes, 90 * 3 * (8 + 4) * 2);
  EXPECT_EQ(layout.partial_bytes, layout.gather_bytes);
}

TEST(StepLayout, EarlierTokensThatOtherRanksGiveDoNotCome) {
  StepLayout layout;
  layout.Add(0, 0, {0, 3}, {0, 64}, 200, 9, Spec(), {.attend_end = 0, .gather_begin = 10, .gather_end = 100});
  layout.Add(0, 1, {0, 3}, {64, kOpenEnd}, 200, 9, Spec(), {.attend_end = 0, .gather_begin = 10, .gather_end = 100});
  layout.Finish(Spec());
  ASSERT_EQ(layout.items.size(), 2u);
  EXPECT_EQ(layout.items[0].gather_count, 54);
  EXPECT_EQ(layout.items[1].gather_first, 64);
  EXPECT_EQ(layout.items[1].gather_count, 36);
  EXPECT_EQ(layout.items[1].rows.kv_count, 9);
}

TEST(StepLayout, OfEarlierTokensOnlyThoseComeThatAWindowSees) {
  SoftmaxSpec spec = Spec();
  spec.window = 20;  // token 300 sees 281 on
  StepLayout layout;
  layout.Add(0, 0, {0, 3}, {}, 300, 5, spec, {.attend_end = 0, .gather_begin = 0});
  layout.Finish(spec);
  EXPECT_EQ(layout.items[0].gather_first, 256) << "the segment's first token: kernels read segments";
  EXPECT_EQ(layout.items[0].gather_count, 44);
}

TEST(StepLayout, LeavesOutShardsThatTheStepDoesNotConcern) {
  StepLayout layout;
  layout.Add(0, 0, {0, 3}, {128, kOpenEnd}, 0, 100, Spec());
  layout.Finish(Spec());
  EXPECT_TRUE(layout.items.empty());
  EXPECT_EQ(layout.query_bytes + layout.key_value_bytes + layout.partial_bytes, 0);
}

TEST(StepLayout, PartsOfAPayloadNeitherOverlapNorLeaveGapsOrBreakAlignment) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 random(seed);
  for (int round = 0; round < 500; ++round) {
    SoftmaxSpec spec = Spec();
    spec.value_dim = random() % 2 == 0 ? 4 : 6;
    spec.kv = random() % 2 == 0 ? DType::kBF16 : DType::kF32;
    spec.window = random() % 2 == 0 ? 0 : 1 + static_cast<int>(random() % 300);
    const int64_t element = SizeOf(spec.kv);
    StepLayout layout;
    for (int entry = 0; entry < 4; ++entry) {
      const Position begin = static_cast<Position>(random() % 3) * 64;
      const TokenRange tokens{begin, random() % 2 == 0 ? kOpenEnd : begin + 64};
      const int head = static_cast<int>(random() % 3);
      const auto ctx_len = static_cast<Position>(random() % 300);
      const bool gathers = ctx_len > 0 && random() % 2 == 0;
      layout.Add(entry, 0, {head, 3}, tokens, ctx_len, 1 + static_cast<int>(random() % 20), spec,
                 {.attend_end = gathers ? 0 : kOpenEnd,
                  .gather_begin = gathers ? static_cast<Position>(random() % ctx_len) : kOpenEnd});
    }
    layout.Finish(spec);
    std::vector<std::pair<int64_t, int64_t>> query, key_value, partial;  // offset, size
    for (const ShardStep& item : layout.items) {
      query.emplace_back(item.query_offset, element * item.rows.q_count * item.query_heads * spec.key_dim);
      key_value.emplace_back(item.key_offset, element * item.rows.kv_count * item.kv_heads.size() * spec.key_dim);
      key_value.emplace_back(item.value_offset, element * item.rows.kv_count * item.kv_heads.size() * spec.value_dim);
      const int64_t whole = element * item.rows.q_count * item.query_heads * spec.value_dim;
      partial.emplace_back(item.partial_offset,
                           item.finished() ? whole : 4 * item.nodes * item.query_heads * (spec.value_dim + 2));
      EXPECT_TRUE(item.finished() || item.partial_offset % 4 == 0);
      if (item.gather_count == 0) continue;
      const int64_t rows = element * item.gather_count * item.kv_heads.size();
      partial.emplace_back(item.gather_key_offset, rows * spec.key_dim);
      partial.emplace_back(item.gather_value_offset, rows * spec.value_dim);
    }
    const auto check = [](std::vector<std::pair<int64_t, int64_t>> parts, int64_t bytes, int64_t slack) {
      std::sort(parts.begin(), parts.end());
      int64_t end = 0;
      for (const auto& [offset, size] : parts) {
        EXPECT_GE(offset, end);
        EXPECT_LE(offset, end + slack);
        end = std::max(end, offset + size);
      }
      EXPECT_EQ(end, bytes);
    };
    check(query, layout.query_bytes, 0);
    check(key_value, layout.key_value_bytes, 0);
    check(partial, layout.partial_bytes, 3);
  }
}

TEST(StepLayout, PiecesAreAllGatheredRowsOnceInOrder) {
  std::mt19937_64 random(5);
  int in_pieces = 0;
  for (int round = 0; round < 500; ++round) {
    SoftmaxSpec spec = Spec();
    spec.kv = random() % 2 == 0 ? DType::kBF16 : DType::kF32;
    spec.window = random() % 3 == 0 ? 1 + static_cast<int>(random() % 300) : 0;
    StepLayout layout, whole;
    layout.piece_bytes = 1 + static_cast<int64_t>(random() % (1 << (4 + random() % 14)));
    for (StepLayout* const to : {&layout, &whole})
      for (int entry = 0; entry < 3; ++entry)
        to->Add(entry, 0, {entry % 2, 3}, {}, 100 + 90 * entry, 20, spec, {.attend_end = 0, .gather_begin = 7});
    layout.Finish(spec);
    whole.Finish(spec);
    EXPECT_EQ(layout.gather_bytes, whole.gather_bytes);
    if (layout.gather_bytes <= layout.piece_bytes) {
      EXPECT_EQ(layout.pieces, 0);
      EXPECT_EQ(layout.partial_bytes, whole.partial_bytes);
      continue;
    }
    ++in_pieces;
    EXPECT_LE(layout.partial_bytes, whole.partial_bytes - whole.gather_bytes);
    size_t item = 0;
    Position at = layout.items[0].gather_first;
    int64_t largest = 0;
    for (int p = 0; p < layout.pieces; ++p) {
      const StepLayout::Piece piece = layout.PieceAt(p, spec);
      if (at == layout.items[item].gather_first + layout.items[item].gather_count)
        at = layout.items[++item].gather_first;
      ASSERT_EQ(piece.item, &layout.items[item]);
      ASSERT_EQ(piece.tokens.begin, at);
      ASSERT_GT(piece.tokens.end, at);
      const int64_t head_rows = (piece.tokens.end - at) * piece.item->kv_heads.size();
      const auto element = static_cast<int64_t>(SizeOf(spec.kv));
      EXPECT_EQ(piece.value_offset, head_rows * spec.key_dim * element);
      EXPECT_EQ(piece.bytes, head_rows * (spec.key_dim + spec.value_dim) * element);
      EXPECT_TRUE(piece.bytes <= layout.piece_bytes || piece.tokens.end - at == 1) << "one token is the least";
      largest = std::max(largest, piece.bytes);
      at = piece.tokens.end;
    }
    EXPECT_EQ(item, layout.items.size() - 1);
    EXPECT_EQ(at, layout.items[item].gather_first + layout.items[item].gather_count);
    EXPECT_EQ(layout.largest_piece, largest);
  }
  EXPECT_GT(in_pieces, 100);
}

}  // namespace
}  // namespace dovetail::proto
