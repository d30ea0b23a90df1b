#include <gtest/gtest.h>

#include "nlohmann/json.hpp"
#include "tests/cluster/test_engine.h"
#include "tests/golden/budgets.h"
#include "tests/golden/reference.h"
#include "tests/support/test_data.h"

// stories260K, a trained Llama of 260,000 parameters with grouped heads of 8, as a Hugging Face folder and as GGUF in
// f32 and f16, against the logits and the 96 greedy tokens of a float64 reference; through the frames, over three
// attention workers and mixed placement.

namespace dovetail::test {
namespace {

class StoriesGolden : public ::testing::TestWithParam<StoriesBudget> {};

TEST_P(StoriesGolden, NinetySixGreedyTokensAndTheLogitsThatChoseThemAreTheReferences) {
  DOVETAIL_DATA_OR_SKIP(const auto folder, "models/stories260K");
  const auto golden = nlohmann::json::parse(ReadFile(folder / "golden.json"));
  const auto greedy = golden["greedy_ids"].get<std::vector<TokenId>>();
  const auto reference = ReadNpy(folder / "golden_step_logits_f32.npy");
  ASSERT_TRUE(reference.ok()) << reference.status();
  ASSERT_EQ(reference->rows, static_cast<int64_t>(greedy.size()));

  const bool f32 = GetParam().path == Path::kF32;
  const auto model =
      TestModel::Load(folder / GetParam().file, f32 ? model::WeightFormat::kF32 : model::WeightFormat::kBF16);
  ASSERT_TRUE(model.ok()) << model.status();
  engine::EmbeddedClusterOptions options = ClusterOptionsFor(**model, f32 ? DType::kF32 : DType::kBF16);
  options.attention_workers = 3;
  options.scheduler.placement = scheduler::PlacementPolicy::kMixed;
  const auto cluster = StartCluster(**model, options);
  ASSERT_TRUE(cluster.ok()) << cluster.status();

  double worst = 0;
  for (int placement = 0; placement < 3; ++placement) {  // whole, by heads, by tokens: one request after the other
    requests::GenerationRequest request =
        GreedyRequest(golden["prompt_ids"].get<std::vector<TokenId>>(), static_cast<int>(greedy.size()));
    request.logits_of_output = true;
    const auto done = Generate(**cluster, std::move(request));
    ASSERT_TRUE(done.ok()) << done.status();
    const auto& choice = (*done)->choices()[0];
    ASSERT_EQ(choice.logits.size(), greedy.size());
    std::vector<float> ours;
    size_t steps = 0;
    for (bool same = true; steps < greedy.size() && same; ++steps) {
      ours.insert(ours.end(), choice.logits[steps].begin(), choice.logits[steps].end());
      same = choice.tokens[steps] == greedy[steps];
      EXPECT_TRUE(same || !IsCertain(reference->row(steps), GetParam().logits)) << "step " << steps;
    }
    EXPECT_TRUE(!f32 || choice.tokens == greedy);
    EXPECT_GE(steps, 48u) << "too few steps say anything";
    worst = std::max(worst, RelativeRms(ours, std::span(reference->values).first(ours.size())));
  }
  RecordProperty("logits", absl::StrCat(worst));
  EXPECT_LE(worst, GetParam().logits);
}

INSTANTIATE_TEST_SUITE_P(All, StoriesGolden, ::testing::ValuesIn(kStoriesBudgets),
                         [](const auto& info) { return absl::StrCat(info.param.name, "_", Name(info.param.path)); });

}  // namespace
}  // namespace dovetail::test
