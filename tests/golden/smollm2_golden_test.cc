#include <gtest/gtest.h>

#include <cmath>

#include "tests/cluster/test_engine.h"
#include "tests/golden/budgets.h"
#include "tests/golden/reference.h"
#include "tests/golden/smollm2.h"
#include "tests/support/test_data.h"

// SmolLM2-135M-Instruct, the very file the quickstart serves, against float32 passes of transformers over the same
// file: the logits after four chats and one long text, and what greedy decoding then says.

namespace dovetail::test {
namespace {

double Rms(std::span<const float> values) {
  double sum = 0;
  for (const float v : values) sum += static_cast<double>(v) * v;
  return std::sqrt(sum / static_cast<double>(values.size()));
}

// The chats' prompts have up to kChatTokens tokens; the long text 2,000.
constexpr size_t kChatTokens = 200;

void CompareWithReference(const SmolLm2Budget& budget) {
  const bool long_text = budget.text == Text::kLong;
  DOVETAIL_DATA_OR_SKIP(const auto folder, "models/smollm2-135m-instruct");
  ASSERT_TRUE(std::filesystem::exists(FetchedSmolLm2())) << "scripts/fetch_model gets it: " << FetchedSmolLm2();
  const auto reference = ReadNpy(folder / "golden_logits_f32.npy");
  ASSERT_TRUE(reference.ok()) << reference.status();
  const std::vector<SmolLm2Case> cases = ReadSmolLm2Cases(folder);
  ASSERT_EQ(reference->rows, static_cast<int64_t>(cases.size()));

  const auto model = TestModel::Load(FetchedSmolLm2(), budget.weights);
  ASSERT_TRUE(model.ok()) << model.status();
  engine::EmbeddedClusterOptions options = ClusterOptionsFor(**model, budget.kv);
  options.attention_workers = 3;
  options.scheduler.placement = scheduler::PlacementPolicy::kMixed;
  options.scheduler.max_model_len = 2048 + 128;
  const auto cluster = StartCluster(**model, options);
  ASSERT_TRUE(cluster.ok()) << cluster.status();

  // All at once: they are decoded as a batch.
  std::vector<std::pair<size_t, std::shared_ptr<cli::CollectingSink>>> running;
  for (size_t i = 0; i < cases.size(); ++i) {
    if ((cases[i].prompt.size() > kChatTokens) != long_text) continue;
    requests::GenerationRequest request = GreedyRequest(cases[i].prompt, static_cast<int>(cases[i].greedy.size()));
    request.logits_last = 1;
    running.emplace_back(i, std::make_shared<cli::CollectingSink>());
    const auto submitted = (*cluster)->Submit(std::move(request), running.back().second);
    ASSERT_TRUE(submitted.ok()) << submitted.status();
  }
  ASSERT_EQ(running.size(), long_text ? 1u : 4u);

  double worst = 0;
  int certain = 0, tokens = 0;
  for (const auto& [i, sink] : running) {
    SCOPED_TRACE(absl::StrCat("case ", i));
    ASSERT_TRUE(sink->WaitForEnd().ok());
    const double error = RelativeRms(sink->prompt_logits(), reference->row(i));
    EXPECT_LE(error, budget.logits);
    worst = std::max(worst, error);
    // The budget of later steps in logits: that of the prompt's last row.
    const double certain_margin = 2 * budget.logits * Rms(reference->row(i));
    const SmolLm2Case& expected = cases[i];
    const std::vector<TokenId>& ours = sink->choices()[0].tokens;
    ASSERT_EQ(ours.size(), expected.greedy.size());
    for (size_t step = 0; step < ours.size(); ++step) {
      const bool is_certain = expected.margins[step] > certain_margin;
      ++tokens;
      certain += is_certain;
      if (ours[step] == expected.greedy[step]) continue;
      EXPECT_FALSE(is_certain) << "step " << step << ", whose margin is " << expected.margins[step];
      break;  // from here on the contexts differ
    }
  }
  ::testing::Test::RecordProperty("logits", absl::StrCat(worst));
  ::testing::Test::RecordProperty("tokens", tokens);
  ::testing::Test::RecordProperty("certain", certain);
  EXPECT_GE(certain, budget.least_certain) << "of " << tokens << ": too few tokens say anything";
}

#ifndef DOVETAIL_LONG
TEST(SmolLm2Golden, ChatsComputedDirectlyOnQuantisedBlocks) { CompareWithReference(kChatsDirect); }
TEST(SmolLm2Golden, ChatsComputedDirectlyOnQuantisedBlocksWithAnExactCache) { CompareWithReference(kChatsDirectF32); }
TEST(SmolLm2Golden, ChatsWithWeightsDequantisedOnceToF32) { CompareWithReference(kChatsF32); }
TEST(SmolLm2Golden, ChatsWithWeightsDequantisedOnceToBf16) { CompareWithReference(kChatsBF16); }
#else
TEST(SmolLm2Golden, ALongTextComputedDirectlyOnQuantisedBlocks) { CompareWithReference(kLongDirect); }
TEST(SmolLm2Golden, ALongTextComputedDirectlyOnQuantisedBlocksWithAnExactCache) {
  CompareWithReference(kLongDirectF32);
}
TEST(SmolLm2Golden, ALongTextWithWeightsDequantisedOnceToF32) { CompareWithReference(kLongF32); }
TEST(SmolLm2Golden, ALongTextWithWeightsDequantisedOnceToBf16) { CompareWithReference(kLongBF16); }
TEST(SmolLm2Golden, ALongTextWithKeysAndValuesInBf16) { CompareWithReference(kLongKvBF16); }
#endif

}  // namespace
}  // namespace dovetail::test
