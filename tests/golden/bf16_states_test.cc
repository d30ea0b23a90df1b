#include <gtest/gtest.h>

#include <algorithm>

#include "attention_worker/cpu/attention_executor.h"
#include "compute_worker/attention_specs.h"
#include "tests/cluster/test_engine.h"
#include "tests/golden/golden.h"
#include "tests/support/test_data.h"

// States kept in bf16 (--state-dtype): how far the logits go from those of states in f32 when both are given the same
// tokens, everything else in f32; and that their bits depend on chunks, workers and prefix hits as little.

namespace dovetail::test {
namespace {

namespace fs = std::filesystem;

struct Stored {
  const char* model;
  const char* group;  // tests/data/goldens, models/, or goldens_<group>.tar.gz of the test data
  int tokens;
  double logits;  // relative RMS over the tokens; twice what was measured

  friend std::ostream& operator<<(std::ostream& out, const Stored& stored) { return out << stored.model; }
};

constexpr Stored kStored[] = {
    {"tales-hybrid", "models", 500, 9.0e-4}, {"minimax_lightning", "hybrid", 300, 7.7e-3},
    {"qwen3_next", "hybrid", 300, 1.2e-3},   {"qwen3_5", "hybrid", 300, 1.7e-3},
    {"kimi_linear", "hybrid", 300, 8.7e-4},  {"mamba2", "hybrid", 300, 2.4e-4},
    {"bamba", "hybrid", 300, 3.9e-4},        {"granite4_hybrid", "hybrid", 300, 1.1e-5},
    {"olmo_hybrid", "hybrid", 300, 1.4e-3},  {"falcon_h1", "hybrid", 300, 2.5e-4},
    {"nemotron_h", "ours", 300, 6.4e-5},
};

class StatesInBF16 : public ::testing::TestWithParam<Stored> {
 protected:
  void SetUp() override {
    const std::string group = GetParam().group;
    const fs::path folder = group == "models" ? ProjectData(absl::StrCat("../../models/", GetParam().model))
                                              : GoldenFolder(group, GetParam().model);
    if (folder.empty()) GTEST_SKIP() << "missing test data: goldens/" << group;
    auto model = TestModel::Load(folder, model::WeightFormat::kF32, {.threads = 2});
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
    const int64_t count = std::min<int64_t>(GetParam().tokens, model_->config().max_positions - 1);
    const int64_t vocab = model_->config().vocab_size;
    for (int64_t i = 0; i < count; ++i)
      tokens_.push_back(static_cast<TokenId>(3 + (i * i * 17 + i * 31) % (vocab - 3)));
  }

  std::unique_ptr<engine::EmbeddedCluster> Start(DType state, int workers, int chunk) {
    engine::EmbeddedClusterOptions options = ClusterOptionsFor(*model_, DType::kF32);
    options.state_dtype = state;
    options.attention_workers = workers;
    if (workers > 1) options.scheduler.placement = scheduler::PlacementPolicy::kMixed;
    options.scheduler.max_num_batched_tokens = chunk;
    auto cluster = StartCluster(*model_, options);
    EXPECT_TRUE(cluster.ok()) << cluster.status();
    return *std::move(cluster);
  }
  // Of every token after the first block of 64, and of eight that follow.
  std::vector<float> Logits(engine::EmbeddedCluster& cluster) {
    requests::GenerationRequest request = GreedyRequest(tokens_, 8);
    request.logits_last = static_cast<int>(tokens_.size()) - 64;
    request.logits_of_output = true;
    const auto done = Generate(cluster, std::move(request));
    EXPECT_TRUE(done.ok()) << done.status();
    if (!done.ok()) return {};
    std::vector<float> logits = (*done)->prompt_logits();
    prompt_logits_ = logits.size();
    for (const auto& row : (*done)->choices()[0].logits) logits.insert(logits.end(), row.begin(), row.end());
    return logits;
  }

  std::unique_ptr<TestModel> model_;
  std::vector<TokenId> tokens_;
  size_t prompt_logits_ = 0;
};

TEST_P(StatesInBF16, GiveLogitsWithinTheirBudgetAndTheSameBitsHoweverTheyAreServed) {
  std::vector<float> in_f32 = Logits(*Start(DType::kF32, 1, 512));
  const std::vector<float> stored = Logits(*Start(DType::kBF16, 1, 512));
  EXPECT_EQ(Logits(*Start(DType::kBF16, 3, 40)), stored) << "three workers, chunks of 40";
  std::vector<float> of_prompt = stored;
  of_prompt.resize(prompt_logits_);
  in_f32.resize(prompt_logits_);
  const double error = RelativeRms(of_prompt, in_f32);
  RecordProperty("logits", absl::StrCat(error));
  EXPECT_LE(error, GetParam().logits);
  EXPECT_GT(error, 0) << "nothing was rounded";
}

// What a sequence is charged: a state of 128 x 128, and its block of 64 tokens in f32 either way.
TEST(AccountingOfStates, CountsTheHalvedMatrix) {
  model::ModelConfig config;
  config.layers.resize(1);
  config.layers[0].kind = model::LayerKind::kLinearState;
  config.state.emplace();
  config.state->family = model::StateConfig::Family::kGatedDelta;
  config.state->heads = config.state->key_heads = 2;
  config.state->key_dim = config.state->value_dim = 128;
  const auto bytes = [&](DType state) {
    const auto table = compute::AttentionTableOf(config, DType::kBF16, state);
    EXPECT_TRUE(table.ok()) << table.status();
    return attention::AttentionExecutor::BlockBytes(*table) * table->linear(LayerGroup(0))->blocks_per_head;
  };
  constexpr size_t kMatrix = 128 * 128, kTokens = 2 * 64 * 128 * 4, kDecays = 64 * 4;
  EXPECT_EQ(bytes(DType::kF32), 4 * kMatrix + kTokens + kDecays);
  EXPECT_EQ(bytes(DType::kBF16), 2 * kMatrix + kTokens + kDecays);
}

INSTANTIATE_TEST_SUITE_P(Models, StatesInBF16, ::testing::ValuesIn(kStored), [](const auto& info) {
  std::string name = info.param.model;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

}  // namespace
}  // namespace dovetail::test
