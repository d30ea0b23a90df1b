#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <variant>

#include "scheduler/core/limits.h"
#include "scheduler/core/prefill_planner.h"
#include "tests/scheduler/small_cluster.h"

// A compute worker and an attention worker on one GPU (AttentionWorkerJoined::pair).

namespace dovetail::scheduler {
namespace {

ClusterOptions Pairs(int pairs) {
  ClusterOptions options = SmallCluster(pairs);
  options.compute_workers = options.pairs = pairs;
  options.scheduler.prefill_ranks = 1;
  return options;
}

constexpr uint32_t kFirst = 100, kSecond = 101;  // compute workers

// Entries of steps by compute worker and by the attention workers of the sequence.
using Steps = std::map<std::pair<uint32_t, std::vector<WorkerId>>, int>;

void CountSteps(FakeCluster& cluster, Steps& steps) {
  cluster.on_action = [&steps](const Action& action) {
    const auto* const run = std::get_if<RunStep>(&action);
    if (run == nullptr) return;
    for (const proto::StepEntry& entry : run->plan.entries) {
      const auto workers = AttentionWorkersOf(entry.placement);
      ++steps[{run->compute_worker.value(), std::vector<WorkerId>(workers.begin(), workers.end())}];
    }
  };
}

int EntriesOf(const Steps& steps, uint32_t compute_worker, std::vector<WorkerId> attention_workers) {
  const auto found = steps.find({compute_worker, std::move(attention_workers)});
  return found == steps.end() ? 0 : found->second;
}

TEST(Pairs, StepsRunWhereTheirSequencesLie) {
  for (const int micro_batches : {1, 2}) {
    SCOPED_TRACE(micro_batches);
    ClusterOptions options = Pairs(2);
    options.scheduler.micro_batches = micro_batches;
    FakeCluster cluster(options);
    Steps steps;
    CountSteps(cluster, steps);
    for (uint64_t i = 0; i < 8; ++i)
      cluster.SubmitAt(cluster.at(absl::Milliseconds(3 * i)), Ask(100 + 10 * static_cast<int>(i), 40, "a", i + 1));
    cluster.RunUntilIdle();
    EXPECT_EQ(steps.size(), 2u) << "nothing steps on the other pair's compute worker";
    EXPECT_GE(EntriesOf(steps, kFirst, {WorkerId(0)}), 3 * 41) << "each has its share";
    EXPECT_GE(EntriesOf(steps, kSecond, {WorkerId(1)}), 3 * 41);
    ExpectUndisturbed(cluster);
  }
}

// With more of them than half of the micro-batches there are not two for each, and none steps ahead of its tokens.
TEST(Pairs, AsManyAsThereAreMicroBatchesStepAll) {
  for (const int pairs : {8, 9, kMaxMicroBatches}) {
    SCOPED_TRACE(pairs);
    ClusterOptions options = Pairs(pairs);
    options.scheduler.run_ahead = true;
    FakeCluster cluster(options);
    for (uint64_t i = 0; i < 40; ++i)
      cluster.SubmitAt(cluster.at(absl::Milliseconds(i)), Ask(100 + static_cast<int>(i), 20, "a", i + 1));
    cluster.RunUntilIdle();
    ExpectUndisturbed(cluster);
  }
}

// Its first micro-batch is that of another worker, which has nothing to do and is planned first.
TEST(Pairs, WhatIsSentToItsPairStepsAtOnce) {
  FakeCluster cluster(Pairs(2));
  Steps steps;
  CountSteps(cluster, steps);
  cluster.Submit(Ask(100, 200));  // on one pair
  const RequestId second = cluster.SubmitAt(cluster.at(absl::Milliseconds(20)), Ask(100, 4, "a", 8));
  cluster.RunUntil(cluster.at(absl::Milliseconds(40)));
  EXPECT_TRUE(cluster.finished(second)) << "it waited for a step of the first";
  cluster.RunUntilIdle();
  EXPECT_EQ(steps.size(), 2u);
  ExpectUndisturbed(cluster);
}

TEST(Pairs, AnotherComputeWorkerStepsForOneThatIsLost) {
  FakeCluster cluster(Pairs(2));
  Steps steps;
  CountSteps(cluster, steps);
  for (uint64_t i = 0; i < 4; ++i) cluster.Submit(Ask(100, 100, "a", i + 1));
  cluster.Post(cluster.at(absl::Milliseconds(30)), ComputeWorkerLost{WorkerId(kFirst)});
  cluster.RunUntilIdle();
  EXPECT_GT(EntriesOf(steps, kFirst, {WorkerId(0)}), 0);
  EXPECT_GT(EntriesOf(steps, kSecond, {WorkerId(0)}), 0) << "what lay there stays there";
  EXPECT_EQ(cluster.core().stats().preemptions, 0u);
  ExpectUndisturbed(cluster);
}

TEST(Pairs, WhatLayOnALostPairBeginsAgainOnTheOther) {
  FakeCluster cluster(Pairs(2));
  std::vector<RequestId> requests;
  for (uint64_t i = 0; i < 4; ++i) requests.push_back(cluster.Submit(Ask(100, 100, "a", i + 1)));
  cluster.Post(cluster.at(absl::Milliseconds(30)), ComputeWorkerLost{WorkerId(kFirst)});
  cluster.Post(cluster.at(absl::Milliseconds(30)),
               AttentionWorkerLost{WorkerId(0), cluster.worker(WorkerId(0)).epoch()});
  cluster.RunUntilIdle();
  for (const RequestId id : requests) {
    EXPECT_EQ(cluster.stream(id).tokens, cluster.Undisturbed(cluster.request(id), 0));
    EXPECT_EQ(cluster.stream(id).attention_workers.back(), WorkerId(1));
  }
}

TEST(Pairs, WhatIsDividedOrLiesElsewhereStepsAnywhere) {
  ClusterOptions options = Pairs(2);
  options.kv_blocks.push_back(100000);  // a third attention worker, in no pair
  options.scheduler.placement = PlacementPolicy::kMixed;
  FakeCluster cluster(options);
  Steps steps;
  CountSteps(cluster, steps);
  for (uint64_t i = 0; i < 12; ++i) cluster.Submit(Ask(300, 60, "a", i + 1));
  cluster.RunUntilIdle();
  EXPECT_EQ(EntriesOf(steps, kFirst, {WorkerId(1)}) + EntriesOf(steps, kSecond, {WorkerId(0)}), 0);
  int of_others[2] = {0, 0};
  for (const auto& [where, entries] : steps)
    if (where.second.size() > 1 || where.second.front() == WorkerId(2)) of_others[where.first - kFirst] += entries;
  EXPECT_GT(of_others[0], 0);
  EXPECT_GT(of_others[1], 0);
  ExpectUndisturbed(cluster);
}

}  // namespace
}  // namespace dovetail::scheduler
