#include "scheduler/core/choices.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "tests/scheduler/core_parts.h"

// The life of choices and of their incarnations on attention workers, without anything that decides about them.

namespace dovetail::scheduler {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class ChoicesTest : public ::testing::Test {
 protected:
  ChoicesTest() { parts_.AddAttentionWorker(0, 100); }

  RequestState& Add(GenerationRequest params) {
    params.id = RequestId(++last_request_);
    RequestState& request =
        requests_.Add(std::make_shared<const GenerationRequest>(std::move(params)), parts_.turn.now());
    choices_.Wait(*request.choices[0]);
    return request;
  }
  // Admits it and lets the worker open it.
  Sequence& Run(RequestState& request) {
    Sequence& sequence = *request.choices[0];
    choices_.EndWait(sequence);
    slots_.Take(sequence, parts_.turn.now());
    incarnations_.Open(sequence, proto::WholePlacement(parts_.options.attention, WorkerId(0), Epoch(1)));
    EXPECT_EQ(Opened(sequence.id, {}), &sequence);
    incarnations_.Start(sequence);
    parts_.actions.clear();
    return sequence;
  }
  Sequence* Opened(SequenceId id, std::vector<uint32_t> resumable, Epoch epoch = Epoch(1)) {
    resumable.push_back(0);
    return incarnations_.Take({WorkerId(0), epoch, {.sequence = id, .resumable = std::move(resumable)}});
  }
  uint64_t used() const { return parts_.accounts.budget().workers()[0].used; }

