#include "kernels/cuda/prompts/prompt_sizes.h"

#include <gtest/gtest.h>

namespace dovetail::kernels::cuda {
namespace {

PromptSize Of(int tokens) { return {32, 8, 128, 128, WireType::kBF16, 0.1f, 1, tokens, false, true}; }

TEST(PromptSizesTest, ASizeIsWorthAPlanWhenItComesAgain) {
  PromptSizes sizes;
  EXPECT_FALSE(sizes.Note(Of(1000)));
  EXPECT_FALSE(sizes.Note(Of(1001))) << "another length is counted apart";
  PromptSize with_sums = Of(1000);
  with_sums.with_sums = true;
  EXPECT_FALSE(sizes.Note(with_sums));
  EXPECT_TRUE(sizes.Note(Of(1000)));
  EXPECT_TRUE(sizes.Note(Of(1000)));
}

TEST(PromptSizesTest, WhatCameLeastRecentlyIsForgotten) {
  PromptSizes sizes;
  sizes.Note(Of(1)), sizes.Note(Of(2));
  for (size_t other = 0; other + 1 < PromptSizes::kMost; ++other) {
    sizes.Note(Of(100 + static_cast<int>(other)));
    EXPECT_TRUE(sizes.Note(Of(2))) << "it comes again and again";
  }
  EXPECT_FALSE(sizes.Note(Of(1)));
}

}  // namespace
}  // namespace dovetail::kernels::cuda
