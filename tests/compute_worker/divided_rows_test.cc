#include "compute_worker/divided_rows.h"

#include <utility>
#include <vector>

#include "compute_worker/row_spread.h"
#include "gmock/gmock.h"
#include "tests/compute_worker/placed_step.h"

namespace dovetail::compute {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Tensor = DividedRows::Tensor;

constexpr int64_t kHead = 8 * 2;  // bytes of a head of SmallSpec

class DividedRowsTest : public PlacedStepTest {
 protected:
  using PlacedStepTest::PlacedStepTest;
  absl::Status Divide() {
    return WhileItRuns([this] { return DivideRows(core_, kFirst, divided_); });
  }
  // tensor_at, tensor_step, payload_at, payload_step, rows, row_bytes
  static std::vector<int64_t> Of(const DividedRows::Copy& c) {
    return {c.tensor_at, c.tensor_step, c.payload_at, c.payload_step, c.rows, c.row_bytes};
  }

  DividedRows divided_;
};

TEST_F(DividedRowsTest, HeadsOfARowGoToTheirWorkersAndComeBackToTheirPlace) {
  Add(1, {ShardOf(0, 0), ShardOf(1, 0)}, 70);  // row 0, whole
  Add(2, {ShardOf(0, 0, {0, 1}), ShardOf(0, 1, {1, 2}), ShardOf(1, 1)}, 5);
  ASSERT_TRUE(Divide().ok());
  const DividedRows::Group& full = divided_.groups[0];
  EXPECT_THAT(full.parts, ElementsAre(0, 1));
  ASSERT_EQ(full.leaving.size(), 9u);
  // Worker 0: four query heads of the first row, then two of each of the others.
  EXPECT_EQ(full.leaving[0].tensor, Tensor::kQuery);
  EXPECT_THAT(Of(full.leaving[0]), ElementsAre(0, 4 * kHead, 0, 4 * kHead, 1, 4 * kHead));
  EXPECT_THAT(Of(full.leaving[1]), ElementsAre(4 * kHead, 4 * kHead, 4 * kHead, 2 * kHead, 2, 2 * kHead));
  EXPECT_EQ(full.leaving[2].tensor, Tensor::kKey);
  EXPECT_THAT(Of(full.leaving[3]), ElementsAre(2 * kHead, 2 * kHead, 2 * kHead, kHead, 2, kHead));
  EXPECT_EQ(full.leaving[5].tensor, Tensor::kValue);
  EXPECT_THAT(Of(full.leaving[5]), ElementsAre(2 * kHead, 2 * kHead, 6 * kHead, kHead, 2, kHead))
      << "behind two heads of k and v of the first row, and two of k";
  // Worker 1: the last two query heads and the last KV head.
  EXPECT_EQ(full.leaving[6].part, 1);
  EXPECT_THAT(Of(full.leaving[6]), ElementsAre(6 * kHead, 4 * kHead, 0, 2 * kHead, 2, 2 * kHead));
  EXPECT_THAT(Of(full.leaving[7]), ElementsAre(3 * kHead, 2 * kHead, 0, kHead, 2, kHead));
  ASSERT_EQ(full.arriving.size(), 3u);
  EXPECT_EQ(full.arriving[2].part, 1);
  EXPECT_THAT(Of(full.arriving[2]), ElementsAre(6 * kHead, 4 * kHead, 0, 2 * kHead, 2, 2 * kHead));
  const DividedRows::Group& windowed = divided_.groups[1];
  EXPECT_THAT(windowed.parts, ElementsAre(0, 1)) << "the second sequence lies on worker 1 here";
  EXPECT_THAT(Of(windowed.leaving[3]), ElementsAre(4 * kHead, 4 * kHead, 0, 4 * kHead, 2, 4 * kHead));
}

TEST_F(DividedRowsTest, RowsOfSequencesThatAreDividedAlikeAreOneCopy) {
  for (int i = 0; i < 5; ++i)
    Add(1, {ShardOf(0, 0, {0, 1}), ShardOf(0, 1, {1, 2}), ShardOf(1, 0, {0, 1}), ShardOf(1, 1, {1, 2})}, 70 + i);
  ASSERT_TRUE(Divide().ok());
  for (const DividedRows::Group& group : divided_.groups) {
    EXPECT_EQ(group.leaving.size(), 6u) << "q, k and v of two workers";
    EXPECT_EQ(group.arriving.size(), 2u);
    for (const DividedRows::Copy& copy : group.leaving) EXPECT_EQ(copy.rows, 5);
  }
}

TEST_F(DividedRowsTest, AWorkerWithoutRowsInALayerGroupHasNoPartInIt) {
  Add(1, {ShardOf(0, 0, {0, 1}), ShardOf(0, 1, {1, 2}), ShardOf(1, 2)}, 70);
  ASSERT_TRUE(Divide().ok());
  EXPECT_THAT(divided_.groups[0].parts, ElementsAre(0, 1));
  EXPECT_THAT(divided_.groups[1].parts, ElementsAre(2));
}

// Worker 0 has the first and the third shard of a sequence, worker 1 the second and, with the new token, the last.
TEST_F(DividedRowsTest, TokenShardsShareQAndTheirPartialResultsAreJoinedInTheOrderOfTokens) {
  Add(1, {ShardOf(0, 0), ShardOf(1, 0)}, 20);  // row 0, whole
  Add(1,
      {ShardOf(0, 0, {0, 2}, {0, 64}), ShardOf(0, 1, {0, 2}, {64, 128}), ShardOf(0, 0, {0, 2}, {128, 192}),
       ShardOf(0, 1, {0, 2}, {192, proto::kOpenEnd}), ShardOf(1, 1)},
      200);
  ASSERT_TRUE(Divide().ok());
  const DividedRows::Group& full = divided_.groups[0];
  ASSERT_EQ(full.leaving.size(), 6u)
      << "q, k and v of row 0; q of row 1 once a worker, k and v where they are appended";
  EXPECT_THAT(Of(full.leaving[0]), ElementsAre(0, 4 * kHead, 0, 4 * kHead, 2, 4 * kHead)) << "q of both, one copy";
  EXPECT_EQ(full.leaving[3].part, 1);
  EXPECT_THAT(Of(full.leaving[3]), ElementsAre(4 * kHead, 4 * kHead, 0, 4 * kHead, 1, 4 * kHead));
  EXPECT_THAT(Of(full.leaving[4]), ElementsAre(2 * kHead, 2 * kHead, 0, 2 * kHead, 1, 2 * kHead));
  EXPECT_EQ(full.arriving.size(), 1u) << "o of row 0";
  ASSERT_EQ(full.joins.size(), 1u);
  const DividedRows::Join& join = full.joins[0];
  EXPECT_EQ(join.o_at, 4 * kHead);
  EXPECT_EQ(join.first_head, 0);
  EXPECT_EQ(join.heads, 4);
  EXPECT_EQ(join.rows, 1);
  EXPECT_EQ(full.joined_rows_and_heads, 4);
  std::vector<std::pair<int, Position>> order;
  for (const DividedRows::Partial& partial : join.partials) order.emplace_back(partial.part, partial.begin);
  EXPECT_THAT(order, ElementsAre(std::pair(0, 0), std::pair(1, 64), std::pair(0, 128), std::pair(1, 192)));
  constexpr int64_t kRow = 4 * 8 * 4;  // o of a row in f32
  EXPECT_EQ(join.partials[0].o_at, 256) << "behind o of row 0";
  EXPECT_EQ(join.partials[2].o_at, 256 + kRow);
  EXPECT_EQ(join.partials[0].ml_at, 512);
  EXPECT_EQ(join.partials[2].ml_at, 512 + 4 * 8);
  EXPECT_EQ(join.partials[1].o_at, 0) << "worker 1 answers nothing else";
  EXPECT_THAT(divided_.answer_bytes, ElementsAre(512 + 2 * 4 * 8, 256 + 2 * 4 * 8));
}

// Of a prompt over two shards, the second one answers the rows that see it.
TEST_F(DividedRowsTest, AShardAnswersTheRowsFromItsFirstTokenOn) {
  Add(10, {ShardOf(0, 0, {0, 2}, {0, 64}), ShardOf(0, 0, {0, 2}, {64, proto::kOpenEnd}), ShardOf(1, 1)}, 60);
  ASSERT_TRUE(Divide().ok());
  const DividedRows::Group& full = divided_.groups[0];
  EXPECT_THAT(Of(full.leaving[0]), ElementsAre(0, 4 * kHead, 0, 4 * kHead, 10, 4 * kHead)) << "q for both shards";
  ASSERT_EQ(full.joins.size(), 1u);
  EXPECT_EQ(full.joins[0].rows, 10);
  EXPECT_EQ(full.joins[0].partials[1].first_row, 4);
  EXPECT_EQ(full.joins[0].partials[1].rows, 6);
  EXPECT_EQ(divided_.query_bytes[0], 10 * 4 * kHead);
}

TEST_F(DividedRowsTest, WhatCannotCrossIsSaid) {
  Add(20, {ShardOf(0, 0, {0, 1}), ShardOf(0, 1, {1, 2}), ShardOf(1, 2)});
  EXPECT_THAT(Divide().message(), HasSubstr("a prompt of a step with divided sequences is attended"));
}

// Layer group 1 is a linear state of 2 heads, each token of which brings a decay and a rate.
class LinearRowsTest : public DividedRowsTest {
 protected:
  static constexpr int64_t kGates = 2 * 4;  // bytes of a head

