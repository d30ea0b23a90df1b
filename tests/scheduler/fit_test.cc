#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <utility>
#include <variant>

#include "tests/scheduler/small_cluster.h"

// Where requests go, and what becomes of those that fit no longer.

namespace dovetail::scheduler {
namespace {

using ::testing::HasSubstr;

TEST(Admission, PrefersAWorkerThatCanHoldARequestUntilItEnds) {
  ClusterOptions options = SmallCluster();
  options.kv_blocks = {20, 2000};
  FakeCluster cluster(options);
  cluster.Submit(Ask(100, 60, "a", 8));  // the large one has less room, relatively
  const RequestId id = cluster.Submit(Ask(100, 400));
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(id).tokens.size(), 400u);
  EXPECT_EQ(cluster.core().stats().preemptions, 0u);
  ExpectClean(cluster);
}

// The large worker is full when it begins, and empty when it outgrows the small one.
TEST(Growth, ASequenceThatOutgrowsItsWorkerGoesOnWhereItFits) {
  ClusterOptions options = SmallCluster();
  options.kv_blocks = {20, 40};  // 320 and 640 tokens
  FakeCluster cluster(options);
  const RequestId first = cluster.Submit(Ask(500, 100, "a", 8));
  const RequestId second = cluster.SubmitAt(cluster.at(absl::Milliseconds(20)), Ask(100, 340));
  cluster.RunUntilIdle();
  EXPECT_LT(cluster.stream(second).first_token, cluster.stream(first).end) << "it began on the small one";
  for (const RequestId id : {first, second}) {
    EXPECT_EQ(cluster.stream(id).error, "");
    EXPECT_EQ(cluster.stream(id).tokens, cluster.Undisturbed(cluster.request(id), 0));
  }
  EXPECT_EQ(cluster.core().stats().preemptions, 1u);
  ExpectClean(cluster);
}

TEST(Growth, ASequenceThatNoWorkerHoldsEndsWithLength) {
  ClusterOptions options = SmallCluster();
  options.kv_blocks = {20};  // 320 tokens
  FakeCluster cluster(options);
  EXPECT_EQ(cluster.core().LongestSequence(), 0) << "nothing has joined";
  const RequestId id = cluster.Submit(Ask(100, 400));
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.core().LongestSequence(), 320);
  EXPECT_EQ(cluster.stream(id).error, "");
  EXPECT_EQ(cluster.stream(id).reason, FinishReason::kLength);
  EXPECT_EQ(cluster.stream(id).tokens.size(), 221u) << "the last token needs no KV";
  ExpectClean(cluster);
}

TEST(Growth, ALossThatChangesNothingDoesNotTurnLengthIntoAnError) {
  ClusterOptions options = SmallCluster();
  options.kv_blocks = {20, 20};
  FakeCluster cluster(options);
  const RequestId id = cluster.Submit(Ask(100, 400));
  cluster.Post(cluster.at(absl::Milliseconds(50)), AttentionWorkerLost{WorkerId(1), Epoch(1)});
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(id).error, "");
  EXPECT_EQ(cluster.stream(id).reason, FinishReason::kLength);
  ExpectClean(cluster);
}

// A worker says that it has no room although the budget says that it has. Prefixes draw a sequence back to it.
TEST(Refusals, ASequenceThatAWorkerHasNoRoomForGoesToAnother) {
  FakeCluster cluster(SmallCluster(2));
  for (int i = 0; i < 4; ++i) cluster.Submit(Ask(200, 60, "a", i + 1));
  cluster.RunUntil(cluster.at(absl::Milliseconds(20)));
  ASSERT_EQ(cluster.worker(WorkerId(0)).sequences(), 2u);
  cluster.LimitRoom(WorkerId(0), 1);
  std::set<WorkerId> opened_at;
  cluster.on_action = [&](const Action& action) {
    if (const auto* open = std::get_if<OpenSequence>(&action)) opened_at.insert(open->worker);
  };
  cluster.RunUntilIdle();
  EXPECT_THAT(opened_at, ::testing::ElementsAre(WorkerId(1)));
  EXPECT_EQ(cluster.core().stats().preemptions, 1u);
  EXPECT_EQ(cluster.out_of_memory, 1u);
  for (const RequestId id : cluster.requests())
    EXPECT_EQ(cluster.stream(id).tokens, cluster.Undisturbed(cluster.request(id), 0));
  ExpectClean(cluster);
}

