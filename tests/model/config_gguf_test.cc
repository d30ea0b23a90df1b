#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "model/checkpoint.h"
#include "model/formats/gguf.h"
#include "tests/model/gguf_builder.h"
#include "tests/support/test_data.h"

// GGUF files of every family, written by hand: H 16, 4 heads of 8 (so H != heads * dim), 2 KV heads, MLP 24, 5 tokens.

namespace dovetail::model {
namespace {

using test::GgufBuilder;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kHidden = 16, kQ = 32, kKv = 16, kMlp = 24, kVocab = 5;

class Model {
 public:
  explicit Model(const std::string& architecture, uint32_t layers = 1) : arch_(architecture), layers_(layers) {
    file.Text("general.architecture", architecture);
    U32("block_count", layers)
        .U32("embedding_length", kHidden)
        .U32("feed_forward_length", kMlp)
        .U32("context_length", 256);
    U32("attention.head_count", 4)
        .U32("attention.head_count_kv", 2)
        .U32("attention.key_length", 8)
        .U32("attention.value_length", 8);
    F32("attention.layer_norm_rms_epsilon", 1e-6f);
  }
  Model& U32(const std::string& key, uint32_t value) { return file.U32(arch_ + "." + key, value), *this; }
  Model& F32(const std::string& key, float value) { return file.F32(arch_ + "." + key, value), *this; }
  Model& Text(const std::string& key, const std::string& value) { return file.Text(arch_ + "." + key, value), *this; }

  // Element i of the tensor is `base` + i.
  Model& Tensor(const std::string& name, const std::vector<uint64_t>& dims, float base = 0) {
    uint64_t count = 1;
    for (const uint64_t dim : dims) count *= dim;
    std::vector<float> values(count);
    for (uint64_t i = 0; i < count; ++i) values[i] = base + static_cast<float>(i);
    file.Tensor(name, dims, values);
    return *this;
  }
  Model& Weights(const std::vector<std::string>& extra_biases = {}) {
    Tensor("token_embd.weight", {kHidden, kVocab}).Tensor("output_norm.weight", {kHidden});
    for (uint32_t i = 0; i < layers_; ++i) Layer("blk." + std::to_string(i) + ".", extra_biases);
    return *this;
  }
  absl::StatusOr<std::unique_ptr<Checkpoint>> Open() const {
    const auto path = dovetail::test::TempFolder() / "model.gguf";
    std::ofstream(path, std::ios::binary) << file.Build();
    return OpenCheckpoint(path);
  }
  std::string Error() const { return std::string(Open().status().message()); }

  GgufBuilder file;

 private:
  void Layer(const std::string& blk, const std::vector<std::string>& extra_biases) {
    const bool phi = arch_ == "phi3", gemma = arch_ == "gemma3";
    Tensor(blk + "attn_norm.weight", {kHidden}).Tensor(blk + "ffn_norm.weight", {kHidden});
    if (phi) {
      Tensor(blk + "attn_qkv.weight", {kHidden, kQ + 2 * kKv}).Tensor(blk + "ffn_up.weight", {kHidden, 2 * kMlp});
    } else {
      Tensor(blk + "attn_q.weight", {kHidden, kQ})
          .Tensor(blk + "attn_k.weight", {kHidden, kKv})
          .Tensor(blk + "attn_v.weight", {kHidden, kKv});
      Tensor(blk + "ffn_gate.weight", {kHidden, kMlp}).Tensor(blk + "ffn_up.weight", {kHidden, kMlp});
    }
    Tensor(blk + "attn_output.weight", {kQ, kHidden}).Tensor(blk + "ffn_down.weight", {kMlp, kHidden});
    if (gemma || arch_ == "qwen3") Tensor(blk + "attn_q_norm.weight", {8}).Tensor(blk + "attn_k_norm.weight", {8});
    if (gemma) Tensor(blk + "post_attention_norm.weight", {kHidden}).Tensor(blk + "post_ffw_norm.weight", {kHidden});
    for (const std::string& name : extra_biases) Tensor(blk + name + ".bias", {name == "attn_q" ? kQ : kKv});
  }

