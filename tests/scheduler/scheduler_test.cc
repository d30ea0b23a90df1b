#include "scheduler/core/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "tests/scheduler/small_cluster.h"

namespace dovetail::scheduler {
namespace {

using ::testing::HasSubstr;

TEST(ContinuousBatching, ARequestGetsTheTokensOfTheModel) {
  FakeCluster cluster(SmallCluster());
  const RequestId id = cluster.Submit(Ask(10, 5));
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(id).tokens, cluster.Undisturbed(cluster.request(id), 0));
  EXPECT_EQ(cluster.stream(id).tokens.size(), 5u);
  EXPECT_EQ(cluster.stream(id).reason, FinishReason::kLength);
  EXPECT_EQ(cluster.steps, 5u);
  ExpectClean(cluster);
}

TEST(ContinuousBatching, RequestsShareSteps) {
  FakeCluster cluster(SmallCluster());
  for (int i = 0; i < 20; ++i) cluster.Submit(Ask(10 + i, 8, "a", i + 1));
  cluster.RunUntilIdle();
  for (RequestId id : cluster.requests())
    EXPECT_EQ(cluster.stream(id).tokens, cluster.Undisturbed(cluster.request(id), 0));
  EXPECT_EQ(cluster.most_sequences_in_step, 20);
  EXPECT_LT(cluster.steps, 14u);
  ExpectClean(cluster);
}

TEST(ContinuousBatching, ChoicesAreForkedAndDrawWithTheirOwnSeeds) {
  FakeCluster cluster(SmallCluster(2));
  GenerationRequest request = Ask(150, 70);
  request.choices = 4;
  const RequestId id = cluster.Submit(request);
  cluster.RunUntilIdle();
  for (int i = 0; i < 4; ++i) EXPECT_EQ(cluster.stream(id, i).tokens, cluster.Undisturbed(cluster.request(id), i));
  EXPECT_NE(cluster.stream(id, 0).tokens, cluster.stream(id, 1).tokens);
  ExpectClean(cluster);
}

// Every plan that the core asked for.
std::vector<proto::StepPlan> PlansOf(FakeCluster& cluster) {
  std::vector<proto::StepPlan> plans;
  cluster.on_action = [&plans](const Action& action) {
    if (const auto* run = std::get_if<RunStep>(&action)) plans.push_back(run->plan);
  };
  cluster.RunUntilIdle();
  cluster.on_action = nullptr;
  return plans;
}

int TokensOf(const proto::StepPlan& plan) {
  int tokens = 0;
  for (const proto::StepEntry& entry : plan.entries) tokens += static_cast<int>(entry.tokens.size());
  return tokens;
}

TEST(ChunkedPrefill, ALongPromptIsReadInPiecesWhileOthersGoOnDecoding) {
  ClusterOptions options = SmallCluster();
  options.scheduler.max_num_seqs = 8;
  options.scheduler.max_num_batched_tokens = 64;
  FakeCluster cluster(options);
  const RequestId talker = cluster.Submit(Ask(5, 40));
  const RequestId reader = cluster.SubmitAt(cluster.at(absl::Milliseconds(3)), Ask(500, 4, "a", 9));
  const auto plans = PlansOf(cluster);
  int mixed = 0;
  for (const proto::StepPlan& plan : plans) {
    EXPECT_LE(TokensOf(plan), 64);
    if (plan.entries.size() < 2 || TokensOf(plan) == 2) continue;
    ++mixed;
    EXPECT_EQ(plan.entries[0].tokens.size(), 1u) << "the stream gets its token in every step";
    if (plan.entries[1].sample) continue;
    EXPECT_EQ(TokensOf(plan), 64) << "the prompt gets all the rest";
  }
  EXPECT_EQ(mixed, 8);  // 500 tokens at 63 a step
  for (const RequestId id : {talker, reader})
    EXPECT_EQ(cluster.stream(id).tokens, cluster.Undisturbed(cluster.request(id), 0));
  ExpectClean(cluster);
}

TEST(ChunkedPrefill, CanBeTurnedOff) {
  ClusterOptions options = SmallCluster();
  options.scheduler.enable_chunked_prefill = false;
  options.scheduler.max_model_len = 256;
  FakeCluster cluster(options);
  for (int i = 0; i < 4; ++i) cluster.Submit(Ask(100, 10, "a", i + 1));
  for (const proto::StepPlan& plan : PlansOf(cluster))
    for (const proto::StepEntry& entry : plan.entries)
      EXPECT_TRUE(entry.tokens.size() == 1 || entry.tokens.size() == 100);
  ExpectClean(cluster);
}

// 2 ops x 2 KV heads: 4 blocks per 64 tokens.
TEST(Admission, WaitsUntilTheKvBudgetHasRoom) {
  ClusterOptions options = SmallCluster();
  options.kv_blocks = {20};  // 5 x 64 tokens
  FakeCluster cluster(options);
  const RequestId first = cluster.Submit(Ask(150, 30));  // 3 x 64
  const RequestId second = cluster.Submit(Ask(150, 30, "a", 8));
  cluster.RunUntil(cluster.at(absl::Milliseconds(10)));
  EXPECT_EQ(cluster.core().stats().running_sequences, 1);
  EXPECT_EQ(cluster.core().stats().waiting_requests, 1);
  EXPECT_DOUBLE_EQ(cluster.core().stats().kv_usage, 12.0 / 20);
  cluster.RunUntilIdle();
  EXPECT_GE(cluster.stream(second).first_token, cluster.stream(first).end);
  EXPECT_EQ(cluster.core().stats().preemptions, 0u);
  ExpectClean(cluster);
}

TEST(Admission, RefusesWhatCouldNeverFitWithBothLengths) {
  ClusterOptions options = SmallCluster();
  options.kv_blocks = {20};
  FakeCluster cluster(options);
  const RequestId id = cluster.Submit(Ask(400, 5));
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(id).error_code, absl::StatusCode::kOutOfRange);
  EXPECT_THAT(cluster.stream(id).error, HasSubstr("hold 320 tokens of one sequence, and this one has 400"));
  ExpectClean(cluster);
}