// The other worker is too small for it.
TEST(Refusals, ASequenceThatNoOtherWorkerHoldsWaitsUntilRoomIsFreedThere) {
  ClusterOptions options = SmallCluster(2);
  options.kv_blocks = {2000, 8};
  FakeCluster cluster(options);
  const RequestId first = cluster.Submit(Ask(200, 100));
  const RequestId second = cluster.Submit(Ask(200, 100, "a", 8));
  cluster.RunUntil(cluster.at(absl::Milliseconds(20)));
  cluster.LimitRoom(WorkerId(0), 1);
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.core().stats().preemptions, 1u);
  EXPECT_EQ(cluster.out_of_memory, 1u) << "it was tried again although nothing had changed";
  EXPECT_GE(cluster.stream(second).end, cluster.stream(first).end);
  for (const RequestId id : {first, second})
    EXPECT_EQ(cluster.stream(id).tokens, cluster.Undisturbed(cluster.request(id), 0));
  ExpectClean(cluster);
}

TEST(Refusals, ASequenceWhoseReaderIsSlowGivesItsRoomToOneThatWaitsForIt) {
  FakeCluster cluster(SmallCluster());
  const RequestId first = cluster.Submit(Ask(200, 100));
  const RequestId second = cluster.Submit(Ask(200, 100, "a", 8));
  cluster.RunUntil(cluster.at(absl::Milliseconds(20)));
  cluster.LimitRoom(WorkerId(0), 1);
  while (cluster.core().stats().preemptions == 0) ASSERT_TRUE(cluster.RunOne());
  cluster.Post(cluster.now(), RequestPaused{first});
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(second).tokens, cluster.Undisturbed(cluster.request(second), 0));
  EXPECT_FALSE(cluster.stream(first).finished);
  cluster.Post(cluster.now(), RequestResumed{first});
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(first).tokens, cluster.Undisturbed(cluster.request(first), 0));
  ExpectClean(cluster);
}

TEST(Refusals, OfOneWorkerToOpenSendASequenceToAnother) {
  FakeCluster cluster(SmallCluster(2));
  cluster.worker(WorkerId(0)).refuse = 1000;
  std::vector<RequestId> asked;
  for (int i = 0; i < 4; ++i) asked.push_back(cluster.Submit(Ask(100, 30, "a", i + 1)));
  cluster.RunUntilIdle();
  for (const RequestId id : asked)
    EXPECT_EQ(cluster.stream(id).tokens, cluster.Undisturbed(cluster.request(id), 0)) << cluster.stream(id).error;
  EXPECT_LE(cluster.core().stats().preemptions, 4u);
  ExpectClean(cluster);
}

class Alone : public ::testing::TestWithParam<PlacementPolicy> {};

TEST_P(Alone, ASequenceThatAWorkerHasNoRoomForGoesToOthers) {
  ClusterOptions options = SmallCluster(3);
  options.scheduler.placement = GetParam();
  FakeCluster cluster(options);
  const RequestId id = cluster.Submit(Ask(200, 60));
  SequenceId first;
  WorkerId full;
  cluster.on_action = [&](const Action& action) {
    const auto* open = std::get_if<OpenSequence>(&action);
    if (open == nullptr) return;
    if (first == SequenceId()) {
      first = open->message.sequence;
      full = open->worker;
    }
    EXPECT_TRUE(open->message.sequence == first || open->worker != full) << "it goes back there";
  };
  cluster.RunUntil(cluster.at(absl::Milliseconds(20)));
  ASSERT_FALSE(cluster.stream(id).tokens.empty());
  cluster.LimitRoom(full, 0);
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(id).error, "");
  EXPECT_EQ(cluster.stream(id).tokens, cluster.Undisturbed(cluster.request(id), 0));
  EXPECT_EQ(cluster.core().stats().preemptions, 1u);
  ExpectClean(cluster);
}

INSTANTIATE_TEST_SUITE_P(Placements, Alone,
                         ::testing::Values(PlacementPolicy::kRequest, PlacementPolicy::kHeads, PlacementPolicy::kTokens,
                                           PlacementPolicy::kMixed, PlacementPolicy::kTiers));

