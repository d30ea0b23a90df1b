#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/scheduler/core_parts.h"

// What sequences are charged for, and the names of their blocks, without a scheduler.

namespace dovetail::scheduler {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

TEST(KvAccounts, ATenantIsChargedForWhatItsSequencesHold) {
  CoreParts parts;
  parts.AddAttentionWorker(0, 10);
  Sequence& a = parts.AddReady(100);  // two blocks
  Sequence& b = parts.AddReady(64);
  EXPECT_EQ(parts.accounts.budget().workers()[0].used, 3u);
  EXPECT_EQ(a.request->tenant->kv_blocks, 3u);
  EXPECT_TRUE(KvAccounts::HoldsOn(b, 0));
  parts.accounts.Return(a);
  EXPECT_EQ(parts.accounts.budget().workers()[0].used, 1u);
  EXPECT_EQ(b.request->tenant->kv_blocks, 1u);
  EXPECT_FALSE(KvAccounts::HoldsOn(a, 0));
}

TEST(KvAccounts, ReserveNamesTheWorkerThatHasNoRoomAndChangesNothingThen) {
  CoreParts parts;
  parts.AddAttentionWorker(0, 3);
  Sequence& a = parts.AddReady(100);
  EXPECT_EQ(parts.accounts.Reserve(a, 128), std::nullopt);
  EXPECT_EQ(parts.accounts.budget().workers()[0].used, 2u) << "it had room for that already";
  EXPECT_EQ(parts.accounts.Reserve(a, 129), std::nullopt);
  EXPECT_EQ(a.reserved, 192);
  EXPECT_EQ(parts.accounts.budget().workers()[0].used, 3u);
  EXPECT_EQ(parts.accounts.Reserve(a, 193), 0);
  EXPECT_EQ(a.reserved, 192);
  EXPECT_EQ(parts.accounts.budget().workers()[0].used, 3u);
}

TEST(KvAccounts, SharedBlocksAreChargedOnceUntilTheLastChoiceLeaves) {
  CoreParts parts;
  parts.AddAttentionWorker(0, 10);
  GenerationRequest request = Ask(130, 10);
  request.choices = 2;
  Sequence& parent = parts.AddRequest(std::move(request));
  parts.MakeReady(parent);
  Sequence& child = *parent.request->choices[1];
  parent.shared_blocks = 2;
  parts.accounts.Share(parent);
  EXPECT_EQ(TotalBlocks(parent.charges), 1u);
  EXPECT_EQ(TotalBlocks(parent.request->shared.charges), 2u);
  parts.accounts.TakeShare(child);
  EXPECT_TRUE(KvAccounts::HoldsOn(child, 0)) << "by what it shares";
  parts.accounts.Return(parent);
  EXPECT_EQ(parts.accounts.budget().workers()[0].used, 2u);
  parts.accounts.LeaveShare(child);
  parts.accounts.LeaveShare(child);  // it has left
  EXPECT_EQ(parts.accounts.budget().workers()[0].used, 0u);
  EXPECT_EQ(parent.request->tenant->kv_blocks, 0u);
}

TEST(KvAccounts, AWindowTakesMoreRoomWhileAGroupPrefills) {
  SchedulerOptions options = SmallOptions();
  options.attention = SmallTable(1, 1, /*windowed=*/1);
  options.max_num_batched_tokens = 64;
  CoreParts parts(options);
  parts.AddAttentionWorker(0, 100);
  Sequence& a = parts.AddReady(1024);
  const uint64_t alone = parts.accounts.budget().workers()[0].used;
  EXPECT_TRUE(parts.accounts.ReserveForGroup(a, std::vector<Position>{0, 256, 512}));
  EXPECT_GT(parts.accounts.budget().workers()[0].used, alone);
  parts.accounts.EndGroup(a);
  EXPECT_EQ(parts.accounts.budget().workers()[0].used, alone);
  parts.accounts.EndGroup(a);  // none is under way
  EXPECT_EQ(parts.accounts.budget().workers()[0].used, alone);
}

TEST(BlockNames, AtLeastOneTokenIsLeftToCompute) {
  CoreParts parts;
  EXPECT_EQ(parts.names.Usable(parts.AddRequest(Ask(128, 4))), 1u);
  EXPECT_EQ(parts.names.Usable(parts.AddRequest(Ask(129, 4))), 2u);
  GenerationRequest with_logits = Ask(129, 4);
  with_logits.logits_last = 2;
  EXPECT_EQ(parts.names.Usable(parts.AddRequest(std::move(with_logits))), 1u);
}

TEST(BlockNames, APromptWhoseLogProbabilitiesAreOwedLooksNothingUp) {
  CoreParts parts;
  GenerationRequest request = Ask(200, 4);
  request.prompt_logprobs = 1;
  Sequence& sequence = parts.AddRequest(std::move(request));
  EXPECT_FALSE(parts.names.MayLookUp(sequence));
  EXPECT_EQ(parts.names.Usable(sequence), 0u);
  sequence.request->prompt_logprobs_next = 200;
  EXPECT_EQ(parts.names.Usable(sequence), 3u);
}

TEST(BlockNames, GoOnFromThePromptIntoTheOutputWhereverTheyBegin) {
  CoreParts parts;
  Sequence& sequence = parts.AddRequest(Ask(100, 100));
  for (Position i = 0; i < 100; ++i) sequence.output.Record(i, static_cast<TokenId>(i));
  std::vector<proto::BlockHash> all, last;
  parts.names.Append(sequence, 2, 3, last);
  parts.names.Append(sequence, 0, 3, all);
  ASSERT_THAT(all, SizeIs(3));
  EXPECT_EQ(all[2], last[0]);
  EXPECT_NE(all[1], all[0]);
}

TEST(BlockNames, WithoutCachingThereAreNone) {
  SchedulerOptions options = SmallOptions();
  options.enable_prefix_caching = false;
  CoreParts parts(options);
  Sequence& sequence = parts.AddRequest(Ask(200, 4));
  std::vector<proto::BlockHash> names;
  parts.names.Append(sequence, 0, 3, names);
  EXPECT_THAT(names, IsEmpty());
  EXPECT_EQ(parts.names.Usable(sequence), 0u);
}

}  // namespace
}  // namespace dovetail::scheduler
