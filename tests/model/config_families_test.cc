#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/config.h"
#include "model/formats/json_file.h"
#include "tests/support/test_data.h"

// Configs of hybrids as they are published, and what is wrong with wrong ones: file, field and remedy are named.

namespace dovetail::model {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;

Json Golden(const std::string& name) {
  return Json::parse(dovetail::test::ReadFile(dovetail::test::ProjectData("goldens/" + name + "/config.json")));
}

ModelConfig Read(const Json& json) {
  const auto config = ConfigFromJson("config.json", json, nullptr);
  EXPECT_TRUE(config.ok()) << config.status();
  return config.ok() ? *config : ModelConfig();
}

template <typename Change>
std::string With(Json json, Change change) {
  change(json);
  const auto config = ConfigFromJson("config.json", json, nullptr);
  return config.ok() ? "accepted" : std::string(config.status().message());
}

TEST(NemotronConfig, ALetterOfThePatternIsALayer) {
  Json json = Golden("nemotron_h");
  const ModelConfig words = Read(json);
  json.erase("layers_block_type");
  json["hybrid_override_pattern"] = "M-*E";
  const ModelConfig letters = Read(json);
  EXPECT_EQ(words.layers, letters.layers);
  ASSERT_EQ(letters.layers.size(), 4u);
  EXPECT_EQ(letters.layers[0].kind, LayerKind::kLinearState);
  EXPECT_EQ(letters.layers[0].mlp, MlpKind::kNone);
  EXPECT_EQ(letters.layers[1].kind, LayerKind::kMlpOnly);
  EXPECT_EQ(letters.layers[1].mlp, MlpKind::kDense);
  EXPECT_EQ(letters.layers[2].kind, LayerKind::kFullAttention);
  EXPECT_EQ(letters.layers[2].rope, -1);
  EXPECT_EQ(letters.layers[3].mlp, MlpKind::kExperts);
  EXPECT_EQ(letters.activation, Activation::kRelu2);
  EXPECT_EQ(letters.state->out_norm_groups, 2);
  const std::vector<AttentionOp> ops = AttentionOpsOf(letters);
  ASSERT_EQ(ops.size(), 2u);
  EXPECT_TRUE(ops[0].state);
  EXPECT_EQ(ops[1].layer, 2u);
}

TEST(NemotronConfig, WhatIsWrongIsNamed) {
  const Json good = Golden("nemotron_h");
  EXPECT_EQ(With(good, [](Json& c) { c["layers_block_type"][1] = "conv"; }),
            "config.json: layer_types[1] is 'conv', which is not served in nemotron_h");
  EXPECT_EQ(With(good,
                 [](Json& c) {
                   c.erase("layers_block_type");
                   c["hybrid_override_pattern"] = "M-X";
                 }),
            "config.json: hybrid_override_pattern has 'X' for layer 2; layers are M, *, - or E");
  EXPECT_EQ(With(good, [](Json& c) { c.erase("layers_block_type"); }),
            "config.json: layers_block_type is missing, and so is hybrid_override_pattern");
  EXPECT_EQ(With(good, [](Json& c) { c["num_hidden_layers"] = 7; }),
            "config.json: layer_types has 4 entries, but num_hidden_layers is 7");
  EXPECT_THAT(With(good, [](Json& c) { c["mlp_hidden_act"] = "silu"; }), HasSubstr("mlp_hidden_act 'silu'"));
  EXPECT_EQ(With(good, [](Json& c) { c["moe_latent_size"] = 64; }),
            "config.json: the experts' latent size is 64; it must be at most the hidden size 32");
  EXPECT_EQ(With(good,
                 [](Json& c) {
                   c["time_step_limit"] = {0.0, "wide"};
                 }),
            "config.json: time_step_limit holds 'wide', which is neither a number nor an infinity");
  EXPECT_EQ(With(good,
                 [](Json& c) {
                   c["time_step_limit"] = {2.0, 1.0};
                 }),
            "config.json: time_step_limit is from 2 to 1; it must ascend from 0 or more");
  EXPECT_EQ(With(good, [](Json& c) { c["time_step_limit"] = 3; }),
            "config.json: time_step_limit must be a list of two numbers");
}

TEST(NemotronConfig, GroupsOfExpertsAreReadAndMustFit) {
  const Json good = Golden("nemotron_h_groups");
  EXPECT_EQ(Read(good).experts->groups, 4);
  EXPECT_EQ(Read(good).experts->chosen_groups, 2);
  EXPECT_EQ(With(good, [](Json& c) { c["n_group"] = 5; }),
            "config.json: n_group is 5, but 16 experts cannot lie in so many equal groups of at least 2");
  EXPECT_EQ(With(good, [](Json& c) { c["n_group"] = 16; }),
            "config.json: n_group is 16, but 16 experts cannot lie in so many equal groups of at least 2");
  EXPECT_EQ(With(good, [](Json& c) { c["topk_group"] = 5; }),
            "config.json: topk_group is 5; it must be from 1 to n_group, 4");
  EXPECT_EQ(With(good, [](Json& c) { c["topk_group"] = 0; }), "config.json: topk_group is 0; it must be positive");
  EXPECT_EQ(With(good, [](Json& c) { c["num_experts_per_tok"] = 9; }),
            "config.json: a token goes to 9 experts, but the groups that it looks at (topk_group 2 of n_group 4) have "
            "8");
  EXPECT_EQ(With(good, [](Json& c) { c.erase("n_group"); }),
            "config.json: topk_group is 2; it must be from 1 to n_group, 1");
}

// What a multimodal checkpoint says of its text model, as published.
TEST(QwenMoeConfig, ATextModelWithExpertsLiesInsideAMultimodalOne) {
  const Json text = Golden("qwen3_5_moe");
  Json outer = {{"model_type", "qwen3_5_moe"}, {"text_config", text}, {"tie_word_embeddings", true}};
  outer["text_config"].erase("tie_word_embeddings");
  const ModelConfig config = Read(outer), alone = Read(text);
  EXPECT_EQ(config.architecture, Architecture::kQwen35Moe);
  EXPECT_EQ(config.tensor_prefix, "model.language_model.");
  EXPECT_EQ(alone.tensor_prefix, "model.");
  EXPECT_TRUE(config.tie_embeddings);
  EXPECT_EQ(config.layers, alone.layers);
  for (const LayerConfig& layer : config.layers) EXPECT_EQ(layer.mlp, MlpKind::kExperts);
  EXPECT_EQ(config.layers[3].kind, LayerKind::kFullAttention);
  EXPECT_EQ(config.experts->experts, 8);
  EXPECT_EQ(config.experts->chosen, 3);
  EXPECT_EQ(config.experts->shared_intermediate, 48);
  EXPECT_TRUE(config.experts->shared_gate);
  EXPECT_TRUE(config.experts->renormalise);
  EXPECT_EQ(With(text, [](Json& c) { c.erase("num_experts"); }), "config.json: num_experts is missing");
  EXPECT_EQ(With(text, [](Json& c) { c.erase("moe_intermediate_size"); }),
            "config.json: moe_intermediate_size is missing");
  EXPECT_EQ(With(text, [](Json& c) { c["num_experts_per_tok"] = 9; }),
            "config.json: a token goes to 9 of 8 experts; from 1 of at most 1024 is served");
}

TEST(FalconConfig, MultipliersBecomeFactorsOfWhatIsThereAnyway) {
  const ModelConfig config = Read(Golden("falcon_h1_multipliers"));
  EXPECT_EQ(config.layers[0].kind, LayerKind::kAttentionAndState);
  EXPECT_EQ(AttentionOpsOf(config).size(), 8u);
  EXPECT_FLOAT_EQ(config.attention_scale, 0.8f * 0.8f * 0.6f / std::sqrt(8.0f));
  EXPECT_FLOAT_EQ(config.residual.full_beta, 0.8f * 1.3f);
  EXPECT_FLOAT_EQ(config.residual.linear_beta, 0.7f);
  EXPECT_FLOAT_EQ(config.residual.mlp_input, 1.5f);
  EXPECT_FLOAT_EQ(config.residual.mlp_beta, 0.6f / 1.5f);
  EXPECT_FLOAT_EQ(config.state->multipliers.gate, 1.25f * 0.9f);
  EXPECT_FLOAT_EQ(config.state->multipliers.v, 1.25f * 0.7f);
  EXPECT_FLOAT_EQ(config.state->multipliers.k, 1.25f * 1.4f);
  EXPECT_FLOAT_EQ(config.state->multipliers.q, 1.25f * 1.2f);
  EXPECT_FLOAT_EQ(config.state->multipliers.step, 1.25f * 0.8f);
  EXPECT_FLOAT_EQ(config.logits_scale, 0.4f);
}

TEST(FalconConfig, WhatIsWrongIsNamed) {
  const Json good = Golden("falcon_h1_multipliers");
  EXPECT_EQ(With(good,
                 [](Json& c) {
                   c["ssm_multipliers"] = {1.0, 1.0};
                 }),
            "config.json: ssm_multipliers has 2 numbers; there must be 5");
  EXPECT_EQ(With(good, [](Json& c) { c["mamba_d_head"] = 8; }),
            "config.json: 4 Mamba heads of 8 make 32, but mamba_d_ssm, or mamba_expand and hidden_size, say 64");
  EXPECT_THAT(With(good, [](Json& c) { c["attention_bias"] = true; }), HasSubstr("biases of projections that have"));
  EXPECT_EQ(With(good, [](Json& c) { c["mlp_multipliers"] = {0.0, 1.0}; }), "config.json: mlp_multipliers holds 0");
  EXPECT_EQ(With(good, [](Json& c) { c["mamba_d_head"] = "auto"; }), "accepted");
}

TEST(HybridConfigs, InfiniteFactorsAreNamedByTheirField) {
  const double infinity = std::numeric_limits<double>::max();  // what Infinity in a file becomes
  EXPECT_EQ(With(Golden("falcon_h1_multipliers"), [&](Json& c) { c["ssm_out_multiplier"] = infinity; }),
            "config.json: ssm_out_multiplier is 1.79769e+308; a factor must be finite, and at most 1e6");
  EXPECT_EQ(With(Golden("nemotron_h_groups"), [&](Json& c) { c["routed_scaling_factor"] = -infinity; }),
            "config.json: routed_scaling_factor is -1.79769e+308; a factor must be finite, and at most 1e6");
}

TEST(OlmoConfig, ABaseThatIsNullMeansNoPositionEmbedding) {
  Json json = Golden("olmo_hybrid_nope");
  EXPECT_EQ(Read(json).layers[3].rope, -1);
  EXPECT_EQ(Read(json).state->rate_scale, 2);
  json["rope_parameters"]["rope_theta"] = 500000.0;
  EXPECT_EQ(Read(json).layers[3].rope, 0);
  json["linear_allow_neg_eigval"] = false;
  EXPECT_EQ(Read(json).state->rate_scale, 1);
  json.erase("layer_types");
  EXPECT_EQ(Read(json).layers[3].kind, LayerKind::kFullAttention);
  EXPECT_EQ(Read(json).layers[2].kind, LayerKind::kLinearState);
}

TEST(Lfm2Config, ConvolutionsAreStatesOfTheirInputs) {
  Json json = Golden("lfm2_bias");
  const ModelConfig config = Read(json);
  EXPECT_EQ(config.state->family, StateConfig::Family::kConvolution);
  EXPECT_EQ(config.state->heads, 2);
  EXPECT_EQ(config.state->value_width(), 32);
  EXPECT_EQ(config.state->conv_width, 4);
  EXPECT_EQ(config.layers[1].kind, LayerKind::kFullAttention);
  EXPECT_EQ(config.intermediate_size, 40);  // 2/3 of 48, times 1.1, up to a multiple of 8
  json["block_auto_adjust_ff_dim"] = false;
  EXPECT_EQ(Read(json).intermediate_size, 48);
  json.erase("layer_types");
  json["full_attn_idxs"] = {0, 2};
  EXPECT_EQ(Read(json).layers[1].kind, LayerKind::kLinearState);
  EXPECT_EQ(Read(json).layers[2].kind, LayerKind::kFullAttention);
  json["full_attn_idxs"] = {0, 4};
  EXPECT_EQ(With(json, [](Json&) {}), "config.json: full_attn_idxs names layer 4, but layers are 0 to 3");
  EXPECT_EQ(With(Golden("lfm2_bias"), [](Json& c) { c["conv_L_cache"] = 1; }),
            "config.json: the convolution is over 1 tokens; it must be over 2 to 8");
  EXPECT_EQ(With(Golden("lfm2_bias"), [](Json& c) { c["num_key_value_heads"] = 0; }),
            "config.json: the number of key/value heads is 0; it must be in [1, 1024]");
}

TEST(GptOssConfig, HasSinksAndMxfp4Experts) {
  const ModelConfig config = Read(Golden("gpt_oss_mxfp4"));
  EXPECT_TRUE(config.sinks);
  EXPECT_EQ(config.activation, Activation::kClampedSwiglu);
  EXPECT_EQ(config.experts->score, ExpertConfig::Score::kSoftmaxOfChosen);
  EXPECT_TRUE(config.q_bias && config.o_bias && config.experts->bias && config.experts->router_bias);
  EXPECT_EQ(config.layers[0].window, 16);
  EXPECT_EQ(config.layers[1].window, 0);
  EXPECT_EQ(config.ropes[0].kind, RopeKind::kYarn);
  EXPECT_FALSE(config.ropes[0].truncate);
}

TEST(GptOssConfig, WhatIsWrongIsNamed) {
  const Json good = Golden("gpt_oss_mxfp4");
  EXPECT_EQ(With(good, [](Json& c) { c["quantization_config"]["quant_method"] = "awq"; }),
            "config.json: quantization_config is set, which is not served");
  EXPECT_EQ(With(good, [](Json& c) { c["swiglu_limit"] = 5.0; }), "config.json: swiglu_limit 5 is not served; 7 is");
  EXPECT_EQ(With(good, [](Json& c) { c["num_experts_per_tok"] = 9; }),
            "config.json: a token goes to 9 of 4 experts; from 1 of at most 1024 is served");
}

TEST(HybridConfigs, ListsOfLayersThatContradictThemselvesAreNamed) {
  const Json minimax = Json::parse(R"({"model_type": "minimax", "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "num_local_experts": 4, "num_experts_per_tok": 2, "attn_type_list": [0, 1]})");
  EXPECT_EQ(With(minimax, [](Json&) {}), "accepted");
  EXPECT_EQ(With(minimax,
                 [](Json& c) {
                   c["attn_type_list"] = {0, 2};
                 }),
            "config.json: attn_type_list[1] is 2; layers are 0 (linear) or 1 (softmax)");
  EXPECT_EQ(With(minimax,
                 [](Json& c) {
                   c["layer_types"] = {"full_attention", "full_attention"};
                 }),
            "config.json: layer_types and attn_type_list contradict each other");
  const Json kimi = Json::parse(R"({"model_type": "kimi_linear", "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "model_max_length": 256, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "mla_use_nope": true, "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 32,
    "linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2], "head_dim": 16, "num_heads": 4,
                           "short_conv_kernel_size": 4}})");
  EXPECT_EQ(With(kimi, [](Json&) {}), "accepted");
  EXPECT_EQ(With(kimi,
                 [](Json& c) {
                   c["linear_attn_config"]["full_attn_layers"] = {1, 2};
                 }),
            "config.json: layer 1 must be in one of linear_attn_config.kda_layers and "
            "linear_attn_config.full_attn_layers");
  EXPECT_EQ(With(kimi, [](Json& c) { c["linear_attn_config"]["full_attn_layers"] = {3}; }),
            "config.json: linear_attn_config.full_attn_layers names layer 3, but layers are 1 to 2");
  EXPECT_EQ(With(kimi,
                 [](Json& c) {
                   c["mlp_layer_types"] = {"dense", "thin"};
                 }),
            "config.json: mlp_layer_types[1] is 'thin'; sparse and dense are served");
  EXPECT_THAT(With(kimi, [](Json& c) { c["mla_use_nope"] = false; }), HasSubstr("mla_use_nope"));
}

