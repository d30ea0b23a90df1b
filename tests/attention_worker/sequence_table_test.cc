#include "attention_worker/core/sequence_table.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/attention_worker/sequence_fixture.h"

namespace dovetail::attention::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// FullTable: 4 KvBlocks for 64 tokens.

TEST(SequenceTable, TakesBlocksAsTokensComeAndGivesThemBackAtRelease) {
  Driver table(FullTable(), 16);
  EXPECT_THAT(table.Open(1), ElementsAre(0));
  EXPECT_EQ(table.in_use(), 0u);
  ASSERT_TRUE(table.Step(1, 0, 64).ok());
  EXPECT_EQ(table.in_use(), 4u);
  ASSERT_TRUE(table.Step(1, 64, 1).ok());
  EXPECT_EQ(table.in_use(), 8u);
  for (Position at = 65; at < 128; ++at) ASSERT_TRUE(table.Step(1, at, 1).ok());
  EXPECT_EQ(table.in_use(), 8u) << "the second block has room for 64";
  ASSERT_TRUE(table.Step(1, 128, 1).ok());
  EXPECT_EQ(table.in_use(), 12u);
  table.Release(1, 129);
  EXPECT_EQ(table.in_use(), 0u);
  EXPECT_EQ(table->status().sequences, 0u);
  EXPECT_EQ(table->pool().free_blocks(), 16u);
}

TEST(SequenceTable, CtxLenCommitsAndTruncates) {
  Driver table(FullTable(), 16);
  table.Open(1);
  ASSERT_TRUE(table.Step(1, 0, 200).ok());
  EXPECT_THAT(table.Sets(1), SizeIs(4));
  ASSERT_TRUE(table.Step(1, 70, 1).ok()) << "130 of the 200 tokens are forgotten";
  EXPECT_THAT(table.Sets(1), SizeIs(2));
  EXPECT_EQ(table.in_use(), 8u);
}

TEST(SequenceTable, ARepeatedStepFindsEverythingAsItWas) {
  Driver table(FullTable(), 16);
  table.Open(1);
  ASSERT_TRUE(table.Step(1, 0, 100).ok());
  ASSERT_TRUE(table.Step(1, 100, 60).ok());
  ASSERT_TRUE(table.Step(1, 100, 60).ok());
  EXPECT_EQ(table.in_use(), 12u);
  EXPECT_THAT(table.copies, IsEmpty());
}

TEST(SequenceTable, RefusesAPositionThatTheSequenceCannotStandAtAndChangesNothing) {
  Driver table(FullTable(), 16);
  table.Open(1);
  EXPECT_THAT(std::string(table.Step(1, 64, 1).message()),
              HasSubstr("ctx_len 64 of its first step is not one that was offered"));
  ASSERT_TRUE(table.Step(1, 0, 100).ok());
  ASSERT_TRUE(table.Step(1, 100, 10).ok());
  EXPECT_THAT(std::string(table.Step(1, 99, 1).message()), HasSubstr("sequence 1: ctx_len 99 is outside 100..110"));
  EXPECT_THAT(std::string(table.Step(1, 111, 1).message()), HasSubstr("ctx_len 111 is outside 100..110"));
  EXPECT_EQ(table->Find(SequenceId(1))->ctx_len, 100);
  EXPECT_EQ(table->Find(SequenceId(1))->q_len, 10);
  EXPECT_TRUE(table.Step(1, 110, 1).ok());
}

TEST(SequenceTable, RefusesShardsThatTheModelDoesNotHave) {
  Driver table(FullTable(), 16);
  EXPECT_THAT(std::string(table->Open({SequenceId(1), {ShardOf(1, {0, 1})}, {}}).status().message()),
              HasSubstr("the model has 1 layer groups"));
  EXPECT_THAT(std::string(table->Open({SequenceId(1), {ShardOf(0, {0, 3})}, {}}).status().message()),
              HasSubstr("the group has 2 KV heads"));
  EXPECT_THAT(std::string(table->Open({SequenceId(1), {}, {}}).status().message()), HasSubstr("shards"));
  EXPECT_EQ(table->Find(SequenceId(1)), nullptr);
}

