#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "tests/cluster/scenario_runner.h"

#ifndef DOVETAIL_SEED_COUNT
#define DOVETAIL_SEED_COUNT 120
#endif

// However many workers there are, wherever a sequence lies, whatever it shares steps with, however its prompt was cut
// into chunks and over compute workers, whether it was preempted, forked, or found its prefix cached: the bits of its
// logits and its tokens are those it has alone. By seed: DOVETAIL_SEED repeats one, DOVETAIL_SEEDS says how many. A
// failure is printed as the simplest scenario that still fails.

namespace dovetail::test {
namespace {

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::strtoull(value, nullptr, 10);
}

TEST(Cluster, EveryStreamIsBitForBitTheOneItsRequestHasAlone) {
  const uint64_t only = FromEnvironment("DOVETAIL_SEED", 0);
  const uint64_t first = only > 0 ? only : 1;
  const uint64_t last = only > 0 ? only : FromEnvironment("DOVETAIL_SEEDS", DOVETAIL_SEED_COUNT);
  ScenarioRunner runner;
  Outcome all;
  uint64_t gathered = 0;  // scenarios in which K and V came to a compute worker
  uint64_t stateful = 0;  // in which states crossed in place of tokens
  uint64_t chained = 0;   // in which ranks handed them to each other
  uint64_t direct = 0;    // in which ranks gave each other K and V
  uint64_t ring = 0;      // in which these went round
  uint64_t switched = 0;  // in which ranks exchanged tokens for heads
  uint64_t asked = 0;     // in which they asked each other
  for (uint64_t seed = first; seed <= last; ++seed) {
    const Scenario scenario = SomeScenario(seed, runner.models());
    const Outcome outcome = runner.Run(scenario);
    if (!outcome.difference.empty()) {
      const Scenario smallest = runner.Shrink(scenario, 3);
      std::string again;
      for (int i = 0; i < 10 && again.empty(); ++i) again = runner.Run(smallest).difference;
      FAIL() << scenario.ToString() << "\n"
             << outcome.difference << "\nsimplest: " << smallest.ToString() << "\n"
             << again;
    }
    all.tokens += outcome.tokens;
    all.preemptions += outcome.preemptions;
    all.prefix_hits += outcome.prefix_hits;
    all.prefill_groups += outcome.prefill_groups;
    gathered += outcome.gathered_bytes > 0 ? 1 : 0;
    stateful += outcome.state_bytes > 0 ? 1 : 0;
    chained += outcome.chain_bytes > 0 ? 1 : 0;
    direct += outcome.direct_bytes > 0 ? 1 : 0;
    ring += outcome.ring_bytes > 0 ? 1 : 0;
    switched += outcome.switch_bytes > 0 ? 1 : 0;
    asked += outcome.pass_q_bytes > 0 ? 1 : 0;
  }
  std::printf(
      "seeds %llu..%llu: %llu tokens, %llu preemptions, %llu prefix tokens found, %llu prefill groups, K and V "
      "gathered in %llu, states crossed in %llu, from rank to rank in %llu, K and V in %llu, round "
      "in %llu, heads in %llu, queries in %llu\n",
      static_cast<unsigned long long>(first), static_cast<unsigned long long>(last),
      static_cast<unsigned long long>(all.tokens), static_cast<unsigned long long>(all.preemptions),
      static_cast<unsigned long long>(all.prefix_hits), static_cast<unsigned long long>(all.prefill_groups),
      static_cast<unsigned long long>(gathered), static_cast<unsigned long long>(stateful),
      static_cast<unsigned long long>(chained), static_cast<unsigned long long>(direct),
      static_cast<unsigned long long>(ring), static_cast<unsigned long long>(switched),
      static_cast<unsigned long long>(asked));
  if (only > 0) return;
  EXPECT_GT(all.preemptions, (last - first) / 10) << "the seeds are too tame to say anything";
  EXPECT_GT(all.prefix_hits, 10 * (last - first));
  EXPECT_GT(all.prefill_groups, (last - first) / 10) << "where ranks are chosen by times, there may be none";
  EXPECT_GT(gathered, (last - first) / 20);
  EXPECT_GT(stateful, (last - first) / 10);
  EXPECT_GT(chained, (last - first) / 40);
  EXPECT_GT(direct, (last - first) / 20);
  EXPECT_GT(ring, (last - first) / 20);
  EXPECT_GT(switched, (last - first) / 20);
  EXPECT_GT(asked, (last - first) / 20);
}

}  // namespace
}  // namespace dovetail::test
