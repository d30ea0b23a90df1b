// Answers drawn at random under the grammars that enforce calls are calls, as the parsers of their formats read them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <random>
#include <regex>

#include "server/openai/answer.h"
#include "server/openai/lark.h"
#include "server/openai/responses_tools.h"
#include "tests/server/byte_grammars.h"
#include "tests/server/test_model.h"

namespace dovetail::server::test {
namespace {

// A text under the grammar that begins with `prefix`; nullopt: it did not end within the limit.
std::optional<std::string> Draw(const std::shared_ptr<const grammar::Compiled>& grammar, const std::string& prefix,
                                std::mt19937& random) {
  grammar::Matcher matcher(grammar, std::vector<TokenId>{kByteEnd});
  std::vector<uint32_t> mask(9);
  std::string text;
  while (text.size() < 3000) {
    if (!matcher.FillMask(mask).ok()) return std::nullopt;
    std::vector<TokenId> allowed;
    for (TokenId id = 0; id <= kByteEnd; ++id)
      if ((mask[id / 32] >> (id % 32) & 1) != 0) allowed.push_back(id);
    if (allowed.empty()) return std::nullopt;
    const bool ends = allowed.back() == kByteEnd && random() % 4 == 0;
    const TokenId token = text.size() < prefix.size() ? static_cast<uint8_t>(prefix[text.size()])
                          : ends                      ? kByteEnd
                                                      : allowed[random() % allowed.size()];
    if (!matcher.Accept(token)) return std::nullopt;
    if (token == kByteEnd) return text;
    text += static_cast<char>(token);
  }
  return std::nullopt;
}

const std::vector<Tool>& Tools() {
  static const std::vector<Tool> tools = {
      {"get_weather",
       *ParseJson(
           R"({"type":"object","properties":{"city":{"enum":["Rome","Oslo"]},"days":{"type":"integer","minimum":1,
               "maximum":9},"now":{"type":"boolean"}},"required":["city","days"],"additionalProperties":false})")},
      {"note", *ParseJson(R"({"type":"object","properties":{"text":{"type":"string","minLength":2,"maxLength":5}},
                              "required":["text"],"additionalProperties":false})")}};
  return tools;
}

struct Drawn {
  std::vector<std::string> names, arguments;
  std::string content, reasoning;
};

Drawn Read(const AnswerSpec& spec, const std::string& text) {
  const auto parser = MakeAnswerParser(spec);
  AnswerPieces pieces;
  parser->Push(text, pieces);
  parser->Finish(pieces);
  Drawn drawn;
  for (const AnswerPiece& piece : pieces.all()) {
    if (piece.kind == AnswerPiece::Kind::kContent) drawn.content += piece.text;
    if (piece.kind == AnswerPiece::Kind::kReasoning) drawn.reasoning += piece.text;
    if (piece.kind == AnswerPiece::Kind::kCallBegins) {
      drawn.names.push_back(piece.text);
      drawn.arguments.emplace_back();
    }
    if (piece.kind == AnswerPiece::Kind::kArguments) drawn.arguments.back() += piece.text;
  }
  return drawn;
}

void ExpectValid(const Drawn& drawn, const std::string& text) {
  for (size_t i = 0; i < drawn.names.size(); ++i) {
    const auto arguments = ParseJson(drawn.arguments[i]);
    ASSERT_TRUE(arguments.ok() && arguments->is_object()) << text << "\n" << drawn.arguments[i];
    if (drawn.names[i] == "note") {
      EXPECT_TRUE(arguments->at("text").is_string()) << text;
      continue;
    }
    EXPECT_EQ(drawn.names[i], "get_weather") << text;
    EXPECT_TRUE(arguments->at("city") == "Rome" || arguments->at("city") == "Oslo") << text;
    EXPECT_TRUE(arguments->at("days") >= 1 && arguments->at("days") <= 9) << text;
    EXPECT_TRUE(!arguments->contains("now") || arguments->at("now").is_boolean()) << text;
  }
}

class CallGrammars : public ::testing::TestWithParam<std::string> {
 protected:
  void Use(ToolUse use, ThoughtState thought, const std::string& content = "", const std::string& prefix = "") {
    served_->calls = FindCallFormat(GetParam());
    use.tools = Tools();
    use.grammar = served_->calls->grammar(Tools(), use.parallel, [](std::string_view mark) {
      return Json{{"type", "const_string"}, {"value", std::string(mark)}};
    });
    if (GetParam() == "openai") served_->thoughts = FindThoughtFormat("openai");
    const std::string source = AnswerGrammar(content, use, thought, *served_);
    const auto compiled = ByteGrammars()->Compile(source);
    ASSERT_TRUE(compiled.ok()) << compiled.status() << "\n" << source;
    spec_.calls = served_->calls;
    spec_.thoughts = thought == ThoughtState::kNone ? nullptr : served_->thoughts;
    spec_.thought_begun = thought == ThoughtState::kBegun;
    spec_.tools = Tools();
    for (int i = 0; i < 40 && whole_ < 12; ++i) {
      const auto text = Draw(*compiled, prefix, random_);
      if (!text) continue;
      ++whole_;
      drawn_.push_back(Read(spec_, *text));
      ExpectValid(drawn_.back(), *text);
      texts_.push_back(*text);
    }
    EXPECT_GT(whole_, 3);
  }

