#include "loadgen/prompt_writer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "loadgen/datasets/line_reader.h"
#include "model/tokenizer/tokenizer_json.h"
#include "tests/support/test_data.h"

namespace dovetail::loadgen {
namespace {

std::shared_ptr<const model::Tokenizer> TokenizerAt(const std::filesystem::path& file) {
  const auto reader = LineReader::Open(file.string());
  EXPECT_TRUE(reader.ok()) << reader.status();
  std::string text;
  for (auto line = (*reader)->Next(); line.ok() && line->has_value(); line = (*reader)->Next()) text += **line + "\n";
  auto data = model::TokenizerDataFromJson(text);
  EXPECT_TRUE(data.ok()) << data.status();
  auto tokenizer = model::Tokenizer::Create(*data);
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return std::shared_ptr<const model::Tokenizer>(*std::move(tokenizer));
}

TEST(PromptWriter, PromptsHaveExactlyTheTokensAskedForInRealVocabularies) {
  for (const char* name : {"tokenizers/llama2", "tokenizers/llama3_1", "tokenizers/qwen3"}) {
    DOVETAIL_DATA_OR_SKIP(const auto file, std::string(name) + "/tokenizer.json.gz");
    const auto tokenizer = TokenizerAt(file);
    LocalTokenCounter counter(tokenizer);
    auto vocabulary = VocabularyOf(*tokenizer, name);
    ASSERT_TRUE(vocabulary.ok()) << vocabulary.status();
    EXPECT_GE(vocabulary->words.size(), 1000u) << name;
    EXPECT_EQ(vocabulary->tokens_per_word, 1) << name;
    PromptWriter writer(*std::move(vocabulary), &counter);
    Random random(1);
    for (const int64_t tokens : {2, 3, 17, 512, 4000}) {
      const auto prompt = writer.Complete("", tokens, random);
      ASSERT_TRUE(prompt.ok()) << prompt.status();
      EXPECT_EQ(prompt->tokens, tokens) << name;
      EXPECT_EQ(*counter.Count(prompt->text), tokens) << name;
    }
    const auto completed = writer.Complete(writer.Piece(100, random), 150, random);
    EXPECT_EQ(*counter.Count(completed->text), 150) << name;
  }
}

// Two tokens for each word and three before the text.
class TwoEach final : public TokenCounter {
 public:
  absl::StatusOr<int64_t> Count(std::string_view text) override {
    return text.empty() ? 3 : 5 + 2 * std::count(text.begin(), text.end(), ' ');
  }
};

TEST(PromptWriter, WordsOfSeveralTokensComeAsNearAsTheyCan) {
  TwoEach counter;
  const auto vocabulary = VocabularyOf(counter, "two");
  ASSERT_TRUE(vocabulary.ok());
  EXPECT_NEAR(vocabulary->tokens_per_word, 2, 0.02);
  EXPECT_EQ(vocabulary->special_tokens, 3);
  PromptWriter writer(*vocabulary, &counter);
  Random random(1);
  EXPECT_EQ(writer.Complete("", 103, random)->tokens, 103);
  EXPECT_NEAR(static_cast<double>(writer.Complete("", 100, random)->tokens), 100, 1);
  EXPECT_EQ(writer.Complete("", 1, random)->tokens, 5) << "one word is the least, and it is said";
}

TEST(PromptWriter, WithoutACounterLengthsAreEstimated) {
  PromptWriter writer(GuessedVocabulary(1.25, "usage"), nullptr);
  Random random(1);
  const auto prompt = writer.Complete("", 100, random);
  ASSERT_TRUE(prompt.ok());
  EXPECT_EQ(prompt->tokens, 100);
  EXPECT_EQ(1 + std::count(prompt->text.begin(), prompt->text.end(), ' '), 80);
  EXPECT_EQ(*writer.Count("a"), -1);
}

TEST(PromptWriter, PiecesAreTheSameForEqualRandomStatesAndShorterOnesBeginLongerOnes) {
  PromptWriter writer(GuessedVocabulary(1, "words"), nullptr);
  Random a(5), b(5);
  const std::string longer = writer.Piece(20, a), shorter = writer.Piece(7, b);
  EXPECT_EQ(longer.substr(0, shorter.size()), shorter);
}

}  // namespace
}  // namespace dovetail::loadgen
