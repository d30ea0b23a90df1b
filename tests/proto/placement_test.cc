#include "proto/placement.h"

#include <algorithm>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dovetail::proto {
namespace {

using ::testing::HasSubstr;

SoftmaxSpec Spec(int kv_heads, int window) {
  SoftmaxSpec spec;
  spec.query_heads = spec.kv_heads = kv_heads;
  spec.key_dim = spec.value_dim = 64;
  spec.scale = 0.125f;
  spec.window = window;
  return spec;
}

// Two groups: 4 KV heads, full; 2 KV heads, window 1024.
AttentionTable TwoGroups() { return *AttentionTable::Build({Spec(4, 0), Spec(2, 1024)}); }

Shard MakeShard(int group, HeadRange heads, TokenRange tokens = {}, int worker = 1) {
  return {LayerGroup(static_cast<uint16_t>(group)), WorkerId(static_cast<uint32_t>(worker)), Epoch(1), heads, tokens};
}

std::string Verdict(const Placement& placement) {
  const absl::Status status = Validate(placement, TwoGroups());
  return status.ok() ? "valid" : std::string(status.message());
}

const Shard kSecondGroup = MakeShard(1, {0, 2});

TEST(PlacementValidate, AcceptsAWholeOneAndSplitsByHeadsAndTokens) {
  EXPECT_EQ(Verdict(WholePlacement(TwoGroups(), WorkerId(1), Epoch(1))), "valid");
  EXPECT_EQ(Verdict({MakeShard(0, {0, 1}), MakeShard(0, {1, 4}), kSecondGroup}), "valid");
  EXPECT_EQ(Verdict({MakeShard(0, {0, 4}, {0, 64}), MakeShard(0, {0, 4}, {64, kOpenEnd}), kSecondGroup}), "valid");
  EXPECT_EQ(Verdict({kSecondGroup, MakeShard(0, {2, 4}), MakeShard(0, {0, 2}, {128, kOpenEnd}),
                     MakeShard(0, {0, 2}, {0, 128})}),
            "valid")
      << "order is free, and each head range has its own tokens";
}

TEST(PlacementValidate, NamesWhatIsPlacedNowhereOrTwice) {
  EXPECT_THAT(Verdict({}), HasSubstr("group 0 KV head 0: positions from 0 are placed nowhere"));
  EXPECT_THAT(Verdict({MakeShard(0, {0, 4})}), HasSubstr("group 1 KV head 0: positions from 0 are placed nowhere"));
  EXPECT_THAT(Verdict({MakeShard(0, {0, 2}), MakeShard(0, {3, 4}), kSecondGroup}), HasSubstr("group 0 KV head 2"));
  EXPECT_THAT(Verdict({MakeShard(0, {0, 4}, {0, 64}), kSecondGroup}),
              HasSubstr("positions from 64 are placed nowhere"));
  EXPECT_THAT(Verdict({MakeShard(0, {0, 4}, {64, kOpenEnd}), kSecondGroup}),
              HasSubstr("positions from 0 are placed nowhere"));
  EXPECT_THAT(Verdict({MakeShard(0, {0, 4}, {0, 64}), MakeShard(0, {0, 4}, {128, kOpenEnd}), kSecondGroup}),
              HasSubstr("positions from 64 are placed nowhere"));
  EXPECT_THAT(Verdict({MakeShard(0, {0, 4}), MakeShard(0, {0, 4}, {64, kOpenEnd}), kSecondGroup}),
              HasSubstr("positions from 64 are placed twice"));
  EXPECT_THAT(Verdict({MakeShard(0, {0, 4}), kSecondGroup, kSecondGroup}),
              HasSubstr("group 1 KV head 0: positions from 0 are placed twice"));
}

TEST(PlacementValidate, NamesTheShardThatIsOutOfRange) {
  EXPECT_THAT(Verdict({MakeShard(2, {0, 4})}),
              HasSubstr("shard of group 2 on worker 1, KV heads 0..4, tokens 0..: the model has 2"));
  for (const HeadRange heads : {HeadRange{0, 5}, HeadRange{-1, 4}, HeadRange{2, 2}, HeadRange{3, 2}})
    EXPECT_THAT(Verdict({MakeShard(0, heads), kSecondGroup}), HasSubstr("KV heads must lie in 0..4"));
  for (const TokenRange tokens : {TokenRange{0, 63}, TokenRange{1, kOpenEnd}, TokenRange{64, 64}, TokenRange{-64, 64}})
    EXPECT_THAT(Verdict({MakeShard(0, {0, 4}, tokens), kSecondGroup}), HasSubstr("begin and end on multiples of 64"));
  EXPECT_THAT(Verdict({MakeShard(0, {0, 4}, {0, kOpenEnd - 63}), kSecondGroup}), HasSubstr("tokens lie in 0.."));
  EXPECT_THAT(Verdict({MakeShard(0, {0, 3}), MakeShard(0, {2, 4}), kSecondGroup}),
              HasSubstr("head ranges must be equal or disjoint"));
  Placement many;
  for (int i = 0; i <= kMaxShards; ++i)
    many.push_back(MakeShard(0, {0, 4}, {i * 64, i == kMaxShards ? kOpenEnd : (i + 1) * 64}));
  EXPECT_THAT(Verdict(many), HasSubstr("65 shards; at most 64"));
}

// ---- random ones ----

// Cuts 0 .. end into ranges at random.
template <typename T>
std::vector<T> Cuts(std::mt19937_64& random, T step, int most) {
  std::vector<T> cuts = {0};
  for (int i = static_cast<int>(random() % static_cast<uint64_t>(most)); i > 0; --i)
    cuts.push_back(cuts.back() + step * static_cast<T>(1 + random() % 3));
  return cuts;
}

std::vector<TokenRange> RandomTiling(std::mt19937_64& random) {
  const auto cuts = Cuts<Position>(random, 64, 4);
  std::vector<TokenRange> ranges;
  for (size_t i = 0; i < cuts.size(); ++i) ranges.push_back({cuts[i], i + 1 < cuts.size() ? cuts[i + 1] : kOpenEnd});
  return ranges;
}

Placement RandomPlacement(std::mt19937_64& random, const AttentionTable& table) {
  Placement placement;
  for (int group = 0; group < table.group_count(); ++group) {
    const int heads = table.softmax(LayerGroup(static_cast<uint16_t>(group))).kv_heads;
    for (int head = 0; head < heads;) {
      const int end = head + 1 + static_cast<int>(random() % static_cast<uint64_t>(heads - head));
      for (const TokenRange& tokens : RandomTiling(random))
        placement.push_back(MakeShard(group, {head, end}, tokens, static_cast<int>(random() % 4)));
      head = end;
    }
  }
  std::shuffle(placement.begin(), placement.end(), random);
  return placement;
}

TEST(PlacementValidate, ARandomTilingIsValidAndAnyShardLessMoreOrMovedIsNot) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 random(seed);
  for (int i = 0; i < 1000; ++i) {
    const AttentionTable table = TwoGroups();
    const Placement good = RandomPlacement(random, table);
    ASSERT_TRUE(Validate(good, table).ok()) << Validate(good, table);
    const size_t at = random() % good.size();
    Placement less = good;
    less.erase(less.begin() + static_cast<std::ptrdiff_t>(at));
    EXPECT_FALSE(Validate(less, table).ok()) << "without " << DebugString(good[at]);
    Placement more = good;
    more.push_back(good[at]);
    EXPECT_FALSE(Validate(more, table).ok()) << "twice " << DebugString(good[at]);
    Placement moved = good;
    TokenRange& tokens = moved[at].tokens;
    tokens.end = tokens.end == kOpenEnd ? tokens.begin + 64 : tokens.end + 64;
    EXPECT_FALSE(Validate(moved, table).ok()) << DebugString(moved[at]);
  }
}

