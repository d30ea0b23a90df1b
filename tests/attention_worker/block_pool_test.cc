#include "attention_worker/core/block_pool.h"

#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dovetail::attention {
namespace {

using ::testing::ElementsAre;

TEST(BlockPool, HandsOutEveryBlockOnceAndThenNone) {
  BlockPool pool(7);
  std::set<KvBlockId> seen;
  for (int i = 0; i < 3; ++i) {
    const BlockSetId set = pool.Allocate(2);
    ASSERT_NE(set, kNoBlockSet);
    for (const KvBlockId block : pool.blocks(set))
      EXPECT_TRUE(seen.insert(block).second) << block << " was given out twice";
  }
  EXPECT_EQ(pool.free_blocks(), 1u);
  EXPECT_EQ(pool.Allocate(2), kNoBlockSet);
  EXPECT_EQ(pool.free_blocks(), 1u) << "a refused allocation takes nothing";
  EXPECT_NE(pool.Allocate(1), kNoBlockSet);
  EXPECT_EQ(pool.free_blocks(), 0u);
}

// So memory may be taken in the order of blocks, before it is used.
TEST(BlockPool, BlocksAreBegunInTheirOrderAndUsedAgainBeforeOthersAreBegun) {
  BlockPool pool(100);
  EXPECT_EQ(pool.begun(), 0u);
  const BlockSetId first = pool.Allocate(10);
  EXPECT_EQ(pool.begun(), 10u);
  EXPECT_NE(pool.Allocate(5), kNoBlockSet);
  EXPECT_EQ(pool.begun(), 15u);
  pool.DropReference(first);
  pool.Free(first);
  EXPECT_NE(pool.Allocate(10), kNoBlockSet);
  EXPECT_EQ(pool.begun(), 15u);
  EXPECT_NE(pool.Allocate(1), kNoBlockSet);
  EXPECT_EQ(pool.begun(), 16u);
}

TEST(BlockPool, ASetIsFreedOnlyByItsOwnerAndThenComesBackWithANewGeneration) {
  BlockPool pool(4);
  const BlockSetId set = pool.Allocate(4);
  const std::vector<KvBlockId> blocks = pool.blocks(set);
  pool.AddReference(set);
  EXPECT_EQ(pool.references(set), 2u);
  EXPECT_EQ(pool.DropReference(set), 1u);
  EXPECT_EQ(pool.DropReference(set), 0u);
  EXPECT_EQ(pool.free_blocks(), 0u) << "an unreferenced set may still be wanted by the prefix index";
  pool.Free(set);
  EXPECT_EQ(pool.free_blocks(), 4u);

  const BlockSetId again = pool.Allocate(4);
  EXPECT_EQ(PlaceOf(again), PlaceOf(set)) << "places are used again";
  EXPECT_EQ(GenerationOf(again), GenerationOf(set) + 1);
  EXPECT_FALSE(pool.Holds(set)) << "a stale reference to the set must show";
  EXPECT_TRUE(pool.Holds(again));
  EXPECT_THAT(pool.blocks(again), ::testing::UnorderedElementsAreArray(blocks));
}

TEST(BlockPool, AllocatesInAFixedOrder) {
  BlockPool a(6), b(6);
  EXPECT_THAT(a.blocks(a.Allocate(3)), ElementsAre(2, 1, 0));
  EXPECT_EQ(b.blocks(b.Allocate(3)), a.blocks(BlockSetId{1} << 32))
      << "the same calls give the same blocks in every process";
}

TEST(BlockPool, TellsWhatWasFreedAndIsStillFree) {
  BlockPool pool(4);
  pool.KeepFreed();
  const BlockSetId two = pool.Allocate(2);
  const std::vector<KvBlockId> blocks = pool.blocks(two);
  EXPECT_THAT(pool.TakeFreed(), ElementsAre());
  pool.DropReference(two);
  pool.Free(two);
  const KvBlockId again = pool.blocks(pool.Allocate(1))[0];
  ASSERT_EQ(again, blocks[1]) << "the block that was freed last is handed out first";
  EXPECT_THAT(pool.TakeFreed(), ElementsAre(blocks[0]));
  EXPECT_THAT(pool.TakeFreed(), ElementsAre());
}

TEST(BlockPoolDeathTest, StopsAtAReferenceToWhatIsNotAllocated) {
  BlockPool pool(2);
  const BlockSetId set = pool.Allocate(1);
  EXPECT_DEATH(pool.Free(set), "freed while in use");
  pool.DropReference(set);
  EXPECT_DEATH(pool.DropReference(set), "references > 0");
  pool.Free(set);
  EXPECT_DEATH(pool.Free(set), "block set 0 of generation 1 is not allocated");
  EXPECT_DEATH(pool.AddReference(set), "is not allocated");
  pool.Allocate(1);
  EXPECT_DEATH(pool.AddReference(set), "is not allocated");
  EXPECT_DEATH(pool.blocks(set), "is not allocated");
}

}  // namespace
}  // namespace dovetail::attention
