#include "scheduler/core/rotation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>

#include "scheduler/core/placement_policy.h"
#include "tests/scheduler/fake_cluster.h"

// How many micro-batches rotate, and how unlike workers share the KV.

namespace dovetail::scheduler {
namespace {

TEST(RotationPlan, IsTheSmallestNumberThatKeepsTheBusierPoolBusy) {
  EXPECT_EQ(PlanRotation({100, 0, 0}, 8).micro_batches, 1) << "nothing to overlap";
  EXPECT_EQ(PlanRotation({100, 100, 0}, 8).micro_batches, 2);
  EXPECT_EQ(PlanRotation({100, 100, 1}, 8).micro_batches, 3) << "two would leave both waiting for the hops";
  EXPECT_EQ(PlanRotation({100, 20, 40}, 8).micro_batches, 2);
  EXPECT_EQ(PlanRotation({10, 10, 100}, 8).micro_batches, 8) << "at most what there is";
  EXPECT_EQ(PlanRotation({0, 0, 0}, 8).micro_batches, 1);
}

TEST(RotationPlan, TurnsAreSpreadOverTheCycle) {
  const RotationPlan plan = PlanRotation({100, 80, 30}, 8);
  EXPECT_EQ(plan.micro_batches, 3);
  EXPECT_DOUBLE_EQ(plan.cycle_us, 300);
  EXPECT_DOUBLE_EQ(plan.stagger_us, 100);
  EXPECT_DOUBLE_EQ(PlanRotation({100, 80, 30}, 1).cycle_us, 240);
}

// A machine whose layers take what `of` says of a micro-batch's sequences.
struct Machine {
  std::function<StageTimes(int sequences)> of;
  int layers = 32;

