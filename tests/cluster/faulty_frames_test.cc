#include <gtest/gtest.h>

#include "tests/cluster/alone.h"
#include "tests/cluster/mini_cluster.h"
#include "tests/cluster/tiny_hybrid.h"
#include "tests/cluster/tiny_model.h"
#include "tests/support/test_data.h"

// A cluster whose fabric delivers frames twice, late, and again long after they were answered, of every role and both
// ways: no stream changes by a bit, nothing is held at the end, and moves and losses go on as usual. Over memory: an
// answer that comes twice would tell UCX's ports that tensors are done with which are not.

namespace dovetail::test {
namespace {

struct Kind {
  const char* name;
  std::string (*hybrid)();  // null: softmax attention only
};

class FaultyFrames : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    const std::filesystem::path folder = TempFolder() / GetParam().name;
    if (GetParam().hybrid != nullptr) {
      model_path_ = WriteTinyFolder(GetParam().hybrid(), 7, folder);
      return;
    }
    TinyModelSpec spec;
    spec.architecture = "gemma3";
    spec.window = 96;
    std::filesystem::create_directories(folder);
    model_path_ = WriteTinyModel(spec, folder);
  }

  MiniClusterOptions Options() const {
    MiniClusterOptions options;
    options.model = model_path_;
    options.weights = model::WeightFormat::kF32;
    options.kv = DType::kF32;
    options.attention_workers = 3;
    options.scheduler.max_model_len = 512;
    options.scheduler.max_num_seqs = 8;
    options.scheduler.max_num_batched_tokens = 128;
    options.scheduler.micro_batches = 2;
    options.scheduler.placement = scheduler::PlacementPolicy::kMixed;
    options.faults = {.duplicate = 0.1, .echo = 0.15, .delay = 0.02, .delay_max = absl::Milliseconds(3)};
    return options;
  }

  static requests::GenerationRequest Request(int prompt, int max_tokens, int salt) {
    requests::GenerationRequest request = GreedyRequest({1}, max_tokens);
    for (int i = 1; i < prompt; ++i) request.prompt.push_back(3 + (17 * i * i + 31 * i + 5 * salt) % 90);
    request.logits_of_output = true;
    return request;
  }

  std::filesystem::path model_path_;
};

TEST_P(FaultyFrames, ThatComeTwiceLateOrAgainChangeNoBit) {
  const auto cluster = MiniCluster::Start(Options());
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  std::vector<requests::GenerationRequest> requests;
  std::vector<std::shared_ptr<cli::CollectingSink>> sinks;
  const auto submit = [&](int prompt, int max_tokens, int salt) {
    requests.push_back(Request(prompt, max_tokens, salt));
    sinks.push_back(std::make_shared<cli::CollectingSink>());
    const auto id = (*cluster)->engine().Submit(requests.back(), sinks.back());
    ASSERT_TRUE(id.ok()) << id.status();
  };
  for (int i = 0; i < 4; ++i) submit(40 + 70 * i, 100, i);
  for (const auto& sink : sinks) sink->WaitForTokens(10);
  (*cluster)->Stop("a1");  // what lay on it is computed again
  submit(250, 60, 3);      // begins as another did
  ASSERT_TRUE((*cluster)->AddAttentionWorker("a4").ok());
  ASSERT_TRUE((*cluster)->Drain("a2").ok());  // what lies on it moves, or is computed again
  Alone alone(model_path_);
  for (size_t i = 0; i < sinks.size(); ++i) {
    ASSERT_EQ(sinks[i]->WaitForEnd(), absl::OkStatus());
    SCOPED_TRACE(absl::StrCat("request ", i));
    alone.Expect(requests[i], *sinks[i]);
  }
  EXPECT_GT((*cluster)->faults().duplicated, 50);
  EXPECT_GT((*cluster)->faults().echoed, 50);
  EXPECT_GT((*cluster)->faults().delayed, 50);
  EXPECT_TRUE(Eventually([&] { return (*cluster)->engine().stats().kv_blocks_in_use == 0; }));
}

INSTANTIATE_TEST_SUITE_P(Models, FaultyFrames,
                         testing::Values(Kind{"softmax", nullptr}, Kind{"gated_delta", TinyGatedDeltaConfig},
                                         Kind{"lightning", TinyLightningConfig}, Kind{"mamba2", TinyMamba2Config}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace dovetail::test
