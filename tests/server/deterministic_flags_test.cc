#include <gtest/gtest.h>

#include <string>

#include "server/cli/deterministic_flags.h"

// What --deterministic does not go with where layers run on a GPU. tests/cluster/deterministic_gpu_test.cc has what the
// flag does.

namespace dovetail::cli {
namespace {

std::string Said(const EngineFlags& flags, bool attends_on_cpu = false) {
  return std::string(CheckDeterministic(flags, attends_on_cpu).message());
}

TEST(DeterministicFlags, WithoutTheFlagEverythingGoes) {
  EngineFlags flags;
  flags.placement = "tokens";
  flags.prefill_ranks = "4";
  EXPECT_EQ(Said(flags, /*attends_on_cpu=*/true), "");
}

TEST(DeterministicFlags, WhatDoesNotGoWithItIsRefusedByName) {
  EngineFlags flags;
  flags.deterministic = true;
  EXPECT_EQ(Said(flags), "");
  EXPECT_EQ(Said(flags, /*attends_on_cpu=*/true),
            "--deterministic: layers run on a GPU and attention on CPUs, which sum in another order; attend on GPUs");
  for (const std::string placement : {"tokens", "mixed", "tiers"}) {
    EngineFlags placed = flags;
    placed.placement = placement;
    EXPECT_EQ(Said(placed), "--deterministic: --placement " + placement +
                                " may divide a sequence's tokens, and what is put together of parts has other bits; "
                                "take request or heads");
  }
  EngineFlags ranks = flags;
  ranks.prefill_ranks = "2";
  EXPECT_EQ(Said(ranks), "--deterministic: --prefill-ranks 2: what ranks put together has other bits; take 1");
  EngineFlags kept = flags;
  kept.gpu_weights = "keep";
  EXPECT_EQ(Said(kept),
            "--deterministic: --gpu-weights keep: kernels for 4 and 8 bits depend on the number of rows; take "
            "dequantise");
}

TEST(DeterministicFlags, WeightsOfFewBitsBecome16) {
  EngineFlags flags;
  EXPECT_EQ(GpuWeightsOf(flags), compute::GpuWeights::kAuto);
  flags.deterministic = true;
  EXPECT_EQ(GpuWeightsOf(flags), compute::GpuWeights::kDequantise);
}

}  // namespace
}  // namespace dovetail::cli
