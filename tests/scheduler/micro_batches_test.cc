#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "scheduler/core/limits.h"
#include "tests/scheduler/core_parts.h"

// Micro-batches and the compute workers that they belong to, without a scheduler.

namespace dovetail::scheduler {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

SchedulerOptions WithMicroBatches(int micro_batches) {
  SchedulerOptions options = SmallOptions();
  options.micro_batches = micro_batches;
  return options;
}

TEST(ComputePool, AWorkerJoinsAndLeavesOnce) {
  CoreParts parts(WithMicroBatches(2));
  EXPECT_TRUE(parts.pool.Join(WorkerId(7)));
  EXPECT_FALSE(parts.pool.Join(WorkerId(7)));
  EXPECT_TRUE(parts.pool.Join(WorkerId(8)));
  EXPECT_THAT(parts.pool.workers(), ElementsAre(WorkerId(7), WorkerId(8)));
  EXPECT_TRUE(parts.pool.Leave(WorkerId(7)));
  EXPECT_FALSE(parts.pool.Leave(WorkerId(7)));
  EXPECT_THAT(parts.pool.workers(), ElementsAre(WorkerId(8)));
}

TEST(ComputePool, MicroBatchesGoRoundTheWorkersAndAFailedAttemptGoesToTheNextOne) {
  CoreParts parts(WithMicroBatches(2));
  parts.pool.Join(WorkerId(7));
  parts.pool.Join(WorkerId(8));
  EXPECT_EQ(parts.pool.micro_batches_in_use(), 4);
  EXPECT_EQ(parts.pool.WorkerOf(2), WorkerId(7));
  EXPECT_EQ(parts.pool.WorkerOf(3), WorkerId(8));
  EXPECT_EQ(parts.pool.WorkerOf(3, /*failed_attempts=*/1), WorkerId(7));
}

TEST(ComputePool, SomeMicroBatchesAreKeptForTheRanksOfPrefillGroups) {
  SchedulerOptions options = WithMicroBatches(kMaxMicroBatches);
  options.prefill_ranks = 3;
  CoreParts parts(options);
  EXPECT_EQ(parts.pool.most_prefill_ranks(), 0);
  EXPECT_EQ(parts.pool.micro_batches_in_use(), kMaxMicroBatches);
  for (uint32_t worker = 0; worker < 4; ++worker) parts.pool.Join(WorkerId(worker));
  EXPECT_EQ(parts.pool.most_prefill_ranks(), 3);
  EXPECT_EQ(parts.pool.micro_batches_in_use(), kMaxMicroBatches - 3);
}

TEST(ComputePool, OnlyWorkersOfAKindPrefillTogether) {
  SchedulerOptions options = WithMicroBatches(1);
  options.prefill_ranks = 0;
  CoreParts parts(options);
  EXPECT_THAT(parts.pool.MostAlike({}), IsEmpty());
  const auto join = [&](uint32_t worker, int kind) { parts.pool.Join(WorkerId(worker), false, kind); };
  join(7, 0);
  join(8, 1);
  EXPECT_EQ(parts.pool.most_prefill_ranks(), 1);
  EXPECT_THAT(parts.pool.MostAlike(parts.pool.workers()), ElementsAre(WorkerId(7))) << "as many of each: the first's";
  join(9, 1);
  EXPECT_EQ(parts.pool.most_prefill_ranks(), 2);
  EXPECT_THAT(parts.pool.MostAlike(parts.pool.workers()), ElementsAre(WorkerId(8), WorkerId(9)));
  EXPECT_THAT(parts.pool.MostAlike({WorkerId(9), WorkerId(7)}), ElementsAre(WorkerId(9)));
  parts.pool.Leave(WorkerId(8));
  EXPECT_EQ(parts.pool.most_prefill_ranks(), 1);
}

TEST(ComputePool, ARequestMayBeBoundToAWorkerAsLongAsThatIsThere) {
  CoreParts parts(WithMicroBatches(1));
  parts.pool.Join(WorkerId(7));
  parts.pool.Join(WorkerId(8));
  GenerationRequest request = Ask(10, 4);
  request.only_compute_worker = WorkerId(8);
  const Sequence& bound = parts.AddRequest(std::move(request));
  EXPECT_FALSE(parts.pool.MayStepIn(bound, 0));
  EXPECT_TRUE(parts.pool.MayStepIn(bound, 1));
  parts.pool.Leave(WorkerId(8));
  EXPECT_TRUE(parts.pool.MayStepIn(bound, 0));
}

TEST(MicroBatches, ASequenceJoinsTheSmallestOneAndMembersAreKeptByAge) {
  CoreParts parts(WithMicroBatches(2));
  parts.AddAttentionWorker(0, 100);
  Sequence& a = parts.AddReady(10);
  Sequence& b = parts.AddReady(10);
  Sequence& c = parts.AddReady(10);
  EXPECT_THAT(parts.batches[0].members, ElementsAre(&a, &c));
  EXPECT_THAT(parts.batches[1].members, ElementsAre(&b));
  parts.batches.Leave(a);
  EXPECT_EQ(a.micro_batch, -1);
  parts.batches.Leave(a);  // it is in none
  parts.batches.Leave(b);
  parts.batches.Enlist(a);
  parts.batches.Enlist(b);
  EXPECT_THAT(parts.batches[1].members, ElementsAre(&a));
  EXPECT_THAT(parts.batches[0].members, ElementsAre(&b, &c)) << "the older one comes first though it came last";
  EXPECT_EQ(parts.batches.members(), 3u);
}

TEST(MicroBatches, WhatBefellTheMembersIsForgottenWithTheLastOfThem) {
  CoreParts parts(WithMicroBatches(1));
  parts.AddAttentionWorker(0, 100);
  Sequence& a = parts.AddReady(10);
  MicroBatch& batch = parts.batches[0];
  batch.held = true;
  batch.failed_attempts = 2;
  batch.not_before = absl::InfiniteFuture();
  EXPECT_FALSE(batch.MayBePlanned(parts.turn.now()));
  parts.batches.Leave(a);
  EXPECT_TRUE(batch.MayBePlanned(parts.turn.now()));
  EXPECT_EQ(batch.failed_attempts, 0);
}

TEST(MicroBatches, MembersOfThoseThatAreNoLongerInUseGoOnInTheOthers) {
  CoreParts parts(WithMicroBatches(1));
  parts.AddAttentionWorker(0, 100);
  parts.pool.Join(WorkerId(7));
  parts.pool.Join(WorkerId(8));
  Sequence& a = parts.AddReady(10);
  Sequence& b = parts.AddReady(10);
  parts.pool.Leave(WorkerId(8));
  parts.batches[1].in_flight = true;
  parts.batches.EmptyUnused();
  EXPECT_THAT(parts.batches[1].members, ElementsAre(&b)) << "its step is in flight";
  parts.batches[1].in_flight = false;
  parts.batches.EmptyUnused();
  EXPECT_THAT(parts.batches[1].members, IsEmpty());
  EXPECT_THAT(parts.batches[0].members, ElementsAre(&a, &b));
}

TEST(MicroBatches, TiersThatArePartedHaveMicroBatchesOfTheirOwn) {
  for (const int workers : {1, 2}) {
    SCOPED_TRACE(workers);
    CoreParts parts(WithMicroBatches(3));
    parts.AddAttentionWorker(0, 1000);
    for (int i = 0; i < workers; ++i) parts.pool.Join(WorkerId(7 + i));
    const int in_use = parts.pool.micro_batches_in_use(), first_slow = in_use - workers;
    ASSERT_EQ(in_use, 3 * workers);
    std::vector<Sequence*> all;
    for (int i = 0; i < 24; ++i) {
      all.push_back(&parts.AddReady(10));
      all.back()->on_slow_tier = i % 3 == 0;
    }
    parts.batches.PartTiers(true);
    for (int round = 0; round < 2; ++round)
      for (int i = 0; i < in_use; ++i) {
        parts.batches.SendHome(i);
        parts.batches.Balance(i);
      }
    for (int i = 0; i < in_use; ++i) {
      EXPECT_EQ(parts.batches[i].members.size(), 8u / workers) << i;
      for (const Sequence* sequence : parts.batches[i].members) EXPECT_EQ(sequence->on_slow_tier, i >= first_slow);
    }
    // Those that come, and come back from the slow tier.
    all[0]->on_slow_tier = false;
    for (int i = first_slow; i < in_use; ++i) parts.batches.SendHome(i);
    EXPECT_LT(all[0]->micro_batch, first_slow);
    Sequence& newcomer = parts.AddReady(10);
    EXPECT_LT(newcomer.micro_batch, first_slow);
    // Those of the slow tier have ended.
    for (Sequence* sequence : all)
      if (sequence->on_slow_tier) parts.batches.Leave(*sequence);
    parts.batches.PartTiers(false);
    for (int round = 0; round < 2; ++round)
      for (int i = 0; i < in_use; ++i) parts.batches.Balance(i);
    for (int i = 0; i < in_use; ++i) EXPECT_GE(parts.batches[i].members.size(), 18u / in_use / 2) << i;
  }
}

TEST(MicroBatches, TiersThatArePartedBringASecondMicroBatchIntoUse) {
  CoreParts parts(WithMicroBatches(1));
  parts.AddAttentionWorker(0, 100);
  Sequence& fast = parts.AddReady(10);
  Sequence& slow = parts.AddReady(10);
  slow.on_slow_tier = true;
  EXPECT_EQ(parts.pool.micro_batches_in_use(), 1);
  parts.batches.PartTiers(true);
  EXPECT_EQ(parts.pool.micro_batches_in_use(), 2);
  parts.batches.SendHome(0);
  EXPECT_THAT(parts.batches[0].members, ElementsAre(&fast));
  EXPECT_THAT(parts.batches[1].members, ElementsAre(&slow));
  parts.batches.PartTiers(false);
  EXPECT_EQ(parts.pool.micro_batches_in_use(), 1);
  parts.batches.EmptyUnused();
  EXPECT_THAT(parts.batches[0].members, ElementsAre(&fast, &slow));
}

TEST(MicroBatches, BalanceGivesTheYoungestAwayUntilNoneHasTwoFewer) {
  CoreParts parts(WithMicroBatches(1));
  parts.AddAttentionWorker(0, 100);
  std::vector<Sequence*> all;
  for (int i = 0; i < 5; ++i) all.push_back(&parts.AddReady(10));
  parts.pool.Join(WorkerId(7));
  parts.pool.Join(WorkerId(8));
  parts.batches.Balance(0);
  EXPECT_THAT(parts.batches[0].members, ElementsAre(all[0], all[1], all[2]));
  EXPECT_THAT(parts.batches[1].members, ElementsAre(all[3], all[4]));
}

TEST(MicroBatches, AStepIsFoundByItsNumberAndWorkerAndByWhatItFollows) {
  CoreParts parts(WithMicroBatches(1));
  MicroBatch& first = parts.batches[0];
  MicroBatch& second = parts.batches[1];
  first.in_flight = second.in_flight = true;
  first.compute_worker = second.compute_worker = WorkerId(7);
  first.step = parts.batches.NextStep();
  second.step = parts.batches.NextStep(/*count=*/3);
  second.follows = first.step;
  EXPECT_EQ(parts.batches.NextStep(), StepId(second.step.value() + 3));
  EXPECT_EQ(parts.batches.InFlight(MicroBatchId(0), first.step, WorkerId(7)), &first);
  EXPECT_EQ(parts.batches.InFlight(MicroBatchId(0), second.step, WorkerId(7)), nullptr);
  EXPECT_EQ(parts.batches.InFlight(MicroBatchId(0), first.step, WorkerId(8)), nullptr);
  EXPECT_EQ(parts.batches.InFlight(MicroBatchId(99), first.step, WorkerId(7)), nullptr);
  EXPECT_EQ(parts.batches.FollowerOf(first), &second);
  EXPECT_EQ(parts.batches.FollowedBy(second), &first);
  EXPECT_EQ(parts.batches.FollowerOf(second), nullptr);
  EXPECT_EQ(parts.batches.FollowedBy(first), nullptr);
}

TEST(MicroBatches, AStepHasAsLongAsAllStepsOfItsWorkerNeed) {
  SchedulerOptions options = WithMicroBatches(2);
  options.step_timeout = absl::Seconds(1);
  CoreParts parts(options);
  parts.pool.Join(WorkerId(7));
  for (const int i : {0, 1}) {
    parts.batches[i].in_flight = true;
    parts.batches[i].compute_worker = WorkerId(7);
    parts.batches.SetDeadline(parts.batches[i], /*work=*/10, parts.turn.now());
  }
  const absl::Duration first = parts.batches[0].deadline - parts.turn.now();
  const absl::Duration second = parts.batches[1].deadline - parts.turn.now();
  EXPECT_EQ(first, absl::Seconds(1) + 10 * StepPatience::kSlowest);
  EXPECT_EQ(second, absl::Seconds(1) + 20 * StepPatience::kSlowest);
  EXPECT_EQ(parts.batches.NextDeadline(parts.turn.now()), parts.turn.now() + first);
  EXPECT_TRUE(parts.batches[0].Overdue(parts.turn.now() + first));
  EXPECT_FALSE(parts.batches[1].Overdue(parts.turn.now() + first));
}

}  // namespace
}  // namespace dovetail::scheduler
