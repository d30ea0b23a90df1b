#include "scheduler/core/slots.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "scheduler/core/grammar_pauses.h"
#include "scheduler/core/limits.h"
#include "tests/scheduler/core_parts.h"

// Who runs, who gives way, and who pauses for a grammar; without a scheduler.

namespace dovetail::scheduler {
namespace {

class SlotsTest : public ::testing::Test {
 protected:
  SlotsTest() { parts_.AddAttentionWorker(0, 100); }

  Sequence& Run(const std::string& tenant, uint64_t served) {
    Sequence& sequence = parts_.AddReady(10, 10, tenant);
    sequence.request->tenant->served = served;
    slots_.Take(sequence, parts_.turn.now());
    return sequence;
  }
  static bool Anyone(const Tenant&) { return true; }

  CoreParts parts_;
  Slots slots_{/*most=*/4};
};

TEST_F(SlotsTest, ALeaderIsPromisedSlotsForTheChoicesToBeForkedFromIt) {
  GenerationRequest request = Ask(10, 10);
  request.choices = 3;
  Sequence& leader = parts_.AddRequest(std::move(request));
  leader.request->unforked = 2;
  leader.phase = Phase::kWaiting;
  EXPECT_EQ(slots_.PromisedTo(leader), 2);
  EXPECT_TRUE(slots_.Has(4));
  slots_.Take(leader, parts_.turn.now());
  EXPECT_EQ(slots_.used(), 3);
  EXPECT_EQ(leader.request->tenant->slots, 3);
  EXPECT_TRUE(slots_.Has(1));
  EXPECT_FALSE(slots_.Has(2));
  leader.request->unforked = 1;
  slots_.DropPromiseOfOne(*leader.request);
  EXPECT_EQ(slots_.used(), 2);
  slots_.GiveBack(leader);
  EXPECT_EQ(slots_.used(), 0);
  EXPECT_EQ(leader.request->tenant->slots, 0);
}

TEST_F(SlotsTest, TheNewestOfTheTenantServedMostGivesWayButNeverTheOldest) {
  Sequence& oldest = Run("much", 100);
  EXPECT_EQ(slots_.PickVictim(std::nullopt, Anyone), nullptr);
  Sequence& newer = Run("much", 100);
  Sequence& newest = Run("much", 100);
  Run("little", 1);
  EXPECT_EQ(slots_.Oldest(), &oldest);
  EXPECT_EQ(slots_.PickVictim(std::nullopt, Anyone), &newest);
  newest.in_flight = 1;
  EXPECT_EQ(slots_.PickVictim(std::nullopt, Anyone), &newer) << "a step holds the newest";
  EXPECT_EQ(slots_.PickVictim(std::nullopt, [](const Tenant& tenant) { return tenant.name == "none"; }), nullptr);
}

TEST_F(SlotsTest, PausedOnesGiveWayFirst) {
  Run("a", 1);
  Sequence& paused = Run("a", 1);
  Run("b", 100);
  EXPECT_EQ(slots_.PickPaused(std::nullopt), nullptr);
  paused.request->paused = true;
  EXPECT_EQ(slots_.PickVictim(std::nullopt, Anyone), &paused);
  EXPECT_EQ(slots_.PickPaused(std::nullopt), &paused);
  EXPECT_EQ(slots_.PickPaused(/*worker=*/0), &paused);
  parts_.accounts.Return(paused);
  EXPECT_EQ(slots_.PickPaused(/*worker=*/0), nullptr) << "it holds nothing there";
}

TEST_F(SlotsTest, AGrammarsPausesGrowUntilTheyAreTooLong) {
  Sequence& sequence = Run("a", 1);
  GrammarPauses pauses;
  absl::Time now = absl::UnixEpoch();
  EXPECT_TRUE(pauses.Pause(sequence, now));
  EXPECT_EQ(sequence.not_before, now + kGrammarPause);
  EXPECT_EQ(pauses.NextDeadline(), sequence.not_before);
  EXPECT_FALSE(sequence.MayStep(now));
  now = sequence.not_before;
  pauses.Renew(slots_.active(), now);
  EXPECT_EQ(pauses.NextDeadline(), absl::InfiniteFuture());
  EXPECT_TRUE(sequence.MayStep(now));
  EXPECT_TRUE(pauses.Pause(sequence, now));
  EXPECT_EQ(sequence.not_before, now + 2 * kGrammarPause);
  EXPECT_FALSE(pauses.Pause(sequence, absl::UnixEpoch() + kGrammarPatience));
  GrammarPauses::Forget(sequence);
  EXPECT_TRUE(pauses.Pause(sequence, absl::UnixEpoch() + kGrammarPatience));
  EXPECT_EQ(sequence.not_before, absl::UnixEpoch() + kGrammarPatience + kGrammarPause);
}

}  // namespace
}  // namespace dovetail::scheduler
