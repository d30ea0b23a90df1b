#include "scheduler/core/probes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "scheduler/core/limits.h"
#include "scheduler/core/moves.h"
#include "tests/scheduler/core_parts.h"

// Questions to attention workers, and sequences on their way between two of them; without a scheduler.

namespace dovetail::scheduler {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class ProbesTest : public ::testing::Test {
 protected:
  ProbesTest() {
    parts_.AddAttentionWorker(4, 100);
    parts_.AddAttentionWorker(5, 100);
  }
  Sequence* Answer(uint32_t worker, uint64_t pin, std::vector<uint32_t> blocks, Epoch epoch = Epoch(1)) {
    return probes_.Take({WorkerId(worker), epoch, {.pin_id = pin, .resumable = std::move(blocks)}});
  }

  CoreParts parts_;
  Probes probes_{parts_.options, parts_.accounts.budget(), parts_.names, parts_.turn};
};

TEST_F(ProbesTest, AskingIsWorthwhileForPromptsOfABlockThatMayLieOnSeveralWorkers) {
  Sequence& sequence = parts_.AddRequest(Ask(100, 10));
  EXPECT_TRUE(probes_.IsWorthwhile(sequence, PlacementPolicy::kRequest));
  EXPECT_FALSE(probes_.IsWorthwhile(sequence, PlacementPolicy::kHeads));
  EXPECT_FALSE(probes_.IsWorthwhile(parts_.AddRequest(Ask(64, 10)), PlacementPolicy::kRequest));
  sequence.probed = true;
  EXPECT_FALSE(probes_.IsWorthwhile(sequence, PlacementPolicy::kRequest));
}

TEST_F(ProbesTest, TheLastAnswerCompletesIt) {
  Sequence& sequence = parts_.AddRequest(Ask(200, 10));
  probes_.Begin(sequence);
  EXPECT_EQ(sequence.phase, Phase::kProbing);
  const std::vector<ProbePrefix> asked = parts_.Take<ProbePrefix>();
  ASSERT_THAT(asked, SizeIs(2));
  EXPECT_THAT(asked[0].message.hashes, SizeIs(3));
  const uint64_t pin = asked[0].message.pin_id;
  EXPECT_EQ(Answer(4, pin, {1, 2, 9}), nullptr);
  EXPECT_EQ(Answer(5, pin, {}), &sequence);
  EXPECT_THAT(sequence.hits, ElementsAre(2u, 0u)) << "nine blocks are more than the prompt has";
  probes_.End(sequence);
  EXPECT_THAT(parts_.Take<Unpin>(), SizeIs(2));
  EXPECT_THAT(probes_.probing(), IsEmpty());
}

TEST_F(ProbesTest, LateAndForeignAnswersAreCounted) {
  Sequence& sequence = parts_.AddRequest(Ask(200, 10));
  probes_.Begin(sequence);
  EXPECT_EQ(Answer(4, sequence.pin_id + 1, {1}), nullptr);
  EXPECT_EQ(Answer(4, sequence.pin_id, {1}, Epoch(2)), nullptr);
  EXPECT_EQ(parts_.turn.late(), 2u);
  EXPECT_EQ(Answer(4, sequence.pin_id, {1}), nullptr);
  EXPECT_EQ(Answer(4, sequence.pin_id, {1}), nullptr);
  EXPECT_EQ(parts_.turn.late(), 3u) << "it answered before";
}

TEST_F(ProbesTest, ItWaitsForNoLostWorkerAndNotForEver) {
  Sequence& a = parts_.AddRequest(Ask(200, 10));
  Sequence& b = parts_.AddRequest(Ask(200, 10));
  probes_.Begin(a);
  probes_.Begin(b);
  Answer(5, a.pin_id, {});
  EXPECT_THAT(probes_.Lose(/*worker=*/0), ElementsAre(&a));
  EXPECT_EQ(probes_.NextDeadline(), parts_.turn.now() + kProbeTimeout);
  EXPECT_EQ(probes_.Expired(), nullptr);
  parts_.At(kProbeTimeout);
  EXPECT_EQ(probes_.Expired(), &a);
  probes_.End(a);
  EXPECT_EQ(probes_.Expired(), &b);
  parts_.accounts.budget().Lose(WorkerId(4));
  parts_.actions.clear();
  probes_.End(b);
  EXPECT_THAT(parts_.Take<Unpin>(), SizeIs(1)) << "the lost worker is told nothing";
  EXPECT_EQ(probes_.NextDeadline(), absl::InfiniteFuture());
}

class MovesTest : public ::testing::Test {
 protected:
  MovesTest() {
    parts_.AddAttentionWorker(4, 4);
    parts_.AddAttentionWorker(5, 4);
  }
  Sequence& AddOn(uint32_t worker, int prompt) {
    Sequence& sequence = parts_.AddRequest(Ask(prompt, 10));
    parts_.MakeReady(sequence, worker);
    sequence.ctx_len = prompt;
    sequence.stepped = true;
    return sequence;
  }
  uint64_t used(int worker) { return parts_.accounts.budget().workers()[worker].used; }
  Sequence* End(const Sequence& sequence, bool moved, uint32_t giver = 4) {
    return moves_.Take({WorkerId(giver), Epoch(1), {sequence.id, sequence.move.step, moved, ""}});
  }

