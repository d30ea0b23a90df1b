#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "model/tokenizer/normalize.h"
#include "model/tokenizer/tokenizer.h"
#include "model/tokenizer/utf8.h"
#include "tests/model/tokenizer_test_models.h"

namespace dovetail::model::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr TokenId kHello = 259, kSpaceHello = 260, kBos = 261, kEnd = 262, kTool = 263;

std::vector<TokenId> Ids(const absl::StatusOr<std::vector<TokenId>>& ids) {
  EXPECT_TRUE(ids.ok()) << ids.status();
  return ids.value_or(std::vector<TokenId>{});
}

TEST(Tokenizer, MergesTheBestPairFirstAndPutsBosInFront) {
  const auto tokenizer = Make(TinyByteLevelData());
  EXPECT_THAT(Ids(tokenizer->Encode("hello hello hel")), ElementsAre(kBos, kHello, kSpaceHello, ' ', 256, 'l'));
  EXPECT_THAT(Ids(tokenizer->Encode("hello", {.add_special = false})), ElementsAre(kHello));
}

TEST(Tokenizer, ControlTokensSpelledInTextAreTextUnlessAllowed) {
  const auto tokenizer = Make(TinyByteLevelData());
  const auto plain = Ids(tokenizer->Encode("hello<|end|>", {.add_special = false}));
  EXPECT_THAT(plain, testing::Not(testing::Contains(kEnd)));
  EXPECT_EQ(tokenizer->Decode(plain, true), "hello<|end|>");
  EXPECT_THAT(Ids(tokenizer->Encode("hello<|end|>", {.add_special = false, .parse_special = true})),
              ElementsAre(kHello, kEnd));
}

TEST(Tokenizer, UserDefinedTokensAreFoundAnywhereAndShown) {
  const auto tokenizer = Make(TinyByteLevelData());
  const auto ids = Ids(tokenizer->Encode("hello<tool>hello", {.add_special = false}));
  EXPECT_THAT(ids, ElementsAre(kHello, kTool, kHello));
  EXPECT_EQ(tokenizer->Decode(ids, /*skip_special=*/true), "hello<tool>hello");
  EXPECT_FALSE(tokenizer->IsSpecial(kTool));
}

TEST(Tokenizer, InputPartsNeverYieldControlTokens) {
  const auto tokenizer = Make(TinyByteLevelData());
  const EncodeOptions bare{.add_special = false};
  const PromptPart parts[] = {{"<|bos|>", false}, {"<|end|>hello", true}, {"<|end|>", false}};
  auto ids = Ids(tokenizer->EncodeParts(parts, bare));
  EXPECT_EQ(ids.front(), kBos);
  EXPECT_EQ(ids.back(), kEnd);
  EXPECT_EQ(std::count(ids.begin(), ids.end(), kEnd), 1);
  EXPECT_EQ(tokenizer->Decode(ids, false), "<|bos|><|end|>hello<|end|>");
}

TEST(Tokenizer, AControlTokenPutTogetherFromTemplateAndInputIsText) {
  const auto tokenizer = Make(TinyByteLevelData());
  for (size_t cut = 1; cut < 7; ++cut) {
    const std::string spelled = "<|end|>";
    for (const bool input_first : {false, true}) {
      const PromptPart parts[] = {{spelled.substr(0, cut), input_first}, {spelled.substr(cut), !input_first}};
      const auto ids = Ids(tokenizer->EncodeParts(parts, {.add_special = false}));
      EXPECT_THAT(ids, testing::Not(testing::Contains(kEnd))) << cut;
      EXPECT_EQ(tokenizer->Decode(ids, false), spelled);
    }
  }
  // Two parts of the template are one text.
  const PromptPart parts[] = {{"<|e", false}, {"nd|>", false}};
  EXPECT_THAT(Ids(tokenizer->EncodeParts(parts, {.add_special = false})), ElementsAre(kEnd));
}

TEST(Tokenizer, PartsAreMergedAcrossTheirBordersAsTheRenderedTextIs) {
  const auto tokenizer = Make(TinyByteLevelData());
  const PromptPart parts[] = {{"hel", false}, {"lo", true}, {"", true}, {" hello", false}};
  EXPECT_THAT(Ids(tokenizer->EncodeParts(parts, {.add_special = false})), ElementsAre(kHello, kSpaceHello));
}

