#include "kernels/cuda/prompt_sizes.h"

#include <gtest/gtest.h>

namespace dovetail::kernels::cuda {
namespace {

PromptSizes::Size Of(int tokens) { return {32, 8, 128, 128, 0, 1, tokens, 0}; }

TEST(PromptSizesTest, ASizeIsWorthAPlanFromTheTimeOnThatItHasComeOften) {
  PromptSizes sizes;
  for (int came = 1; came < PromptSizes::kOften; ++came) {
    EXPECT_FALSE(sizes.Note(Of(1000))) << came;
    EXPECT_FALSE(sizes.Note(Of(1001))) << "another length is counted apart";
  }
  EXPECT_TRUE(sizes.Note(Of(1000)));
  EXPECT_TRUE(sizes.Note(Of(1000)));
}

TEST(PromptSizesTest, WhatCameLeastRecentlyIsForgotten) {
  PromptSizes sizes;
  for (int came = 0; came < PromptSizes::kOften; ++came) sizes.Note(Of(1)), sizes.Note(Of(2));
  for (size_t other = 0; other + 1 < PromptSizes::kMost; ++other) {
    sizes.Note(Of(100 + static_cast<int>(other)));
    EXPECT_TRUE(sizes.Note(Of(2))) << "it comes again and again";
  }
  EXPECT_FALSE(sizes.Note(Of(1)));
}

TEST(PromptSizesTest, WhatHasNoPlanIsNeverWorthOne) {
  PromptSizes sizes;
  for (int came = 1; came < PromptSizes::kOften; ++came) sizes.Note(Of(7));
  ASSERT_TRUE(sizes.Note(Of(7)));
  EXPECT_FALSE(sizes.IsRefused(Of(7)));
  sizes.Refuse(Of(7));
  EXPECT_TRUE(sizes.IsRefused(Of(7)));
  EXPECT_FALSE(sizes.IsRefused(Of(8)));
  for (int came = 0; came < 2 * PromptSizes::kOften; ++came) EXPECT_FALSE(sizes.Note(Of(7)));
}

}  // namespace
}  // namespace dovetail::kernels::cuda