TEST(Admission, NeverRunsMoreSequencesThanAllowed) {
  ClusterOptions options = SmallCluster();
  options.scheduler.max_num_seqs = 3;
  FakeCluster cluster(options);
  for (int i = 0; i < 10; ++i) cluster.Submit(Ask(20, 10, "a", i + 1));
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.most_sequences_in_step, 3);
  ExpectClean(cluster);
}

TEST(Preemption, BeginsAgainFromTheTokenLogAndChangesNoToken) {
  ClusterOptions options = SmallCluster();
  options.kv_blocks = {4 * 10};
  FakeCluster cluster(options);
  for (int i = 0; i < 4; ++i) cluster.Submit(Ask(60, 150, "a", i + 1));  // each grows from 1 to 4 x 64 tokens
  cluster.RunUntilIdle();
  EXPECT_GE(cluster.core().stats().preemptions, 1u);
  for (const RequestId id : cluster.requests()) {
    EXPECT_EQ(cluster.stream(id).tokens, cluster.Undisturbed(cluster.request(id), 0));
    EXPECT_EQ(cluster.stream(id).tokens.size(), 150u);
  }
  ExpectClean(cluster);
}

TEST(Preemption, FollowsAWorkerThatRanOutOfMemory) {
  FakeCluster cluster(SmallCluster());
  for (int i = 0; i < 3; ++i) cluster.Submit(Ask(60, 20, "a", i + 1));
  cluster.RunUntil(cluster.at(absl::Milliseconds(8)));
  cluster.FailNextStep(proto::StepStatus::kOutOfMemory);
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.core().stats().preemptions, 1u);
  for (const RequestId id : cluster.requests())
    EXPECT_EQ(cluster.stream(id).tokens, cluster.Undisturbed(cluster.request(id), 0));
  ExpectClean(cluster);
}

