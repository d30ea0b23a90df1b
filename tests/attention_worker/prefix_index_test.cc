#include "attention_worker/core/prefix_index.h"

#include <vector>

#include "gtest/gtest.h"

namespace dovetail::attention {
namespace {

PrefixKey Key(uint64_t content) { return PrefixKey{{content, 1}, 0, 0, 2}; }

class PrefixIndexTest : public ::testing::Test {
 protected:
  // A set of 2 blocks, findable under `content`, that no sequence uses any more.
  BlockSetId Cached(uint64_t content) {
    const BlockSetId set = pool_.Allocate(2);
    EXPECT_TRUE(index_.Insert(Key(content), set));
    index_.Release(set);
    return set;
  }

  BlockPool pool_{8};
  PrefixIndex index_{pool_};
};

TEST_F(PrefixIndexTest, FindsASetByItsWholeKeyOnly) {
  const BlockSetId set = Cached(5);
  EXPECT_EQ(index_.Find(Key(5)), set);
  for (const PrefixKey& other : {PrefixKey{{5, 2}, 0, 0, 2}, PrefixKey{{6, 1}, 0, 0, 2}, PrefixKey{{5, 1}, 1, 0, 2},
                                 PrefixKey{{5, 1}, 0, 1, 2}, PrefixKey{{5, 1}, 0, 0, 1}})
    EXPECT_EQ(index_.Find(other), kNoBlockSet) << "another hash, layer group or head range is other content";
}

TEST_F(PrefixIndexTest, TheFirstSetOfAContentStaysAndALaterOneIsAnonymous) {
  const BlockSetId first = Cached(5);
  const BlockSetId second = pool_.Allocate(2);
  EXPECT_FALSE(index_.Insert(Key(5), second));
  EXPECT_FALSE(index_.Insert(Key(6), first)) << "a set has one name";
  index_.Release(second);
  EXPECT_EQ(index_.Find(Key(5)), first);
  EXPECT_EQ(pool_.free_blocks(), 6u) << "the anonymous set was freed at once";
}

TEST_F(PrefixIndexTest, AnUnusedSetCanBeEvictedAndOneInUseCannot) {
  const BlockSetId set = Cached(5);
  EXPECT_EQ(index_.evictable_blocks(), 2u);
  index_.Acquire(set);
  EXPECT_EQ(index_.evictable_blocks(), 0u);
  EXPECT_FALSE(index_.MakeRoom(7)) << "6 are free";
  index_.Release(set);
  EXPECT_TRUE(index_.MakeRoom(7));
  EXPECT_EQ(index_.Find(Key(5)), kNoBlockSet);
  EXPECT_EQ(pool_.free_blocks(), 8u);
  EXPECT_EQ(index_.size(), 0u);
}

TEST_F(PrefixIndexTest, KeepsWhatBecomesFindableAndWhatCeasesToBe) {
  Cached(1);
  EXPECT_FALSE(index_.has_changes()) << "they are not kept yet";
  index_.KeepChanges();
  const BlockSetId set = Cached(2);
  Cached(3), Cached(4);
  EXPECT_FALSE(index_.Insert(Key(2), set)) << "it is known";
  EXPECT_TRUE(index_.MakeRoom(2));  // evicts 1
  index_.Acquire(set);
  index_.Forget(set);
  std::vector<std::pair<uint64_t, bool>> changes;
  for (const PrefixIndex::Change& change : index_.TakeChanges())
    changes.emplace_back(change.key.hash[0], change.findable);
  const std::vector<std::pair<uint64_t, bool>> expected = {{2, true}, {3, true}, {4, true}, {1, false}, {2, false}};
  EXPECT_EQ(changes, expected);
  EXPECT_FALSE(index_.has_changes());
}

TEST_F(PrefixIndexTest, EvictsTheLeastRecentlyUsedFirstAndNoMoreThanNeeded) {
  Cached(1), Cached(2), Cached(3);
  const BlockSetId one = index_.Find(Key(1));
  index_.Acquire(one);
  index_.Release(one);  // used again: now the newest
  EXPECT_TRUE(index_.MakeRoom(3));
  EXPECT_EQ(index_.Find(Key(2)), kNoBlockSet);
  EXPECT_NE(index_.Find(Key(3)), kNoBlockSet);
  EXPECT_TRUE(index_.MakeRoom(6));
  EXPECT_EQ(index_.Find(Key(3)), kNoBlockSet);
  EXPECT_NE(index_.Find(Key(1)), kNoBlockSet);
}

// As a fault in the bookkeeping would leave them.
TEST_F(PrefixIndexTest, SetsThatWereFreedThoughTheyHaveNamesAreNeitherFoundNorEvicted) {
  pool_.Free(Cached(1));
  pool_.Free(Cached(2));
  const BlockSetId other = pool_.Allocate(2);  // in the place of one of them
  EXPECT_EQ(index_.Find(Key(1)), kNoBlockSet);
  EXPECT_EQ(index_.evictable_blocks(), 2u) << "of content 2, as far as is known";
  EXPECT_FALSE(index_.MakeRoom(8));
  EXPECT_TRUE(pool_.Holds(other));
  EXPECT_EQ(index_.size(), 0u);
  EXPECT_EQ(index_.Find(Key(2)), kNoBlockSet);
  EXPECT_EQ(index_.Find(Key(1)), kNoBlockSet);
  Cached(1);
  EXPECT_NE(index_.Find(Key(1)), kNoBlockSet) << "the name is free again";
}

TEST_F(PrefixIndexTest, FreesNothingWhenEvenAllWouldNotDo) {
  Cached(1);
  EXPECT_FALSE(index_.MakeRoom(9));
  EXPECT_NE(index_.Find(Key(1)), kNoBlockSet);
}

TEST_F(PrefixIndexTest, ASetThatChangesCannotBeFoundAndIsFreedWhenItsUserEnds) {
  const BlockSetId set = Cached(5);
  index_.Acquire(set);
  index_.Forget(set);
  index_.Forget(set);
  EXPECT_EQ(index_.Find(Key(5)), kNoBlockSet);
  index_.Release(set);
  EXPECT_EQ(pool_.free_blocks(), 8u);
}

TEST_F(PrefixIndexTest, ASetSharedByTwoBecomesEvictableWithTheLastOfThem) {
  const BlockSetId set = Cached(5);
  index_.Acquire(set), index_.Acquire(set);
  index_.Release(set);
  EXPECT_EQ(index_.evictable_blocks(), 0u);
  index_.Release(set);
  EXPECT_EQ(index_.evictable_blocks(), 2u);
}

// Snapshots of linear states, 2 blocks each, in a pool of 32 of which they may keep 8 when no sequence uses them.
class Snapshots : public ::testing::Test {
 protected:
  BlockSetId InUse(uint64_t content, PrefixIndex::Content kind = PrefixIndex::Content::kSnapshot) {
    const BlockSetId set = pool_.Allocate(2);
    EXPECT_TRUE(index_.Insert(Key(content), set, kind));
    return set;
  }
  void Pass(uint64_t content) { index_.Release(InUse(content)); }
  void Use(uint64_t content) {
    const BlockSetId set = InUse(content);
    index_.MarkUseful(set);
    index_.Release(set);
  }
  bool Kept(uint64_t content) { return index_.Find(Key(content)) != kNoBlockSet; }

