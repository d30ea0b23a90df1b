#include <gtest/gtest.h>

#include "nlohmann/json.hpp"
#include "tests/cluster/test_engine.h"
#include "tests/golden/budgets.h"
#include "tests/golden/reference.h"
#include "tests/support/test_data.h"

// models/tales-hybrid, a trained hybrid of six lightning and two softmax layers, against the greedy tokens and the
// logits of full float32 passes; through the frames, over three attention workers and mixed placement.

namespace dovetail::test {
namespace {

class TalesGolden : public ::testing::TestWithParam<Path> {
 protected:
  void SetUp() override {
    folder_ = ProjectData("../../models/tales-hybrid");
    golden_ = nlohmann::json::parse(ReadFile(folder_ / "golden.json"));
    const bool f32 = GetParam() == Path::kF32;
    auto model = TestModel::Load(folder_, f32 ? model::WeightFormat::kF32 : model::WeightFormat::kAuto);
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
    StartWith(scheduler::PlacementPolicy::kMixed);
  }

  void StartWith(scheduler::PlacementPolicy placement) {
    const bool f32 = GetParam() == Path::kF32;
    engine::EmbeddedClusterOptions options = ClusterOptionsFor(*model_, f32 ? DType::kF32 : DType::kBF16);
    options.attention_workers = 3;
    options.scheduler.placement = placement;
    options.scheduler.max_num_batched_tokens = 100;
    auto cluster = StartCluster(*model_, options);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
  }