TEST(SequenceTable, RefusesWhenFullAndTheRefusedStepCanBeRepeatedLater) {
  Driver table(FullTable(), 8);
  table.Open(1), table.Open(2);
  ASSERT_TRUE(table.Step(1, 0, 64).ok());
  ASSERT_TRUE(table.Step(2, 0, 64).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(table.Step(1, 64, 1)));
  EXPECT_EQ(table.in_use(), 8u);
  table.Release(2, 64);
  EXPECT_TRUE(table.Step(1, 64, 1).ok());
}

TEST(SequenceTable, OpeningAnOpenSequenceAgainReplacesIt) {
  Driver table(FullTable(), 16);
  table.Open(1);
  ASSERT_TRUE(table.Step(1, 0, 130).ok());
  table.Open(1);
  EXPECT_EQ(table.in_use(), 0u);
  EXPECT_EQ(table->status().sequences, 1u);
  EXPECT_TRUE(table.Step(1, 0, 10).ok());
}

// ---- fork ----

TEST(Fork, SharesEveryBlockAndCopiesTheOpenOneWhenItIsWritten) {
  Driver table(FullTable(), 32);
  table.Open(1);
  ASSERT_TRUE(table.Step(1, 0, 100).ok());
  ASSERT_TRUE(table->Fork({SequenceId(1), SequenceId(2), 100}).ok());
  EXPECT_EQ(table.in_use(), 8u) << "nothing is copied yet";
  EXPECT_EQ(table.Sets(1), table.Sets(2));

  ASSERT_TRUE(table.Step(2, 100, 1).ok());
  EXPECT_EQ(table.in_use(), 12u);
  EXPECT_THAT(table.copies, SizeIs(4)) << "the open block of 2 ops x 2 heads";
  EXPECT_EQ(table.Sets(1)[0], table.Sets(2)[0]) << "a full block is shared for good";
  EXPECT_NE(table.Sets(1)[1], table.Sets(2)[1]);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(table.copies[i].from, table->pool().blocks(table.Sets(1)[1])[i]);
    EXPECT_EQ(table.copies[i].to, table->pool().blocks(table.Sets(2)[1])[i]);
  }
  ASSERT_TRUE(table.Step(1, 100, 1).ok());
  EXPECT_THAT(table.copies, IsEmpty()) << "the parent has its block for itself again";
}

TEST(Fork, TheParentMayEndFirst) {
  Driver table(FullTable(), 32);
  table.Open(1);
  ASSERT_TRUE(table.Step(1, 0, 100).ok());
  ASSERT_TRUE(table->Fork({SequenceId(1), SequenceId(2), 100}).ok());
  table.Release(1, 100);
  EXPECT_EQ(table.in_use(), 8u);
  ASSERT_TRUE(table.Step(2, 100, 1).ok());
  EXPECT_THAT(table.copies, IsEmpty());
  table.Release(2, 101);
  EXPECT_EQ(table.in_use(), 0u);
}

TEST(Fork, AtAnEarlierPositionOfTheRunningStepLeavesTheRestBehind) {
  Driver table(FullTable(), 32);
  table.Open(1, Hashes(1, 3));
  ASSERT_TRUE(table.Step(1, 0, 200).ok());
  ASSERT_TRUE(table->Fork({SequenceId(1), SequenceId(2), 64}).ok());
  EXPECT_THAT(table.Sets(2), SizeIs(1));
  EXPECT_THAT(table->Find(SequenceId(2))->hashes, SizeIs(1)) << "what follows in the child has another name";
  EXPECT_TRUE(table.Step(2, 64, 1).ok());
}

