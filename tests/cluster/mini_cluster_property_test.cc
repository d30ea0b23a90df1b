#include <gtest/gtest.h>

#include "tests/cluster/mini_cluster.h"
#include "tests/cluster/scenario.h"
#include "tests/cluster/scenario_runner.h"

#ifndef DOVETAIL_SEED_COUNT
#define DOVETAIL_SEED_COUNT 24
#endif

namespace dovetail::test {
namespace {

// By seed: models, placements, numbers of workers of both kinds, micro-batches, scratch, lanes, and requests that come,
// share, are preempted and cancelled.
TEST(MiniClusterProperty, WhateverTheClusterIsLikeEveryStreamIsTheOneItsRequestHasAlone) {
  ScenarioRunner runner;
  Outcome all;
  for (uint64_t seed = 9001; seed < 9001 + DOVETAIL_SEED_COUNT; ++seed) {
    const Scenario scenario = SomeScenario(seed, runner.models());
    MiniClusterOptions options;
    options.deployment = seed % 3 == 0 ? Deployment::kUcxThreads : Deployment::kThreads;
    options.lanes = seed % 2 == 0 ? "shm" : "tcp";
    options.model = runner.file(scenario.model);
    options.kv = scenario.kv;
    options.isa = scenario.strongest_isa ? kernels::kStrongestIsa : kernels::Isa::kAvx2;
    options.kv_bytes = runner.KvBytesOfWorker(scenario);
    options.attention_workers = scenario.workers;
    options.compute_workers = scenario.compute_workers;
    options.scheduler.prefill_ranks = scenario.prefill_ranks;
    options.scheduler.prefill_rank_tokens = scenario.prefill_rank_tokens;
    options.scheduler.prefill_exchange = scenario.prefix;
    if (scenario.chain) options.scheduler.linear_exchange = proto::LinearExchange::kChain;
    if (scenario.state_switch) options.scheduler.linear_exchange = proto::LinearExchange::kSwitch;
    if (!scenario.prefix) options.scheduler.linear_exchange.reset();
    options.compute = ScenarioRunner::TuningOf(scenario);
    options.scheduler.placement = scenario.placement;
    options.scheduler.micro_batches = scenario.micro_batches;
    options.scheduler.adapt_micro_batches = seed % 5 == 0;
    options.scheduler.enable_prefix_caching = scenario.prefix_cache;
    options.scheduler.enable_chunked_prefill = scenario.chunked;
    options.scheduler.max_model_len = kScenarioPositions;
    options.scheduler.max_num_batched_tokens = scenario.step_tokens;
    options.scheduler.max_num_seqs = scenario.max_seqs;
    options.scheduler.token_shard_tokens = scenario.token_shard;
    const auto cluster = MiniCluster::Start(options);
    ASSERT_TRUE(cluster.ok()) << scenario.ToString() << "\n" << cluster.status();
    const Outcome outcome = runner.Run(scenario, (*cluster)->engine());
    EXPECT_EQ(outcome.difference, "") << Name(options.deployment) << " " << options.lanes << "\n"
                                      << scenario.ToString();
    all.preemptions += outcome.preemptions;
    all.prefix_hits += outcome.prefix_hits;
    all.prefill_groups += outcome.prefill_groups;
    all.chain_bytes += outcome.chain_bytes;
    all.direct_bytes += outcome.direct_bytes;
    all.ring_bytes += outcome.ring_bytes;
    all.switch_bytes += outcome.switch_bytes;
    all.pass_q_bytes += outcome.pass_q_bytes;
  }
  EXPECT_GT(all.prefill_groups, 0u);
  if (DOVETAIL_SEED_COUNT >= 100) {
    EXPECT_GT(all.chain_bytes, 0u) << "no ranks handed on states";
  }
  EXPECT_GT(all.direct_bytes, 0u) << "none gave each other K and V";
  EXPECT_GT(all.ring_bytes, 0u) << "nothing went round";
  EXPECT_GT(all.switch_bytes, 0u) << "none exchanged tokens for heads";
  if (DOVETAIL_SEED_COUNT >= 100) {
    EXPECT_GT(all.pass_q_bytes, 0u) << "none asked each other";
  }
  EXPECT_GT(all.preemptions + all.prefix_hits, 0u) << "the seeds are too tame to say anything";
}

}  // namespace
}  // namespace dovetail::test
