#include <cstdio>
#include <cstdlib>
#include <random>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/compute_worker/core_cluster.h"

#ifndef DOVETAIL_SEED_COUNT
#define DOVETAIL_SEED_COUNT 1000
#endif

// Whatever comes, and in whatever order: what StepWatch and CoreCluster expect of a core holds behind every event.

namespace dovetail::compute {
namespace {

using ::testing::Each;
using ::testing::Gt;

// DOVETAIL_SEED=n runs that seed alone.
TEST(ComputeWorkerCoreProperty, EveryStepEndsOnceAsWhatHappenedToItSaysAndLeavesNothing) {
  const char* given = std::getenv("DOVETAIL_SEED");
  const uint64_t first = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  const int seeds = given != nullptr ? 1 : DOVETAIL_SEED_COUNT;
  CoreCluster::Counts all;
  for (int i = 0; i < seeds; ++i) {
    const uint64_t seed = first + static_cast<uint64_t>(i);
    SCOPED_TRACE(absl::StrCat("DOVETAIL_SEED=", seed));
    CoreCluster cluster(seed);
    for (int step = 0; step < 2000 && !HasFailure(); ++step) cluster.Step();
    if (!HasFailure()) cluster.End();
    if (HasFailure()) return;
    all += cluster.counts();
  }
  std::printf(
      "seeds %llu..: %d steps done, %d failed, %d refused, %d ahead, %d pieces, %d kept, %d came again; groups:",
      static_cast<unsigned long long>(first), all.done, all.failed, all.refused, all.ahead, all.pieces, all.kept,
      all.again);
  for (const int count : all.groups) std::printf(" %d", count);
  std::printf("\n");
  if (given != nullptr) return;
  for (const int count : {all.done, all.failed, all.refused, all.ahead, all.pieces, all.kept, all.again})
    EXPECT_GT(count, seeds) << "the seeds are too tame to say anything";
  EXPECT_THAT(all.groups, Each(Gt(seeds / 4))) << "of each exchange";
}

}  // namespace
}  // namespace dovetail::compute
