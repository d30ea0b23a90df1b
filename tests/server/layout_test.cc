#include "server/cli/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>

namespace dovetail::cli {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

GpuOfMachine Gpu(int index, const char* model, int major = 9, int multiprocessors = 132, size_t gib = 140) {
  GpuOfMachine gpu{.name = absl::StrCat("cuda:", index), .info = {}};
  std::snprintf(gpu.info.name, sizeof(gpu.info.name), "%s", model);
  gpu.info.major = major;
  gpu.info.multiprocessors = multiprocessors;
  gpu.info.memory_bytes = gib << 30;
  return gpu;
}

TEST(Layout, AlikeGpusArePairsAndSaySo) {
  const auto layout = ChooseLayout("auto", {Gpu(0, "H200"), Gpu(2, "H200")});
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_TRUE(layout->pairs);
  EXPECT_THAT(layout->layers, ElementsAre("cuda:0", "cuda:2"));
  EXPECT_THAT(layout->attention, IsEmpty());
  EXPECT_THAT(layout->why, HasSubstr("2 GPUs are alike"));
}

TEST(Layout, OneGpuIsAPair) {
  const auto layout = ChooseLayout("auto", {Gpu(1, "L4")});
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_TRUE(layout->pairs);
  EXPECT_THAT(layout->layers, ElementsAre("cuda:1"));
}

TEST(Layout, UnlikeGpusAreSplitWithLayersOnTheFastest) {
  const auto layout = ChooseLayout("auto", {Gpu(0, "A100", 8, 108, 80), Gpu(1, "H200"), Gpu(2, "A100", 8, 108, 80)});
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_FALSE(layout->pairs);
  EXPECT_THAT(layout->layers, ElementsAre("cuda:1"));
  EXPECT_THAT(layout->attention, ElementsAre("cuda:0", "cuda:2"));
  EXPECT_THAT(layout->why, HasSubstr("cuda:1 (H200)"));
}

TEST(Layout, GpusOfOneModelWithUnequalMemoryAreUnlike) {
  const auto layout = ChooseLayout("auto", {Gpu(0, "A100", 8, 108, 40), Gpu(1, "A100", 8, 108, 80)});
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_FALSE(layout->pairs);
}

TEST(Layout, ASplitIsMadeOnRequestAlsoOfAlikeGpus) {
  const auto layout = ChooseLayout("split", {Gpu(0, "H200"), Gpu(1, "H200")});
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_FALSE(layout->pairs);
  EXPECT_EQ(layout->layers.size() + layout->attention.size(), 2u);
}

TEST(Layout, WhatCannotBeIsRefusedWithWhatCan) {
  EXPECT_THAT(ChooseLayout("split", {Gpu(0, "H200")}).status().message(),
              testing::AllOf(HasSubstr("--layout split"), HasSubstr("--layout pairs")));
  EXPECT_THAT(ChooseLayout("pairs", {Gpu(0, "H200"), Gpu(1, "L4", 8, 58, 24)}).status().message(),
              testing::AllOf(HasSubstr("cuda:1 (L4)"), HasSubstr("--layout split")));
}

}  // namespace
}  // namespace dovetail::cli