  BlockPool pool_{32};
  PrefixIndex index_{pool_, 8};
};

TEST_F(Snapshots, KeepNoMoreThanTheirBudgetHoweverMuchIsFree) {
  for (uint64_t content = 1; content <= 6; ++content) Pass(content);
  EXPECT_EQ(index_.evictable_snapshot_blocks(), 8u);
  EXPECT_EQ(pool_.free_blocks(), 24u);
  EXPECT_FALSE(Kept(1) || Kept(2)) << "the oldest went";
  EXPECT_TRUE(Kept(3) && Kept(6));
}

TEST_F(Snapshots, ThatAreInUseCountForNothing) {
  std::vector<BlockSetId> used;
  for (uint64_t content = 1; content <= 6; ++content) used.push_back(InUse(content));
  EXPECT_EQ(index_.evictable_snapshot_blocks(), 0u);
  EXPECT_TRUE(Kept(1));
  for (const BlockSetId set : used) index_.Release(set);
  EXPECT_EQ(index_.evictable_snapshot_blocks(), 8u);
}

TEST_F(Snapshots, ThatWereUsefulOutliveThoseThatWerePassed) {
  Use(1);
  for (uint64_t content = 2; content <= 20; ++content) Pass(content);
  EXPECT_TRUE(Kept(1)) << "a long prompt does not drive out what others begin from";
  EXPECT_TRUE(Kept(20) && Kept(18));
  EXPECT_FALSE(Kept(17));
}

TEST_F(Snapshots, LeaveAQuarterToThoseThatWerePassed) {
  Pass(1);
  for (uint64_t content = 2; content <= 9; ++content) Use(content);
  EXPECT_TRUE(Kept(1));
  EXPECT_TRUE(Kept(9) && Kept(7));
  EXPECT_FALSE(Kept(2) || Kept(6)) << "the useful ones give way to each other";
}

TEST_F(Snapshots, GoBeforeYoungerKeysAndValuesAndAfterOlderOnes) {
  index_.Release(InUse(100, PrefixIndex::Content::kTokens));
  Pass(1);
  index_.Release(InUse(101, PrefixIndex::Content::kTokens));
  ASSERT_TRUE(index_.MakeRoom(28));
  EXPECT_TRUE(!Kept(100) && Kept(1) && Kept(101));
  ASSERT_TRUE(index_.MakeRoom(30));
  EXPECT_TRUE(!Kept(1) && Kept(101));
  ASSERT_TRUE(index_.MakeRoom(32));
  EXPECT_EQ(index_.size(), 0u);
}

}  // namespace
}  // namespace dovetail::attention