TEST(Tokenizer, NoSequenceOfOddTextsYieldsAControlTokenUnasked) {
  for (const auto& data : {TinyByteLevelData(), TinySpmData(), TalesData()}) {
    const auto tokenizer = Make(data);
    for (const std::string& text : OddTexts(/*seed=*/2, 500)) {
      for (const TokenId id : Ids(tokenizer->Encode(text, {.add_special = false}))) {
        EXPECT_FALSE(tokenizer->IsSpecial(id)) << text;
      }
    }
  }
}

TEST(Tokenizer, MergesThatWouldMakeAControlTokenAreNotFollowed) {
  TokenizerData data = TinyByteLevelData();
  data.tokens.insert(data.tokens.end(), {"<|", "<|x"});
  data.types.insert(data.types.end(), {TokenType::kNormal, TokenType::kControl});
  data.merges.push_back({'<', '|'});
  data.merges.push_back({264, 'x'});
  data.pre_tokenizer = PreTokenizer::kGpt2;
  const auto tokenizer = Make(data);
  EXPECT_THAT(Ids(tokenizer->Encode("<|x", {.add_special = false})), ElementsAre(264, 'x'));
  TokenizerData spm = TinySpmData();
  spm.types.back() = TokenType::kControl;  // " hello"
  EXPECT_THAT(Ids(Make(spm)->Encode("hello", {.add_special = false})), ElementsAre(259, 289));
}

TEST(Tokenizer, TheLongestSpecialTokenWinsAndRulesStripSpace) {
  TokenizerData data = TinyByteLevelData();
  data.tokens.insert(data.tokens.end(), {"<|end|>s", "[M]", "[W]"});
  data.types.insert(data.types.end(), {TokenType::kControl, TokenType::kUserDefined, TokenType::kUserDefined});
  data.cut_rules = {{.id = 265, .strip_left = true, .strip_right = true}, {.id = 266, .single_word = true}};
  const auto tokenizer = Make(data);
  const EncodeOptions options{.add_special = false, .parse_special = true};
  EXPECT_THAT(Ids(tokenizer->Encode("<|end|>s<|end|>", options)), ElementsAre(264, kEnd));
  EXPECT_THAT(Ids(tokenizer->Encode("a \n[M]\u3000 b", options)), ElementsAre('a', 265, 'b'));
  EXPECT_THAT(Ids(tokenizer->Encode("[W] a[W]", options)), ElementsAre(266, ' ', 'a', '[', 'W', ']'));
}

TEST(Tokenizer, SpmPutsASpaceInFrontAndFallsBackToBytes) {
  const auto tokenizer = Make(TinySpmData());
  EXPECT_THAT(Ids(tokenizer->Encode("hello")), ElementsAre(1, 290));
  EXPECT_THAT(Ids(tokenizer->Encode(" hello", {.add_special = false})), ElementsAre(259, 290));
  EXPECT_THAT(Ids(tokenizer->Encode("é", {.add_special = false})), ElementsAre(259, 3 + 0xC3, 3 + 0xA9));
  EXPECT_THAT(Ids(tokenizer->Encode("", {.add_special = false})), ElementsAre());
  EXPECT_EQ(tokenizer->Decode(std::vector<TokenId>{1, 290, 290}, /*skip_special=*/true), "hello hello");
}

TEST(Tokenizer, UnknownTokensAreFusedIfTheModelSaysSo) {
  TokenizerData data = TinySpmData();
  for (TokenType& type : data.types) {
    if (type == TokenType::kByte) type = TokenType::kUnused;
  }
  EXPECT_THAT(Ids(Make(data)->Encode("a漢字b", {.add_special = false})), ElementsAre(259, 260, 0, 0, 261));
  data.fuse_unknown = true;
  EXPECT_THAT(Ids(Make(data)->Encode("a漢字b", {.add_special = false})), ElementsAre(259, 260, 0, 261));
}

TEST(Tokenizer, EveryOddTextRoundTrips) {
  for (const auto& data : {TinyByteLevelData(), TinySpmData(), TalesData()}) {
    const auto tokenizer = Make(data);
    for (std::string text : OddTexts(/*seed=*/3, 1000)) {
      const std::string decoded = tokenizer->Decode(Ids(tokenizer->Encode(text)), /*skip_special=*/true);
      if (data.kind == TokenizerKind::kSpmBpe) text = ReplaceSpmSpaces(text);
      EXPECT_EQ(decoded, text);
    }
  }
}