// A worker that refuses to open a sequence, or a fork of one, does not know it: no step may name it.
TEST(RefusedOpens, BeginAgainAndChangeNoToken) {
  FakeCluster cluster(SmallCluster());
  cluster.worker(WorkerId(0)).refuse = 2;
  const RequestId asked = cluster.Submit(Ask(100, 30));
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(asked).tokens, cluster.Undisturbed(cluster.request(asked), 0));
  EXPECT_EQ(cluster.stream(asked).tokens.size(), 30u);
  ExpectClean(cluster);
}

TEST(RefusedOpens, OfForksBeforeTheFirstWholeBlockBeginAgainAlone) {
  FakeCluster cluster(SmallCluster());
  GenerationRequest request = Ask(20, 30);
  request.choices = 3;
  cluster.on_action = [&cluster](const Action& action) {
    const auto* fork = std::get_if<ForkSequence>(&action);
    if (fork != nullptr && cluster.core().stats().preemptions == 0) cluster.worker(fork->worker).refuse = 1;
  };
  const RequestId asked = cluster.Submit(request);
  cluster.RunUntilIdle();
  EXPECT_GE(cluster.core().stats().preemptions, 1u);
  for (int choice = 0; choice < 3; ++choice)
    EXPECT_EQ(cluster.stream(asked, choice).tokens, cluster.Undisturbed(cluster.request(asked), choice));
  ExpectClean(cluster);
}

TEST(RefusedOpens, OfWorkersThatAlwaysRefuseEndTheRequestWithAnError) {
  FakeCluster cluster(SmallCluster());
  cluster.worker(WorkerId(0)).refuse = 1000;
  const RequestId asked = cluster.Submit(Ask(100, 30));
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(asked).reason, FinishReason::kError);
  EXPECT_EQ(cluster.stream(asked).error_code, absl::StatusCode::kUnavailable);
  EXPECT_EQ(cluster.stream(asked).error,
            "attention worker 0 refused to open this request's sequence 3 times; its log may say why");
  EXPECT_EQ(cluster.core().stats().preemptions, 2u);
  ExpectClean(cluster);
}

TEST(Cancellation, FreesTheKvWithinAStepAndLeavesTheOthersAlone) {
  FakeCluster cluster(SmallCluster());
  const RequestId gone = cluster.Submit(Ask(100, 1000));
  const RequestId stays = cluster.Submit(Ask(30, 50, "a", 8));
  cluster.RunUntil(cluster.at(absl::Milliseconds(20)));
  EXPECT_EQ(cluster.sequences_held(), 2);
  cluster.Post(cluster.now(), RequestCancelled{gone});
  const uint64_t steps = cluster.steps;
  while (cluster.sequences_held() == 2) ASSERT_TRUE(cluster.RunOne());
  EXPECT_LE(cluster.steps, steps + 1);
  EXPECT_EQ(cluster.stream(gone).reason, FinishReason::kCancelled);
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(stays).tokens, cluster.Undisturbed(cluster.request(stays), 0));
  ExpectClean(cluster);
}

TEST(Cancellation, OfOneThatStillWaitsEndsItAtOnce) {
  ClusterOptions options = SmallCluster();
  options.scheduler.max_num_seqs = 1;
  FakeCluster cluster(options);
  cluster.Submit(Ask(10, 100));
  const RequestId waits = cluster.Submit(Ask(10, 100, "a", 8));
  cluster.RunUntil(cluster.at(absl::Milliseconds(10)));
  cluster.Post(cluster.now(), RequestCancelled{waits});
  cluster.RunUntil(cluster.now());
  EXPECT_TRUE(cluster.finished(waits));
  EXPECT_TRUE(cluster.stream(waits).tokens.empty());
  cluster.Post(cluster.now(), RequestCancelled{waits});  // late
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.core().stats().late_events, 1u);
  ExpectClean(cluster);
}

