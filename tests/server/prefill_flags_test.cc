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
  EXPECT_EQ(SaidOnGpu("switch"), "");
  EXPECT_EQ(SaidOnGpu("ring"), "");
  EXPECT_EQ(SaidOnGpu("gather-direct"), "");
}

TEST(PrefillFlags, ASwitchOnGpusHasAtMostAsManyRanksAsKvHeads) {
  EngineFlags flags;
  flags.prefill_exchange = "switch";
  flags.prefill_ranks = "5";
  EXPECT_EQ(
      CheckPrefillExchange(flags, Table(), /*on_gpu=*/true, /*cache_on_its_gpu=*/false).message(),
      "--prefill-exchange switch: 5 ranks (--prefill-ranks) cannot each have one of the 4 KV heads of this model; "
      "ask for at most 4, or take gather-direct or ring");
}

TEST(PrefillFlags, ASwitchOnGpusNeedsAPromptScratch) {
  EngineFlags flags;
  flags.prefill_exchange = "switch";
  flags.prompt_scratch = "0";
  EXPECT_EQ(
      CheckPrefillExchange(flags, Table(), /*on_gpu=*/true, /*cache_on_its_gpu=*/false).message(),
      "--prefill-exchange switch: a GPU that attends no prompts has no heads to exchange, and --prompt-scratch is "
      "0; give it memory, or take plane");
  EXPECT_TRUE(CheckPrefillExchange(flags, Table(), /*on_gpu=*/false, /*cache_on_its_gpu=*/false).ok());
}

TEST(PrefillFlags, AModelOfLinearLayersSwitchesNoHeadsOnGpus) {
  proto::LinearSpec state;
  state.heads = 4;
  state.key_dim = state.value_dim = 16;
  proto::LinearConstants decays;
  decays.log_decay.assign(4, -0.1f);
  const auto table = proto::AttentionTable::Build({state}, {decays});
  ASSERT_TRUE(table.ok()) << table.status();
  EngineFlags flags;
  flags.prefill_exchange = "switch";
  EXPECT_EQ(CheckPrefillExchange(flags, *table, /*on_gpu=*/true, /*cache_on_its_gpu=*/false).message(),
            "--prefill-exchange switch: all attention layers of this model are linear, whose heads are exchanged among "
            "compute workers on CPUs only; take chain, or --device cpu");
  EXPECT_TRUE(CheckPrefillExchange(flags, *table, /*on_gpu=*/false, /*cache_on_its_gpu=*/false).ok());
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