  std::filesystem::path folder_;
  nlohmann::json golden_;
  std::unique_ptr<TestModel> model_;
  std::unique_ptr<engine::EmbeddedCluster> cluster_;
};

TEST_P(TalesGolden, StoriesGoOnAsTheReferencesDo) {
  const double budget = GetParam() == Path::kF32 ? kTalesF32 : kTalesBF16;
  for (const auto& story : golden_) {
    const auto greedy = story["greedy_ids"].get<std::vector<TokenId>>();
    requests::GenerationRequest request =
        GreedyRequest(story["prompt_ids"].get<std::vector<TokenId>>(), static_cast<int>(greedy.size()));
    request.logits_of_output = true;
    const auto done = Generate(*cluster_, std::move(request));
    ASSERT_TRUE(done.ok()) << done.status();
    const auto& choice = (*done)->choices()[0];
    ASSERT_EQ(choice.tokens.size(), greedy.size());
    size_t same = 0;
    while (same < greedy.size() && choice.tokens[same] == greedy[same]) ++same;
    if (same < greedy.size()) {
      EXPECT_LT(Margin(choice.logits[same]), 0.2) << "step " << same << ": no near-tie";
    }
    EXPECT_GE(same, GetParam() == Path::kF32 ? greedy.size() : 16) << story["prompt"];
    for (const auto& [id, logit] : story["top5"].get<std::vector<std::pair<TokenId, float>>>())
      EXPECT_NEAR(choice.logits[0][id], logit, budget) << story["prompt"] << ", token " << id;
  }
}

// What a plain double-precision pass over the same weights gives (the reference above was run with TF32 products, which
// is most of its distance).
TEST_P(TalesGolden, TheFirstLogitsAreThoseOfADoublePrecisionPass) {
  constexpr std::pair<TokenId, double> kExpected[] = {
      {13, 16.90634831}, {327, 15.49947507}, {330, 9.90014030}, {1126, 8.85648058}, {544, 8.17287235}};
  requests::GenerationRequest request = GreedyRequest(golden_[0]["prompt_ids"].get<std::vector<TokenId>>(), 1);
  request.logits_of_output = true;
  const auto done = Generate(*cluster_, std::move(request));
  ASSERT_TRUE(done.ok()) << done.status();
  for (const auto& [id, logit] : kExpected)
    EXPECT_NEAR((*done)->choices()[0].logits[0][id], logit, GetParam() == Path::kF32 ? 1e-5 : kTalesBF16) << id;
}

TEST_P(TalesGolden, ChunksAndOtherRequestsLeaveTheTokensAlone) {
  const auto prompt = golden_[0]["prompt_ids"].get<std::vector<TokenId>>();
  auto longer = golden_[0]["greedy_ids"].get<std::vector<TokenId>>();
  longer.insert(longer.begin(), prompt.begin(), prompt.end());  // resumed: what was written becomes a prompt
  const auto whole = Generate(*cluster_, GreedyRequest(prompt, 150));
  ASSERT_TRUE(whole.ok()) << whole.status();
  const std::vector<TokenId> expected = (*whole)->choices()[0].tokens;
  for (const size_t cut : {1, 63, 64, 65, 90}) {
    std::vector<TokenId> begun = prompt;
    begun.insert(begun.end(), expected.begin(), expected.begin() + cut);
    const auto rest = Generate(*cluster_, GreedyRequest(begun, static_cast<int>(150 - cut)));
    ASSERT_TRUE(rest.ok()) << rest.status();
    EXPECT_EQ((*rest)->choices()[0].tokens, std::vector<TokenId>(expected.begin() + cut, expected.end())) << cut;
  }
}

TEST_P(TalesGolden, APrefixHitRestoresStatesAndKvTogether) {
  std::vector<TokenId> prompt;
  for (const auto& story : golden_) {
    const auto ids = story["greedy_ids"].get<std::vector<TokenId>>();
    prompt.insert(prompt.end(), ids.begin(), ids.end());
  }
  while (prompt.size() < 400) prompt.insert(prompt.end(), prompt.begin(), prompt.begin() + 50);
  prompt.resize(400);
  StartWith(scheduler::PlacementPolicy::kRequest);  // a hit needs the same worker
  const auto run = [&](std::vector<TokenId> tokens, const std::string& salt = "") {
    requests::GenerationRequest request = GreedyRequest(std::move(tokens), 24);
    request.logits_of_output = true;
    request.cache_salt = salt;
    const auto done = Generate(*cluster_, std::move(request));
    EXPECT_TRUE(done.ok()) << done.status();
    return *done;
  };
  const auto expect_same_bits = [](const cli::CollectingSink& a, const cli::CollectingSink& b) {
    EXPECT_EQ(a.choices()[0].tokens, b.choices()[0].tokens);
    EXPECT_EQ(a.choices()[0].logits, b.choices()[0].logits);
  };
  const auto first = run(prompt);
  EXPECT_EQ(first->cached_tokens(), 0);
  EXPECT_EQ(cluster_->stats().scheduler.prefix_hits, 0u);
  const auto again = run(prompt);
  EXPECT_EQ(again->cached_tokens(), 384);
  expect_same_bits(*again, *first);
  EXPECT_EQ(cluster_->stats().scheduler.prefix_hits, 384u);

  // Prompts that part in the middle begin at the last snapshot before that.
  std::vector<TokenId> other = prompt;
  other[300] = prompt[300] == 5 ? 6 : 5;
  const auto parted = run(other);
  EXPECT_EQ(parted->cached_tokens(), 256);
  const auto salted = run(other, "another tenant");
  EXPECT_EQ(salted->cached_tokens(), 0);
  expect_same_bits(*parted, *salted);

  // What was said becomes a prompt.
  std::vector<TokenId> longer = prompt;
  const auto& said = first->choices()[0].tokens;
  for (int i = 0; i < 3; ++i) longer.insert(longer.end(), said.begin(), said.end());
  EXPECT_EQ(run(longer)->cached_tokens(), 384);
  EXPECT_EQ(run(longer)->cached_tokens(), 448);
}

INSTANTIATE_TEST_SUITE_P(All, TalesGolden, ::testing::Values(Path::kF32, Path::kBF16),
                         [](const auto& info) { return std::string(Name(info.param)); });

}  // namespace
}  // namespace dovetail::test
