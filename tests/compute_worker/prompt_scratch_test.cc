#include "compute_worker/core/prompt_scratch.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

// A scratch that holds what it said it holds, never gives a block to two, and can always do without.

namespace dovetail::compute {
namespace {

proto::AttentionTable Table() {
  proto::SoftmaxSpec spec{.query_heads = 4, .kv_heads = 2, .key_dim = 8, .value_dim = 8, .scale = 1};
  proto::SoftmaxSpec other = spec;
  other.kv_heads = 1;
  return *proto::AttentionTable::Build({spec, other, spec});  // 5 blocks for 64 tokens, 2 of one op
}

constexpr SequenceId kOne(1), kTwo(2);

TEST(PromptScratch, APromptsPartsAreAttendedFromItsBeginning) {
  PromptScratch scratch(Table(), 100);
  const PromptScratch::Part* part = scratch.Begin(kOne, 0, 100, /*more=*/true);
  ASSERT_NE(part, nullptr);
  EXPECT_EQ(part->begin, 0);
  ASSERT_EQ(part->segments.size(), 2u);
  std::set<uint32_t> blocks;
  for (const auto& segment : part->segments) {
    EXPECT_FALSE(segment.of_one_op);
    for (const auto& [op, heads] : {std::pair{0, 2}, {1, 1}, {2, 2}})
      for (int head = 0; head < heads; ++head) EXPECT_TRUE(blocks.insert(scratch.BlockOf(segment, op, head)).second);
  }
  scratch.End(kOne, true, 100);
  part = scratch.Begin(kOne, 100, 60, /*more=*/false);  // goes on inside a segment
  ASSERT_NE(part, nullptr);
  EXPECT_EQ(part->begin, 0);
  ASSERT_EQ(part->segments.size(), 3u);
  EXPECT_FALSE(part->segments[1].of_one_op) << "holds tokens of the part before";
  EXPECT_TRUE(part->segments[2].of_one_op) << "nothing follows";
  EXPECT_EQ(scratch.BlockOf(part->segments[2], 0, 1), scratch.BlockOf(part->segments[2], 2, 1));
  scratch.End(kOne, true, 160);
  EXPECT_EQ(scratch.free_blocks(), 100u) << "a prompt that is done leaves nothing behind";
}

TEST(PromptScratch, APrefixThatLiesElsewhereStaysThere) {
  PromptScratch scratch(Table(), 100);
  const PromptScratch::Part* part = scratch.Begin(kOne, 192, 30, true);
  ASSERT_NE(part, nullptr);
  EXPECT_EQ(part->begin, 192);
  EXPECT_EQ(scratch.Begin(kTwo, 200, 30, true), nullptr) << "the segment that is open is elsewhere";
}

TEST(PromptScratch, WhatIsGatheredFillsTheGapBeforeTheStep) {
  PromptScratch scratch(Table(), 100);
  EXPECT_EQ(scratch.FirstMissing(kOne, 200, 200), 0);
  const PromptScratch::Part* part =
      scratch.BeginGathering(kOne, {.from = 200, .ctx_len = 200, .q_len = 30, .more = true});
  ASSERT_NE(part, nullptr) << "inside a segment";
  EXPECT_EQ(part->begin, 0);
  EXPECT_EQ(part->segments.size(), 4u);
  scratch.End(kOne, true, 230);
  EXPECT_EQ(scratch.FirstMissing(kOne, 230, 230), 230) << "the next step has all";
  EXPECT_EQ(scratch.FirstMissing(kOne, 400, 400), 230);
  part = scratch.BeginGathering(kOne, {.from = 400, .ctx_len = 400, .q_len = 10, .more = true});
  ASSERT_NE(part, nullptr);
  EXPECT_EQ(part->segments.size(), 7u);
  scratch.End(kOne, false, 410);
  EXPECT_EQ(scratch.FirstMissing(kOne, 400, 400), 230) << "what came for a step that failed may not be whole";
}

// Of ops with a window no more is gathered than the step at hand sees.
TEST(PromptScratch, AStepBeforeTheOneForWhichTokensWereGatheredFindsNothing) {
  PromptScratch scratch(Table(), 100);
  const auto gather = [&](Position at) {
    return scratch.BeginGathering(kOne, {.from = at, .ctx_len = at, .q_len = 64, .more = true});
  };
  ASSERT_NE(gather(256), nullptr);
  scratch.End(kOne, true, 320);
  EXPECT_EQ(scratch.FirstMissing(kOne, 320, 320), 320);
  EXPECT_EQ(scratch.FirstMissing(kOne, 128, 128), 0) << "tokens that its windows see may not be here";
  ASSERT_NE(gather(128), nullptr);
  scratch.End(kOne, true, 192);
  EXPECT_EQ(scratch.FirstMissing(kOne, 192, 192), 192) << "it was gathered anew";
  const PromptScratch::Part* part = scratch.Begin(kOne, 64, 64, true);
  ASSERT_NE(part, nullptr);
  EXPECT_EQ(part->begin, 64) << "what comes before is asked about";
}

TEST(PromptScratch, TokensOfOtherRanksArePutInBehindWhatIsHeld) {
  PromptScratch scratch(Table(), 100);
  scratch.Begin(kOne, 0, 128, true);
  scratch.End(kOne, true, 128);
  EXPECT_EQ(scratch.FirstMissing(kOne, 200, 320), 128);
  const PromptScratch::Part* part =
      scratch.BeginGathering(kOne, {.from = 200, .ctx_len = 320, .q_len = 64, .more = true});
  ASSERT_NE(part, nullptr);
  EXPECT_EQ(part->begin, 0);
  EXPECT_EQ(part->segments.size(), 6u);
  scratch.End(kOne, true, 384);
  part = scratch.BeginGathering(kOne, {.begin = 64, .from = 384, .ctx_len = 384, .q_len = 64, .more = true});
  EXPECT_EQ(part->begin, 0) << "something is held";
  scratch.Drop(kOne);
  part = scratch.BeginGathering(kOne, {.begin = 64, .from = 100, .ctx_len = 192, .q_len = 64, .more = true});
  ASSERT_NE(part, nullptr);
  EXPECT_EQ(part->begin, 64);
  EXPECT_EQ(part->segments.size(), 3u);
  EXPECT_EQ(scratch.FirstMissing(kOne, 100, 192), 64);
}

TEST(PromptScratch, WhatAStepThatFailedWroteAnewIsNotTakenForWhatWasThereBefore) {
  PromptScratch scratch(Table(), 100);
  scratch.Begin(kOne, 0, 192, true);
  scratch.End(kOne, true, 192);
  scratch.Begin(kOne, 64, 64, true);  // begins again from an earlier token
  scratch.End(kOne, false, 128);
  EXPECT_EQ(scratch.FirstMissing(kOne, 192, 192), 64);
  const PromptScratch::Part* part = scratch.Begin(kOne, 192, 64, true);
  ASSERT_NE(part, nullptr);
  EXPECT_EQ(part->begin, 192) << "tokens 64 to 191 are not here any more";
}

TEST(PromptScratch, APrefixThatDoesNotFitIsNotGathered) {
  PromptScratch scratch(Table(), 20);  // 4 segments, or 10 of one op
  EXPECT_NE(scratch.BeginGathering(kOne, {.from = 512, .ctx_len = 512, .q_len = 100, .more = true}), nullptr)
      << "its blocks serve one op after the other";
  scratch.End(kOne, true, 612);
  EXPECT_EQ(scratch.FirstMissing(kOne, 612, 612), 0);
  EXPECT_EQ(scratch.BeginGathering(kOne, {.from = 640, .ctx_len = 640, .q_len = 100, .more = true}), nullptr);
  EXPECT_EQ(scratch.free_blocks(), 20u);
}

TEST(PromptScratch, AFailedStepIsRepeatedOverWhatWasThere) {
  PromptScratch scratch(Table(), 100);
  scratch.Begin(kOne, 0, 64, true);
  scratch.End(kOne, true, 64);
  scratch.Begin(kOne, 64, 64, true);
  scratch.End(kOne, false, 128);
  EXPECT_EQ(scratch.Begin(kOne, 64, 64, true)->begin, 0);
  scratch.End(kOne, false, 128);
  EXPECT_EQ(scratch.Begin(kOne, 128, 64, true)->begin, 128) << "another worker repeated it: what is here is not known";
}

TEST(PromptScratch, WhatDoesNotFitGoesToAttentionWorkers) {
  PromptScratch scratch(Table(), 20);  // 4 segments
  scratch.Begin(kOne, 0, 192, true);
  scratch.End(kOne, true, 192);
  const PromptScratch::Part* part = scratch.Begin(kOne, 192, 128, true);  // 2 more need 10 blocks, 5 are free
  ASSERT_NE(part, nullptr);
  EXPECT_EQ(part->begin, 0);
  EXPECT_TRUE(part->segments.back().of_one_op) << "4 blocks do for one op at a time";
  scratch.End(kOne, true, 320);
  part = scratch.Begin(kOne, 320, 640, true);
  ASSERT_NE(part, nullptr);
  EXPECT_EQ(part->begin, 320) << "the earlier parts are attended where they live";
  scratch.End(kOne, true, 960);
  EXPECT_EQ(scratch.Begin(kOne, 960, 704, true), nullptr) << "11 segments of 2 blocks";
  EXPECT_EQ(scratch.free_blocks(), 20u);
  PromptScratch none(Table(), 0);
  EXPECT_EQ(none.Begin(kOne, 0, 64, true), nullptr);
}

TEST(PromptScratch, WhoWasUsedLongestAgoMakesRoomUnlessAStepUsesIt) {
  PromptScratch scratch(Table(), 20);
  scratch.Begin(kOne, 0, 128, true);
  scratch.End(kOne, true, 128);
  scratch.Begin(kTwo, 0, 128, true);
  EXPECT_NE(scratch.Begin(SequenceId(3), 0, 128, true), nullptr);
  EXPECT_EQ(scratch.Begin(SequenceId(4), 0, 64, true), nullptr) << "two are in steps";
  scratch.End(kTwo, true, 128);
  EXPECT_EQ(scratch.Begin(kTwo, 128, 64, false)->begin, 128) << "its own earlier parts went";
}

TEST(PromptScratch, ThereIsRoomForWhatOtherRanksGiveBackIfItFitsForAllOps) {
  PromptScratch scratch(Table(), 30);  // of 6 segments
  const GatherStep step{.ctx_len = 0, .q_len = 64, .more = true, .room_to = 6 * 64};
  const PromptScratch::Part* part = scratch.BeginGathering(kOne, step);
  ASSERT_NE(part, nullptr);
  EXPECT_TRUE(part->HasRoomTo(6 * 64));
  EXPECT_FALSE(part->HasRoomTo(6 * 64 + 1));
  scratch.End(kOne, true, 64);
  EXPECT_EQ(scratch.FirstMissing(kOne, 384, 384), 64);
  scratch.Extend(kOne, 300, 384);
  EXPECT_EQ(scratch.FirstMissing(kOne, 384, 384), 300);
  EXPECT_EQ(scratch.FirstMissing(kOne, 200, 383), 0) << "ops with windows have what a step from 384 on sees";
  scratch.Extend(kOne, 200, 384);
  EXPECT_EQ(scratch.FirstMissing(kOne, 384, 384), 300) << "it had more";
  ASSERT_NE(scratch.Begin(kTwo, 0, 64, true), nullptr);
  EXPECT_EQ(scratch.Find(kOne), nullptr) << "a cache";
  scratch.Extend(kOne, 384, 384);
  EXPECT_EQ(scratch.FirstMissing(kOne, 384, 384), 0);
  EXPECT_NE(scratch.Find(kTwo), nullptr);
}

// What is taken for them is not taken from a step, and nothing goes for a room that is too small all the same.
TEST(PromptScratch, WithoutRoomForWhatOtherRanksGiveBackThereIsRoomForTheStep) {
  PromptScratch scratch(Table(), 30);
  ASSERT_NE(scratch.Begin(kTwo, 0, 64, true), nullptr);
  scratch.End(kTwo, true, 64);
  const GatherStep step{.ctx_len = 0, .q_len = 64, .more = true, .room_to = 7 * 64};
  const PromptScratch::Part* part = scratch.BeginGathering(kOne, step);
  ASSERT_NE(part, nullptr);
  EXPECT_FALSE(part->HasRoomTo(65));
  EXPECT_FALSE(part->segments[0].of_one_op);
  EXPECT_NE(scratch.Find(kTwo), nullptr);
}

TEST(PromptScratch, NoBlockIsEverInTwoPlaces) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 200; ++round) {
    const uint32_t capacity = static_cast<uint32_t>(random() % 60);
    PromptScratch scratch(Table(), capacity);
    std::map<SequenceId, const PromptScratch::Part*> running;
    std::map<SequenceId, Position> at;
    for (int i = 0; i < 60; ++i) {
      const SequenceId id(random() % 5);
      if (running.contains(id)) {
        const Position end = at[id] + 16;
        scratch.End(id, random() % 4 != 0, end);
        at[id] = random() % 3 == 0 ? 64 * static_cast<Position>(random() % 4) : end;
        running.erase(id);
      } else if (const auto* part = scratch.Begin(id, at[id], 16, random() % 2 == 0)) {
        running[id] = part;
        EXPECT_EQ(part->begin % kSegmentTokens, 0);
        EXPECT_LE(part->begin, at[id]);
        EXPECT_GE(part->begin + 64 * static_cast<Position>(part->segments.size()), at[id] + 16);
      }
      std::set<uint32_t> used;
      for (const auto& [other, part] : running)
        for (const auto& segment : part->segments)
          for (const uint32_t block : segment.blocks) {
            EXPECT_LT(block, capacity);
            EXPECT_TRUE(used.insert(block).second);
          }
      EXPECT_LE(used.size() + scratch.free_blocks(), capacity);
    }
  }
}

}  // namespace
}  // namespace dovetail::compute
