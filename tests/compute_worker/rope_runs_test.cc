#include "compute_worker/rope_runs.h"

#include <gtest/gtest.h>

#include <vector>

namespace dovetail::compute {
namespace {

// Grows with the length beyond 8 tokens.
model::RopeSpec Dynamic() {
  return {.kind = model::RopeKind::kDynamic, .rotary_dims = 8, .factor = 2, .max_positions = 8};
}

proto::StepPlan PlanOf(const std::vector<std::pair<int64_t, size_t>>& entries) {  // length, tokens
  proto::StepPlan plan;
  for (const auto& [length, tokens] : entries) {
    proto::StepEntry& entry = plan.entries.emplace_back();
    entry.rope_length = static_cast<decltype(entry.rope_length)>(length);
    entry.tokens.resize(tokens);
  }
  return plan;
}

std::vector<RopeRun> RunsOf(const model::RopeSpec& spec, const proto::StepPlan& plan) {
  std::vector<RopeRun> runs;
  EXPECT_TRUE(ForEachRopeRun(spec, plan, [&](const RopeRun& run) {
                runs.push_back(run);
                return absl::OkStatus();
              }).ok());
  return runs;
}

TEST(RopeRuns, JoinNeighboursThatShareFrequencies) {
  const std::vector<RopeRun> runs = RunsOf(Dynamic(), PlanOf({{5, 3}, {8, 1}, {20, 2}, {20, 4}, {4, 1}}));
  ASSERT_EQ(runs.size(), 3u);
  EXPECT_EQ(runs[0].first, 0);
  EXPECT_EQ(runs[0].rows, 4);
  EXPECT_EQ(runs[0].length, 5);
  EXPECT_EQ(runs[1].first, 4);
  EXPECT_EQ(runs[1].rows, 6);
  EXPECT_EQ(runs[1].variant, model::RopeVariant(Dynamic(), 20));
  EXPECT_EQ(runs[2].first, 10);
  EXPECT_EQ(runs[2].rows, 1) << "like the first, but not next to it";
}

TEST(RopeRuns, AreOneWhereTheLengthDoesNotMatter) {
  const std::vector<RopeRun> runs = RunsOf({.rotary_dims = 8}, PlanOf({{5, 3}, {500, 1}}));
  ASSERT_EQ(runs.size(), 1u);
  EXPECT_EQ(runs[0].rows, 4);
  EXPECT_TRUE(RunsOf({.rotary_dims = 8}, PlanOf({})).empty());
}

TEST(RopeRuns, EndWithTheFirstFailure) {
  int calls = 0;
  const absl::Status status = ForEachRopeRun(Dynamic(), PlanOf({{5, 1}, {20, 1}}), [&](const RopeRun&) {
    ++calls;
    return absl::InternalError("lost");
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(calls, 1);
}

TEST(RopeCache, MakesATableOnceAndForgetsTheLongestUnused) {
  RopeCache<int> cache;
  int made = 0;
  const auto get = [&](int rope, int64_t variant) {
    const absl::StatusOr<const int*> table = cache.Get(rope, variant, [&] { return absl::StatusOr<int>(made++); });
    return table.ok() ? **table : -1;
  };
  EXPECT_EQ(get(0, 0), 0);
  EXPECT_EQ(get(1, 0), 1) << "another rope";
  EXPECT_EQ(get(0, 0), 0);
  for (int64_t variant = 1; variant < static_cast<int64_t>(RopeCache<int>::kMost); ++variant) get(0, variant);
  EXPECT_EQ(cache.size(), RopeCache<int>::kMost);
  const int before = made;
  EXPECT_EQ(get(0, 0), 0) << "was used later than (1, 0)";
  EXPECT_EQ(get(1, 0), before) << "made again";
}

TEST(RopeCache, KeepsNothingThatCouldNotBeMade) {
  RopeCache<int> cache;
  EXPECT_FALSE(cache.Get(0, 0, [] { return absl::StatusOr<int>(absl::ResourceExhaustedError("full")); }).ok());
  EXPECT_EQ(cache.size(), 0u);
  EXPECT_TRUE(cache.Get(0, 0, [] { return absl::StatusOr<int>(3); }).ok());
}

}  // namespace
}  // namespace dovetail::compute