TEST(Ends, AStopTokenIsReportedButNotBeforeMinTokens) {
  FakeCluster cluster(SmallCluster());
  GenerationRequest request = Ask(10, 200);
  const std::vector<TokenId> free_run = cluster.Undisturbed(request, 0);
  request.stop_token_ids = {free_run[3]};
  const RequestId stops = cluster.Submit(request);
  request.min_tokens = 10;
  const RequestId later = cluster.Submit(request);
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(stops).reason, FinishReason::kStop);
  EXPECT_EQ(cluster.stream(stops).stop_token, free_run[3]);
  EXPECT_LE(cluster.stream(stops).tokens.size(), 4u);
  EXPECT_GT(cluster.stream(later).tokens.size(), 10u);
  for (int i = 0; i < 10; ++i) EXPECT_NE(cluster.stream(later).tokens[i], free_run[3]);
  ExpectClean(cluster);
}

TEST(TokenLogged, ResultsThatComeTwiceOrLateAreDroppedAndCounted) {
  FakeCluster cluster(SmallCluster());
  const RequestId id = cluster.Submit(Ask(10, 20));
  std::vector<proto::StepPlan> plans;
  cluster.on_action = [&plans](const Action& action) {
    if (const auto* run = std::get_if<RunStep>(&action)) plans.push_back(run->plan);
  };
  cluster.RunUntil(cluster.at(absl::Milliseconds(8)));
  ASSERT_GE(plans.size(), 3u);
  for (const size_t step : {size_t{0}, plans.size() - 2}) {
    proto::StepResult again{.step = plans[step].step, .micro_batch = plans[step].micro_batch};
    again.entries.push_back(
        {.sequence = plans[step].entries[0].sequence, .position = plans[step].entries[0].ctx_len + 1, .token = 1});
    cluster.Post(cluster.now(), StepFinished{WorkerId(100), again});
  }
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.core().stats().late_events, 2u);
  EXPECT_EQ(cluster.stream(id).tokens, cluster.Undisturbed(cluster.request(id), 0));
  ExpectClean(cluster);
}

TEST(Grammars, OneThatIsBeingCompiledDelaysItsOwnRequestOnly) {
  FakeCluster cluster(SmallCluster());
  const absl::Time compiled = cluster.at(absl::Milliseconds(500));
  int asked = 0;
  cluster.compiles_grammar = [&](const proto::StepEntry& entry) {
    const bool pending = entry.sampling.follows_grammar && cluster.now() < compiled;
    asked += pending ? 1 : 0;
    return pending;
  };
  GenerationRequest constrained = Ask(11, 20, "a", 8);
  constrained.sampling.follows_grammar = true;
  constrained.sampling.grammar = {"ra", {1}};
  const RequestId slow = cluster.Submit(constrained);
  const RequestId plain = cluster.Submit(Ask(10, 100));
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(plain).tokens, cluster.Undisturbed(cluster.request(plain), 0));
  EXPECT_EQ(cluster.stream(slow).tokens, cluster.Undisturbed(cluster.request(slow), 0));
  EXPECT_LT(cluster.stream(plain).end, cluster.at(absl::Milliseconds(200)));
  EXPECT_GE(cluster.stream(slow).first_token, compiled);
  EXPECT_LT(cluster.stream(slow).first_token, compiled + absl::Milliseconds(150));
  EXPECT_LT(asked, 15) << "pauses between questions grow";
  ExpectClean(cluster);
}

