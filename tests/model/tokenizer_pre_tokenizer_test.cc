#include "model/tokenizer/pre_tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/model/tokenizer_test_models.h"

namespace dovetail::model::test {
namespace {

using Pieces = std::vector<std::string>;

Pieces Split(PreTokenizer pre, std::string_view text) {
  const auto splitter = PieceSplitter::Create(pre);
  EXPECT_TRUE(splitter.ok()) << splitter.status();
  std::vector<std::string_view> pieces;
  EXPECT_TRUE(splitter->Split(text, pieces).ok());
  return Pieces(pieces.begin(), pieces.end());
}

// What the tokenizers library (0.23.3) makes of the same text with the same patterns.
TEST(PreTokenizer, SplitsAsTheModelsOwnTokenizersDo) {
  const std::string text = "I'LL pay 12345 for  HelloWorld's\n\n  x=漢字カナ!";
  EXPECT_EQ(Split(PreTokenizer::kGpt2, text), (Pieces{"I", "'", "LL", " pay", " 12345", " for", " ", " HelloWorld",
                                                      "'s", "\n\n ", " x", "=", "漢字カナ", "!"}));
  EXPECT_EQ(Split(PreTokenizer::kLlama3, text), (Pieces{"I", "'LL", " pay", " ", "123", "45", " for", " ",
                                                        " HelloWorld", "'s", "\n\n", " ", " x", "=漢字カナ", "!"}));
  EXPECT_EQ(Split(PreTokenizer::kQwen2, text), (Pieces{"I", "'LL", " pay", " ", "1", "2", "3", "4", "5", " for", " ",
                                                       " HelloWorld", "'s", "\n\n", " ", " x", "=漢字カナ", "!"}));
  EXPECT_EQ(Split(PreTokenizer::kGpt4o, text), (Pieces{"I'LL", " pay", " ", "123", "45", " for", " ", " Hello",
                                                       "World's", "\n\n", " ", " x", "=漢字カナ", "!"}));
  EXPECT_EQ(Split(PreTokenizer::kTekken, text), (Pieces{"I", "'LL", " pay", " ", "1", "2", "3", "4", "5", " for", " ",
                                                        " Hello", "World", "'s", "\n\n", " ", " x", "=漢字カナ", "!"}));
  EXPECT_EQ(Split(PreTokenizer::kDeepSeek3, text),
            (Pieces{"I", "'LL", " pay", " ", "123", "45", " for", " ", " HelloWorld", "'s", "\n\n", " ", " x", "=",
                    "漢字カナ", "!"}));
  EXPECT_EQ(Split(PreTokenizer::kSmolLm, text),
            (Pieces{"I", "'", "LL", " pay", " ", "1", "2", "3", "4", "5", " for", " ", " HelloWorld", "'s", "\n\n ",
                    " x", "=", "漢字カナ", "!"}));
  EXPECT_EQ(Split(PreTokenizer::kNone, text), Pieces{text});
}

TEST(PreTokenizer, MarksCountAsLettersForQwen35Only) {
  EXPECT_EQ(Split(PreTokenizer::kQwen35, "a\u0323b"), (Pieces{"a\u0323b"}));
  EXPECT_EQ(Split(PreTokenizer::kQwen2, "a\u0323b"), (Pieces{"a", "\u0323b"}));
}

TEST(PreTokenizer, TheMongolianVowelSeparatorIsNotWhiteSpace) {
  EXPECT_EQ(Split(PreTokenizer::kGpt2, " \u180E "), (Pieces{" \u180E", " "}));
}

TEST(PreTokenizer, PiecesCoverEveryText) {
  for (const PreTokenizer pre :
       {PreTokenizer::kGpt2, PreTokenizer::kLlama3, PreTokenizer::kQwen2, PreTokenizer::kQwen35, PreTokenizer::kGpt4o,
        PreTokenizer::kTekken, PreTokenizer::kDeepSeek3, PreTokenizer::kSmolLm}) {
    for (const std::string& text : OddTexts(/*seed=*/6, 300)) {
      std::string joined;
      for (const std::string& piece : Split(pre, text)) {
        EXPECT_FALSE(piece.empty());
        joined += piece;
      }
      EXPECT_EQ(joined, text) << Name(pre);
    }
  }
}

TEST(PreTokenizer, AnUnknownNameOrPatternIsRefusedWithTheKnownOnes) {
  EXPECT_EQ(PreTokenizerOfGguf("smollm")->pre, PreTokenizer::kSmolLm);
  EXPECT_TRUE(PreTokenizerOfGguf("llama-bpe")->ignore_merges);
  const auto unknown = PreTokenizerOfGguf("falcon");
  EXPECT_EQ(unknown.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(unknown.status().message()), testing::HasSubstr("smollm"));
  EXPECT_EQ(PreTokenizerOfPatterns({}).status().code(), absl::StatusCode::kUnimplemented);
  for (const PreTokenizer pre : {PreTokenizer::kLlama3, PreTokenizer::kDeepSeek3}) {
    EXPECT_EQ(*PreTokenizerOfPatterns(PatternsOf(pre)), pre);
    EXPECT_FALSE(PreTokenizerOfPatterns(PatternsOf(pre).subspan(1)).ok() && PatternsOf(pre).size() > 1);
  }
}

}  // namespace
}  // namespace dovetail::model::test