// A compute worker sends such a worker nothing but the begin of the step, and waits for no answer.
TEST(Fork, WhereNoneOfTheTokensBelongsItDoesNotWaitForTheStepThatMadeThem) {
  Driver table(FullTable(), 32);
  ASSERT_TRUE(table->Open({SequenceId(1), {ShardOf(0, {0, 2}, {128, 256})}, Hashes(1, 1)}).ok());
  ASSERT_TRUE(table->Fork({SequenceId(1), SequenceId(2), 109}).ok()) << "the first step has not come";
  EXPECT_FALSE(table->Fork({SequenceId(1), SequenceId(3), 129}).ok()) << "token 128 belongs here";
  EXPECT_TRUE(table.Step(2, 109, 30).ok());
  EXPECT_THAT(table.Sets(2), SizeIs(1));
  EXPECT_TRUE(table.Step(1, 0, 109).ok()) << "late";
  EXPECT_TRUE(table.Step(1, 109, 1).ok());
  ASSERT_TRUE(table->Fork({SequenceId(1), SequenceId(4), 128}).ok()) << "nor for a step of decode";
  EXPECT_EQ(table->CheckInvariants(), absl::OkStatus());
}

TEST(Fork, NamesWhatItRefuses) {
  Driver table(FullTable(), 32);
  table.Open(1);
  EXPECT_THAT(std::string(table->Fork({SequenceId(9), SequenceId(2), 0}).status().message()),
              HasSubstr("sequence 9 is not open"));
  EXPECT_FALSE(table->Fork({SequenceId(1), SequenceId(2), 0}).ok()) << "not started: nothing to copy";
  ASSERT_TRUE(table.Step(1, 0, 10).ok());
  ASSERT_TRUE(table.Step(1, 10, 10).ok());
  for (const Position at : {9, 21})
    EXPECT_THAT(std::string(table->Fork({SequenceId(1), SequenceId(2), at}).status().message()),
                HasSubstr("holds 10 to 20 tokens"));
  EXPECT_THAT(std::string(table->Fork({SequenceId(1), SequenceId(1), 10}).status().message()),
              HasSubstr("its own child"));
  EXPECT_EQ(table->status().sequences, 1u);
}

TEST(Fork, AStepOfAllSharersNeedsOneCopyLessThanThereAreSharers) {
  Driver table(FullTable(), 12);  // 4 shared, room for two copies
  table.Open(1);
  ASSERT_TRUE(table.Step(1, 0, 10).ok());
  ASSERT_TRUE(table->Fork({SequenceId(1), SequenceId(2), 10}).ok());
  ASSERT_TRUE(table->Fork({SequenceId(1), SequenceId(3), 10}).ok());
  std::vector<SequenceTable::Growth> step;
  for (const uint64_t id : {1, 2, 3}) {
    ASSERT_TRUE(table->Commit(*table->Find(SequenceId(id)), 10, {}).ok());
    step.push_back(SequenceTable::Growth::OfStep(*table->Find(SequenceId(id)), 1));
  }
  EXPECT_EQ(table->BlocksToAppend(step), 8);
  EXPECT_EQ(table->BlocksToAppend(std::span(step).first(2)), 8) << "the third still holds the original";
  ASSERT_TRUE(table->MakeRoom(8));
  std::vector<BlockCopy> copies;
  for (const auto& growth : step) table->Append(growth, copies);
  EXPECT_THAT(copies, SizeIs(8));
  EXPECT_EQ(table.in_use(), 12u);
}

TEST(Fork, WhatAChildNamedIsNotFoundOnceTheParentWritesItAnew) {
  Driver table(FullTable(), 32);
  table.Open(1);
  ASSERT_TRUE(table.Step(1, 0, 20).ok());
  ASSERT_TRUE(table.Step(1, 20, 50).ok());
  ASSERT_TRUE(table->Fork({SequenceId(1), SequenceId(2), 70}).ok());
  table.Release(2, 70, Hashes(5, 1));
  ASSERT_THAT(table->Probe({0, WholeShards(FullTable()), Hashes(5, 1)}), ElementsAre(1, 0));
  ASSERT_TRUE(table.Step(1, 20, 60).ok()) << "the parent takes its last step back";
  EXPECT_THAT(table->Probe({0, WholeShards(FullTable()), Hashes(5, 1)}), ElementsAre(0));
}