TEST(Grammars, OneThatIsNeverCompiledEndsItsRequest) {
  FakeCluster cluster(SmallCluster());
  cluster.compiles_grammar = [&](const proto::StepEntry& entry) { return entry.sampling.follows_grammar; };
  GenerationRequest constrained = Ask(11, 20);
  constrained.sampling.follows_grammar = true;
  constrained.sampling.grammar = {"ra", {1}};
  constrained.choices = 2;
  const RequestId never = cluster.Submit(constrained);
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(never).error_code, absl::StatusCode::kUnavailable);
  EXPECT_THAT(cluster.stream(never).error, HasSubstr("grammar"));
  ExpectClean(cluster);
}

TEST(Failures, ABadEntryEndsItsRequestOnly) {
  FakeCluster cluster(SmallCluster());
  const RequestId spoiled = cluster.Submit(Ask(10, 20));
  const RequestId fine = cluster.Submit(Ask(10, 20, "a", 8));
  cluster.RunUntil(cluster.at(absl::Milliseconds(5)));
  cluster.SpoilNextEntry();
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(spoiled).error_code, absl::StatusCode::kInternal);
  EXPECT_THAT(cluster.stream(spoiled).error, HasSubstr("no usable logits"));
  EXPECT_EQ(cluster.stream(fine).tokens, cluster.Undisturbed(cluster.request(fine), 0));
  ExpectClean(cluster);
}

TEST(Failures, AFailedWorkerEndsTheRequestsOfTheStep) {
  FakeCluster cluster(SmallCluster());
  const RequestId id = cluster.Submit(Ask(10, 20));
  cluster.RunUntil(cluster.at(absl::Milliseconds(5)));
  cluster.FailNextStep(proto::StepStatus::kWorkerFailed);
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(id).error_code, absl::StatusCode::kUnavailable);
  const RequestId next = cluster.Submit(Ask(10, 20));
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(next).tokens, cluster.Undisturbed(cluster.request(next), 0));
  ExpectClean(cluster);
}

// A client's stream goes on when steps end for a worker whose loss is known later, was known before or is forgotten.
TEST(Failures, AStepThatLostItsWorkerIsRepeatedHoweverLateTheNews) {
  for (const absl::Duration late : {absl::ZeroDuration(), absl::Milliseconds(3), absl::Seconds(2)}) {
    FakeCluster cluster(SmallCluster(2));
    std::vector<RequestId> ids;
    for (int i = 0; i < 4; ++i) ids.push_back(cluster.Submit(Ask(10 + i, 40)));
    cluster.RunUntil(cluster.at(absl::Milliseconds(5)));
    const Epoch epoch = cluster.worker(WorkerId(1)).epoch();
    cluster.Disconnect(WorkerId(1));
    cluster.Post(cluster.now() + late, AttentionWorkerLost{WorkerId(1), epoch});
    cluster.RunUntilIdle();
    EXPECT_LT(cluster.steps, 1000u) << "a step that cannot run is not tried all the time";
    for (RequestId id : ids) {
      EXPECT_EQ(cluster.stream(id).error, "");
      EXPECT_EQ(cluster.stream(id).tokens, cluster.Undisturbed(cluster.request(id), 0));
    }
    ExpectClean(cluster);
  }
}

TEST(Failures, AWorkerThatStaysOutOfReachEndsTheRequestsOnIt) {
  FakeCluster cluster(SmallCluster(2));
  std::vector<RequestId> ids;
  for (int i = 0; i < 4; ++i) ids.push_back(cluster.Submit(Ask(10 + i, 40)));
  cluster.RunUntil(cluster.at(absl::Milliseconds(5)));
  cluster.Disconnect(WorkerId(1));
  cluster.RunUntilIdle();
  int ended = 0;
  for (RequestId id : ids) {
    if (cluster.stream(id).error_code == absl::StatusCode::kUnavailable) {
      ++ended;
    } else {
      EXPECT_EQ(cluster.stream(id).tokens, cluster.Undisturbed(cluster.request(id), 0));
    }
  }
  EXPECT_EQ(ended, 2);
  ExpectClean(cluster);
}

