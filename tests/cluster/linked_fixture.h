#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <vector>

#include "tests/cluster/linked_cluster.h"
#include "tests/cluster/tiny_model.h"
#include "tests/golden/reference.h"
#include "tests/support/test_data.h"

// Requests to a cluster of linked GPUs, whose answers are compared with those of one GPU that does all. On emulated
// GPUs.

namespace dovetail::test {

// What a prompt's attention sums depends on how it is cut into steps, and products on how many rows those have.
inline constexpr double kBudget = 2.5e-2;

inline std::vector<TokenId> Tokens(int count, int seed) {
  std::vector<TokenId> tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(static_cast<TokenId>(1 + (17 * i * i + (31 + seed) * i) % 90));
  return tokens;
}

inline std::vector<TokenId> Joined(std::vector<TokenId> first, const std::vector<TokenId>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

class LinkedTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const absl::Status possible = LinkedCluster::Possible(); !possible.ok())
      GTEST_SKIP() << "needs a GPU that is emulated: " << possible.message();
    TinyModelSpec spec;
    spec.layers = 4;
    UseModel(spec);
  }
  void UseModel(const TinyModelSpec& spec) { path_ = WriteTinyModel(spec, TempFolder()); }
  void Start(const LinkedClusterOptions& options = {}) {
    auto made = LinkedCluster::Create(path_, options);
    ASSERT_TRUE(made.ok()) << made.status();
    linked_ = *std::move(made);
    auto alone = LinkedCluster::Create(path_, {.attention_workers = 0, .step_tokens = options.step_tokens});
    ASSERT_TRUE(alone.ok()) << alone.status();
    alone_ = *std::move(alone);
  }
  // The same request on both: the same tokens, and logits of the prompt and of what follows within the budget.
  void ExpectTheSame(const char* what, const std::vector<TokenId>& prompt, int rows, int max_tokens = 4) {
    const uint64_t ours = linked_->Submit(prompt, max_tokens, rows, /*logits_of_output=*/true);
    ASSERT_TRUE(linked_->UntilTheEndOf(ours)) << what;
    ExpectOfOneGpu(what, ours, prompt, rows, max_tokens);
  }
  void ExpectOfOneGpu(const char* what, uint64_t request, const std::vector<TokenId>& prompt, int rows,
                      int max_tokens) {
    const LinkedStream& ours = linked_->stream(request);
    ASSERT_EQ(ours.error, "") << what;
    const uint64_t id = alone_->Submit(prompt, max_tokens, rows, /*logits_of_output=*/true);
    ASSERT_TRUE(alone_->UntilTheEndOf(id)) << what;
    const LinkedStream& theirs = alone_->stream(id);
    ASSERT_EQ(theirs.error, "") << what;
    ASSERT_EQ(ours.tokens.size(), static_cast<size_t>(max_tokens)) << what;
    double error = rows > 0 ? RelativeRms(ours.prompt_logits, theirs.prompt_logits) : 0;
    for (size_t i = 0; i < ours.logits.size(); ++i) {
      error = std::max(error, RelativeRms(ours.logits[i], theirs.logits[i]));
      if (ours.tokens[i] == theirs.tokens[i]) continue;
      EXPECT_FALSE(IsCertain(theirs.logits[i], kBudget)) << what << ": token " << i;
      break;  // what follows is another text
    }
    std::printf("measured %s %.3g\n", what, error);
    EXPECT_LE(error, kBudget) << what;
  }
  void ExpectNothingThroughHosts() {
    EXPECT_GT(linked_->frames().begun_between_gpus, 0);
    EXPECT_EQ(linked_->frames().begun_through_hosts, 0);
    EXPECT_EQ(linked_->frames().tensors, 0);
  }

  std::filesystem::path path_;
  std::unique_ptr<LinkedCluster> linked_, alone_;
};

}  // namespace dovetail::test