  CoreParts parts_;
  TenantQueues queues_;
  RequestTable requests_{parts_.options, queues_};
  Slots slots_{parts_.options.max_num_seqs};
  ReplacementWait stranded_;
  PrefillGroups groups_{parts_.options, parts_.pool,   parts_.batches, parts_.accounts,
                        parts_.room,    parts_.writer, parts_.turn};
  Probes probes_{parts_.options, parts_.accounts.budget(), parts_.names, parts_.turn};
  Moves moves_{parts_.accounts, parts_.names, parts_.batches, parts_.turn};
  Incarnations incarnations_{parts_.accounts, parts_.names, parts_.batches, moves_, slots_, parts_.turn};
  EndedPrefixes ended_{parts_.options, parts_.accounts.budget()};
  Choices choices_{{.accounts = parts_.accounts,
                    .queues = queues_,
                    .requests = requests_,
                    .slots = slots_,
                    .probes = probes_,
                    .groups = groups_,
                    .stranded = stranded_,
                    .incarnations = incarnations_,
                    .ended = ended_},
                   parts_.turn};
  uint64_t last_request_ = 0;
};

TEST_F(ChoicesTest, AnOpenedSequenceBeginsWithTheMostThatItsWorkersHave) {
  RequestState& request = Add(Ask(200, 10));
  Sequence& sequence = *request.choices[0];
  choices_.EndWait(sequence);
  slots_.Take(sequence, parts_.turn.now());
  incarnations_.Open(sequence, proto::WholePlacement(parts_.options.attention, WorkerId(0), Epoch(1)));
  EXPECT_EQ(used(), 4u);
  EXPECT_THAT(parts_.Take<OpenSequence>()[0].message.hashes, SizeIs(3));
  EXPECT_EQ(Opened(sequence.id, {2}, Epoch(2)), nullptr) << "of another incarnation of the worker";
  EXPECT_EQ(Opened(SequenceId(99), {2}), nullptr);
  EXPECT_EQ(parts_.turn.late(), 2u);
  ASSERT_EQ(Opened(sequence.id, {2, 9}), &sequence);
  incarnations_.Start(sequence);
  EXPECT_EQ(sequence.ctx_len, 128) << "nine blocks are more than were asked for";
  EXPECT_EQ(sequence.phase, Phase::kReady);
  EXPECT_EQ(request.cached_tokens, 128);
  EXPECT_EQ(incarnations_.prefix_hits(), 128u);
  EXPECT_THAT(parts_.batches[0].members, ElementsAre(&sequence));
}

TEST_F(ChoicesTest, APreemptedOneGivesEverythingBackAndWaitsInFront) {
  RequestState& request = Add(Ask(100, 10));
  Sequence& sequence = Run(request);
  RequestState& other = Add(Ask(100, 10));
  choices_.Preempt(sequence);
  EXPECT_THAT(parts_.Take<ReleaseSequence>(), SizeIs(1));
  EXPECT_EQ(used(), 0u);
  EXPECT_EQ(slots_.used(), 0);
  EXPECT_EQ(incarnations_.Find(sequence.id), nullptr);
  EXPECT_EQ(sequence.micro_batch, -1);
  EXPECT_EQ(queues_.LeastServed()->waiting.begin()->second, &sequence);
  EXPECT_EQ(choices_.waiting(), 2);
  EXPECT_EQ(choices_.preemptions(), 1u);
  EXPECT_EQ(other.choices[0]->phase, Phase::kWaiting);
}

TEST_F(ChoicesTest, WhatRefusedItIsRememberedAsItWasAfterItLeft) {
  Sequence& sequence = Run(Add(Ask(100, 10)));
  const WorkerId worker(0);
  choices_.GoElsewhere(sequence, {&worker, 1});
  EXPECT_TRUE(sequence.refusals.HadNoRoomOn(0, parts_.accounts.budget())) << "what it gave back itself changed nothing";
}

TEST_F(ChoicesTest, OneThatEndsUnderAStepIsReleasedWhenThatReturns) {
  RequestState& request = Add(Ask(100, 10));
  Sequence& sequence = Run(request);
  sequence.in_flight = 1;
  choices_.End(sequence, FinishReason::kCancelled);
  const std::vector<EmitUpdate> updates = parts_.Take<EmitUpdate>();
  ASSERT_THAT(updates, SizeIs(1));
  EXPECT_TRUE(updates[0].update.choice_finished);
  EXPECT_TRUE(updates[0].update.request_finished);
  EXPECT_GT(used(), 0u);
  requests_.ForgetFinished();
  EXPECT_EQ(requests_.size(), 1u) << "a step contains it";
  sequence.in_flight = 0;
  choices_.Settle(sequence);
  EXPECT_EQ(used(), 0u);
  requests_.ForgetFinished();
  EXPECT_EQ(requests_.size(), 0u);
  EXPECT_EQ(queues_.tenant_count(), 0);
}

TEST_F(ChoicesTest, ForksShareThePromptAndThoseWithoutASlotWaitOnTheirOwn) {
  GenerationRequest params = Ask(130, 10);
  params.choices = kMaxChoices;
  RequestState& request = Add(std::move(params));
  Sequence& parent = Run(request);
  Run(Add(Ask(64, 10)));  // takes the last slot but those that are promised
  parent.ctx_len = 129;
  choices_.Fork(parent);
  const std::vector<ForkSequence> forked = parts_.Take<ForkSequence>();
  EXPECT_EQ(forked.size(), static_cast<size_t>(parts_.options.max_num_seqs - 2));
  EXPECT_EQ(choices_.waiting(), kMaxChoices - 1 - static_cast<int>(forked.size()));
  EXPECT_EQ(used(), 1u + 2u + 1u + forked.size()) << "the other, the shared blocks, and one of each choice";
  EXPECT_TRUE(parent.awaits_forks);
  for (const ForkSequence& fork : forked) {
    Sequence* const child = Opened(fork.message.child, {2});
    ASSERT_NE(child, nullptr);
    incarnations_.MakeReady(*child);
    Choices::FinishForks(request);
  }
  EXPECT_FALSE(parent.awaits_forks);
}

TEST_F(ChoicesTest, TheNextChoiceLeadsWhenTheFirstEnds) {
  GenerationRequest params = Ask(100, 10);
  params.choices = 3;
  RequestState& request = Add(std::move(params));
  Run(request);
  EXPECT_EQ(slots_.used(), 3) << "two are promised";
  choices_.End(*request.choices[0], FinishReason::kStop);
  EXPECT_EQ(slots_.used(), 0);
  EXPECT_EQ(request.choices[1]->phase, Phase::kWaiting);
  EXPECT_EQ(request.unforked, 1);
  EXPECT_FALSE(parts_.Take<EmitUpdate>()[0].update.request_finished);
  choices_.EndAll(request, FinishReason::kError, absl::UnavailableError("why"));
  const std::vector<EmitUpdate> updates = parts_.Take<EmitUpdate>();
  ASSERT_THAT(updates, SizeIs(2));
  EXPECT_EQ(updates[0].update.choice, 2) << "the unforked first";
  EXPECT_EQ(updates[1].update.error, "why");
  EXPECT_EQ(choices_.waiting(), 0);
}

TEST_F(ChoicesTest, APausedRequestIsInNoQueue) {
  RequestState& request = Add(Ask(100, 10));
  EXPECT_FALSE(choices_.Resume(request));
  EXPECT_TRUE(choices_.Pause(request));
  EXPECT_FALSE(choices_.Pause(request));
  EXPECT_EQ(queues_.LeastServed(), nullptr);
  EXPECT_EQ(choices_.waiting(), 1);
  EXPECT_EQ(choices_.paused(), 1);
  EXPECT_TRUE(choices_.Resume(request));
  EXPECT_NE(queues_.LeastServed(), nullptr);
  EXPECT_THAT(parts_.actions, IsEmpty());
}

TEST_F(ChoicesTest, AResumedOneThatNoWorkerCanHoldStaysOutOfTheQueueUntilOneJoins) {
  RequestState& request = Add(Ask(100, 10));
  choices_.Strand(*request.choices[0]);
  EXPECT_TRUE(choices_.Pause(request));
  EXPECT_TRUE(choices_.Resume(request));
  EXPECT_EQ(queues_.LeastServed(), nullptr);
  choices_.EndStranding();
  ASSERT_NE(queues_.LeastServed(), nullptr);
  EXPECT_EQ(queues_.LeastServed()->waiting.size(), 1u);
}

}  // namespace
}  // namespace dovetail::scheduler
