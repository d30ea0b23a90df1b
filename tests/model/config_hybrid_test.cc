#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/config.h"
#include "model/families/checkpoint_tensors.h"
#include "model/formats/json_file.h"

namespace dovetail::model {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;

Json MiniMax() {
  return Json::parse(R"({"model_type": "minimax", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "num_local_experts": 4, "num_experts_per_tok": 2,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_attn_alpha_factor": 1.5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e7}})");
}

Json Mamba2() {
  return Json::parse(R"({"model_type": "mamba2", "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 3,
    "num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16, "conv_kernel": 4, "expand": 2,
    "layer_norm_epsilon": 1e-5, "time_step_limit": [0.0, {"__float__": "Infinity"}]})");
}

std::string ErrorOf(const Json& json) {
  const auto config = ConfigFromJson("config.json", json, nullptr);
  return config.ok() ? "accepted" : std::string(config.status().message());
}

template <typename Change>
std::string With(Json json, Change change) {
  change(json);
  return ErrorOf(json);
}

TEST(HybridConfig, ReadsLightningLayersAndExperts) {
  const auto config = ConfigFromJson("config.json", MiniMax(), nullptr);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->layers[0].kind, LayerKind::kLinearState);
  EXPECT_EQ(config->layers[0].rope, -1);
  EXPECT_EQ(config->layers[3].kind, LayerKind::kFullAttention);
  EXPECT_EQ(config->layers[3].rope, 0);
  EXPECT_EQ(config->layers[3].mlp, MlpKind::kExperts);
  EXPECT_EQ(config->state->family, StateConfig::Family::kLightning);
  EXPECT_EQ(config->experts->chosen, 2);
  EXPECT_TRUE(config->residual.from_norm);
  EXPECT_EQ(config->residual.linear_alpha, 1.5f);
}

TEST(HybridConfig, ReadsTheOriginalSpellingOfMiniMax) {
  Json json = MiniMax();
  json.erase("layer_types");
  json.erase("linear_attn_alpha_factor");
  json["attn_type_list"] = {0, 0, 0, 1};
  json["layernorm_linear_attention_alpha"] = 1.5;
  const auto original = ConfigFromJson("config.json", json, nullptr);
  ASSERT_TRUE(original.ok()) << original.status();
  EXPECT_EQ(original->layers, ConfigFromJson("config.json", MiniMax(), nullptr)->layers);
  EXPECT_EQ(original->residual.linear_alpha, 1.5f);
}

TEST(HybridConfig, InfinityLimitsNothing) {
  for (const char* limit : {R"({"__float__": "Infinity"})", "Infinity"}) {
    std::string text = Mamba2().dump();
    text.replace(text.find(R"({"__float__":"Infinity"})"), std::string_view(R"({"__float__":"Infinity"})").size(),
                 limit);
    const auto json = ParseJson("config.json", text);
    ASSERT_TRUE(json.ok()) << json.status();
    const auto config = ConfigFromJson("config.json", *json, nullptr);
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->state->step_low, 0);
    EXPECT_GT(config->state->step_high, 1e38f);
    EXPECT_EQ(config->layers[0].mlp, MlpKind::kNone);
  }
}

TEST(HybridConfig, WhatContradictsItselfIsNamed) {
  EXPECT_EQ(With(MiniMax(), [](Json& c) { c["layer_types"] = {"linear_attention"}; }),
            "config.json: layer_types has 1 entries, but num_hidden_layers is 4");
  EXPECT_EQ(With(MiniMax(), [](Json& c) { c["layer_types"][1] = "lightning"; }),
            "config.json: layer_types[1] is 'lightning', which is not served in minimax");
  EXPECT_EQ(With(MiniMax(), [](Json& c) { c["num_experts_per_tok"] = 5; }),
            "config.json: a token goes to 5 of 4 experts; from 1 of at most 1024 is served");
  EXPECT_EQ(With(MiniMax(), [](Json& c) { c.erase("num_local_experts"); }),
            "config.json: num_local_experts is missing");
  EXPECT_EQ(With(Mamba2(), [](Json& c) { c["n_groups"] = 3; }),
            "config.json: 8 linear-state heads cannot share 3 key heads evenly");
  EXPECT_EQ(With(Mamba2(), [](Json& c) { c["state_size"] = 512; }),
            "config.json: the key dimension of a linear state is 512; it must be in [1, 256]");
  EXPECT_EQ(With(Mamba2(), [](Json& c) { c["conv_kernel"] = 9; }),
            "config.json: the width of the convolution is 9; it must be in [2, 8]");
  EXPECT_EQ(With(Mamba2(), [](Json& c) { c["head_dim"] = 8; }),
            "config.json: 8 Mamba heads of 8 make 64, but mamba_expand and hidden_size say 128");
  EXPECT_THAT(With(MiniMax(), [](Json& c) { c["model_type"] = "retnet"; }), HasSubstr("model_type 'retnet'"));
}

TEST(HybridConfig, FusedRowsAreFoundHeadByHead) {
  const auto config = *ConfigFromJson("config.json", MiniMax(), nullptr);
  for (const TensorNeed& need : TensorsOf(config)) {
    if (need.canonical != "layers.0.state.v_proj.weight") continue;
    EXPECT_EQ(need.hf, "model.layers.0.self_attn.qkv_proj.weight");
    EXPECT_EQ(need.stored_rows, 192);
    EXPECT_EQ(need.pattern.SourceRow(0), 32);        // head 0: q 0..15, k 16..31, v 32..47
    EXPECT_EQ(need.pattern.SourceRow(17), 48 + 33);  // head 1
    return;
  }
  FAIL() << "no v_proj";
}

}  // namespace
}  // namespace dovetail::model