TEST(Tokenizer, RefusesTextThatIsNotUtf8OrTooLong) {
  const auto tokenizer = Make(TinyByteLevelData());
  for (const char* bad : {"ab\xFF", "ab\xC3", "ab\xED\xA0\x80", "ab\xC0\x80", "ab\xF4\x90\x80\x80"}) {
    const auto ids = tokenizer->Encode(bad);
    EXPECT_EQ(ids.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(ids.status().message()), HasSubstr("not valid UTF-8 at byte 2"));
  }
  const auto ids = tokenizer->Encode("hello", {.max_input_bytes = 4});
  EXPECT_THAT(std::string(ids.status().message()), HasSubstr("5 bytes, which exceeds the limit of 4"));
  const PromptPart parts[] = {{"hel", true}, {"lo", true}};
  EXPECT_FALSE(tokenizer->EncodeParts(parts, {.max_input_bytes = 4}).ok());
  EXPECT_TRUE(tokenizer->EncodeParts(parts, {.max_input_bytes = 5}).ok());
}

TEST(Tokenizer, IdsOutsideTheVocabularyAreEmpty) {
  const auto tokenizer = Make(TinyByteLevelData());
  for (const TokenId id : {-1, 264, 1 << 30}) {
    EXPECT_EQ(tokenizer->TokenText(id), "");
    EXPECT_FALSE(tokenizer->IsSpecial(id));
    EXPECT_EQ(tokenizer->Decode(std::vector<TokenId>{'a', id, 'b'}, false), "ab");
  }
}

TEST(Tokenizer, FindsTokensByTheTextTheyAdd) {
  const auto tokenizer = Make(TinyByteLevelData());
  EXPECT_EQ(tokenizer->TokenToId(" hello"), kSpaceHello);
  EXPECT_EQ(tokenizer->TokenToId("<|end|>"), kEnd);
  EXPECT_EQ(tokenizer->TokenToId("world"), std::nullopt);
  EXPECT_EQ(tokenizer->TokenText(kSpaceHello), " hello");
}

TEST(Tokenizer, NormalisesToNfcWhereTheModelDoes) {
  TokenizerData data = TinyByteLevelData();
  const EncodeOptions bare{.add_special = false};
  EXPECT_EQ(Ids(Make(data)->Encode("e\u0301", bare)).size(), 3u);
  data.normalize_nfc = true;
  EXPECT_THAT(Ids(Make(data)->Encode("e\u0301", bare)), ElementsAre(0xC3, 0xA9));
}

TEST(NormalizeNfc, OrdersAndComposesAsUnicodeSays) {
  EXPECT_EQ(*NormalizeNfc("plain ASCII é"), "plain ASCII é");
  EXPECT_EQ(*NormalizeNfc("e\u0301"), "é");
  EXPECT_EQ(*NormalizeNfc("a\u0308\u0323"), "\u1EA1\u0308");  // the dot below composes first
  EXPECT_EQ(*NormalizeNfc("\u1100\u1161\u11A8"), "각");
  EXPECT_EQ(*NormalizeNfc("\u212B"), "Å");
  EXPECT_EQ(*NormalizeNfc("\uFB01"), "\uFB01");  // compatibility characters stay
}

TEST(Utf8, ReplacesEachMaximalPartOfAnIllFormedSequence) {
  const auto drained = [](std::string bytes) {
    std::string out;
    DrainUtf8(bytes, /*finish=*/true, out);
    return out;
  };
  EXPECT_EQ(drained("a\xF0\x9F\x9A\x80z"), "a🚀z");
  EXPECT_EQ(drained("\xF0\x9F\x9Az"), "\uFFFDz");
  EXPECT_EQ(drained("\xED\xA0\x80"), "\uFFFD\uFFFD\uFFFD");
  EXPECT_EQ(drained("\xC3"), "\uFFFD");
  EXPECT_EQ(drained("\xFF\xC3\xA9"), "\uFFFDé");
}

}  // namespace
}  // namespace dovetail::model::test