TEST(Failures, AComputeWorkerWithoutAResultInTimeIsDismissedAndItsStepRepeated) {
  for (const int micro_batches : {1, 3}) {
    ClusterOptions options = SmallCluster();
    options.scheduler.step_timeout = absl::Seconds(20);
    options.scheduler.micro_batches = micro_batches;
    FakeCluster cluster(options);
    std::vector<RequestId> ids;
    for (int i = 0; i < 4; ++i) ids.push_back(cluster.Submit(Ask(10 + i, 40)));
    cluster.RunUntil(cluster.at(absl::Milliseconds(5)));
    cluster.LoseNextResults(1);
    cluster.RunUntilIdle();
    ASSERT_EQ(cluster.dismissed.size(), 1u);
    EXPECT_GT(cluster.now(), cluster.at(absl::Seconds(20)));
    EXPECT_LT(cluster.now(), cluster.at(absl::Seconds(22))) << "what a token takes is known by then";
    for (RequestId id : ids) EXPECT_EQ(cluster.stream(id).tokens, cluster.Undisturbed(cluster.request(id), 0));
    ExpectClean(cluster);
  }
}

TEST(Failures, AStepThatNeverHasAResultEndsItsRequestsAtLast) {
  ClusterOptions options = SmallCluster();
  options.scheduler.step_timeout = absl::Seconds(20);
  FakeCluster cluster(options);
  const RequestId id = cluster.Submit(Ask(10, 40));
  cluster.LoseNextResults(3);
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.dismissed.size(), 3u);
  EXPECT_EQ(cluster.stream(id).error_code, absl::StatusCode::kUnavailable);
  EXPECT_THAT(cluster.stream(id).error, HasSubstr("the last of 3 attempts at this step: no result for"));
  const RequestId next = cluster.Submit(Ask(10, 40));
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(next).tokens, cluster.Undisturbed(cluster.request(next), 0));
  ExpectClean(cluster);
}

TEST(Failures, AStepThatTakesWhatItsTokensNeedIsWaitedFor) {
  ClusterOptions options = SmallCluster();
  options.scheduler.step_timeout = absl::Seconds(20);
  options.step_base = absl::Seconds(1);
  options.step_per_token = absl::Seconds(1);
  FakeCluster cluster(options);
  const RequestId id = cluster.Submit(Ask(200, 10));
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.dismissed.size(), 0u);
  EXPECT_EQ(cluster.stream(id).tokens, cluster.Undisturbed(cluster.request(id), 0));
  ExpectClean(cluster);
}

// The scheduler's process was stopped: what came meanwhile is read after the tick.
TEST(Failures, ADeadlineThatTheSchedulerMissedItselfIsNoneOfTheWorkers) {
  SchedulerOptions options = SmallCluster().scheduler;
  options.step_timeout = absl::Seconds(20);
  SchedulerCore core(options, 0);
  std::vector<Action> actions;
  const auto handle = [&](Event event, absl::Duration when) {
    actions.clear();
    core.Handle(event, absl::UnixEpoch() + when, actions);
  };
  const auto dismissed = [&] {
    return std::any_of(actions.begin(), actions.end(),
                       [](const Action& a) { return std::holds_alternative<DismissComputeWorker>(a); });
  };
  handle(AttentionWorkerJoined{WorkerId(1), Epoch(1), 1000}, absl::ZeroDuration());
  handle(ComputeWorkerJoined{WorkerId(100)}, absl::ZeroDuration());
  GenerationRequest request = Ask(10, 40);
  request.id = RequestId(1);
  request.use_prefix_cache = false;
  handle(RequestArrived{std::make_shared<GenerationRequest>(request)}, absl::ZeroDuration());
  const auto* open = std::get_if<OpenSequence>(&actions.at(0));
  ASSERT_NE(open, nullptr);
  handle(SequenceOpened{WorkerId(1), Epoch(1), {.sequence = open->message.sequence, .resumable = {0}}},
         absl::Milliseconds(1));
  const auto* run = std::get_if<RunStep>(&actions.at(0));
  ASSERT_NE(run, nullptr);
  handle(RequestCancelled{RequestId(77)}, absl::Seconds(500));
  EXPECT_FALSE(dismissed()) << "only a tick says that all results were read";
  handle(Tick{}, absl::Seconds(500));
  EXPECT_FALSE(dismissed());
  handle(Tick{}, absl::Seconds(501));
  EXPECT_TRUE(dismissed());
}

