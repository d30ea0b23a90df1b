// GBNF: what is taken, what is refused and where, and that texts under what the compiler gets are those of the grammar.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ctime>

#include "absl/strings/str_replace.h"
#include "server/openai/api_error.h"
#include "server/openai/gbnf.h"
#include "server/openai/structured_output.h"
#include "tests/server/byte_grammars.h"
#include "tests/server/test_model.h"

namespace dovetail::server::test {
namespace {

using ::testing::HasSubstr;

// Whether `text` is one of the grammar's.
bool Takes(const std::string& gbnf, const std::string& text) {
  const auto written = EnforceableGbnf(gbnf, "grammar");
  EXPECT_TRUE(written.ok()) << written.status();
  if (!written.ok()) return false;
  const auto compiled = ByteGrammars()->Compile(grammar::SourceOf(grammar::Kind::kEbnf, *written));
  EXPECT_TRUE(compiled.ok()) << compiled.status() << "\n" << *written;
  if (!compiled.ok()) return false;
  grammar::Matcher matcher(*compiled, std::vector<TokenId>{kByteEnd});
  for (const char c : text)
    if (!matcher.Accept(static_cast<uint8_t>(c))) return false;
  return matcher.Accept(kByteEnd);
}

std::string Error(const std::string& gbnf) {
  const absl::Status status = EnforceableGbnf(gbnf, "grammar").status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << gbnf;
  EXPECT_EQ(ToApiError(status).param.value_or("none"), "grammar");
  return std::string(status.message());
}

TEST(Gbnf, RulesGroupsRepetitionsAndCommentsAreEnforced) {
  const std::string arithmetic =
      "root  ::= (expr \"=\" ws term \"\\n\")+ # lines\n"
      "expr  ::= term ([-+*/] term)*\n"
      "term  ::= ident | num |\n"
      "    \"(\" ws expr \")\" ws\n"
      "ident ::= [a-z] [a-z0-9_]* ws\r\n"
      "num   ::= [0-9] + ws\n"
      "ws    ::= [ \\t\\n]*";
  EXPECT_TRUE(Takes(arithmetic, "(a+1)*b2 = 7\n"));
  EXPECT_TRUE(Takes(arithmetic, "1=2\na_=b\n"));
  EXPECT_FALSE(Takes(arithmetic, "(a+1 = 7\n"));
  EXPECT_FALSE(Takes(arithmetic, ""));
  EXPECT_TRUE(Takes("root ::= list\nlist ::= \"[\" (list (\",\" list)*)? \"]\"", "[[],[[]]]"));
  EXPECT_FALSE(Takes("root ::= list\nlist ::= \"[\" (list (\",\" list)*)? \"]\"", "[[],]"));
  EXPECT_TRUE(Takes("a-1 ::= \"x\" root ::= a-1 a-1", "xx"));  // rules may follow on one line
}

TEST(Gbnf, RepetitionsHaveTheirBounds) {
  for (const int n : {0, 1, 2, 3, 4}) {
    const std::string text(n, 'a');
    EXPECT_EQ(Takes("root ::= \"a\"{2}", text), n == 2) << n;
    EXPECT_EQ(Takes("root ::= \"a\"{2,}", text), n >= 2) << n;
    EXPECT_EQ(Takes("root ::= \"a\"{ ,3 }", text), n <= 3) << n;
    EXPECT_EQ(Takes("root ::= \"a\"{1,3}", text), n >= 1 && n <= 3) << n;
    EXPECT_EQ(Takes("root ::= \"a\"?", text), n <= 1) << n;
    EXPECT_EQ(Takes("root ::= (\"a\" | )\n", text), n <= 1) << n;
  }
}

TEST(Gbnf, ClassesAndEscapesMeanCharacters) {
  EXPECT_TRUE(Takes("root ::= \"\\\"\\u00e9\\x41\\U0001F600\\\\\"", "\"\u00e9A\U0001F600\\"));
  EXPECT_TRUE(Takes("root ::= [^a-c\\]]{2,3}", "x\n"));
  EXPECT_FALSE(Takes("root ::= [^a-c\\]]{2,3}", "x]"));
  EXPECT_FALSE(Takes("root ::= [^a-c\\]]{2,3}", "xxxx"));
  EXPECT_TRUE(Takes("root ::= [a-]", "-"));
  EXPECT_FALSE(Takes("root ::= [a-]", "b"));
  EXPECT_TRUE(Takes("root ::= . Token\nToken ::= \"(1)\"{,2}", "\u65e5(1)(1)"));
  EXPECT_TRUE(Takes("root ::= [\u3041-\u3096]+", "\u3042\u3044"));
  EXPECT_FALSE(Takes("root ::= [\u3041-\u3096]+", "\u3042a"));
  // Neither surrogates nor overlong forms, which are no UTF-8.
  for (const char* gbnf : {"root ::= .", "root ::= [^a]", "root ::= [\\x00-\\U0010FFFF]"}) {
    EXPECT_TRUE(Takes(gbnf, "\uffff")) << gbnf;
    EXPECT_FALSE(Takes(gbnf, "\xed\xa0\x80")) << gbnf;
    EXPECT_FALSE(Takes(gbnf, "\xc0\xaf")) << gbnf;
    EXPECT_FALSE(Takes(gbnf, std::string(1, '\0'))) << gbnf;
  }
}

// The shape of the grammars that llama.cpp's users have for JSON.
TEST(Gbnf, AGrammarOfJsonTakesJson) {
  const std::string json =
      "root   ::= object\n"
      "value  ::= object | array | string | number | (\"true\" | \"false\" | \"null\") ws\n"
      "object ::= \"{\" ws ( string \":\" ws value (\",\" ws string \":\" ws value)* )? \"}\" ws\n"
      "array  ::= \"[\" ws ( value (\",\" ws value)* )? \"]\" ws\n"
      "string ::= \"\\\"\" ( [^\"\\\\\\x7F\\x00-\\x1F] | escape )* \"\\\"\" ws\n"
      "escape ::= \"\\\\\" ([\"\\\\bfnrt] | \"u\" [0-9a-fA-F]{4})\n"
      "number ::= (\"-\"? ([0-9] | [1-9] [0-9]{0,15})) (\".\" [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws\n"
      "ws     ::= | \" \" | \"\\n\" [ \\t]{0,20}\n";
  EXPECT_TRUE(Takes(json, R"({"a": [1, -2.5e3, "\u00e9\n"], "b": {"c": null}})"));
  EXPECT_FALSE(Takes(json, R"({"a": [1, ]})"));
  EXPECT_FALSE(Takes(json, "{\"a\": \"\x01\"}"));
}

TEST(Gbnf, WhatIsWrongIsNamedWithItsLine) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "has no rule root"},
      {"a ::= \"b\"", "has no rule root"},
      {"root ::= a", "line 1: there is no rule a"},
      {"root ::= \"a\"\n\nroot ::= \"b\"", "line 3: the rule root is defined twice"},
      {"root = \"a\"", "line 1: ::= is missing behind root"},
      {"\nroot ::= \"a", "line 2: a literal or class does not end"},
      {"root ::= \"a\nb\"", "does not end"},
      {"root ::= [a", "does not end"},
      {"root ::= \"\\", "does not end"},
      {"root ::= []", "no character"},
      {"root ::= [b-a]", "ends before it begins"},
      {"root ::= (\"a\"", "a ) is missing"},
      {"root ::= \"a\")", "a rule begins with its name"},
      {"root ::= $", "'$' begins nothing"},
      {"root ::= \"\\q\"", "a \\ stands before"},
      {"root ::= \"\\uD800\"", "U+D800"},
      {"root ::= \"\\U00110000\"", "U+110000"},
      {"root ::= \"\\x00\"", "U+0000"},
      {"root ::= \"\\x4\"", "2 hexadecimal digits"},
      {"root ::= \"a\"**", "cannot be repeated again"},
      {"root ::= \"a\"{3,2}", "at least 3 and at most 2"},
      {"root ::= \"a\"{0}", "at most 0"},
      {"root ::= \"a\"{x}", "{n}"},
      {"root ::= \"a\"{99999999999}", "more than 20000"},
      {"root ::= <think>", "tokens of the model"},
      {"root ::= root \"a\" | \"b\"", "line 1: the rule root may begin with itself"},
      {"root ::= \"a\"\nx ::= \"\" y \"c\"\ny ::= [z]? x | \"d\"", "line 2: the rule x may begin with itself"},
      {"root ::= \"a\" root", "line 1: the rule root never ends"},
      {"root ::= \"a\" | x\nx ::= \"b\" (y | x)\ny ::= x x", "line 2: the rule x never ends"},
      {"root ::= ((\"a\"{1000}){1000}){1000}", "has more than 20000 parts"},
      // What the compiler's own notation would take, and we would not enforce.
      {"root[max_tokens=3] ::= \"a\"*", "::= is missing"},
      {"root ::= \"a\" (=\"b\")", "'=' begins nothing"},
      {"root ::= Token(3)", "there is no rule Token"},
  };
  for (const auto& [gbnf, message] : cases) EXPECT_THAT(Error(gbnf), HasSubstr(message)) << gbnf;
  EXPECT_THAT(Error("root ::= " + std::string(10'000, '(')), HasSubstr("more than 32 groups in one another"));
}

// 64 KiB of the worst kinds are read in well under a second: the numbers are of a thread's own time, and generous.
TEST(Gbnf, ReadingIsBounded) {
  const auto seconds = [](const std::string& gbnf) {
    const std::clock_t begun = std::clock();
    (void)EnforceableGbnf(gbnf, "grammar");
    return static_cast<double>(std::clock() - begun) / CLOCKS_PER_SEC;
  };
  std::string chain = "root ::= \"a\" r0\n", back, many;
  const std::string twenty = " r999 r999 r999 r999 r999 r999 r999 r999 r999";
  for (int i = 0; i < 900; ++i) absl::StrAppend(&chain, "r", i, " ::= r", i + 1, twenty, " | \"\"?\n");
  absl::StrAppend(&chain, "r900 ::= \"b\"\nr999 ::= \"\"\n");
  EXPECT_TRUE(EnforceableGbnf(chain, "grammar").ok()) << EnforceableGbnf(chain, "grammar").status();
  EXPECT_LT(seconds(chain), 5);
  for (int i = 0; i < 2000; ++i) absl::StrAppend(&many, "r", i, " ::= r", i + 1, "\n");
  EXPECT_THAT(Error(many), HasSubstr("more than 1000 rules"));
  EXPECT_LT(seconds("root ::= " + std::string(65'000, '|')), 5);
  EXPECT_LT(seconds("root ::= " + std::string(65'000, 'a')), 5);
}

// Each field that takes GBNF, with the path that its errors name.
TEST(Gbnf, EveryFieldForItIsTakenAndNamed) {
  const auto model = TestModel();
  model->grammars = ByteGrammars();
  const auto parse = [&](const std::string& body, const std::string& value, GenerationFields& fields) {
    return ParseStructuredOutput(*ParseJson(absl::StrReplaceAll(body, {{"%", value}})), *model, fields);
  };
  const std::vector<std::pair<std::string, std::string>> bodies = {
      {R"({"grammar":%})", "grammar"},
      {R"({"guided_grammar":%})", "guided_grammar"},
      {R"({"structured_outputs":{"grammar":%}})", "structured_outputs.grammar"},
      {R"({"response_format":{"type":"grammar","grammar":%}})", "response_format.grammar"},
  };
  for (const auto& [body, param] : bodies) {
    GenerationFields fields;
    const absl::Status good = parse(body, R"("root ::= [0-9]")", fields);
    EXPECT_TRUE(good.ok()) << good;
    EXPECT_EQ(fields.grammar, grammar::SourceOf(grammar::Kind::kEbnf, *EnforceableGbnf("root ::= [0-9]", "")));
    EXPECT_EQ(fields.grammar_param, param);
    for (const char* bad : {R"("x")", "1"}) {
      GenerationFields refused;
      EXPECT_EQ(ToApiError(parse(body, bad, refused)).param.value_or("none"), param) << bad;
    }
  }
  GenerationFields none;
  EXPECT_TRUE(parse(R"({"grammar":%})", R"("")", none).ok());
  EXPECT_EQ(none.grammar, "");
}

}  // namespace
}  // namespace dovetail::server::test