TEST(Refusals, OfAWorkerWhereASequenceIsAloneCostNothingToThoseElsewhere) {
  FakeCluster cluster(SmallCluster(2));
  for (int i = 0; i < 4; ++i) cluster.Submit(Ask(200, 60, "a", i + 1));
  cluster.RunUntil(cluster.at(absl::Milliseconds(20)));
  cluster.LimitRoom(WorkerId(0), 0);
  int released = 0;
  cluster.on_action = [&](const Action& action) {
    const auto* release = std::get_if<ReleaseSequence>(&action);
    released += release != nullptr && release->worker == WorkerId(1) ? 1 : 0;
  };
  cluster.RunUntilIdle();
  for (const RequestId id : cluster.requests())
    EXPECT_EQ(cluster.stream(id).tokens, cluster.Undisturbed(cluster.request(id), 0)) << cluster.stream(id).error;
  EXPECT_EQ(released, 4) << "each when it ended: none gave way there";
  ExpectClean(cluster);
}

TEST(Refusals, OfAllWorkersWhereASequenceIsAloneEndItAsUnavailable) {
  FakeCluster cluster(SmallCluster(2));
  for (const uint32_t worker : {0u, 1u}) cluster.LimitRoom(WorkerId(worker), 0);
  const RequestId id = cluster.Submit(Ask(200, 60));
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(id).error_code, absl::StatusCode::kUnavailable);
  EXPECT_THAT(cluster.stream(id).error, HasSubstr("has no room for this request alone"));
  EXPECT_EQ(cluster.core().stats().preemptions, 2u) << "each had its turn";
  ExpectClean(cluster);
}

// The worker that is left refuses it.
TEST(Refusals, OfTheWorkerThatIsLeftLetASequenceWaitForAReplacement) {
  for (const bool comes : {true, false}) {
    FakeCluster cluster(SmallCluster(2));
    cluster.LimitRoom(WorkerId(0), 0);
    cluster.Post(cluster.at(absl::Milliseconds(1)), AttentionWorkerLost{WorkerId(1), Epoch(1)});
    const RequestId id = cluster.SubmitAt(cluster.at(absl::Milliseconds(2)), Ask(200, 60));
    if (comes)
      cluster.Post(cluster.at(absl::Seconds(5)), AttentionWorkerJoined{.worker = WorkerId(1), .kv_blocks = 2000});
    cluster.RunUntilIdle();
    const std::vector<TokenId> all = cluster.Undisturbed(cluster.request(id), 0);
    EXPECT_EQ(cluster.stream(id).tokens, comes ? all : std::vector<TokenId>()) << cluster.stream(id).error;
    EXPECT_EQ(cluster.stream(id).error_code, comes ? absl::StatusCode::kOk : absl::StatusCode::kUnavailable);
    EXPECT_GT(cluster.stream(id).end, cluster.at(absl::Seconds(comes ? 5 : 10)));
    ExpectClean(cluster);
  }
}

TEST(Damage, LetsASequenceBeginAgainAFewTimesAndThenEndsItsRequest) {
  for (const int steps : {3, 4}) {
    FakeCluster cluster(SmallCluster());
    const RequestId id = cluster.Submit(Ask(50, 30));
    cluster.RunUntil(cluster.at(absl::Milliseconds(8)));
    ASSERT_FALSE(cluster.stream(id).tokens.empty());
    cluster.Damage(steps);
    cluster.RunUntilIdle();
    EXPECT_EQ(cluster.core().stats().damaged, static_cast<uint64_t>(steps));
    const std::vector<TokenId> all = cluster.Undisturbed(cluster.request(id), 0);
    if (steps == 3) {
      EXPECT_EQ(cluster.stream(id).tokens, all) << cluster.stream(id).error;
    } else {
      EXPECT_EQ(cluster.stream(id).error_code, absl::StatusCode::kInternal);
      EXPECT_THAT(cluster.stream(id).error, HasSubstr("last on attention worker 0, whose memory may be failing"));
      EXPECT_LT(cluster.stream(id).tokens.size(), all.size());
    }
    ExpectClean(cluster);
  }
}

// The workers that were told to open sequences, in order, until nothing happens any more.
std::vector<uint32_t> WorkersOf(FakeCluster& cluster, const std::function<void(const Action&)>& more) {
  std::vector<uint32_t> opened;
  cluster.on_action = [&](const Action& action) {
    if (const auto* open = std::get_if<OpenSequence>(&action)) opened.push_back(open->worker.value());
    more(action);
  };
  cluster.RunUntilIdle();
  return opened;
}

