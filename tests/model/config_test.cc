#include "model/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "model/formats/json_file.h"

namespace dovetail::model {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Json = nlohmann::json;

Json Base(const std::string& model_type) {
  return {{"model_type", model_type}, {"hidden_size", 64},
          {"intermediate_size", 96},  {"num_hidden_layers", 4},
          {"num_attention_heads", 4}, {"num_key_value_heads", 2},
          {"vocab_size", 320},        {"rms_norm_eps", 1e-6},
          {"head_dim", 16},           {"max_position_embeddings", 256},
          {"bos_token_id", 1},        {"eos_token_id", 2},
          {"pad_token_id", nullptr}};
}

Json With(Json config, const Json& changes) {
  config.update(changes);
  return config;
}

ModelConfig Read(const Json& config, const Json& generation = nullptr) {
  auto result = ConfigFromJson("config.json", config, generation);
  EXPECT_TRUE(result.ok()) << result.status();
  return result.ok() ? *std::move(result) : ModelConfig{};
}

std::string Error(const Json& config, const Json& generation = nullptr) {
  return std::string(ConfigFromJson("config.json", config, generation).status().message());
}

std::vector<int64_t> Windows(const ModelConfig& config) {
  std::vector<int64_t> windows;
  for (const LayerConfig& layer : config.layers) windows.push_back(layer.window);
  return windows;
}

TEST(Config, DynamicRopeServesFactorTimesThePositionsTheModelWasTrainedAt) {
  const auto scaled = [](const char* kind) {
    return Read(With(Base("llama"),
                     {{"max_position_embeddings", 64}, {"rope_scaling", {{"rope_type", kind}, {"factor", 2.5}}}}));
  };
  const ModelConfig dynamic = scaled("dynamic");
  EXPECT_EQ(dynamic.max_positions, 160);
  ASSERT_THAT(dynamic.ropes, testing::SizeIs(1));
  EXPECT_EQ(dynamic.ropes[0].max_positions, 64) << "where the base begins to grow";
  EXPECT_EQ(scaled("linear").max_positions, 64);
}

TEST(Config, ReadsBothSpellingsOfRopeAlike) {
  const Json v4 = With(Base("llama"), {{"rope_theta", 5e5},
                                       {"rope_scaling",
                                        {{"type", "llama3"},
                                         {"factor", 8.0},
                                         {"low_freq_factor", 1.0},
                                         {"high_freq_factor", 4.0},
                                         {"original_max_position_embeddings", 64}}}});
  const Json v5 = With(Base("llama"), {{"rope_parameters",
                                        {{"rope_type", "llama3"},
                                         {"rope_theta", 5e5},
                                         {"factor", 8.0},
                                         {"low_freq_factor", 1.0},
                                         {"high_freq_factor", 4.0},
                                         {"original_max_position_embeddings", 64}}}});
  const ModelConfig config = Read(v5);
  EXPECT_EQ(Read(v4).ropes, config.ropes);
  ASSERT_EQ(config.ropes.size(), 1u);
  EXPECT_EQ(config.ropes[0].kind, RopeKind::kLlama3);
  EXPECT_EQ(config.ropes[0].theta, 5e5);
  EXPECT_EQ(config.ropes[0].rotary_dims, 16);
  EXPECT_EQ(config.ropes[0].original_max_positions, 64);
}

TEST(Config, FillsInWhatOldFilesLeaveOut) {
  Json config = Base("llama");
  for (const char* field : {"num_key_value_heads", "head_dim", "rms_norm_eps"}) config.erase(field);
  const ModelConfig read = Read(config);
  EXPECT_EQ(read.kv_heads, 4);
  EXPECT_EQ(read.key_dim, 16);
  EXPECT_EQ(read.norm_eps, 1e-6);
  EXPECT_EQ(read.ropes[0].theta, 10000.0) << "Llama 2 files say nothing about it";
  EXPECT_FALSE(read.tie_embeddings);
  EXPECT_FLOAT_EQ(read.attention_scale, 0.25f);
}

TEST(Config, HeadDimensionDoesNotFollowFromTheHiddenSize) {
  EXPECT_EQ(Read(With(Base("llama"), {{"head_dim", 32}})).key_dim, 32);
  Json qwen3 = Base("qwen3");
  qwen3.erase("head_dim");
  EXPECT_EQ(Read(qwen3).key_dim, 128);
}

TEST(Config, CollectsEveryStopTokenOfBothFiles) {
  const Json generation = {
      {"eos_token_id", {7, 2, 9}}, {"temperature", 0.6}, {"top_p", 0.9}, {"top_k", 20}, {"do_sample", true}};
  const ModelConfig config = Read(With(Base("llama"), {{"eos_token_id", {2, 5}}}), generation);
  EXPECT_THAT(config.stop_ids, ElementsAre(2, 5, 7, 9));
  EXPECT_EQ(config.sampling.temperature, 0.6);
  EXPECT_EQ(config.sampling.top_k, 20);
  EXPECT_EQ(config.sampling.min_p, std::nullopt);
  EXPECT_EQ(config.bos, 1);
}

TEST(Config, BiasesFollowTheFamily) {
  const ModelConfig qwen2 = Read(Base("qwen2"));
  EXPECT_TRUE(qwen2.q_bias && qwen2.k_bias && qwen2.v_bias);
  EXPECT_FALSE(qwen2.o_bias || qwen2.mlp_bias || qwen2.qk_norm);
  const ModelConfig llama = Read(With(Base("llama"), {{"attention_bias", true}, {"mlp_bias", true}}));
  EXPECT_TRUE(llama.q_bias && llama.o_bias && llama.mlp_bias);
  EXPECT_TRUE(Read(Base("qwen3")).qk_norm);
}

TEST(Config, WindowsFollowTheFamily) {
  EXPECT_THAT(Windows(Read(With(Base("mistral"), {{"sliding_window", 16}}))), ElementsAre(16, 16, 16, 16));
  EXPECT_THAT(Windows(Read(With(Base("mistral"), {{"sliding_window", nullptr}}))), ElementsAre(0, 0, 0, 0));
  const Json qwen =
      With(Base("qwen2"), {{"use_sliding_window", true}, {"sliding_window", 16}, {"max_window_layers", 2}});
  EXPECT_THAT(Windows(Read(qwen)), ElementsAre(0, 0, 16, 16));
  EXPECT_THAT(Windows(Read(With(qwen, {{"use_sliding_window", false}}))), ElementsAre(0, 0, 0, 0));
  const Json types = {{"layer_types", {"sliding_attention", "full_attention", "full_attention", "sliding_attention"}}};
  EXPECT_THAT(Windows(Read(With(qwen, types))), ElementsAre(16, 0, 0, 16)) << "an explicit list decides";
  EXPECT_THAT(Windows(Read(With(Base("gemma3_text"), {{"sliding_window", 16}, {"sliding_window_pattern", 2}}))),
              ElementsAre(16, 0, 16, 0));
}

TEST(Config, SmolLm3LeavesRopeOutOfSomeLayers) {
  const auto ropes = [](const ModelConfig& config) {
    std::vector<int> out;
    for (const LayerConfig& layer : config.layers) out.push_back(layer.rope);
    return out;
  };
  EXPECT_THAT(ropes(Read(Base("smollm3"))), ElementsAre(0, 0, 0, -1));
  EXPECT_THAT(ropes(Read(With(Base("smollm3"), {{"no_rope_layers", {0, 1, 0, 1}}}))), ElementsAre(-1, 0, -1, 0));
  EXPECT_THAT(Error(With(Base("smollm3"), {{"no_rope_layers", {0, 1}}})),
              HasSubstr("no_rope_layers has 2 entries, but num_hidden_layers is 4"));
}

TEST(Config, Gemma3HasTwoRopesFourNormsAndItsOwnScales) {
  const Json v4 = With(Base("gemma3_text"), {{"sliding_window", 16},
                                             {"sliding_window_pattern", 4},
                                             {"query_pre_attn_scalar", 24},
                                             {"rope_theta", 1e6},
                                             {"rope_local_base_freq", 1e4},
                                             {"rope_scaling", {{"rope_type", "linear"}, {"factor", 8.0}}},
                                             {"hidden_activation", "gelu_pytorch_tanh"}});
  Json v5 = With(Base("gemma3_text"),
                 {{"sliding_window", 16},
                  {"query_pre_attn_scalar", 24},
                  {"layer_types", {"sliding_attention", "sliding_attention", "sliding_attention", "full_attention"}},
                  {"rope_parameters",
                   {{"full_attention", {{"rope_type", "linear"}, {"factor", 8.0}, {"rope_theta", 1e6}}},
                    {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", 1e4}}}}}});
  for (const Json& json : {v4, v5}) {
    const ModelConfig config = Read(json);
    EXPECT_TRUE(config.post_norms && config.qk_norm && config.norms_stored_minus_one && config.tie_embeddings);
    EXPECT_EQ(config.activation, Activation::kGeluTanh);
    EXPECT_FLOAT_EQ(config.attention_scale, static_cast<float>(1 / std::sqrt(24.0)));
    EXPECT_EQ(config.embedding_scale, 8.0f);
    ASSERT_EQ(config.ropes.size(), 2u);
    EXPECT_EQ(config.RopeOf(config.layers[0])->kind, RopeKind::kDefault);
    EXPECT_EQ(config.RopeOf(config.layers[0])->theta, 1e4);
    EXPECT_EQ(config.RopeOf(config.layers[3])->kind, RopeKind::kLinear);
    EXPECT_EQ(config.RopeOf(config.layers[3])->theta, 1e6);
    EXPECT_EQ(config.RopeOf(config.layers[3])->factor, 8.0);
  }
}

TEST(Config, Gemma3KeepsTheEmbeddingScaleInTheModelsDtype) {
  const Json config = With(Base("gemma3_text"), {{"hidden_size", 1152}, {"sliding_window", 16}});
  EXPECT_EQ(Read(With(config, {{"torch_dtype", "bfloat16"}})).embedding_scale, 34.0f);
  EXPECT_FLOAT_EQ(Read(With(config, {{"dtype", "float32"}})).embedding_scale, 33.941125f);
}

TEST(Config, Phi3ReadsLongRopeAndPartialRotation) {
  const Json lists = {
      {"type", "longrope"}, {"short_factor", std::vector<double>(8, 1.5)}, {"long_factor", std::vector<double>(8, 4)}};
  const Json longrope = With(Base("phi3"), {{"original_max_position_embeddings", 64}, {"rope_scaling", lists}});
  const ModelConfig config = Read(longrope);
  ASSERT_EQ(config.ropes.size(), 1u);
  EXPECT_EQ(config.ropes[0].kind, RopeKind::kLongRope);
  EXPECT_EQ(config.ropes[0].original_max_positions, 64);
  EXPECT_DOUBLE_EQ(config.ropes[0].attention_factor, std::sqrt(1 + std::log(4.0) / std::log(64.0)));
  Json su = longrope;
  su["rope_scaling"]["type"] = "su";
  EXPECT_EQ(Read(su).ropes, config.ropes);
  su["rope_scaling"]["long_factor"] = {1, 2};
  EXPECT_THAT(Error(su), HasSubstr("long_factor of longrope rope has 2 numbers, but 16 rotary dimensions need 8"));
  EXPECT_EQ(Read(With(Base("phi3"), {{"partial_rotary_factor", 0.75}})).ropes[0].rotary_dims, 12);
}

TEST(Config, YarnsMultiplierIsDerivedUnlessGiven) {
  const Json yarn = {{"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 64}};
  EXPECT_DOUBLE_EQ(Read(With(Base("llama"), {{"rope_scaling", yarn}})).ropes[0].attention_factor,
                   0.1 * std::log(4.0) + 1);
  EXPECT_DOUBLE_EQ(
      Read(With(Base("llama"), {{"rope_scaling", With(yarn, {{"attention_factor", 1.5}})}})).ropes[0].attention_factor,
      1.5);
  EXPECT_DOUBLE_EQ(Read(With(Base("llama"), {{"rope_scaling", With(yarn, {{"mscale", 1.0}, {"mscale_all_dim", 1.0}})}}))
                       .ropes[0]
                       .attention_factor,
                   1.0);
}

TEST(ConfigErrors, NameTheFieldThatIsMissingOrOfTheWrongType) {
  for (const char* field : {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
                            "vocab_size", "max_position_embeddings"}) {
    Json config = Base("llama");
    config.erase(field);
    EXPECT_EQ(Error(config), absl::StrCat("config.json: ", field, " is missing"));
    config[field] = "64";
    EXPECT_EQ(Error(config), absl::StrCat("config.json: ", field, " must be an integer"));
    config[field] = 0;
    EXPECT_EQ(Error(config), absl::StrCat("config.json: ", field, " is 0; it must be at least 1"));
  }
  EXPECT_THAT(Error(Json::array()), HasSubstr("is not a JSON object"));
  EXPECT_THAT(Error(Json::object()), HasSubstr("model_type is missing"));
  EXPECT_THAT(Error(With(Base("llama"), {{"tie_word_embeddings", 1}})),
              HasSubstr("tie_word_embeddings must be true or false"));
  EXPECT_THAT(Error(With(Base("llama"), {{"rope_scaling", {{"type", "linear"}}}})),
              HasSubstr("rope_scaling.factor is missing"));
  EXPECT_THAT(Error(With(Base("llama"), {{"rope_scaling", "linear"}})), HasSubstr("rope_scaling must be an object"));
}

TEST(ConfigErrors, SayWhatIsNotServed) {
  EXPECT_EQ(Error(Base("retnet")),
            "config.json: model_type 'retnet' is not served; served are llama, mistral, smollm3, qwen2, qwen3, phi3, "
            "gemma3_text, mixtral, qwen3_moe, minimax_m2, minimax, qwen3_next, qwen3_5_text, qwen3_5_moe_text, "
            "kimi_linear, mamba2, bamba, granitemoehybrid, nemotron_h, falcon_h1, olmo_hybrid, lfm2, gpt_oss");
  EXPECT_THAT(Error(With(Base("llama"), {{"hidden_act", "relu"}})), HasSubstr("hidden_act 'relu' is not served"));
  EXPECT_THAT(Error(With(Base("llama"), {{"quantization_config", {{"quant_method", "gptq"}}}})),
              HasSubstr("quantization_config is set, which is not served"));
  EXPECT_THAT(Error(With(Base("llama"), {{"rope_scaling", {{"type", "mrope"}}}})),
              HasSubstr("rope type 'mrope' is not served"));
  EXPECT_THAT(
      Error(With(Base("qwen3"),
                 {{"layer_types", {"full_attention", "linear_attention", "full_attention", "full_attention"}}})),
      HasSubstr("layer_types[1] is 'linear_attention', which is not served in qwen3"));
}

TEST(ConfigErrors, RefuseContradictionsAndAbsurdNumbers) {
  const auto error = [](const Json& changes) { return Error(With(Base("llama"), changes)); };
  EXPECT_THAT(error({{"num_key_value_heads", 3}}),
              HasSubstr("4 attention heads cannot share 3 key/value heads evenly"));
  EXPECT_THAT(error({{"hidden_size", 1e12}}), HasSubstr("hidden_size is 1000000000000; it must be below 2^32"));
  EXPECT_THAT(error({{"num_hidden_layers", 1u << 30}}), HasSubstr("num_hidden_layers is 1073741824; at most 1024"));
  EXPECT_THAT(error({{"head_dim", 1e18}}), HasSubstr("head_dim must be an integer"));
  EXPECT_THAT(error({{"head_dim", 100000}}), HasSubstr("head_dim is 100000; it must be in [2, 1024]"));
  EXPECT_THAT(error({{"head_dim", 17}}), HasSubstr("rope turns 17 dimensions of a head; it must be even"));
  EXPECT_THAT(error({{"head_dim", nullptr}, {"hidden_size", 63}}),
              HasSubstr("head_dim is missing, and hidden_size 63 is not a multiple"));
  EXPECT_THAT(error({{"rms_norm_eps", 0}}), HasSubstr("the norm epsilon is 0"));
  EXPECT_THAT(error({{"rope_theta", -1}}), HasSubstr("the rope base is -1"));
  EXPECT_THAT(error({{"rope_theta", 1.7976931348623157e308}}), HasSubstr("the rope base is 1.79769e+308"));
  EXPECT_THAT(error({{"eos_token_id", 320}}), HasSubstr("eos_token_id is 320, but vocab_size is 320"));
  EXPECT_THAT(error({{"bos_token_id", -1}}), HasSubstr("bos_token_id is -1"));
  EXPECT_THAT(error({{"rope_scaling", {{"type", "linear"}, {"factor", 0.5}}}}),
              HasSubstr("rope_scaling.factor is 0.5; it must be in [1, 1e6]"));
  EXPECT_THAT(error({{"rope_scaling",
                      {{"type", "llama3"},
                       {"factor", 8},
                       {"low_freq_factor", 4},
                       {"high_freq_factor", 1},
                       {"original_max_position_embeddings", 64}}}}),
              HasSubstr("llama3 rope needs 0 < low_freq_factor < high_freq_factor"));
  EXPECT_THAT(error({{"partial_rotary_factor", 1.5}}), HasSubstr("partial_rotary_factor is 1.5; it must be in (0, 1]"));
  EXPECT_THAT(Error(With(Base("mistral"), {{"sliding_window", -5}})),
              HasSubstr("its window is -5; it must be at least 1"));
  EXPECT_THAT(Error(With(Base("qwen3"), {{"layer_types", {"full_attention"}}})),
              HasSubstr("layer_types has 1 entries, but num_hidden_layers is 4"));
  EXPECT_THAT(Error(With(Base("qwen3"), {{"layer_types", Json::array({"full_attention", "full_attention",
                                                                      "full_attention", "sliding_attention"})}})),
              HasSubstr("sliding_window is missing, but layer 3 is sliding_attention"));
  EXPECT_THAT(Error(Base("llama"), {{"eos_token_id", {2, 999}}}),
              HasSubstr("generation_config.json: eos_token_id is 999"));
}

TEST(JsonFile, ReadsPythonsNumbersButNotInsideStrings) {
  const auto json = ParseJson("config.json", R"({"a": [0.0, Infinity, -Infinity, NaN], "b": "Infinity \" NaN"})");
  ASSERT_TRUE(json.ok()) << json.status();
  EXPECT_EQ((*json)["a"][1], std::numeric_limits<double>::max());
  EXPECT_EQ((*json)["a"][2], std::numeric_limits<double>::lowest());
  EXPECT_EQ((*json)["a"][3], "NaN");  // not null, which would mean that the field is not there
  EXPECT_EQ((*json)["b"], "Infinity \" NaN");
}

TEST(JsonFile, NotANumberIsNoValueOfAField) {
  std::string text = Base("llama").dump();
  const std::string eps = "\"rms_norm_eps\":";
  text.replace(text.find(eps), eps.size(), eps + "NaN,\"unknown\":");
  const auto json = ParseJson("config.json", text);
  ASSERT_TRUE(json.ok()) << json.status();
  EXPECT_EQ(Error(*json), "config.json: rms_norm_eps must be a number");
}

TEST(JsonFile, RefusesWhatIsNotJsonOrTooDeep) {
  EXPECT_EQ(ParseJson("c.json", "{\"a\": }").status().message(), "c.json: is not valid JSON at byte 7");
  EXPECT_THAT(std::string(ParseJson("c.json", std::string(1000000, '[')).status().message()),
              HasSubstr("nests deeper than 32 levels at byte 32"));
  EXPECT_THAT(std::string(ParseJson("c.json", "{\"a\": \"\xff\"}").status().message()), HasSubstr("not valid JSON"));
  EXPECT_THAT(std::string(ParseJson("c.json", "1e999").status().message()), HasSubstr("a number out of range"));
  EXPECT_THAT(std::string(ParseJson("c.json", "").status().message()), HasSubstr("not valid JSON"));
  EXPECT_THAT(std::string(ParseJson("c.json", "\"a").status().message()), HasSubstr("not valid JSON"));
}

}  // namespace
}  // namespace dovetail::model
