#include "server/cli/core_shares.h"

#include "gtest/gtest.h"

namespace dovetail::cli {
namespace {

TEST(CoreShares, LayersAndAttentionOnOneCpuHaveHalfOfItEach) {
  EXPECT_EQ(AttentionThreads(16, {.compute = 1, .attention_on_cpu = 1}), 8);
  EXPECT_EQ(AttentionThreads(16, {.compute = 2, .attention_on_cpu = 2}), 4);
  EXPECT_EQ(AttentionThreads(2, {.compute = 1, .attention_on_cpu = 4}), 1);
  EXPECT_FALSE(CoresAreShort(2, {.compute = 1, .attention_on_cpu = 4}));
}

TEST(CoreShares, AttentionHasWhatWorkersOnGpusLeave) {
  EXPECT_EQ(AttentionThreads(16, {.compute = 1, .layers_on_gpu = true, .attention_on_cpu = 1}), 14);
  EXPECT_EQ(AttentionThreads(16, {.compute = 1, .layers_on_gpu = true, .attention_on_cpu = 2}), 7);
  EXPECT_EQ(AttentionThreads(16, {.compute = 2, .layers_on_gpu = true, .attention_on_cpu = 1}), 12);
  EXPECT_EQ(AttentionThreads(16, {.compute = 1, .layers_on_gpu = true, .attention_on_cpu = 1, .attention_on_gpu = 1}),
            12);
}

TEST(CoreShares, EveryWorkerHasAThreadAndTooFewCoresAreSeen) {
  const WorkersOfMachine workers{.compute = 1, .layers_on_gpu = true, .attention_on_cpu = 3};
  EXPECT_EQ(AttentionThreads(2, workers), 1);
  EXPECT_TRUE(CoresAreShort(2, workers));
  EXPECT_TRUE(CoresAreShort(4, workers));
  EXPECT_EQ(AttentionThreads(5, workers), 1);
  EXPECT_FALSE(CoresAreShort(5, workers));
  EXPECT_FALSE(CoresAreShort(2, {.compute = 1, .layers_on_gpu = true, .attention_on_gpu = 1}));
}

}  // namespace
}  // namespace dovetail::cli