TEST(RowsOf, AnswersEveryQueryThatSeesTheShardAndAppendsItsOwnTokensOnly) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 random(seed);
  for (int i = 0; i < 20000; ++i) {
    const Position begin = static_cast<Position>(random() % 6) * 64;
    const TokenRange tokens{begin, random() % 3 == 0 ? kOpenEnd : begin + 64 * static_cast<Position>(1 + random() % 4)};
    const int window = random() % 2 == 0 ? 0 : 1 + static_cast<int>(random() % 200);
    const Position ctx_len = static_cast<Position>(random() % 600);
    const int q_len = 1 + static_cast<int>(random() % (random() % 2 == 0 ? 3 : 300));
    const ShardRows rows = RowsOf(tokens, window, ctx_len, q_len);
    SCOPED_TRACE(
        absl::StrCat("tokens ", begin, "..", tokens.end, " window ", window, " ctx_len ", ctx_len, " q_len ", q_len));

    int first_seeing = -1, appended = 0, first_appended = -1;
    for (int row = 0; row < q_len; ++row) {
      const Position position = ctx_len + row;
      if (first_seeing < 0 && !VisibleTokens(position, window, tokens.begin, tokens.end).empty()) first_seeing = row;
      if (position >= tokens.begin && position < tokens.end) {
        if (first_appended < 0) first_appended = row;
        ++appended;
      }
    }
    ASSERT_EQ(rows.kv_count, appended);
    ASSERT_TRUE(appended == 0 || rows.kv_first == first_appended);
    if (first_seeing < 0) {
      ASSERT_EQ(rows.q_count, 0) << "a shard that no row sees is not asked";
    } else {
      ASSERT_EQ(rows.q_first, first_seeing);
      ASSERT_EQ(rows.q_count, q_len - first_seeing) << "through the last new token";
    }
  }
}

TEST(RowsOf, OverATilingEveryNewTokenIsAppendedOnce) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 random(seed);
  for (int i = 0; i < 2000; ++i) {
    const Position ctx_len = static_cast<Position>(random() % 700);
    const int q_len = 1 + static_cast<int>(random() % 300);
    std::vector<int> times(static_cast<size_t>(q_len), 0);
    for (const TokenRange& tokens : RandomTiling(random)) {
      const ShardRows rows = RowsOf(tokens, 0, ctx_len, q_len);
      for (int row = rows.kv_first; row < rows.kv_first + rows.kv_count; ++row) ++times[static_cast<size_t>(row)];
    }
    EXPECT_THAT(times, ::testing::Each(1));
  }
}

}  // namespace
}  // namespace dovetail::proto