  CoreParts parts_;
  Moves moves_{parts_.accounts, parts_.names, parts_.batches, parts_.turn};
};

TEST_F(MovesTest, BothHoldItUntilTheGiverHasSentAll) {
  Sequence& sequence = AddOn(4, 100);
  ASSERT_TRUE(moves_.Begin(sequence, 0, 1));
  EXPECT_EQ(sequence.phase, Phase::kMoving);
  EXPECT_EQ(used(0), 2u);
  EXPECT_EQ(used(1), 2u);
  const std::vector<OpenSequence> opened = parts_.Take<OpenSequence>();
  ASSERT_THAT(opened, SizeIs(1));
  EXPECT_EQ(opened[0].worker, WorkerId(5));
  EXPECT_THAT(opened[0].message.hashes, SizeIs(1));
  sequence.resumable = {0, 1};
  moves_.Send(sequence);
  const std::vector<MoveSequence> sent = parts_.Take<MoveSequence>();
  ASSERT_THAT(sent, SizeIs(1));
  EXPECT_EQ(sent[0].message.begin, 64) << "the taker has a block of it";
  EXPECT_EQ(sent[0].message.end, 100);
  EXPECT_EQ(End(sequence, true), nullptr);
  EXPECT_EQ(sequence.phase, Phase::kReady);
  EXPECT_EQ(sequence.placement[0].worker, WorkerId(5));
  EXPECT_EQ(used(0), 0u);
  EXPECT_EQ(used(1), 2u);
  EXPECT_EQ(moves_.finished(), 1u);
  EXPECT_EQ(parts_.Take<ReleaseSequence>()[0].worker, WorkerId(4));
}

TEST_F(MovesTest, WithoutRoomThereNothingBegins) {
  AddOn(5, 200);
  Sequence& sequence = AddOn(4, 100);
  EXPECT_FALSE(moves_.Begin(sequence, 0, 1));
  EXPECT_EQ(sequence.phase, Phase::kReady);
  EXPECT_EQ(used(0), 2u);
  EXPECT_THAT(parts_.actions, IsEmpty());
  EXPECT_TRUE(moves_.empty());
}

TEST_F(MovesTest, AMoveThatFailsOrTakesTooLongIsTheCallersToEnd) {
  Sequence& sequence = AddOn(4, 100);
  ASSERT_TRUE(moves_.Begin(sequence, 0, 1));
  moves_.Send(sequence);
  EXPECT_EQ(End(sequence, false, /*giver=*/5), nullptr) << "the taker has nothing to say";
  EXPECT_EQ(parts_.turn.late(), 1u);
  EXPECT_EQ(End(sequence, false), &sequence);
  EXPECT_EQ(moves_.Expired(), nullptr);
  parts_.At(kMoveTimeout);
  EXPECT_EQ(moves_.NextDeadline(), parts_.turn.now());
  EXPECT_EQ(moves_.Expired(), &sequence);
  parts_.actions.clear();
  moves_.Abandon(sequence);
  const std::vector<ReleaseSequence> released = parts_.Take<ReleaseSequence>();
  ASSERT_THAT(released, SizeIs(1));
  EXPECT_EQ(released[0].worker, WorkerId(5));
  EXPECT_TRUE(moves_.empty());
}

TEST_F(MovesTest, ALostTakerLeavesTheSequenceWithItsGiver) {
  Sequence& sequence = AddOn(4, 100);
  ASSERT_TRUE(moves_.Begin(sequence, 0, 1));
  moves_.ForgetTo(WorkerId(5), /*but_not_of=*/Epoch(1));
  EXPECT_EQ(sequence.phase, Phase::kMoving);
  moves_.ForgetTo(WorkerId(5), std::nullopt);
  EXPECT_EQ(sequence.phase, Phase::kReady);
  EXPECT_EQ(sequence.placement[0].worker, WorkerId(4));
  EXPECT_EQ(used(1), 0u);
}

TEST_F(MovesTest, SoManyAtATime) {
  parts_.accounts.budget().Join(WorkerId(6), Epoch(1), 1000);
  parts_.accounts.budget().Join(WorkerId(7), Epoch(1), 1000);
  for (int i = 0; i < proto::kMoveSlots; ++i) {
    EXPECT_FALSE(moves_.full());
    ASSERT_TRUE(moves_.Begin(AddOn(6, 64), 2, 3));
  }
  EXPECT_TRUE(moves_.full());
}

}  // namespace
}  // namespace dovetail::scheduler
