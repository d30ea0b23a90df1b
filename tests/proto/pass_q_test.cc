#include "proto/pass_q.h"

#include <gtest/gtest.h>

#include "base/segment_tree.h"

// What ranks of a prefill group send each other when they ask about earlier tokens, against the definition of it.

namespace dovetail::proto {
namespace {

SoftmaxSpec Spec(int window, DType kv = DType::kBF16) {
  return {.query_heads = 6, .kv_heads = 3, .key_dim = 16, .value_dim = 24, .scale = 1, .window = window, .kv = kv};
}

bool Sees(Position query, Position token, int window) {
  return token <= query && (window == 0 || query - token < window);
}

const std::vector<std::vector<Position>> kCuts = {{0, 64, 300}, {100, 128, 192, 517}, {130, 256, 448, 512, 540}};

TEST(PassQ, TheRowsThatSeeSomethingOfAShardAreTheFirstOnes) {
  for (const auto& cuts : kCuts)
    for (const int window : {0, 1, 50, 64, 65, 200, 1000})
      for (int asker = 1; asker + 1 < static_cast<int>(cuts.size()); ++asker)
        for (int holder = 0; holder < asker; ++holder) {
          SCOPED_TRACE(absl::StrCat("window ", window, ", rank ", asker, " asks ", holder));
          const TokenRange shard = PassQShard(cuts, holder);
          EXPECT_EQ(shard.begin % kSegmentTokens, 0);
          int64_t rows = 0, nodes = 0;
          for (Position query = cuts[asker]; query < cuts[asker + 1]; ++query) {
            if (Sees(query, shard.end - 1, window)) {
              EXPECT_EQ(query, cuts[asker] + rows);
              ++rows;
            }
            nodes += CountSubtrees(VisibleSegments(query, window, shard.begin, shard.end));
          }
          const TokenRange queries = PassQQueries(Spec(window), cuts, asker, holder);
          EXPECT_EQ(queries.begin, cuts[asker]);
          EXPECT_EQ(queries.end - queries.begin, rows);
          EXPECT_EQ(PassQQueryBytes(Spec(window), cuts, asker, holder), rows * 6 * 16 * 2);
          EXPECT_EQ(PassQQueryBytes(Spec(window, DType::kF32), cuts, asker, holder), rows * 6 * 16 * 4);
          EXPECT_EQ(PassQPartialBytes(Spec(window), cuts, asker, holder), nodes * 6 * (24 + 2) * 4);
        }
}

TEST(PassQ, ShardsAreAllTokensOfTheGroupAndOfItsFirstSegment) {
  for (const auto& cuts : kCuts) {
    Position next = cuts.front() / kSegmentTokens * kSegmentTokens;
    for (int rank = 0; rank + 1 < static_cast<int>(cuts.size()); ++rank) {
      EXPECT_EQ(PassQShard(cuts, rank).begin, next);
      next = PassQShard(cuts, rank).end;
    }
    EXPECT_EQ(next, cuts.back());
  }
}

TEST(PassQ, ARankGetsQueriesOfLaterOnesAndPartialsOfEarlierOnes) {
  const auto& cuts = kCuts[2];
  for (const int window : {0, 90}) {
    const SoftmaxSpec spec = Spec(window);
    for (int rank = 0; rank < 4; ++rank) {
      int64_t bytes = 0;
      for (int other = 0; other < 4; ++other) {
        if (other < rank) bytes += PassQPartialBytes(spec, cuts, rank, other);
        if (other > rank) bytes += PassQQueryBytes(spec, cuts, other, rank);
      }
      EXPECT_EQ(PassQBytesTo(spec, cuts, rank), bytes);
    }
  }
}

// One segment before the group, of which each sees as much as without a group.
TEST(PassQ, RanksShareTheFlopsOfAllTokens) {
  const auto& cuts = kCuts[2];
  for (const int window : {0, 90}) {
    double all = 0;
    for (int rank = 0; rank < 4; ++rank) all += PassQFlopsOf(Spec(window), cuts, rank);
    int64_t pairs = 0;
    for (Position query = cuts.front(); query < cuts.back(); ++query)
      for (Position token = PassQShard(cuts, 0).begin; token <= query; ++token)
        pairs += Sees(query, token, window) ? 1 : 0;
    EXPECT_EQ(all, 2.0 * static_cast<double>(pairs) * 6 * (16 + 24));
  }
}

TEST(PassQ, CutsAreThoseOfThePlan) {
  StepPlan plan;
  plan.part = {StepId(10), 100, 300, 1, 2};
  plan.ranks = {{WorkerId(0), StepId(10), MicroBatchId(0), 100}, {WorkerId(1), StepId(11), MicroBatchId(0), 192}};
  EXPECT_EQ(PassQCuts(plan), (std::vector<Position>{100, 192, 300}));
}

}  // namespace
}  // namespace dovetail::proto
