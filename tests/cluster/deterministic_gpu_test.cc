#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "compute_worker/attention_specs.h"
#include "proto/kv_blocks.h"
#include "tests/cluster/test_engine.h"
#include "tests/cluster/test_gpus.h"
#include "tests/cluster/tiny_for_gpus.h"

// With --deterministic a request has the same bits on GPUs whatever else runs, however its prompt is cut, on whichever
// GPU it is, preempted or not. On real GPUs, and on emulated ones with DOVETAIL_EMULATED_PREFILL.

namespace dovetail::test {
namespace {

struct Answer {
  std::vector<TokenId> tokens;
  std::vector<float> logits;  // of all the prompt's tokens
  bool operator==(const Answer&) const = default;
};

struct TinyModel {
  std::string name;
  std::function<std::filesystem::path()> write;
};
TinyModel Gguf(const std::string& name, const TinyModelSpec& spec) {
  return {name, [spec] { return WriteTinyModel(spec, TempFolder()); }};
}
TinyModel Folder(const std::string& name, const std::string& config) {
  return {name, [config] { return WriteTinyFolder(config, 5, TempFolder()); }};
}
std::string NameOf(const ::testing::TestParamInfo<TinyModel>& info) { return info.param.name; }

constexpr char kExperts[] = R"({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 96, "moe_intermediate_size": 64, "num_experts": 16, "num_experts_per_tok": 4,
    "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 97,
    "max_position_embeddings": 2304, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": false})";

class DeterministicGpu : public ::testing::TestWithParam<TinyModel> {
 protected:
  void SetUp() override {
    ASSERT_EQ(LoadOnTwo(GetParam().write()), absl::OkStatus());
    if (gpus_[0].device == nullptr) GTEST_SKIP() << "needs a GPU";
    for (int i = 0; i < 12; ++i)
      prompts_.push_back(UnlikeTokens(1 + 13 * i + (i == 7 ? 2020 : i % 4 == 3 ? 300 : 0), 5 + i));
  }

  absl::Status LoadOnTwo(const std::filesystem::path& path) {
    DT_ASSIGN_OR_RETURN(auto checkpoint, model::OpenCheckpoint(path));
    DT_ASSIGN_OR_RETURN(model_, model::LoadModel(std::move(checkpoint), model::WeightFormat::kElsewhere, nullptr, {}));
    if (!OpenTestGpu(0, *model_, gpus_[0]).ok()) {
      gpus_[0] = {};
      return absl::OkStatus();
    }
    return OpenTestGpu(1, *model_, gpus_[1]).ok() ? absl::OkStatus() : OpenTestGpu(0, *model_, gpus_[1]);
  }

  using Change = std::function<void(engine::EmbeddedClusterOptions&)>;
  absl::StatusOr<std::unique_ptr<engine::EmbeddedCluster>> Start(const Change& change = {}) {
    engine::EmbeddedClusterOptions options;
    options.kv_dtype = DType::kBF16;
    options.poison_freed_kv = true;
    options.kv_cache_bytes = uint64_t{64} << 20;
    options.compute.dense = gpus_[0].weights.get();
    options.compute.deterministic = true;
    options.scheduler.max_model_len = 2304;
    options.scheduler.max_num_seqs = 16;
    options.scheduler.max_num_batched_tokens = 2048;
    options.scheduler.prefill_ranks = 1;
    options.scheduler.enable_prefix_caching = false;
    if (change) change(options);
    return engine::EmbeddedCluster::Create(*model_, *gpus_[0].device, options);
  }

  requests::GenerationRequest RequestOf(const std::vector<TokenId>& prompt) const {
    requests::GenerationRequest request = GreedyRequest(prompt, tokens_);
    request.logits_last = static_cast<int>(prompt.size());
    return request;
  }
  absl::StatusOr<std::unique_ptr<engine::EmbeddedCluster>> StartOnTwo() {
    return Start([&](auto& options) {
      options.compute_workers = 2;
      options.more_compute_devices = {{gpus_[1].device.get(), gpus_[1].weights.get()}};
      for (const TestGpu& gpu : gpus_)
        options.attention_places.push_back({gpu.device.get(), [] { return uint64_t{64} << 20; }});
    });
  }

  static Answer AnswerOf(cli::CollectingSink& sink) {
    EXPECT_EQ(sink.WaitForEnd(), absl::OkStatus());
    return {sink.choices()[0].tokens, sink.prompt_logits()};
  }

  // What each prompt gets in a cluster of its own time.
  std::vector<Answer> Alone() {
    std::vector<Answer> answers;
    auto cluster = Start();
    EXPECT_TRUE(cluster.ok()) << cluster.status();
    if (!cluster.ok()) return std::vector<Answer>(prompts_.size());
    for (const std::vector<TokenId>& prompt : prompts_)
      answers.push_back(AnswerOf(*Submit(**cluster, RequestOf(prompt))));
    return answers;
  }