TEST(Pauses, ASlowReaderGetsNoStepsAndLosesItsKvWhenOthersNeedIt) {
  ClusterOptions options = SmallCluster();
  options.kv_blocks = {20};
  FakeCluster cluster(options);
  const RequestId slow = cluster.Submit(Ask(100, 50));
  cluster.RunUntil(cluster.at(absl::Milliseconds(10)));
  cluster.Post(cluster.now(), RequestPaused{slow});
  cluster.RunUntil(cluster.now() + absl::Milliseconds(5));
  const size_t read = cluster.stream(slow).tokens.size();
  const RequestId other = cluster.Submit(Ask(200, 20, "a", 8));
  cluster.RunUntilIdle();
  EXPECT_TRUE(cluster.finished(other));
  EXPECT_EQ(cluster.stream(slow).tokens.size(), read);
  EXPECT_EQ(cluster.core().stats().preemptions, 1u);
  cluster.Post(cluster.now(), RequestResumed{slow});
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(slow).tokens, cluster.Undisturbed(cluster.request(slow), 0));
  ExpectClean(cluster);
}

TEST(PrefixCache, ASecondRequestOfTheTenantStartsBehindWhatIsKept) {
  FakeCluster cluster(SmallCluster(2));
  const RequestId first = cluster.Submit(Ask(300, 5));
  cluster.RunUntilIdle();
  const RequestId again = cluster.Submit(Ask(300, 5));
  const RequestId stranger = cluster.Submit(Ask(300, 5, "b"));
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(first).cached_tokens, 0);
  EXPECT_EQ(cluster.stream(again).cached_tokens, 256);
  EXPECT_EQ(cluster.stream(stranger).cached_tokens, 0) << "another tenant's blocks are salted otherwise";
  EXPECT_EQ(cluster.core().stats().prefix_hits, 256u);
  EXPECT_EQ(cluster.stream(again).tokens, cluster.stream(first).tokens);
  ExpectClean(cluster);
}

ClusterOptions OneRunsThreeWait() {
  ClusterOptions options = SmallCluster();
  options.scheduler.max_num_seqs = 1;
  options.scheduler.max_queued_requests = 3;
  return options;
}

TEST(Queue, AFullOneLosesTheLastOfTheTenantThatFillsIt) {
  FakeCluster cluster(OneRunsThreeWait());
  std::vector<RequestId> greedy;
  for (int i = 0; i < 5; ++i) greedy.push_back(cluster.Submit(Ask(10, 50, "greedy", i + 1)));  // one runs, three wait
  const RequestId modest = cluster.Submit(Ask(10, 5, "modest", 9));
  const RequestId late = cluster.Submit(Ask(10, 5, "greedy", 10));
  cluster.RunUntil(cluster.at(absl::Milliseconds(1)));
  EXPECT_EQ(cluster.stream(greedy[4]).error_code, absl::StatusCode::kResourceExhausted) << "no other tenant was there";
  EXPECT_THAT(cluster.stream(greedy[4]).error, HasSubstr("the queue holds 3 requests (--max-num-queued-reqs); try"));
  EXPECT_EQ(cluster.stream(greedy[3]).error_code, absl::StatusCode::kAborted);
  EXPECT_THAT(cluster.stream(greedy[3]).error, HasSubstr("a tenant with fewer needed a place"));
  EXPECT_EQ(cluster.stream(late).error_code, absl::StatusCode::kAborted);
  EXPECT_THAT(cluster.stream(late).error, HasSubstr("this tenant has its part of it"));
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(modest).reason, FinishReason::kLength);
  ExpectClean(cluster);
}