  std::shared_ptr<ServedModel> served_ = TestModel();
  AnswerSpec spec_;
  std::mt19937 random_{20261125};
  int whole_ = 0;
  std::vector<Drawn> drawn_;
  std::vector<std::string> texts_;
};

TEST_P(CallGrammars, RequiredCallsAreAllThereIs) {
  Use({.required = true}, ThoughtState::kNone);
  for (size_t i = 0; i < drawn_.size(); ++i) {
    EXPECT_FALSE(drawn_[i].names.empty()) << texts_[i];
    EXPECT_EQ(drawn_[i].content, "") << texts_[i];
  }
}

TEST_P(CallGrammars, OneCallIsOne) {
  Use({.parallel = false, .required = true}, ThoughtState::kNone);
  for (size_t i = 0; i < drawn_.size(); ++i) EXPECT_EQ(drawn_[i].names.size(), 1u) << texts_[i];
}

TEST_P(CallGrammars, AThoughtMayComeBefore) {
  const bool messages = GetParam() == "openai";
  const std::string thought = "Which <tool_call> [ {?";
  served_->thoughts = FindThoughtFormat(messages ? "openai" : "think");
  Use({.required = true}, messages ? ThoughtState::kMay : ThoughtState::kBegun, "",
      messages ? "<|channel|>analysis<|message|>" + thought + "<|end|>" : thought + "\n</think>");
  for (size_t i = 0; i < drawn_.size(); ++i) {
    EXPECT_EQ(drawn_[i].reasoning, thought) << texts_[i];
    EXPECT_FALSE(drawn_[i].names.empty()) << texts_[i];
    EXPECT_EQ(drawn_[i].content, "") << texts_[i];
  }
}

TEST_P(CallGrammars, ContentHasItsOwnGrammar) {
  Use({.parallel = false}, ThoughtState::kNone, grammar::SourceOf(grammar::Kind::kRegex, "yes|no"));
  for (size_t i = 0; i < drawn_.size(); ++i) {
    if (drawn_[i].names.empty())
      EXPECT_THAT(drawn_[i].content, ::testing::AnyOf("yes", "no")) << texts_[i];
    else
      EXPECT_EQ(drawn_[i].content, "") << texts_[i];
  }
}

TEST_P(CallGrammars, FreeTextHasValidCallsOnly) {
  const std::string begin(FindCallFormat(GetParam())->begin);
  const std::string text = begin.size() > 1 ? "Let me see." : "";
  Use({.parallel = false}, ThoughtState::kNone, "", text + begin);
  for (size_t i = 0; i < drawn_.size(); ++i) {
    EXPECT_LE(drawn_[i].names.size(), 1u) << texts_[i];
    if (begin.empty()) continue;
    EXPECT_EQ(drawn_[i].names.size(), 1u) << texts_[i];
    EXPECT_EQ(drawn_[i].content, text) << texts_[i];
  }
}

// Of a custom tool: its input is what the grammar says, whatever a JSON string makes of its characters.
TEST_P(CallGrammars, AnInputHasItsGrammar) {
  const CallFormat& format = *FindCallFormat(GetParam());
  const std::vector<Tool> tools = {
      {"patch", *ParseJson(R"({"type":"object","properties":{"input":{"type":"string"}},"required":["input"]})"),
       *EnforceableLark("start: (LINE LF)~1..2\nLINE: \"+\" /[a\"\\\\\\t<]{0,6}/\nLF: /\\n/", "g",
                        gbnf::Spelling::kJson)}};
  if (!format.json_arguments) return;
  ToolUse use{.tools = tools, .required = true};
  use.grammar = format.grammar(tools, true, [](std::string_view mark) {
    return Json{{"type", "const_string"}, {"value", std::string(mark)}};
  });
  served_->calls = &format;
  if (GetParam() == "openai") served_->thoughts = FindThoughtFormat("openai");
  const auto compiled = ByteGrammars()->Compile(AnswerGrammar("", use, ThoughtState::kNone, *served_));
  ASSERT_TRUE(compiled.ok()) << compiled.status();
  spec_.calls = &format;
  spec_.tools = tools;
  int inputs = 0;
  const std::regex expected("(\\+[a\"\\\\\t<]{0,6}\n){1,2}");
  for (int i = 0; i < 60 && inputs < 12; ++i) {
    const auto text = Draw(*compiled, "", random_);
    if (!text) continue;
    const Drawn drawn = Read(spec_, *text);
    EXPECT_EQ(drawn.content, "") << *text;
    for (const std::string& arguments : drawn.arguments) {
      const std::string input = InputOf(arguments);
      EXPECT_TRUE(std::regex_match(input, expected)) << *text << "\n" << input;
      ++inputs;
    }
  }
  EXPECT_GE(inputs, 12);
}

INSTANTIATE_TEST_SUITE_P(Formats, CallGrammars, ::testing::ValuesIn(CallFormatNames()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace dovetail::server::test