TEST(Damage, KeepsASequenceFromTheWorkerWhereItWasWhereAnotherHoldsIt) {
  for (const uint64_t second : {uint64_t{100000}, uint64_t{4}}) {  // blocks of the second worker
    ClusterOptions options = SmallCluster(2);
    options.kv_blocks[1] = second;
    FakeCluster cluster(options);
    const RequestId id = cluster.Submit(Ask(500, 60));
    int damages = 2;
    const std::vector<uint32_t> opened = WorkersOf(cluster, [&](const Action& action) {
      if (std::holds_alternative<EmitUpdate>(action) && cluster.stream(id).tokens.size() % 20 == 10 && damages-- > 0)
        cluster.Damage(1);
    });
    EXPECT_EQ(cluster.core().stats().damaged, 2u);
    EXPECT_EQ(cluster.stream(id).tokens, cluster.Undisturbed(cluster.request(id), 0)) << cluster.stream(id).error;
    ASSERT_EQ(opened.size(), 3u);
    if (second > 4)
      EXPECT_NE(opened[0], opened[1]) << "it began again where its KV had been damaged";
    else
      EXPECT_EQ(opened, (std::vector<uint32_t>{0, 0, 0})) << "nothing else holds it";
    ExpectClean(cluster);
  }
}

TEST(Damage, IsNoReasonToWaitForRoomOnTheOnlyWorker) {
  FakeCluster cluster(SmallCluster());
  const RequestId longer = cluster.Submit(Ask(50, 1000));
  const RequestId shorter = cluster.Submit(Ask(50, 30, "a", 8));
  while (cluster.stream(longer).tokens.size() < 10 || cluster.stream(shorter).tokens.size() < 10)
    ASSERT_TRUE(cluster.RunOne());
  cluster.Damage(1);  // both
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.core().stats().damaged, 2u);
  EXPECT_LT(cluster.stream(shorter).end, cluster.stream(longer).end) << "it waited until the other had ended";
  for (const RequestId id : {longer, shorter})
    EXPECT_EQ(cluster.stream(id).tokens, cluster.Undisturbed(cluster.request(id), 0));
  ExpectClean(cluster);
}

// Between two of them it got tokens.
TEST(Damage, FromTimeToTimeEndsNoRequest) {
  FakeCluster cluster(SmallCluster());
  const RequestId id = cluster.Submit(Ask(50, 200));
  for (size_t tokens = 10; tokens < 200; tokens += 10) {
    while (cluster.stream(id).tokens.size() < tokens) ASSERT_TRUE(cluster.RunOne());
    cluster.Damage(1);
  }
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.core().stats().damaged, 19u);
  EXPECT_EQ(cluster.stream(id).tokens, cluster.Undisturbed(cluster.request(id), 0)) << cluster.stream(id).error;
  ExpectClean(cluster);
}

TEST(Damage, EndsWhereItNeverDoes) {
  FakeCluster cluster(SmallCluster());
  const RequestId id = cluster.Submit(Ask(50, 2000));
  cluster.on_action = [&](const Action& action) {
    if (std::holds_alternative<EmitUpdate>(action)) cluster.Damage(1);
  };
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(id).error_code, absl::StatusCode::kInternal);
  EXPECT_EQ(cluster.core().stats().damaged, 101u);
  ExpectClean(cluster);
}

// Else it would be planned again and again.
TEST(Damage, OfNoSequenceOfTheStepIsAFailureOfTheComputeWorker) {
  FakeCluster cluster(SmallCluster());
  const RequestId id = cluster.Submit(Ask(50, 30));
  cluster.on_action = [&](const Action& action) {
    if (std::holds_alternative<RunStep>(action)) cluster.FailNextStep(proto::StepStatus::kDamaged);
  };
  cluster.RunUntilIdle(10'000);
  EXPECT_EQ(cluster.stream(id).error_code, absl::StatusCode::kUnavailable);
  EXPECT_THAT(cluster.stream(id).error, HasSubstr("damaged sequences that are not in it"));
  EXPECT_EQ(cluster.core().stats().damaged, 0u);
  ExpectClean(cluster);
}

TEST(Loss, WhatNoOtherWorkerHoldsWaitsForAReplacement) {
  ClusterOptions options = SmallCluster(2);
  options.kv_blocks = {20, 2000};
  FakeCluster cluster(options);
  const RequestId id = cluster.Submit(Ask(500, 200));
  const RequestId small = cluster.Submit(Ask(50, 30, "a", 8));
  cluster.Post(cluster.at(absl::Milliseconds(20)), AttentionWorkerLost{WorkerId(1), Epoch(1)});
  cluster.Post(cluster.at(absl::Seconds(5)), AttentionWorkerJoined{.worker = WorkerId(1), .kv_blocks = 2000});
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(id).error, "");
  EXPECT_EQ(cluster.stream(id).tokens, cluster.Undisturbed(cluster.request(id), 0));
  EXPECT_LT(cluster.stream(small).end, cluster.at(absl::Seconds(1))) << "it does not stand in the way of others";
  ExpectClean(cluster);
}