TEST(Queue, NobodyLosesWhatHasBegun) {
  FakeCluster cluster(OneRunsThreeWait());
  GenerationRequest several = Ask(1, 50, "greedy");  // one prompt token: nothing to share, so one runs, three wait
  several.choices = 4;
  const RequestId begun = cluster.Submit(several);
  const RequestId modest = cluster.Submit(Ask(10, 5, "modest", 9));
  cluster.RunUntilIdle();
  for (int choice = 0; choice < 4; ++choice) EXPECT_EQ(cluster.stream(begun, choice).reason, FinishReason::kLength);
  EXPECT_EQ(cluster.stream(modest).error_code, absl::StatusCode::kResourceExhausted) << "it had no part of the queue";
  ExpectClean(cluster);
}

// What a stream has begun to say it must be able to end.
TEST(Queue, NobodyLosesAPartOfACallThatHasBegun) {
  FakeCluster cluster(OneRunsThreeWait());
  std::vector<RequestId> call;
  const auto next = [&] {
    GenerationRequest prompt = Ask(10, 20, "greedy", 1 + static_cast<int>(call.size()));
    prompt.call = 7;
    call.push_back(cluster.Submit(prompt));
  };
  for (int i = 0; i < 4; ++i) next();  // one runs, three wait
  cluster.RunUntil(cluster.at(absl::Milliseconds(3)));
  const RequestId modest = cluster.Submit(Ask(10, 5, "modest", 9));
  next();  // though there is no room for others
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(modest).error_code, absl::StatusCode::kResourceExhausted);
  for (const RequestId id : call) EXPECT_EQ(cluster.stream(id).tokens, cluster.Undisturbed(cluster.request(id), 0));
  ExpectClean(cluster);
}

TEST(Queue, ACallThatHasNotBegunLosesItsLastRequestAsOthersDo) {
  FakeCluster cluster(OneRunsThreeWait());
  const RequestId runs = cluster.Submit(Ask(10, 50, "greedy", 1));
  std::vector<RequestId> call;
  for (int i = 0; i < 3; ++i) {
    GenerationRequest prompt = Ask(10, 20, "greedy", 2 + i);
    prompt.call = 7;
    call.push_back(cluster.Submit(prompt));
  }
  cluster.RunUntil(cluster.at(absl::Milliseconds(3)));
  cluster.Submit(Ask(10, 5, "modest", 9));
  cluster.RunUntil(cluster.at(absl::Milliseconds(4)));
  EXPECT_EQ(cluster.stream(call[2]).error_code, absl::StatusCode::kAborted);
  EXPECT_TRUE(cluster.stream(call[0]).tokens.empty() && cluster.stream(call[1]).tokens.empty());
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(runs).reason, FinishReason::kLength);
  ExpectClean(cluster);
}

TEST(Queue, UpdatesSayHowLongTheirRequestWaited) {
  FakeCluster cluster(OneRunsThreeWait());
  const RequestId first = cluster.Submit(Ask(10, 50));
  const RequestId second = cluster.Submit(Ask(10, 5, "b", 2));
  cluster.RunUntilIdle();
  EXPECT_EQ(cluster.stream(first).queued_us, 0);
  EXPECT_GT(cluster.stream(second).queued_us, 0);
  const absl::Duration busy = cluster.stream(first).end - cluster.at(absl::ZeroDuration());
  EXPECT_EQ(cluster.stream(second).queued_us, absl::ToInt64Microseconds(busy));
}

}  // namespace
}  // namespace dovetail::scheduler