// ---- prefix cache ----

TEST(PrefixCache, FullCommittedBlocksAreFoundAgain) {
  Driver table(FullTable(), 32);
  table.Cache(1, /*version=*/5, 150);
  EXPECT_EQ(table.in_use(), 0u);
  EXPECT_EQ(table.cached(), 8u) << "the open third block is not kept";
  EXPECT_THAT(table.Open(2, Hashes(5, 3)), ElementsAre(2, 1, 0));
  EXPECT_EQ(table.in_use(), 8u) << "taken over at once, so they cannot be evicted";
  EXPECT_EQ(table.cached(), 0u);
}

TEST(PrefixCache, ANameThatDiffersAnywhereBeforeIsAMiss) {
  Driver table(FullTable(), 32);
  table.Cache(1, 5, 128);
  EXPECT_THAT(table.Open(2, Hashes(6, 2)), ElementsAre(0)) << "another salt or text: another chain from the start";
  auto hashes = Hashes(5, 2);
  hashes[0] = Hashes(6, 1)[0];
  EXPECT_THAT(table.Open(3, hashes), ElementsAre(0)) << "a later block alone is of no use";
}

TEST(PrefixCache, AStartBelowTheHitGivesTheRestBack) {
  Driver table(FullTable(), 32);
  table.Cache(1, 5, 192);
  EXPECT_THAT(table.Open(2, Hashes(5, 3)), ElementsAre(3, 2, 1, 0));
  ASSERT_TRUE(table.Step(2, 64, 100).ok());
  EXPECT_EQ(table.in_use(), 4u + 8u);
  EXPECT_EQ(table.cached(), 8u) << "blocks 1 and 2 of the hit are findable still";
  EXPECT_THAT(table.Open(3, Hashes(5, 3)), ElementsAre(3, 2, 1, 0));
}

TEST(PrefixCache, BlocksGeneratedWithoutHashesAreNotKept) {
  Driver table(FullTable(), 32);
  table.Open(1);
  ASSERT_TRUE(table.Step(1, 0, 128).ok());
  table.Release(1, 128);
  EXPECT_EQ(table.cached(), 0u);
}

TEST(PrefixCache, TokensThatWereNotCommittedAreNotKept) {
  Driver table(FullTable(), 32);
  table.Open(1);
  ASSERT_TRUE(table.Step(1, 0, 128).ok());
  table.Release(1, 100, Hashes(5, 1));
  EXPECT_EQ(table.cached(), 4u);
  EXPECT_THAT(table.Open(2, Hashes(5, 2)), ElementsAre(1, 0));
}

// The scheduler names a prompt's blocks when it opens, and again in the steps that complete them.
TEST(PrefixCache, NamingBlocksAgainDoesNotGiveTheirNamesToLaterBlocks) {
  Driver table(FullTable(), 64);
  ASSERT_THAT(table.Open(1, Hashes(5, 2)), ElementsAre(0));
  ASSERT_TRUE(table.Step(1, 0, 128).ok());
  ASSERT_TRUE(table.Step(1, 128, 64, HashesBetween(5, 0, 2)).ok());
  ASSERT_TRUE(table.Step(1, 192, 64, HashesBetween(5, 2, 3)).ok());
  ASSERT_TRUE(table.Step(1, 256, 64, HashesBetween(5, 3, 4)).ok());
  ASSERT_TRUE(table.Step(1, 256, 64, HashesBetween(5, 3, 4)).ok()) << "a repeated step names them once more";
  const std::vector<BlockSetId> sets = table.Sets(1);
  table.Release(1, 320, HashesBetween(5, 4, 5));
  EXPECT_THAT(table.Open(2, Hashes(5, 5)), ElementsAre(5, 4, 3, 2, 1, 0));
  EXPECT_EQ(table.Sets(2), sets) << "block n of the text is found as block n";
}