  // Micro-batches without a sequence take no turn.
  double StepMicroseconds(int micro_batches, int sequences) const {
    micro_batches = std::min(micro_batches, sequences);
    const StageTimes times = of(sequences / micro_batches);
    const double busier = std::max(times.dense_us, times.attention_us);
    return layers * std::max(micro_batches * busier, times.dense_us + times.attention_us + 2 * times.hop_us);
  }
  // `steps` of `sequences` in all; how many of them had how many micro-batches.
  std::map<int, int> Run(Rotation& rotation, int sequences, int steps, int prompt_every = 0) const {
    std::map<int, int> seen;
    for (int i = 0; i < steps; ++i) {
      const int n = rotation.micro_batches();
      ++seen[n];
      const bool decodes = prompt_every == 0 || i % prompt_every != 0;
      rotation.Note({.layer = of(std::max(1, sequences / n)),
                     .total_us = StepMicroseconds(n, sequences) * (decodes ? 1 : 20),
                     .decodes = decodes,
                     .sequences = static_cast<double>(sequences)});
    }
    return seen;
  }
};
// A CPU computes; a GPU reads its weights whatever the batch.
const Machine kComputes{[](int n) { return StageTimes{10.0 * n, 9.0 * n, 5}; }};
const Machine kReadsWeights{[](int n) { return StageTimes{150 + 0.1 * n, 4 + 1.0 * n, 5}; }};

TEST(RotationTest, WhereHalvesOfABatchTakeHalfAsLongThePlanHolds) {
  Rotation rotation(4);
  std::map<int, int> seen = kComputes.Run(rotation, 48, 4000);
  EXPECT_GT(seen[2] + seen[3], 3900);
  EXPECT_LT(kComputes.StepMicroseconds(rotation.micro_batches(), 48), 0.6 * kComputes.StepMicroseconds(1, 48));
}

TEST(RotationTest, WhereTheyTakeAsLongAsTheWholeOneBatchIsReturnedTo) {
  Rotation rotation(4);
  EXPECT_EQ(PlanRotation(kReadsWeights.of(16), 4).micro_batches, 2) << "the plan alone would split it";
  std::map<int, int> seen = kReadsWeights.Run(rotation, 16, 10000);
  EXPECT_GT(seen[1], 9500);
  EXPECT_GT(seen[2], 0) << "it was tried";
}

TEST(RotationTest, OneSequenceTakesItsTimeWhateverTheNumber) {
  Rotation rotation(4);
  kReadsWeights.Run(rotation, 1, 4000);
  kComputes.Run(rotation, 48, 32 * 6);
  EXPECT_LT(kComputes.StepMicroseconds(rotation.micro_batches(), 48), 0.6 * kComputes.StepMicroseconds(1, 48));
}

TEST(RotationTest, AnotherLoadIsTriedAnew) {
  Rotation rotation(4);
  kReadsWeights.Run(rotation, 16, 2000);
  ASSERT_EQ(rotation.micro_batches(), 1);
  std::map<int, int> seen = kReadsWeights.Run(rotation, 512, 2000);
  EXPECT_GT(seen[2] + seen[3], 1800) << "attention takes as long as two readings of the weights";
  seen = kReadsWeights.Run(rotation, 16, 2000);
  EXPECT_GT(seen[1], 1800);
}

TEST(RotationTest, StepsThatReadPromptsSayNothingOfATokensTime) {
  Rotation rotation(4);
  std::map<int, int> seen = kReadsWeights.Run(rotation, 16, 10000, 3);
  EXPECT_GT(seen[1], 9000);
}

TEST(RotationTest, NeverMoreThanThereMayBe) {
  Rotation rotation(2);
  const Machine far{[](int n) { return StageTimes{1.0 * n, 1.0 * n, 500}; }};
  std::map<int, int> seen = far.Run(rotation, 64, 1000);
  EXPECT_EQ(seen.rbegin()->first, 2);
}

std::vector<KvBudget::Worker> Workers(std::vector<std::pair<uint64_t, double>> capacity_and_rate) {
  std::vector<KvBudget::Worker> workers;
  for (const auto& [capacity, rate] : capacity_and_rate)
    workers.push_back({.id = WorkerId(static_cast<uint32_t>(workers.size())), .capacity = capacity, .rate = rate});
  return workers;
}

TEST(FairParts, AreLimitedByMemoryAndBySpeed) {
  EXPECT_EQ(FairParts(Workers({{100, 1}, {300, 1}})), (std::vector<double>{0.25, 0.5}));
  EXPECT_EQ(FairParts(Workers({{100, 3}, {100, 1}})), (std::vector<double>{0.5, 0.25}));
}

proto::AttentionTable EightHeads() {
  return *proto::AttentionTable::Build(
      {proto::SoftmaxSpec{.query_heads = 8, .kv_heads = 8, .key_dim = 8, .value_dim = 8, .scale = 1}});
}

TEST(FairParts, HeadsAndTokensGoToWorkersByThem) {
  const auto workers = Workers({{1000, 1}, {1000, 3}});
  const auto heads = SplitHeads(EightHeads(), workers, {0, 1});
  ASSERT_EQ(heads.size(), 2u);
  EXPECT_EQ(heads[0].kv_heads, (proto::HeadRange{0, 3})) << "a quarter to a half: one to two";
  EXPECT_EQ(heads[1].kv_heads, (proto::HeadRange{3, 8}));
  int of_fast = 0;
  const auto tokens = SplitTokens(EightHeads(), workers, {0, 1}, 64, 64 * 12);
  ASSERT_EQ(tokens.size(), 12u);
  for (const proto::Shard& shard : tokens) of_fast += shard.worker == WorkerId(1);
  EXPECT_EQ(of_fast, 8);
  EXPECT_TRUE(proto::Validate(heads, EightHeads()).ok());
  EXPECT_TRUE(proto::Validate(tokens, EightHeads()).ok());
}

TEST(FairParts, SequencesGoToAFasterWorkerMoreOften) {
  ClusterOptions options;
  options.scheduler.attention = EightHeads();
  options.scheduler.max_num_seqs = 12;
  options.scheduler.enable_prefix_caching = false;
  options.kv_blocks = {100000, 100000};
  FakeCluster cluster(options);
  cluster.Post(cluster.now(), AttentionWorkerLost{WorkerId(1), cluster.worker(WorkerId(1)).epoch()});
  cluster.Post(cluster.now(),
               AttentionWorkerJoined{WorkerId(1), Epoch(cluster.worker(WorkerId(1)).epoch().value() + 1), 100000, 3});
  for (int i = 0; i < 12; ++i) {
    GenerationRequest request;
    request.tenant = "t";
    request.prompt.assign(100, 7);
    request.max_tokens = 100;
    cluster.SubmitAt(cluster.at(absl::Milliseconds(1 + i)), request);
  }
  cluster.RunUntil(cluster.at(absl::Milliseconds(30)));
  EXPECT_EQ(cluster.worker(WorkerId(0)).sequences(), 4u);
  EXPECT_EQ(cluster.worker(WorkerId(1)).sequences(), 8u);
  cluster.RunUntilIdle();
  EXPECT_TRUE(cluster.violations().empty());
}

TEST(ComputeWorkers, EachOfSeveralHasMicroBatchesOfItsOwnAndOneMayBeLost) {
  ClusterOptions options;
  options.scheduler.attention = EightHeads();
  options.scheduler.max_num_seqs = 12;
  options.compute_workers = 3;
  FakeCluster cluster(options);
  std::map<WorkerId, int> steps;
  cluster.on_action = [&](const Action& action) {
    if (const auto* run = std::get_if<RunStep>(&action)) ++steps[run->compute_worker];
  };
  for (int i = 0; i < 9; ++i) {
    GenerationRequest request;
    request.tenant = "t";
    request.prompt.assign(20 + i, i);
    request.max_tokens = 60;
    cluster.Submit(request);
  }
  cluster.RunUntil(cluster.at(absl::Milliseconds(40)));
  EXPECT_EQ(steps.size(), 3u);
  for (const auto& [worker, count] : steps) EXPECT_GT(count, 10) << worker.value();
  EXPECT_EQ(cluster.most_sequences_in_step, 3);
  cluster.RunUntilIdle();
  EXPECT_TRUE(cluster.violations().empty());
  for (const RequestId id : cluster.requests())
    EXPECT_EQ(cluster.stream(id).tokens, cluster.Undisturbed(cluster.request(id), 0));
}

}  // namespace
}  // namespace dovetail::scheduler