  // All at once.
  std::vector<std::shared_ptr<cli::CollectingSink>> SubmitAll(engine::Engine& engine) {
    std::vector<std::shared_ptr<cli::CollectingSink>> sinks;
    for (const std::vector<TokenId>& prompt : prompts_) sinks.push_back(Submit(engine, RequestOf(prompt)));
    return sinks;
  }
  void ExpectAnswers(const std::vector<std::shared_ptr<cli::CollectingSink>>& sinks, const std::vector<Answer>& alone) {
    for (size_t i = 0; i < sinks.size(); ++i) {
      const Answer answer = AnswerOf(*sinks[i]);
      EXPECT_EQ(answer.tokens, alone[i].tokens) << "prompt " << i;
      EXPECT_EQ(answer.logits, alone[i].logits) << "prompt " << i;
    }
  }

  std::unique_ptr<model::LoadedModel> model_;
  TestGpu gpus_[2];
  std::vector<std::vector<TokenId>> prompts_;
  int tokens_ = 24;  // of an answer
};

TEST_P(DeterministicGpu, AmongOthersAndInPartsAsAlone) {
  const std::vector<Answer> alone = Alone();
  for (const int step_tokens : {2048, 37}) {
    SCOPED_TRACE(step_tokens);
    auto cluster = Start([&](auto& options) { options.scheduler.max_num_batched_tokens = step_tokens; });
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    ExpectAnswers(SubmitAll(**cluster), alone);
  }
}

// More than the KV cache has room for, once they have grown.
TEST_P(DeterministicGpu, PreemptedAndFromThePrefixCacheAsAlone) {
  std::erase_if(prompts_, [](const std::vector<TokenId>& prompt) { return prompt.size() > 200; });
  tokens_ = 150;
  const std::vector<Answer> alone = Alone();
  const auto table = compute::AttentionTableOf(model_->config(), DType::kBF16);
  ASSERT_TRUE(table.ok()) << table.status();
  auto cluster = Start([&](auto& options) {
    options.kv_cache_bytes =
        20 * proto::BlocksPerSegment(*table) * attention::KvBlockBytes(*table, attention::KvStorage::kAsSent);
    options.scheduler.max_model_len = 1024;
    options.scheduler.enable_prefix_caching = true;
  });
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  ExpectAnswers(SubmitAll(**cluster), alone);
  EXPECT_GT((*cluster)->stats().scheduler.preemptions, 0u) << "else this shows nothing";
  ExpectAnswers(SubmitAll(**cluster), alone);
}

TEST_P(DeterministicGpu, OnEitherOfTwoGpusAsAlone) {
  const std::vector<Answer> alone = Alone();
  auto cluster = StartOnTwo();
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  ExpectAnswers(SubmitAll(**cluster), alone);
}

TEST_P(DeterministicGpu, ThroughTheHostsAndByHeadsAsAlone) {
  const std::vector<Answer> alone = Alone();
  auto cluster = Start([](auto& options) {
    options.attention_workers = 2;
    options.scheduler.placement = scheduler::PlacementPolicy::kHeads;
  });
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  ExpectAnswers(SubmitAll(**cluster), alone);
}

TEST_P(DeterministicGpu, AfterItsGpuWasLostAsAlone) {
  const TellGpu lose = EmulatedGpus("LoseEmulatedGpu");
  if (lose == nullptr) GTEST_SKIP() << "needs emulated GPUs";
  const std::vector<Answer> alone = Alone();
  auto cluster = StartOnTwo();
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  const auto sinks = SubmitAll(**cluster);
  for (const auto& sink : sinks) sink->WaitForTokens(3);
  lose(1);
  for (size_t i = 0; i < sinks.size(); ++i) EXPECT_EQ(AnswerOf(*sinks[i]).tokens, alone[i].tokens) << "prompt " << i;
  cluster->reset();
  lose(-1);  // all are well again, for other tests
}

INSTANTIATE_TEST_SUITE_P(
    , DeterministicGpu,
    ::testing::Values(
        Gguf("Plain", {.layers = 3, .head_dim = 64, .hidden = 128, .positions = 2304}),
        Gguf("WithWindows",
             {.architecture = "gemma3", .layers = 4, .head_dim = 64, .window = 100, .positions = 2304, .seed = 2}),
        Folder("WithExperts", kExperts)),
    NameOf);

class DeterministicRefusals : public DeterministicGpu {
 protected:
  void SetUp() override {}
};

TEST_P(DeterministicRefusals, SayWhatAModelLacks) {
  ASSERT_EQ(LoadOnTwo(GetParam().write()), absl::OkStatus());
  if (gpus_[0].device == nullptr) GTEST_SKIP() << "needs a GPU";
  const auto cluster = Start([](auto& options) { options.scheduler.max_model_len = 256; });
  ASSERT_FALSE(cluster.ok());
  const std::string said(cluster.status().message());
  EXPECT_NE(said.find("--deterministic"), std::string::npos) << said;
  EXPECT_NE(said.find(GetParam().name == "LinearLayers" ? "linear layers" : "heads of 16"), std::string::npos) << said;
}

INSTANTIATE_TEST_SUITE_P(, DeterministicRefusals,
                         ::testing::Values(Folder("LinearLayers", TinyGatedDeltaConfig()),
                                           Gguf("SmallHeads", {.head_dim = 16})),
                         NameOf);

}  // namespace
}  // namespace dovetail::test