TEST(PrefixCache, RefusesHashesThatLeaveBlocksOutOrContradict) {
  Driver table(FullTable(), 64);
  table.Open(1, Hashes(5, 1));
  ASSERT_TRUE(table.Step(1, 0, 200).ok());
  EXPECT_THAT(std::string(table.Step(1, 200, 1, HashesBetween(5, 2, 3)).message()), HasSubstr("the first 1 are known"));
  EXPECT_THAT(std::string(table.Step(1, 200, 1, Hashes(6, 3)).message()),
              HasSubstr("hash of block 0 is not the one given before"));
  EXPECT_THAT(std::string(table.Step(1, 200, 1, Hashes(5, 4)).message()), HasSubstr("4 hashes end at block 3"));
  EXPECT_EQ(table->Find(SequenceId(1))->ctx_len, 0) << "nothing was committed";
  EXPECT_TRUE(table.Step(1, 200, 1, HashesBetween(5, 0, 3)).ok());
}

TEST(PrefixCache, EvictsLeastRecentlyUsedAndTheEndOfAPrefixBeforeItsBeginning) {
  Driver table(FullTable(), 16);
  table.Cache(1, 5, 128);
  table.Cache(2, 6, 64);
  EXPECT_EQ(table.cached(), 12u);
  table.Open(3);
  ASSERT_TRUE(table.Step(3, 0, 128).ok()) << "4 blocks are free, 4 more are evicted";
  EXPECT_EQ(table.cached(), 8u);
  EXPECT_THAT(table.Open(4, Hashes(5, 2)), ElementsAre(1, 0)) << "the beginning of the oldest can still be used";
  EXPECT_THAT(table.Open(5, Hashes(6, 1)), ElementsAre(1, 0));
}

TEST(PrefixCache, TwoSequencesOfOneTextComputeItTwiceAndOneIsKept) {
  Driver table(FullTable(), 32);
  for (const uint64_t id : {1, 2}) {
    table.Open(id, Hashes(5, 1));
    ASSERT_TRUE(table.Step(id, 0, 64).ok());
  }
  EXPECT_EQ(table.in_use(), 8u);
  table.Release(1, 64, Hashes(5, 1));
  table.Release(2, 64, Hashes(5, 1));
  EXPECT_EQ(table.cached(), 4u);
  EXPECT_EQ(table->pool().free_blocks(), 28u);
}

TEST(PrefixCache, AHitIsTheMinimumOverTheShardsOfTheSequence) {
  Driver table(FullTable(), 64);
  const auto shards = std::vector<proto::Shard>{ShardOf(0, {0, 1}), ShardOf(0, {1, 2})};
  ASSERT_TRUE(table->Open({SequenceId(1), {shards[0]}, {}}).ok());
  ASSERT_TRUE(table.Step(1, 0, 192).ok());
  table.Release(1, 192, Hashes(5, 3));
  ASSERT_TRUE(table->Open({SequenceId(2), {shards[1]}, {}}).ok());
  ASSERT_TRUE(table.Step(2, 0, 64).ok());
  table.Release(2, 64, Hashes(5, 1));

  EXPECT_THAT((*table->Open({SequenceId(3), shards, Hashes(5, 3)}))->resumable, ElementsAre(1, 0));
  EXPECT_THAT(table.Open(4, Hashes(5, 3)), ElementsAre(0)) << "sets of both heads together are another content";
}

TEST(PrefixCache, AShardOfLaterTokensOffersWhatComesBeforeItToo) {
  Driver table(FullTable(), 64);
  const proto::Shard late = ShardOf(0, {0, 2}, {128, proto::kOpenEnd});
  ASSERT_TRUE(table->Open({SequenceId(1), {late}, {}}).ok());
  ASSERT_TRUE(table.Step(1, 0, 192).ok());
  EXPECT_EQ(table.in_use(), 4u) << "only its own range";
  table.Release(1, 192, Hashes(5, 3));
  EXPECT_THAT((*table->Open({SequenceId(2), {late}, Hashes(5, 4)}))->resumable, ElementsAre(3, 2, 1, 0));
}

