#include "proto/state_blocks.h"

#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/step_layout.h"

namespace dovetail::proto {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

StateBlock Full(int64_t block) { return {block, 64}; }

// Two heads of which a state has 100 bytes, a token 10.
SoftmaxSpec State() {
  SoftmaxSpec spec;
  spec.query_heads = spec.kv_heads = 2;
  spec.key_dim = spec.value_dim = 4;
  spec.kv = DType::kF32;
  spec.gates = 1;
  spec.window = 1;
  spec.state_bytes = 100;
  spec.token_bytes = 10;
  return spec;
}

TEST(StateBlocks, AStepNeedsTheFullBlockBeforeItAndTheOpenOne) {
  EXPECT_THAT(StatesBefore(0), IsEmpty());
  EXPECT_THAT(StatesBefore(5), ElementsAre(StateBlock{0, 5}));
  EXPECT_THAT(StatesBefore(64), ElementsAre(Full(0)));
  EXPECT_THAT(StatesBefore(200), ElementsAre(Full(2), StateBlock{3, 8}));
}

TEST(StateBlocks, AStepLeavesItsEndAndSnapshots) {
  EXPECT_THAT(StatesLeft(0, 5), ElementsAre(StateBlock{0, 5}));
  EXPECT_THAT(StatesLeft(0, 130), ElementsAre(Full(1), StateBlock{2, 2}));
  EXPECT_THAT(StatesLeft(0, 1200),
              ElementsAre(Full(1), Full(3), Full(5), Full(7), Full(15), Full(17), StateBlock{18, 48}));
  EXPECT_THAT(StatesLeft(70, 700), ElementsAre(Full(1), Full(3), Full(5), Full(7), Full(9), StateBlock{10, 60}));
  EXPECT_THAT(StatesLeft(600, 700), ElementsAre(Full(9), StateBlock{10, 60})) << "block 9 was open";
}

TEST(StateBlocks, WhatTheNextStepNeedsIsLeftOrWasThere) {
  for (Position begin = 0; begin < 300; begin += 7)
    for (Position end = begin + 1; end < 900; end += 11) {
      const StateBlocks before = StatesBefore(begin), left = StatesLeft(begin, end);
      for (const StateBlock& block : StatesBefore(end)) {
        const bool there = std::find(left.begin(), left.end(), block) != left.end() ||
                           std::find(before.begin(), before.end(), block) != before.end();
        EXPECT_TRUE(there) << begin << ".." << end << ": block " << block.block;
      }
    }
}

TEST(StateBlocks, WhatIsHeldDuringAStepAreTheBlocksBeforeItAndThoseThatItLeaves) {
  for (Position begin = 0; begin < 1100; begin += 13)
    for (Position end = begin + 1; end < begin + 1500; end += 37) {
      std::set<int64_t> held;
      for (const StateBlock& block : StatesBefore(begin)) held.insert(block.block);
      for (const StateBlock& block : StatesLeft(begin, end)) held.insert(block.block);
      const Position cuts[] = {begin, end};
      ASSERT_EQ(StateBlocksHeld(cuts), static_cast<int64_t>(held.size())) << begin << ".." << end;
      ASSERT_LE(StateBlocksHeld(cuts), MostStateBlocks(static_cast<int>(end - begin))) << begin << ".." << end;
    }
  const Position steps[][2] = {{191, 703}, {191, 1215}, {959, 1089}};
  for (const auto& step : steps)
    EXPECT_EQ(StateBlocksHeld(step), MostStateBlocks(static_cast<int>(step[1] - step[0]))) << "no more than needed";
  const Position group[] = {512, 1024, 1600};
  EXPECT_EQ(StateBlocksHeld(group), 1 + 2 + 2) << "the one before, and two at each end, among them all snapshots";
  EXPECT_EQ(MostStateBlocks(65472), 4 + 128 + 2);
  EXPECT_EQ(MostStateBlocks(64), 3);
}

TEST(StateBlocks, BytesGrowByASnapshotEvery512Tokens) {
  const auto bytes = [](Position begin, Position end) { return BytesOf(StatesLeft(begin, end), State()); };
  EXPECT_EQ(bytes(0, 4096) - bytes(0, 2048), 4 * 100);
  EXPECT_EQ(bytes(8192, 16384), bytes(16384, 24576)) << "wherever a step begins";
}

TEST(StateLayout, StatesComeBeforeTheStepAndFollowAllElse) {
  StepLayout layout;
  layout.Add(0, 0, {0, 2}, {}, /*ctx_len=*/70, /*q_len=*/100, State(), {.states = StateExchange::kFetch});
  layout.Add(1, 0, {0, 2}, {}, 0, 64, State(), {.attend_end = 0, .states = StateExchange::kLeave});
  layout.Add(2, 0, {0, 2}, {}, 9, 3, State(), {.attend_end = 0});
  layout.Finish(State());
  ASSERT_EQ(layout.items.size(), 3u);
  EXPECT_TRUE(layout.with_states);
  EXPECT_TRUE(layout.asks());
  EXPECT_EQ(layout.query_bytes, 0) << "the third's go with its k and v";
  EXPECT_EQ(layout.before_bytes, 2 * (100 + 6 * 10)) << "only the first asks";
  const int64_t rows = 3 * 2 * 4 * 4;
  EXPECT_EQ(layout.items[2].query_offset, 0);
  EXPECT_EQ(layout.items[2].key_offset, rows);
  EXPECT_EQ(layout.items[2].value_offset, 2 * rows);
  EXPECT_EQ(layout.items[2].gate_offset, 3 * rows);
  EXPECT_EQ(layout.items[0].state_offset, 3 * rows + 3 * 2 * 4);
  EXPECT_EQ(layout.items[1].state_offset, layout.items[0].state_offset + 2 * (100 + 42 * 10));
  EXPECT_EQ(layout.key_value_bytes, layout.items[1].state_offset + 2 * 100);
  EXPECT_EQ(layout.partial_bytes, rows) << "whole on one worker: o itself, though softmax attention is done elsewhere";
}

TEST(StateLayout, AsksNothingWhereAllStatesAreKnown) {
  StepLayout layout;
  layout.Add(0, 0, {0, 2}, {}, 64, 64, State(), {.states = StateExchange::kLeave});
  layout.Finish(State());
  EXPECT_FALSE(layout.asks());
  EXPECT_EQ(layout.partial_bytes, 0);
  EXPECT_EQ(layout.key_value_bytes, 2 * 100);
}

}  // namespace
}  // namespace dovetail::proto
