#include "compute_worker/sampling_lists_cache.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dovetail::compute {
namespace {

using ::testing::HasSubstr;

constexpr size_t kTokens = 100;
constexpr size_t kBytes = kTokens * sizeof(TokenId);  // of one sequence's lists

proto::StepPlan Plan(uint64_t sequence, bool has_lists = true) {
  proto::StepPlan plan;
  plan.entries.resize(1);
  plan.entries[0].sequence = SequenceId(sequence);
  plan.entries[0].has_lists = has_lists;
  return plan;
}
proto::StepPlan Giving(uint64_t sequence, TokenId token) {
  proto::StepPlan plan = Plan(sequence);
  proto::SamplingLists lists;
  lists.allowed_token_ids.assign(kTokens, token);
  plan.entries[0].given.lists = std::make_shared<const proto::SamplingLists>(std::move(lists));
  return plan;
}

// The first allowed token of the sequence's lists; -1: they are not known.
TokenId Known(SamplingListsCache& cache, uint64_t sequence) {
  proto::StepPlan plan = Plan(sequence);
  if (!cache.Complete(plan).ok()) return -1;
  return plan.entries[0].given.lists->allowed_token_ids[0];
}

TEST(SamplingListsCache, KeepsWhatIsGivenUntilItIsGivenAnew) {
  SamplingListsCache cache;
  proto::StepPlan plan = Giving(1, 11);
  ASSERT_TRUE(cache.Complete(plan).ok());
  EXPECT_EQ(Known(cache, 1), 11);
  plan = Giving(1, 12);
  ASSERT_TRUE(cache.Complete(plan).ok());
  EXPECT_EQ(Known(cache, 1), 12);
  EXPECT_EQ(cache.bytes(), kBytes);
}

TEST(SamplingListsCache, NamesTheSequenceWhoseListsItDoesNotHave) {
  SamplingListsCache cache;
  proto::StepPlan plan = Plan(7);
  EXPECT_THAT(std::string(cache.Complete(plan).message()), HasSubstr("sequence 7: the lists"));
  plan = Plan(7, /*has_lists=*/false);
  EXPECT_TRUE(cache.Complete(plan).ok());
  EXPECT_EQ(plan.entries[0].given.lists, nullptr);
}

TEST(SamplingListsCache, DropsTheListsUsedLeastRecently) {
  SamplingListsCache cache(3 * kBytes);
  for (const int sequence : {1, 2, 3}) {
    proto::StepPlan plan = Giving(sequence, sequence);
    ASSERT_TRUE(cache.Complete(plan).ok());
  }
  EXPECT_EQ(Known(cache, 1), 1);
  proto::StepPlan plan = Giving(4, 4);
  ASSERT_TRUE(cache.Complete(plan).ok());
  EXPECT_EQ(Known(cache, 2), -1);
  EXPECT_EQ(Known(cache, 1), 1);
  EXPECT_EQ(Known(cache, 3), 3);
  EXPECT_EQ(Known(cache, 4), 4);
  EXPECT_EQ(cache.bytes(), 3 * kBytes);
}

TEST(SamplingListsCache, APlanKeepsListsThatAreTooLargeToBeKept) {
  SamplingListsCache cache(kBytes - 1);
  proto::StepPlan plan = Giving(1, 11);
  ASSERT_TRUE(cache.Complete(plan).ok());
  EXPECT_EQ(plan.entries[0].given.lists->allowed_token_ids[0], 11);
  EXPECT_EQ(cache.bytes(), 0u);
  EXPECT_EQ(Known(cache, 1), -1);
}

}  // namespace
}  // namespace dovetail::compute
