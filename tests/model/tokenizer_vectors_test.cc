#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "nlohmann/json.hpp"
#include "tests/model/tokenizer_test_models.h"
#include "tests/support/test_data.h"

namespace dovetail::model::test {
namespace {

using dovetail::test::ReadFile;

void ExpectVectors(const Tokenizer& tokenizer, const std::string& name) {
  DOVETAIL_DATA_OR_SKIP(const auto folder, "tokenizers/vectors");
  const std::vector<Vector> vectors = ReadVectors(folder, name);
  ASSERT_EQ(vectors.size(), 47u);
  for (const Vector& vector : vectors) {
    const auto ids = tokenizer.Encode(vector.text, {.add_special = false});
    ASSERT_TRUE(ids.ok()) << ids.status();
    EXPECT_EQ(*ids, vector.ids) << vector.text;
    EXPECT_EQ(tokenizer.Decode(*ids, false), vector.text);
  }
}

TEST(TokenizerVectors, Gpt2FromGguf) {
  DOVETAIL_DATA_OR_SKIP(const auto path, "tokenizers/vectors/ggml-vocab-gpt-2.gguf.gz");
  const auto tokenizer = FromGgufFile(path);
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_EQ(tokenizer->vocab_size(), 50257);
  ExpectVectors(*tokenizer, "ggml-vocab-gpt-2.gguf");
}

TEST(TokenizerVectors, LlamaSpmFromGguf) {
  DOVETAIL_DATA_OR_SKIP(const auto path, "tokenizers/vectors/ggml-vocab-llama-spm.gguf.gz");
  const auto tokenizer = FromGgufFile(path);
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_THAT(tokenizer->prefix_ids(), testing::ElementsAre(1));
  ExpectVectors(*tokenizer, "ggml-vocab-llama-spm.gguf");
}

TEST(TokenizerVectors, LlamaSpmFromLlama2Json) {
  DOVETAIL_DATA_OR_SKIP(const auto path, "tokenizers/llama2/tokenizer.json.gz");
  const auto tokenizer = FromJsonFile(path, /*with_config=*/false);
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_THAT(tokenizer->prefix_ids(), testing::ElementsAre(1));
  ExpectVectors(*tokenizer, "ggml-vocab-llama-spm.gguf");
}

TEST(TokenizerVectors, LlamaBpeFromLlama31Json) {
  DOVETAIL_DATA_OR_SKIP(const auto path, "tokenizers/llama3_1/tokenizer.json.gz");
  const auto tokenizer = FromJsonFile(path, /*with_config=*/true);
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_EQ(tokenizer->special().bos, 128000);
  EXPECT_EQ(tokenizer->special().eos, tokenizer->TokenToId("<|eot_id|>"));
  EXPECT_THAT(tokenizer->prefix_ids(), testing::ElementsAre(128000));
  ExpectVectors(*tokenizer, "ggml-vocab-llama-bpe.gguf");
}

TEST(TokenizerVectors, Qwen2FromQwen3Json) {
  DOVETAIL_DATA_OR_SKIP(const auto path, "tokenizers/qwen3/tokenizer.json.gz");
  const auto tokenizer = FromJsonFile(path, /*with_config=*/true);
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_EQ(tokenizer->special().eos, 151645);
  EXPECT_TRUE(tokenizer->prefix_ids().empty());
  ExpectVectors(*tokenizer, "ggml-vocab-qwen2.gguf");
}

TEST(TokenizerVectors, LlamaFilesOfBothFormatsAgreeOnOddTexts) {
  DOVETAIL_DATA_OR_SKIP(const auto gguf, "tokenizers/vectors/ggml-vocab-llama-spm.gguf.gz");
  DOVETAIL_DATA_OR_SKIP(const auto json, "tokenizers/llama2/tokenizer.json.gz");
  const auto by_score = FromGgufFile(gguf);
  const auto by_merge = FromJsonFile(json, false);
  ASSERT_TRUE(by_score != nullptr && by_merge != nullptr);
  for (const std::string& text : OddTexts(/*seed=*/1, 2000)) {
    for (const bool parse_special : {false, true}) {
      const EncodeOptions options{.parse_special = parse_special};
      EXPECT_EQ(*by_score->Encode(text, options), *by_merge->Encode(text, options)) << text;
    }
  }
}

TEST(TokenizerVectors, TalesPromptsHaveTheGoldenIds) {
  DOVETAIL_DATA_OR_SKIP(const auto path, "models/tales-hybrid/golden.json");
  const auto tokenizer = Make(TalesData());
  const auto golden = nlohmann::json::parse(ReadFile(path));
  ASSERT_GT(golden.size(), 0u);
  for (const auto& entry : golden) {
    EXPECT_EQ(tokenizer->Decode(entry["greedy_ids"].get<std::vector<TokenId>>(), /*skip_special=*/false),
              entry["text"]);
    if (entry["prompt"] == "long") continue;  // ids repeated, not a text
    const auto ids = tokenizer->Encode(entry["prompt"].get<std::string>());
    ASSERT_TRUE(ids.ok());
    EXPECT_EQ(*ids, entry["prompt_ids"].get<std::vector<TokenId>>());
  }
}

TEST(TokenizerVectors, Stories260KStartsAtBosAndRoundTrips) {
  DOVETAIL_DATA_OR_SKIP(const auto path, "models/stories260K/stories260K-f32.gguf");
  const auto tokenizer = FromGgufFile(path);
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_EQ(*tokenizer->Encode(""), std::vector<TokenId>{1});
  DOVETAIL_DATA_OR_SKIP(const auto golden_path, "models/stories260K/golden.json");
  const auto golden = nlohmann::json::parse(ReadFile(golden_path));
  const auto ids = golden["greedy_ids"].get<std::vector<TokenId>>();
  const std::string story = tokenizer->Decode(ids, true);
  EXPECT_TRUE(story.starts_with("Once upon a time, there was a little girl named Lily.")) << story;
  EXPECT_EQ(*tokenizer->Encode(story, {.add_special = false}), ids);
}

TEST(TokenizerVectors, SmolLm2ChatPromptsHaveTheGoldenIds) {
  DOVETAIL_DATA_OR_SKIP(const auto golden_path, "models/smollm2-135m-instruct/golden.json");
  const char* home = std::getenv("HOME");
  const std::filesystem::path path =
      std::filesystem::path(home ? home : "") / ".cache/dovetail/smollm2-135m-instruct.gguf";
  if (!std::filesystem::exists(path)) GTEST_SKIP() << "missing model: smollm2-135m-instruct.gguf";
  const auto tokenizer = FromGgufFile(path);
  ASSERT_NE(tokenizer, nullptr);
  const auto golden = nlohmann::json::parse(ReadFile(golden_path));
  ASSERT_GT(golden.size(), 0u);
  for (const auto& entry : golden) {
    EXPECT_EQ(tokenizer->Decode(entry["greedy_ids"].get<std::vector<TokenId>>(), /*skip_special=*/false),
              entry["text"]);
    if (!entry.contains("rendered")) continue;  // ids repeated, not a text
    const auto rendered = entry["rendered"].get<std::string>();
    const auto ids = tokenizer->Encode(rendered, {.add_special = false, .parse_special = true});
    ASSERT_TRUE(ids.ok());
    EXPECT_EQ(*ids, entry["prompt_ids"].get<std::vector<TokenId>>()) << rendered;
    EXPECT_EQ(tokenizer->Decode(*ids, /*skip_special=*/false), rendered);
  }
}

}  // namespace
}  // namespace dovetail::model::test