TEST(Loss, WhatNoOtherWorkerHoldsEndsAsUnavailableInTheEnd) {
  ClusterOptions options = SmallCluster(2);
  options.kv_blocks = {20, 2000};
  FakeCluster cluster(options);
  const RequestId id = cluster.Submit(Ask(500, 200));
  cluster.Post(cluster.at(absl::Milliseconds(20)), AttentionWorkerLost{WorkerId(1), Epoch(1)});
  const RequestId late = cluster.SubmitAt(cluster.at(absl::Seconds(1)), Ask(500, 20));
  const RequestId later = cluster.SubmitAt(cluster.at(absl::Seconds(20)), Ask(500, 20));
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(id).error_code, absl::StatusCode::kUnavailable) << cluster.stream(id).error;
  EXPECT_EQ(cluster.stream(late).error_code, absl::StatusCode::kUnavailable);
  EXPECT_EQ(cluster.stream(later).error_code, absl::StatusCode::kOutOfRange) << "the cluster is as small as that";
  EXPECT_THAT(cluster.stream(id).error, HasSubstr("hold 320 tokens of one sequence"));
  ExpectClean(cluster);
}

// A compute worker cannot reach a worker for a while; that ends, all its sequences end, and much later it happens
// again.
TEST(Unreachable, PatienceBeginsAnewForTheNextMembers) {
  FakeCluster cluster(SmallCluster(1));
  const RequestId first = cluster.Submit(Ask(50, 30));
  cluster.RunUntil(cluster.at(absl::Milliseconds(5)));
  cluster.Disconnect(WorkerId(0));
  cluster.RunUntil(cluster.at(absl::Milliseconds(500)));
  cluster.Post(cluster.now(), RequestCancelled{first});
  cluster.RunUntil(cluster.at(absl::Seconds(60)));
  const RequestId second = cluster.Submit(Ask(50, 30, "a", 8));
  cluster.RunUntil(cluster.at(absl::Seconds(61)));
  EXPECT_FALSE(cluster.stream(second).finished) << cluster.stream(second).error;
  cluster.Reconnect(WorkerId(0));
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(second).tokens, cluster.Undisturbed(cluster.request(second), 0));
  ExpectClean(cluster);
}

TEST(Pins, ARequestRunsOnTheWorkersThatItNames) {
  ClusterOptions options = SmallCluster(3);
  options.compute_workers = 3;
  options.scheduler.micro_batches = 2;
  FakeCluster cluster(options);
  std::set<std::pair<WorkerId, WorkerId>> ran;  // of the pinned sequence
  SequenceId pinned;
  cluster.on_action = [&](const Action& action) {
    if (const auto* run = std::get_if<RunStep>(&action))
      for (const proto::StepEntry& entry : run->plan.entries)
        if (entry.tokens.size() > 1 ? entry.prompt_tokens == 33 : entry.sequence == pinned) {
          pinned = entry.sequence;
          ran.emplace(entry.placement[0].worker, run->compute_worker);
        }
  };
  for (int i = 0; i < 20; ++i) cluster.Submit(Ask(10 + i, 30, "a", i + 1));
  GenerationRequest request = Ask(33, 40);
  request.only_attention_worker = WorkerId(1);
  request.only_compute_worker = WorkerId(102);
  const RequestId id = cluster.Submit(std::move(request));
  cluster.RunUntilIdle();
  EXPECT_THAT(ran, ::testing::ElementsAre(std::pair(WorkerId(1), WorkerId(102))));
  EXPECT_EQ(cluster.stream(id).tokens, cluster.Undisturbed(cluster.request(id), 0));
  ExpectClean(cluster);
}

TEST(Pins, WhereTheWorkerIsNotThereARequestRunsElsewhere) {
  FakeCluster cluster(SmallCluster(2));
  GenerationRequest request = Ask(33, 10);
  request.only_attention_worker = WorkerId(77);
  request.only_compute_worker = WorkerId(78);
  const RequestId id = cluster.Submit(std::move(request));
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(id).tokens.size(), 10u);
  ExpectClean(cluster);
}

}  // namespace
}  // namespace dovetail::scheduler
