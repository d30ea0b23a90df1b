// How soon the engine of this process lets go of a request that its client left.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "server/cli/engine_flags.h"
#include "tests/server/holding_sink.h"
#include "tests/support/test_data.h"

namespace dovetail::engine::test {
namespace {

class EngineCancel : public testing::TestWithParam<int> {};

TEST_P(EngineCancel, EndsWithinOneStepAndFreesItsKv) {
  DOVETAIL_DATA_OR_SKIP(const auto model, "models/stories260K/stories260K-f32.gguf");
  cli::EngineFlags flags;
  flags.model = model.string();
  flags.attention_workers = 3;
  flags.placement = "mixed";
  flags.micro_batches = GetParam();
  flags.enable_prefix_caching = false;
  const auto engine = cli::StartEngine(flags, {});
  ASSERT_TRUE(engine.ok()) << engine.status();
  for (const int choices : {1, 4}) {
    requests::GenerationRequest request;
    request.tenant = "test";
    request.prompt.assign(100, 403);
    request.choices = choices;
    request.max_tokens = 400;
    constexpr size_t kBefore = 40;
    const auto sink = std::make_shared<server::test::HoldingSink>(kBefore);
    const auto id = engine->cluster->Submit(std::move(request), sink);
    ASSERT_TRUE(id.ok()) << id.status();
    sink->WaitUntilHeld();
    EXPECT_GT(engine->cluster->stats().kv_blocks_in_use, 0u);
    (void)engine->cluster->TakeStepSamples();
    engine->cluster->Cancel(*id);
    sink->LetGo();
    sink->WaitForEnd();
    EXPECT_EQ(sink->reason(), requests::FinishReason::kCancelled);
    // Every step that was under way may still end; none begins.
    EXPECT_LE(sink->tokens(), kBefore + static_cast<size_t>(choices * (1 + GetParam())));
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (engine->cluster->stats().kv_blocks_in_use > 0 && std::chrono::steady_clock::now() < deadline)
      std::this_thread::yield();
    EXPECT_EQ(engine->cluster->stats().kv_blocks_in_use, 0u);
    EXPECT_EQ(engine->cluster->stats().scheduler.running_sequences, 0);
    // Those, and the one whose tokens the sink was being told: a step is recorded behind them.
    EXPECT_LE(engine->cluster->TakeStepSamples().size(), static_cast<size_t>(GetParam()) + 1);
  }
}
INSTANTIATE_TEST_SUITE_P(MicroBatches, EngineCancel, testing::Values(1, 2, 3));

}  // namespace
}  // namespace dovetail::engine::test