// Every field in turn with every kind of wrong value: refused by a text that names the file, or believed, never worse.
void TryWrongFields(const Json& good) {
  ASSERT_EQ(With(good, [](Json&) {}), "accepted");
  for (const auto& [field, was] : good.items())
    for (const Json& wrong : {Json(), Json(-1), Json(0), Json(int64_t{1} << 62), Json(1e300), Json("x"), Json::array(),
                              Json::object(), Json({1, "y"}), Json(true)}) {
      Json json = good;
      json[field] = wrong;
      const auto config = ConfigFromJson("config.json", json, nullptr);
      if (!config.ok()) {
        EXPECT_THAT(std::string(config.status().message()), HasSubstr("config.json: "));
      }
    }
}

TEST(HybridConfigs, FieldsOfAnyTypeAndSizeAreRefusedAndNotBelieved) {
  for (const char* name : {"nemotron_h_latent", "nemotron_h_groups", "qwen3_5_moe", "falcon_h1_norm",
                           "olmo_hybrid_nope", "lfm2_bias", "gpt_oss_mxfp4"}) {
    SCOPED_TRACE(name);
    TryWrongFields(Golden(name));
  }
}

TEST(HybridConfigs, SoAreThoseOfPublishedFamilies) {
  for (const std::string group : {"hybrid", "moe"}) {
    DOVETAIL_DATA_OR_SKIP(const auto archive, "goldens/goldens_" + group + ".tar.gz");
    const auto folder = dovetail::test::TempFolder();
    ASSERT_EQ(std::system(("tar xzf '" + archive.string() + "' -C '" + folder.string() + "'").c_str()), 0);
    for (const auto& entry : std::filesystem::directory_iterator(folder / group)) {
      SCOPED_TRACE(entry.path().filename().string());
      TryWrongFields(Json::parse(dovetail::test::ReadFile(entry.path() / "config.json")));
    }
  }
}

}  // namespace
}  // namespace dovetail::model
