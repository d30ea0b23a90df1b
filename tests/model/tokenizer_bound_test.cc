#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "model/tokenizer/byte_level.h"
#include "model/tokenizer/normalize.h"
#include "model/tokenizer/tokenizer.h"
#include "model/tokenizer/utf8.h"
#include "tests/model/tokenizer_test_models.h"

// How few tokens a text can be is said before it is encoded. It must never be said too high: a prompt that fits would
// be refused.

namespace dovetail::model::test {
namespace {

std::string Times(int count, const std::string& unit) {
  std::string text;
  for (int i = 0; i < count; ++i) text += unit;
  return text;
}

size_t Count(const Tokenizer& tokenizer, const std::string& text) {
  const auto ids = tokenizer.Encode(text, {.add_special = false, .parse_special = true});
  EXPECT_TRUE(ids.ok()) << ids.status();
  return ids.ok() ? ids->size() : 0;
}

void ExpectSound(const Tokenizer& tokenizer, const std::string& text) {
  EXPECT_LE(tokenizer.LeastTokens(text), static_cast<int64_t>(Count(tokenizer, text))) << text.substr(0, 80);
}

TEST(LeastTokens, IsTheCountWhereEveryTokenIsTheLongestOne) {
  const auto tokenizer = Make(TinyByteLevelData());
  const std::string text = Times(1000, "<|bos|>");
  EXPECT_EQ(tokenizer->LeastTokens(text), 1000);
  EXPECT_EQ(Count(*tokenizer, text), 1000u);
  EXPECT_EQ(tokenizer->LeastTokens(text + "x"), 1001);
  EXPECT_EQ(tokenizer->LeastTokens(""), 0);
}

TEST(LeastTokens, IsNeverAboveWhatEncodingMakes) {
  TokenizerData nfc = TinyByteLevelData();
  nfc.normalize_nfc = true;
  for (const TokenizerData& data : {TinyByteLevelData(), TinySpmData(), TalesData(), nfc}) {
    const auto tokenizer = Make(data);
    for (const std::string& text : OddTexts(/*seed=*/7, /*count=*/300)) ExpectSound(*tokenizer, text);
    for (TokenId id = 0; id < tokenizer->vocab_size(); id += 1 + tokenizer->vocab_size() / 500) {
      const std::string text(tokenizer->TokenText(id));
      if (ValidUtf8Prefix(text) == text.size()) ExpectSound(*tokenizer, Times(50, text));
    }
  }
}

TEST(LeastTokens, KnowsThatSpacesMayBeSpelledInThreeBytes) {
  TokenizerData data = TinySpmData();
  data.space_prefix = SpacePrefix::kNone;
  data.tokens.push_back(Times(16, std::string(kSpmSpace)));
  data.types.push_back(TokenType::kUserDefined);
  data.scores.push_back(0);
  const auto cut = Make(data);
  ExpectSound(*cut, Times(16 * 20, std::string(kSpmSpace)));
  ExpectSound(*Make(TinySpmData()), Times(50, std::string(kSpmSpace) + "hello"));
}

TEST(LeastTokens, KnowsHowMuchTheNormalFormIsShorter) {
  const std::string longest = "\u1FBE\u0308\u0301", normal = "\u0390";
  const auto shorter = NormalizeNfc(longest);
  ASSERT_TRUE(shorter.ok());
  EXPECT_EQ(*shorter, normal);
  TokenizerData data = TinyByteLevelData();
  data.normalize_nfc = true;
  data.ignore_merges = true;
  data.tokens.push_back(SpellingOfBytes(absl::StrCat(" ", Times(8, normal))));
  data.types.push_back(TokenType::kNormal);
  const auto tokenizer = Make(data);
  const std::string text = Times(100, absl::StrCat(" ", Times(8, longest)));
  EXPECT_EQ(Count(*tokenizer, text), 100u);
  ExpectSound(*tokenizer, text);
  EXPECT_LT(tokenizer->LeastTokens(Times(500, longest)), tokenizer->LeastTokens(std::string(3500, 'a')))
      << "a text that is surely normal is not taken to shrink";
}

// Each character alone: no canonical form is more than kMostNfcShrinks times shorter.
TEST(LeastTokens, NoCharacterShrinksMoreThanTheLimit) {
  for (char32_t c = 1; c < 0x110000; ++c) {
    if (c >= 0xD800 && c < 0xE000) continue;
    std::string text;
    AppendUtf8(c, text);
    const auto normal = NormalizeNfc(text);
    ASSERT_TRUE(normal.ok());
    ASSERT_LE(text.size(), kMostNfcShrinks * normal->size()) << static_cast<uint32_t>(c);
    ASSERT_TRUE(!SurelyNfc(text) || *normal == text) << static_cast<uint32_t>(c);
  }
}

TEST(LeastTokens, DoesNotCountSpaceThatATokenSwallows) {
  TokenizerData data = TinyByteLevelData();
  const TokenId end = 262;
  ASSERT_EQ(data.tokens[end], "<|end|>");
  data.cut_rules.push_back({.id = end, .strip_right = true});
  const auto tokenizer = Make(data);
  const std::string text = "<|end|>" + Times(2000, " \u3000\n");
  EXPECT_EQ(Count(*tokenizer, text), 1u);
  EXPECT_EQ(tokenizer->LeastTokens(text), 1);
  EXPECT_GT(tokenizer->LeastTokens(text + Times(700, "abcdefg")), 600);
}

TEST(LeastTokens, SaysNothingWhereUnknownRunsBecomeOneToken) {
  TokenizerData data = TinySpmData();
  data.fuse_unknown = true;
  EXPECT_GT(Make(data)->LeastTokens(std::string(1000, 'x')), 0) << "with all byte tokens nothing is unknown";
  std::replace(data.types.begin(), data.types.end(), TokenType::kByte, TokenType::kUnused);
  const auto tokenizer = Make(data);
  const std::string text = Times(1000, "漢");
  EXPECT_LE(Count(*tokenizer, text), 2u);
  EXPECT_EQ(tokenizer->LeastTokens(text), 0);
}

TEST(MaxTokens, EncodingEndsWhereTheTextIsMore) {
  for (const TokenizerData& data : {TinyByteLevelData(), TinySpmData(), TalesData()}) {
    const auto tokenizer = Make(data);
    const std::string text = Times(200, "hello 漢 <tool>\n");
    const auto all = tokenizer->Encode(text);
    ASSERT_TRUE(all.ok());
    EXPECT_EQ(tokenizer->Encode(text, {.max_tokens = all->size()}).value(), *all);
    EXPECT_EQ(tokenizer->Encode(text, {.max_tokens = all->size() - 1}).status().code(), absl::StatusCode::kOutOfRange);
    EXPECT_EQ(tokenizer->Encode(text, {.max_tokens = 1}).status().code(), absl::StatusCode::kOutOfRange);
  }
}

}  // namespace
}  // namespace dovetail::model::test
