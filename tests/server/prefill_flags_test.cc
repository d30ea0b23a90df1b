#include "server/cli/prefill_flags.h"

#include <gtest/gtest.h>

// What --prefill-exchange refuses at start, and what it says can be taken in its place. logits_test has what needs no
// GPU.

namespace dovetail::cli {
namespace {

proto::AttentionTable Table() {
  return *proto::AttentionTable::Build(
      {proto::SoftmaxSpec{.query_heads = 4, .kv_heads = 4, .key_dim = 8, .value_dim = 8, .scale = 1}});
}

std::string SaidOnGpu(const std::string& exchange) {
  EngineFlags flags;
  flags.prefill_exchange = exchange;
  return std::string(CheckPrefillExchange(flags, Table(), /*on_gpu=*/true, /*cache_on_its_gpu=*/false).message());
}

TEST(PrefillFlags, ExchangesThatGpusDoNotHaveAreRefusedByName) {
  EXPECT_EQ(SaidOnGpu("pass-q"),
            "--prefill-exchange pass-q: compute workers on CPUs only ask each other about earlier tokens; take "
            "gather-direct, or --device cpu");
  EXPECT_EQ(SaidOnGpu("switch"),
            "--prefill-exchange switch: tokens are exchanged for heads among compute workers on CPUs only; take "
            "gather-direct, or --device cpu");
  EXPECT_EQ(SaidOnGpu("ring"), "");
  EXPECT_EQ(SaidOnGpu("gather-direct"), "");
}

TEST(PrefillFlags, OnCpusAllOfThemMayBeTaken) {
  for (const char* exchange : {"plane", "gather", "gather-direct", "ring", "switch", "pass-q"}) {
    EngineFlags flags;
    flags.prefill_exchange = exchange;
    EXPECT_TRUE(CheckPrefillExchange(flags, Table(), /*on_gpu=*/false, /*cache_on_its_gpu=*/false).ok()) << exchange;
  }
}

}  // namespace
}  // namespace dovetail::cli