// ---- probe and pin ----

TEST(Pin, KeepsAHitFromEvictionUntilItIsUnpinned) {
  Driver table(FullTable(), 12);
  table.Cache(1, 5, 128);
  EXPECT_THAT(table->Probe({0, WholeShards(FullTable()), Hashes(5, 2)}), ElementsAre(2, 1, 0));
  EXPECT_EQ(table.cached(), 8u) << "a probe alone holds nothing";
  EXPECT_THAT(table->Probe({77, WholeShards(FullTable()), Hashes(5, 1)}), ElementsAre(1, 0));
  EXPECT_EQ(table.in_use(), 4u);
  table.Open(2);
  EXPECT_TRUE(absl::IsResourceExhausted(table.Step(2, 0, 192)));
  ASSERT_TRUE(table.Step(2, 0, 128).ok());
  EXPECT_THAT(table->Probe({0, WholeShards(FullTable()), Hashes(5, 2)}), ElementsAre(1, 0));
  table->Unpin(77);
  table->Unpin(77);
  EXPECT_EQ(table.in_use(), 8u);
  EXPECT_EQ(table.cached(), 4u);
}

TEST(Pin, PinningAgainUnderOneIdReplacesThePin) {
  Driver table(FullTable(), 32);
  table.Cache(1, 5, 128);
  table.Cache(2, 6, 64);
  const auto shards = WholeShards(FullTable());
  table->Probe({9, shards, Hashes(5, 2)});
  EXPECT_EQ(table.in_use(), 8u);
  table->Probe({9, shards, Hashes(6, 1)});
  EXPECT_EQ(table.in_use(), 4u);
  table->Unpin(9);
  EXPECT_EQ(table.in_use(), 0u);
}

TEST(Pin, ThereIsAMostOfPins) {
  Driver table(FullTable(), 32);
  table.Cache(1, 5, 64);
  const auto shards = WholeShards(FullTable());
  for (uint64_t id = 1; id <= SequenceTable::kMaxPins; ++id) table->Probe({id, shards, {}});
  EXPECT_THAT(table->Probe({1u << 20, shards, Hashes(5, 1)}), ElementsAre(0))
      << "it cannot be kept, so it is not promised";
  EXPECT_THAT(table->Probe({3, shards, Hashes(5, 1)}), ElementsAre(1, 0)) << "one that is held may change";
  table->Unpin(4);
  EXPECT_THAT(table->Probe({1u << 20, shards, Hashes(5, 1)}), ElementsAre(1, 0));
}

TEST(Pin, OfShardsThatTheModelDoesNotHaveFindsNothing) {
  Driver table(FullTable(), 32);
  EXPECT_THAT(table->Probe({9, {ShardOf(4, {0, 1})}, Hashes(5, 1)}), ElementsAre(0));
}

// ---- windows. MixedTable: group 0 takes 4 KvBlocks for 64 tokens, group 1 (window 100) one. ----

TEST(Window, LayersFreeTheBlocksThatNoLaterTokenSees) {
  Driver table(MixedTable(), 64);
  table.Open(1);
  ASSERT_TRUE(table.Step(1, 0, 256).ok());
  EXPECT_EQ(table.in_use(), 4u * 5);
  ASSERT_TRUE(table.Step(1, 256, 1).ok());
  EXPECT_THAT(table.Sets(1, 1), SizeIs(5));
  EXPECT_EQ(table.Sets(1, 1)[0], kNoBlockSet);
  EXPECT_EQ(table.Sets(1, 1)[1], kNoBlockSet) << "token 256 sees 157..256";
  EXPECT_NE(table.Sets(1, 1)[2], kNoBlockSet);
  EXPECT_EQ(table.in_use(), 5u * 4 + 3);
}