  LinearRowsTest() : DividedRowsTest(WithStates(), /*prompt_blocks=*/0) {}
  static proto::AttentionTable WithStates() {
    proto::LinearSpec state;
    state.heads = 2;
    state.key_dim = state.value_dim = 8;
    state.delta = state.token_decay = state.token_rate = true;
    return *proto::AttentionTable::Build({SmallSpec(), state}, {{}, {}});
  }
};

TEST_F(LinearRowsTest, GatesGoWithTheHeadsOfTheirStateBehindItsValues) {
  Add(1, {ShardOf(0, 0), ShardOf(1, 0)}, 70);  // row 0, whole
  Add(2, {ShardOf(0, 0), ShardOf(1, 0, {0, 1}), ShardOf(1, 1, {1, 2})}, 5);
  ASSERT_TRUE(Divide().ok());
  const DividedRows::Group& states = divided_.groups[1];
  EXPECT_THAT(states.parts, ElementsAre(0, 1));
  ASSERT_EQ(states.leaving.size(), 12u) << "q, k, v and gates: two copies to worker 0, one to worker 1";
  EXPECT_THAT(Of(states.leaving[0]), ElementsAre(0, 2 * kHead, 0, 2 * kHead, 1, 2 * kHead)) << "q of a state's heads";
  EXPECT_EQ(states.leaving[6].tensor, Tensor::kGates);
  EXPECT_THAT(Of(states.leaving[6]), ElementsAre(0, 2 * kGates, 8 * kHead, 2 * kGates, 1, 2 * kGates));
  EXPECT_THAT(Of(states.leaving[7]), ElementsAre(2 * kGates, 2 * kGates, 8 * kHead + 2 * kGates, kGates, 2, kGates));
  EXPECT_EQ(states.leaving[11].part, 1);
  EXPECT_THAT(Of(states.leaving[11]), ElementsAre(3 * kGates, 2 * kGates, 4 * kHead, kGates, 2, kGates));
  ASSERT_EQ(states.arriving.size(), 3u);
  EXPECT_THAT(Of(states.arriving[2]), ElementsAre(3 * kHead, 2 * kHead, 0, kHead, 2, kHead));
}

TEST_F(LinearRowsTest, ManyNewTokensOfASequenceDoNotCross) {
  Add(16, {ShardOf(0, 0), ShardOf(1, 0)});
  EXPECT_TRUE(Divide().ok());
  Add(17, {ShardOf(0, 0), ShardOf(1, 0)});
  EXPECT_THAT(Divide().message(), HasSubstr("more than 16 new tokens for linear states"));
}

// Where both workers share a GPU they are whole rows of the step's tensors, and gates behind them.
TEST_F(LinearRowsTest, WholeSequencesAreSpreadOnOneGpuButCrossBetweenGpusAsDividedOnesDo) {
  RowSpread spread;
  for (const bool between : {false, true}) {
    Add(1, {ShardOf(0, 0), ShardOf(1, 0)}, 70);
    EXPECT_TRUE(WhileItRuns([&] {
      return between ? CrossesAsDivided(core_, kFirst, spread) : SpreadRows(core_, kFirst, spread);
    })) << between;
  }
}

}  // namespace
}  // namespace dovetail::compute