  std::string arch_;
  uint32_t layers_;
};

std::unique_ptr<Checkpoint> Open(const Model& model) {
  auto checkpoint = model.Open();
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
  return checkpoint.ok() ? *std::move(checkpoint) : nullptr;
}

TEST(GgufConfig, EveryFamilyOpensAndUsesAllOfItsTensors) {
  for (const char* architecture : {"llama", "smollm3", "qwen2", "qwen3", "phi3", "gemma3"}) {
    Model model(architecture, 2);
    if (std::string(architecture) == "gemma3") model.U32("attention.sliding_window", 16);
    const auto checkpoint = Open(model.Weights());
    ASSERT_NE(checkpoint, nullptr) << architecture;
    EXPECT_THAT(checkpoint->warnings(), IsEmpty()) << architecture;
    EXPECT_EQ(checkpoint->config().key_dim, 8) << architecture;
    EXPECT_TRUE(checkpoint->config().tie_embeddings) << architecture;
  }
}

TEST(GgufConfig, AFileThatRecommendsNoSamplingGetsOneAndARecommendationCountsWhole) {
  const SamplingDefaults silent = Open(Model("llama").Weights())->config().sampling;
  EXPECT_EQ(silent.temperature, 0.8);
  EXPECT_EQ(silent.top_p, 0.95);
  EXPECT_EQ(silent.min_p, 0.05);
  EXPECT_EQ(silent.top_k, std::nullopt);
  Model said("llama");
  said.file.F32("general.sampling.temp", 0.25f);
  const SamplingDefaults recommended = Open(said.Weights())->config().sampling;
  EXPECT_EQ(recommended.temperature, 0.25);
  EXPECT_EQ(recommended.top_p, std::nullopt);
  EXPECT_EQ(recommended.min_p, std::nullopt);
}

TEST(GgufConfig, UndoesTheInterleavingOfQAndKAndTheirBiasesInLlamaOnly) {
  const std::vector<std::string> biases = {"attn_q", "attn_k", "attn_v"};
  const auto llama = Open(Model("llama").Weights(biases)), qwen = Open(Model("qwen2").Weights(biases));
  ASSERT_TRUE(llama && qwen);
  const std::vector<float> q = llama->Find("layers.0.attn.q_proj.weight").value().ReadAll();
  for (int h = 0; h < 4; ++h) {
    for (int i = 0; i < 4; ++i) {
      for (int s = 0; s < 2; ++s) {
        const int logical = 8 * h + i + 4 * s, stored = 8 * h + 2 * i + s;
        EXPECT_EQ(q[static_cast<size_t>(logical) * kHidden], static_cast<float>(stored) * kHidden);
      }
    }
  }
  const auto head = [](const Checkpoint& checkpoint, const char* name) {
    const std::vector<float> all = checkpoint.Find(name).value().ReadAll();
    return std::vector<float>(all.begin(), all.begin() + 8);
  };
  EXPECT_THAT(head(*llama, "layers.0.attn.k_proj.bias"), ElementsAre(0, 2, 4, 6, 1, 3, 5, 7));
  EXPECT_THAT(head(*llama, "layers.0.attn.v_proj.bias"), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  EXPECT_THAT(head(*qwen, "layers.0.attn.k_proj.bias"), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  EXPECT_FALSE(qwen->config().o_bias);
}

TEST(GgufConfig, GemmaHasItsPatternScalesAndRopesAndNormsAsStored) {
  const auto gemma = Open(Model("gemma3", 7)
                              .U32("attention.sliding_window", 16)
                              .F32("rope.freq_base", 1e6f)
                              .Text("rope.scaling.type", "linear")
                              .F32("rope.scaling.factor", 8)
                              .Weights());
  ASSERT_NE(gemma, nullptr);
  const ModelConfig& config = gemma->config();
  std::vector<int64_t> windows;
  for (const LayerConfig& layer : config.layers) windows.push_back(layer.window);
  EXPECT_THAT(windows, ElementsAre(16, 16, 16, 16, 16, 0, 16));
  EXPECT_EQ(config.RopeOf(config.layers[0])->theta, 1e4);
  EXPECT_EQ(config.RopeOf(config.layers[0])->kind, RopeKind::kDefault);
  EXPECT_EQ(config.RopeOf(config.layers[5])->theta, 1e6);
  EXPECT_EQ(config.RopeOf(config.layers[5])->kind, RopeKind::kLinear);
  EXPECT_EQ(config.embedding_scale, 4.0f);
  EXPECT_EQ(config.activation, Activation::kGeluTanh);
  EXPECT_EQ(gemma->Find("layers.0.post_mlp_norm.weight").value().add, 0.0f) << "GGUF stores 1 + w";
  EXPECT_THAT(Model("gemma3").Weights().Error(), HasSubstr("gemma3.attention.sliding_window is missing or 0"));
}

TEST(GgufConfig, SmolLm3SkipsRopeInEveryFourthLayer) {
  const auto checkpoint = Open(Model("smollm3", 8).Weights());
  ASSERT_NE(checkpoint, nullptr);
  std::vector<int> ropes;
  for (const LayerConfig& layer : checkpoint->config().layers) ropes.push_back(layer.rope);
  EXPECT_THAT(ropes, ElementsAre(0, 0, 0, -1, 0, 0, 0, -1));
}

TEST(GgufConfig, FoldsTheFilesRopeTensorsIn) {
  const auto llama3 = Open(Model("llama").Tensor("rope_freqs.weight", {4}, 1).Weights());
  ASSERT_NE(llama3, nullptr);
  EXPECT_THAT(llama3->config().ropes[0].divisors, ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(llama3->warnings(), IsEmpty());

  Model phi("phi3");
  phi.U32("rope.scaling.original_context_length", 64)
      .Tensor("rope_factors_long.weight", {4}, 2)
      .Tensor("rope_factors_short.weight", {4}, 1)
      .Weights();
  const auto checkpoint = Open(phi);
  ASSERT_NE(checkpoint, nullptr);
  const RopeSpec& rope = checkpoint->config().ropes[0];
  EXPECT_EQ(rope.kind, RopeKind::kLongRope);
  EXPECT_THAT(rope.long_factor, ElementsAre(2, 3, 4, 5));
  EXPECT_EQ(rope.original_max_positions, 64);
  EXPECT_DOUBLE_EQ(rope.attention_factor, std::sqrt(1 + std::log(4.0) / std::log(64.0)));
}

TEST(GgufConfig, YarnAndPartialRotation) {
  const auto yarn = Open(Model("qwen2")
                             .Text("rope.scaling.type", "yarn")
                             .F32("rope.scaling.factor", 4)
                             .U32("rope.scaling.original_context_length", 64)
                             .Weights());
  ASSERT_NE(yarn, nullptr);
  EXPECT_EQ(yarn->config().ropes[0].kind, RopeKind::kYarn);
  EXPECT_DOUBLE_EQ(yarn->config().ropes[0].attention_factor, 0.1 * std::log(4.0) + 1);
  const auto phi4 = Open(Model("phi3").U32("rope.dimension_count", 6).Weights());
  ASSERT_NE(phi4, nullptr);
  EXPECT_EQ(phi4->config().ropes[0].rotary_dims, 6);
}

TEST(GgufConfigErrors, NameTheKey) {
  EXPECT_THAT(Model("rwkv7").Weights().Error(),
              HasSubstr("architecture 'rwkv7' is not served; served are llama, smollm3, qwen2, qwen3, phi3, gemma3, "
                        "lfm2, mamba2, nemotron_h, gpt-oss, qwen3moe, minimax-m2, qwen3next, qwen35, qwen35moe, "
                        "kimi-linear, granitehybrid, falcon-h1, nemotron_h_moe"));
  EXPECT_EQ(Model("qwen2").U32("expert_count", 8).Weights().Error(),
            "model.gguf: has 8 experts, which are not served in qwen2");
  EXPECT_EQ(Model("llama").U32("expert_count", 8).Weights().Error(),
            "model.gguf: metadata key llama.expert_used_count is missing");
  EXPECT_THAT(Model("llama").Text("rope.scaling.type", "ntk").Weights().Error(),
              HasSubstr("rope scaling type 'ntk' is not served"));
  EXPECT_THAT(Model("qwen2").Text("rope.scaling.type", "yarn").Weights().Error(),
              HasSubstr("qwen2.rope.scaling.factor is missing"));
  EXPECT_THAT(Model("llama").U32("rope.dimension_count", 9).Weights().Error(),
              HasSubstr("llama.rope.dimension_count is 9; it must be in [2, 8]"));
  EXPECT_THAT(Model("llama").U32("rope.dimension_count", 4).Weights().Error(),
              HasSubstr("rope turns 4 of 8 dimensions, which is not served for llama"));
  EXPECT_THAT(Model("llama").Tensor("rope_freqs.weight", {3}, 1).Weights().Error(),
              HasSubstr("rope_freqs of default rope has 3 numbers, but 8 rotary dimensions need 4"));
  EXPECT_THAT(Model("llama").Tensor("rope_freqs.weight", {4}, 0).Weights().Error(),
              HasSubstr("not positive and finite"));
  Model eos("llama");
  eos.file.U32("tokenizer.ggml.eos_token_id", 5);
  EXPECT_THAT(eos.Weights().Error(), HasSubstr("tokenizer.ggml.eos_token_id is 5, but the vocabulary has 5 tokens"));
  Model wrong("qwen3");
  EXPECT_THAT(wrong.Tensor("blk.1.attn_norm.weight", {kHidden}).Weights().Open().value()->warnings(),
              ElementsAre("model.gguf: tensor blk.1.attn_norm.weight is not used by qwen3"));
}

TEST(GgufConfigErrors, PerLayerArraysMustAgree) {
  const auto error = [](const std::vector<int32_t>& heads) {
    GgufBuilder file;
    file.Text("general.architecture", "llama")
        .U32("llama.block_count", 2)
        .U32("llama.embedding_length", 16)
        .U32("llama.feed_forward_length", 4)
        .U32("llama.context_length", 8)
        .I32s("llama.attention.head_count", heads)
        .F32("llama.attention.layer_norm_rms_epsilon", 1e-5f);
    const std::string bytes = file.Build();
    const auto gguf = GgufFile::FromBytes("model.gguf", std::as_bytes(std::span(bytes.data(), bytes.size())));
    return std::string(ConfigFromGguf(**gguf).status().message());
  };
  EXPECT_THAT(error({4, 8}), HasSubstr("llama.attention.head_count differs between layers"));
  EXPECT_THAT(error({}), HasSubstr("llama.attention.head_count is an empty array"));
  EXPECT_THAT(error({4, 4}), HasSubstr("token_embd.weight is missing")) << "equal entries are one value";
  EXPECT_THAT(error({-4, -4}), HasSubstr("llama.attention.head_count is -4; it must be at least 1"));
}

}  // namespace
}  // namespace dovetail::model