TEST(Window, HoldsNoMoreThanTheWindowHoweverLongTheSequence) {
  const auto table_of_one = *proto::AttentionTable::Build({Spec(1, 100)});
  Driver table(table_of_one, 3);
  table.Open(1);
  for (Position at = 0; at < 5000; ++at) ASSERT_TRUE(table.Step(1, at, 1).ok()) << at;
  table.Release(1, 5000);
  EXPECT_EQ(table->pool().free_blocks(), 3u);
}

TEST(Window, AHitNeedsOnlyWhatItsFirstTokenSees) {
  Driver table(MixedTable(), 200);
  table.Open(1);
  ASSERT_TRUE(table.Step(1, 0, 640).ok());
  ASSERT_TRUE(table.Step(1, 640, 1, Hashes(5, 10)).ok());
  table.Release(1, 640);
  // Everything was indexed before the window left it, so all of it can be found while memory lasts.
  EXPECT_THAT(table.Open(2, Hashes(5, 10)), ElementsAre(10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
}

TEST(Window, BlocksBehindAHoleInTheHitAreGivenBackToo) {
  const auto windowed = *proto::AttentionTable::Build({Spec(1, 100)});
  Driver table(windowed, 8);
  table.Open(1);
  ASSERT_TRUE(table.Step(1, 0, 256).ok());
  table.Release(1, 256, Hashes(5, 4));                                             // LRU order: blocks 3, 2, 1, 0
  table->Probe({9, WholeShards(windowed), Hashes(5, 1)});                          // holds block 0
  table->Probe({10, {ShardOf(0, {0, 1}, {128, proto::kOpenEnd})}, Hashes(5, 4)});  // holds blocks 2 and 3
  ASSERT_TRUE(table->MakeRoom(5));                                                 // evicts block 1
  EXPECT_THAT(table.Open(2, Hashes(5, 4)), ElementsAre(4, 1, 0)) << "block 1 is missing, and 2 and 3 need it";
  table->Unpin(9), table->Unpin(10);
  EXPECT_EQ(table.in_use(), 3u);
  ASSERT_TRUE(table.Step(2, 256, 1).ok());
  EXPECT_THAT(table.Sets(2), ElementsAre(kNoBlockSet, kNoBlockSet, ::testing::Ne(kNoBlockSet),
                                         ::testing::Ne(kNoBlockSet), ::testing::Ne(kNoBlockSet)));
  EXPECT_EQ(table.in_use(), 3u);
}

// ---- token ranges ----

TEST(TokenRange, AShardTakesBlocksOnlyForItsOwnTokens) {
  Driver table(FullTable(), 64);
  const std::vector<proto::Shard> shards = {ShardOf(0, {0, 2}, {0, 128}), ShardOf(0, {0, 2}, {128, 192}),
                                            ShardOf(0, {0, 2}, {192, proto::kOpenEnd})};
  ASSERT_TRUE(table->Open({SequenceId(1), shards, {}}).ok());
  ASSERT_TRUE(table.Step(1, 0, 100).ok());
  EXPECT_THAT(table.Sets(1, 0), SizeIs(2));
  EXPECT_THAT(table.Sets(1, 1), IsEmpty());
  ASSERT_TRUE(table.Step(1, 100, 200).ok());
  EXPECT_THAT(table.Sets(1, 0), SizeIs(2));
  EXPECT_THAT(table.Sets(1, 1), SizeIs(1));
  EXPECT_THAT(table.Sets(1, 2), SizeIs(2));
  EXPECT_EQ(table.in_use(), 20u);
  ASSERT_TRUE(table.Step(1, 130, 1).ok()) << "truncation reaches into the middle shard";
  EXPECT_THAT(table.Sets(1, 1), SizeIs(1));
  EXPECT_THAT(table.Sets(1, 2), IsEmpty());
}

}  // namespace
}  // namespace dovetail::attention::testing
