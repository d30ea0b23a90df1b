#include "proto/head_switch.h"

#include <gtest/gtest.h>

#include "base/segment_tree.h"
#include "proto/rank_frames.h"
#include "proto/token_layout.h"

// What ranks of a prefill group exchange when they switch between tokens and heads, against the primitive that moves it
// and against the definition of what is counted.

namespace dovetail::proto {
namespace {

SoftmaxSpec Spec(int group, int kv_heads, int window = 0) {
  return {.query_heads = group * kv_heads,
          .kv_heads = kv_heads,
          .key_dim = 16,
          .value_dim = 24,
          .scale = 1,
          .window = window,
          .kv = DType::kBF16};
}

Layout ByTokens(const TensorShape& shape, const std::vector<Position>& cuts) {
  std::vector<AxisRange> ranges;
  for (size_t r = 0; r + 1 < cuts.size(); ++r) ranges.push_back({cuts[r], cuts[r + 1]});
  return *Layout::Of(shape, "tokens", ranges);
}

TensorShape Tensor(int64_t tokens, int kv_heads, int64_t head_elements) {
  return {{{"tokens", tokens}, {"heads", kv_heads}, {"head", head_elements}}, 2};
}

// With the group's own tokens, for o as for q, k and v: all query heads of a KV head go together.
TEST(HeadSwitch, TransfersAreThoseOfTheLayouts) {
  for (const int kv_heads : {2, 3, 5, 8})
    for (int ranks = 2; ranks <= std::min(kv_heads, 4); ++ranks) {
      const SoftmaxSpec spec = Spec(2, kv_heads);
      std::vector<Position> cuts = {0};
      for (int r = 1; r < ranks; ++r) cuts.push_back(cuts.back() + 64 * (1 + r % 2));
      cuts.push_back(cuts.back() + 37);
      std::vector<Switch> there;
      for (const int elements : {2 * 16, 16, 24})
        there.push_back(*Switch::Between(ByTokens(Tensor(cuts.back(), kv_heads, elements), cuts),
                                         *Layout::Even(Tensor(cuts.back(), kv_heads, elements), "heads", ranks)));
      const TensorShape out = Tensor(cuts.back(), kv_heads, 2 * 24);
      const Switch back = *Switch::Between(*Layout::Even(out, "heads", ranks), ByTokens(out, cuts));
      for (int rank = 0; rank < ranks; ++rank) {
        SCOPED_TRACE(absl::StrCat(kv_heads, " KV heads, rank ", rank, " of ", ranks));
        const HeadRange heads = HeadsOfRank(kv_heads, rank, ranks);
        EXPECT_EQ(there[0].to().range(rank), (AxisRange{heads.begin, heads.end}));
        const SwitchRank of{cuts.front(), cuts.back(), {cuts[rank], cuts[rank + 1]}, rank, ranks};
        int64_t bytes = back.bytes_received(rank);
        for (const Switch& one : there) bytes += one.bytes_received(rank);
        EXPECT_EQ(SwitchBytesTo(spec, of), bytes);
        for (int from = 0; from < ranks; ++from) {
          if (from == rank) continue;
          int64_t sent = 0;
          for (const Switch& one : there)
            for (const Transfer& transfer : one.SentBy(from))
              if (transfer.destination == rank) sent += transfer.bytes();
          EXPECT_EQ(HeadRowsBytes(spec, {cuts[from], cuts[from + 1]}, cuts[from], heads.size()), sent);
        }
      }
    }
}

TEST(HeadSwitch, EachKvHeadIsOfOneRank) {
  for (int kv_heads = 1; kv_heads <= 20; ++kv_heads)
    for (int ranks = 1; ranks <= kv_heads; ++ranks) {
      int next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const HeadRange heads = HeadsOfRank(kv_heads, rank, ranks);
        EXPECT_EQ(heads.begin, next);
        EXPECT_GE(heads.size(), kv_heads / ranks);
        EXPECT_LE(heads.size(), kv_heads / ranks + 1);
        next = heads.end;
      }
      EXPECT_EQ(next, kv_heads);
    }
}

TEST(HeadSwitch, SubtreesAreThoseThatEachTokenSees) {
  for (const int window : {0, 1, 50, 64, 200})
    for (const TokenRange& tokens : {TokenRange{100, 128}, TokenRange{128, 517}, TokenRange{448, 449}}) {
      int64_t nodes = 0;
      for (Position token = tokens.begin; token < tokens.end; ++token)
        nodes += CountSubtrees(VisibleSegments(token, window, 64, tokens.end));
      EXPECT_EQ(SubtreesOf(tokens, window, 64), nodes) << window << ", " << tokens.begin;
      const SoftmaxSpec spec = Spec(2, 3, window);
      EXPECT_EQ(HeadOutputBytes(spec, tokens, 64, 3), nodes * 6 * (24 + 2) * 4);
      EXPECT_EQ(HeadOutputBytes(spec, tokens, 64, 3, HeadPartials::kOfTokens),
                (tokens.end - tokens.begin) * 6 * (24 + 2) * 4);
      EXPECT_EQ(HeadOutputBytes(spec, tokens, 0, 3), (tokens.end - tokens.begin) * 6 * 24 * 2) << "o itself";
    }
}

// Rank 0 gives the others K and V of the tokens before the group which lie in its first segment.
TEST(HeadSwitch, EarlierTokensOfTheFirstSegmentGoToAllButRankZero) {
  const SoftmaxSpec spec = Spec(2, 4);
  const SwitchRank first{100, 300, {100, 192}, 0, 2}, second{100, 300, {192, 300}, 1, 2};
  EXPECT_EQ(SwitchBytesTo(spec, first),
            HeadRowsBytes(spec, {192, 300}, 192, 2) + HeadOutputBytes(spec, {100, 192}, 64, 2));
  EXPECT_EQ(SwitchBytesTo(spec, second),
            HeadRowsBytes(spec, {100, 192}, 64, 2) + HeadOutputBytes(spec, {192, 300}, 64, 2));
  SwitchRank of_tokens = second;
  of_tokens.partials = HeadPartials::kOfTokens;
  EXPECT_EQ(SwitchBytesTo(spec, of_tokens),
            HeadRowsBytes(spec, {100, 192}, 64, 2) + HeadOutputBytes(spec, {192, 300}, 64, 2, HeadPartials::kOfTokens));
  EXPECT_EQ(HeadRowsBytes(spec, {100, 192}, 64, 2) - HeadRowsBytes(spec, {100, 192}, 100, 2), 36 * 2 * (16 + 24) * 2);
}

// One segment before the group, of which each sees as much as without a group.
TEST(HeadSwitch, RanksShareTheFlopsOfAllTokens) {
  for (const int window : {0, 90}) {
    const SoftmaxSpec spec = Spec(2, 5, window);
    double all = 0;
    for (int rank = 0; rank < 3; ++rank)
      all += SwitchFlopsOf(spec, {.base = 100, .end = 500, .rank = rank, .ranks = 3});
    int64_t pairs = 0;
    for (Position token = 100; token < 500; ++token)
      pairs += token + 1 - std::max<Position>(64, window > 0 ? token - window + 1 : 0);
    EXPECT_EQ(all, 2.0 * static_cast<double>(pairs) * 10 * (16 + 24));
  }
}

TEST(HeadSwitch, AsManyRanksMaySwitchAsTheFewestKvHeads) {
  LinearSpec linear{.heads = 1, .key_dim = 16, .value_dim = 16};
  LinearConstants decays;
  decays.log_decay.assign(1, -0.1f);
  const std::vector<LinearConstants> none(3);
  EXPECT_EQ(MostSwitchRanks(*AttentionTable::Build({Spec(2, 4), Spec(1, 3), Spec(2, 4)}, none)), 3);
  EXPECT_EQ(MostSwitchRanks(*AttentionTable::Build({linear, Spec(2, 4)}, {decays, {}})), 4);
  EXPECT_EQ(MostSwitchRanks(*AttentionTable::Build({linear}, {decays})), 0);
}

}  // namespace
}  // namespace dovetail::proto
