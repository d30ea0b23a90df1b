#include "proto/prefix_traffic.h"

#include <gtest/gtest.h>

#include <random>

namespace dovetail::proto {
namespace {

TEST(PrefixTraffic, SeenTokensAreThoseThatEachRowSees) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 3000; ++i) {
    const auto ctx_len = static_cast<Position>(random() % 300);
    const auto rows = static_cast<int64_t>(random() % 200);
    const int window = random() % 2 == 0 ? 0 : static_cast<int>(random() % 150) + 1;
    const auto begin = static_cast<Position>(random() % 400);
    const Position end = begin + static_cast<Position>(random() % 300);
    int64_t seen = 0;
    for (int64_t row = 0; row < rows; ++row) {
      const TokenSpan span = VisibleTokens(ctx_len + row, window, begin, end);
      seen += span.end - span.begin;
    }
    ASSERT_EQ(SeenTokens(ctx_len, rows, window, begin, end), seen)
        << ctx_len << " " << rows << " " << window << " " << begin << " " << end;
  }
  EXPECT_EQ(SeenTokens(0, int64_t{1} << 20, 0, 0, int64_t{1} << 20), (int64_t{1} << 19) * ((int64_t{1} << 20) + 1));
}

TEST(PrefixTraffic, AskedBytesAreQueriesAndPartialsOfEachSubtree) {
  const SoftmaxSpec spec{.query_heads = 8, .kv_heads = 2, .key_dim = 16, .value_dim = 32, .scale = 1};
  StepLayout layout;
  layout.Add(0, 0, {0, 2}, {}, /*ctx_len=*/192, /*q_len=*/10, spec, {.attend_end = 192});
  layout.Finish(spec);
  // n Hq (dk e + 4 s (dv + 2)): 192 tokens are two subtrees, of 128 and of 64.
  EXPECT_EQ(TrafficOf(layout, spec), (PrefixTraffic{.asked_bytes = 10 * 8 * (16 * 2 + 4 * 2 * (32 + 2))}));
}

TEST(PrefixTraffic, GatheredBytesAreKeysAndValuesOfEarlierTokens) {
  const SoftmaxSpec spec{.query_heads = 8, .kv_heads = 2, .key_dim = 16, .value_dim = 32, .scale = 1};
  StepLayout layout;
  layout.Add(0, 0, {0, 2}, {}, 192, 10, spec, {.attend_end = 0, .gather_begin = 64});
  layout.Finish(spec);
  EXPECT_EQ(TrafficOf(layout, spec), (PrefixTraffic{.gathered_bytes = 128 * 2 * (16 + 32) * 2}));
}

TEST(PrefixTraffic, ALaterRankNeedsWhatItsFirstTokenSeesInWholeSegments) {
  EXPECT_EQ(RowsForLaterRank({100, 192}, 192, /*window=*/0), (TokenRange{100, 192}));
  EXPECT_EQ(RowsForLaterRank({100, 192}, 320, 0), (TokenRange{100, 192}));
  EXPECT_EQ(RowsForLaterRank({0, 192}, 192, 20), (TokenRange{128, 192})) << "token 192 sees 173 on";
  EXPECT_EQ(RowsForLaterRank({0, 192}, 320, 129), (TokenRange{192, 192})) << "token 320 sees 192 on";
  EXPECT_EQ(RowsForLaterRank({0, 192}, 320, 130), (TokenRange{128, 192}));
  EXPECT_EQ(RowsForLaterRank({100, 192}, 192, 500), (TokenRange{100, 192})) << "a window that reaches further back";
  EXPECT_EQ(RowsForLaterRank({0, 64}, 640, 20), (TokenRange{64, 64}));
}

}  // namespace
}  // namespace dovetail::proto
