#include "compute_worker/row_spread.h"

#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "tests/compute_worker/placed_step.h"

namespace dovetail::compute {
namespace {

using ::testing::ElementsAre;

class RowSpreadTest : public PlacedStepTest {
 protected:
  bool Spread() {
    return WhileItRuns([this] { return SpreadRows(core_, kFirst, spread_); });
  }
  std::vector<std::pair<int, int>> Rows() const {
    std::vector<std::pair<int, int>> rows;
    for (const RowSpread::Row& row : spread_.rows) rows.emplace_back(row.part, row.row);
    return rows;
  }

  RowSpread spread_;
};

TEST_F(RowSpreadTest, RowsOfAWorkerAreCountedThroughItsEntriesInTheOrderOfTheStep) {
  Add(1, {ShardOf(0, 2), ShardOf(1, 2)}, 70);
  Add(3, {ShardOf(0, 0), ShardOf(1, 0)});
  Add(2, {ShardOf(0, 2), ShardOf(1, 2)}, 5);
  Add(1, {ShardOf(0, 0), ShardOf(1, 0)}, 500);
  ASSERT_TRUE(Spread());
  using P = std::pair<int, int>;
  EXPECT_THAT(Rows(), ElementsAre(P(0, 0), P(1, 0), P(1, 1), P(1, 2), P(0, 1), P(0, 2), P(1, 3)));
  EXPECT_THAT(spread_.part_rows, ElementsAre(3, 4));
  EXPECT_THAT(spread_.entry_part, ElementsAre(0, 1, 0, 1));
}

TEST_F(RowSpreadTest, AnotherStepBeginsAnew) {
  Add(4, {ShardOf(0, 1), ShardOf(1, 1)});
  Add(4, {ShardOf(0, 0), ShardOf(1, 0)});
  ASSERT_TRUE(Spread());
  Add(1, {ShardOf(0, 1), ShardOf(1, 1)});
  ASSERT_TRUE(Spread());
  EXPECT_THAT(Rows(), ElementsAre(std::pair(0, 0)));
  EXPECT_THAT(spread_.part_rows, ElementsAre(1));
}

TEST_F(RowSpreadTest, RowsOfPromptsThatAreAttendedHereAreKAndVOnly) {
  Add(1, {ShardOf(0, 2), ShardOf(1, 2)}, 70);
  Add(2, {ShardOf(0, 2), ShardOf(1, 2)});
  Add(20, {ShardOf(0, 2), ShardOf(1, 2)});
  Add(17, {ShardOf(0, 2), ShardOf(1, 2)});
  Add(16, {ShardOf(0, 0), ShardOf(1, 0)});
  Add(1, {ShardOf(0, 2), ShardOf(1, 2)}, 500);
  ASSERT_TRUE(Spread());
  const auto run = [this](size_t i) {
    const RowSpread::Run& of = spread_.runs[i];
    return std::vector<int64_t>{of.part, of.attended_here, of.first_row, of.count, of.query_row, of.key_value_row};
  };
  ASSERT_EQ(spread_.runs.size(), 4u);
  EXPECT_THAT(run(0), ElementsAre(0, 0, 0, 3, 0, 0));
  EXPECT_THAT(run(1), ElementsAre(0, 1, 3, 37, 3, 3)) << "two prompts in a row are one run";
  EXPECT_THAT(run(2), ElementsAre(1, 1, 40, 16, 0, 0));
  EXPECT_THAT(run(3), ElementsAre(0, 0, 56, 1, 3, 40)) << "behind three rows of q, and 40 of k and v";
  EXPECT_THAT(spread_.part_rows, ElementsAre(41, 16));
}

TEST_F(RowSpreadTest, APromptWhoseEarlierTokensAreAskedForIsNoWorkersWholly) {
  Add(20, {ShardOf(0, 1), ShardOf(1, 1)}, 64);
  EXPECT_FALSE(Spread()) << "it is attended from token 64 on here";
}

TEST_F(RowSpreadTest, ASequenceDividedByHeadsTokensOrLayerGroupsIsNobodysWholly) {
  Add(1, {ShardOf(0, 1), ShardOf(1, 1)});
  Add(1, {ShardOf(0, 0, {0, 1}), ShardOf(0, 1, {1, 2}), ShardOf(1, 0)});
  EXPECT_FALSE(Spread()) << "heads";
  Add(1, {ShardOf(0, 0, {0, 2}, {0, 64}), ShardOf(0, 1, {0, 2}, {64, proto::kOpenEnd}), ShardOf(1, 1)}, 70);
  EXPECT_FALSE(Spread()) << "tokens";
  Add(1, {ShardOf(0, 0), ShardOf(1, 1)});
  EXPECT_FALSE(Spread()) << "layer groups";
  Add(1, {ShardOf(0, 0), ShardOf(1, 1)});
  Add(1, {ShardOf(0, 1), ShardOf(1, 0)});
  EXPECT_FALSE(Spread()) << "layer groups, as many items everywhere";
}

}  // namespace
}  // namespace dovetail::compute
