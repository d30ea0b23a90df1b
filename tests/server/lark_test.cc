// Lark's notation: what is taken, what is refused and where, and that texts under what the compiler gets are those of
// the grammar, also inside of a JSON string.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/openai/api_error.h"
#include "server/openai/json.h"
#include "server/openai/lark.h"
#include "tests/server/byte_grammars.h"

namespace dovetail::server::test {
namespace {

using gbnf::Spelling;
using ::testing::HasSubstr;

bool TakesWritten(const absl::StatusOr<std::string>& written, const std::string& text) {
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

// Whether `text` is one of the grammar's; it is so as a text, and as what stands in a JSON string.
bool Takes(const std::string& lark, const std::string& text) {
  const bool plain = TakesWritten(EnforceableLark(lark, "g", Spelling::kText), text);
  const std::string quoted = Dump(Json(text));
  EXPECT_EQ(plain, TakesWritten(EnforceableLark(lark, "g", Spelling::kJson), quoted.substr(1, quoted.size() - 2)))
      << lark << "\n"
      << text;
  return plain;
}

bool RegexTakes(const std::string& regex, const std::string& text) {
  return TakesWritten(EnforceableLarkRegex(regex, "g", Spelling::kText), text);
}

std::string Error(const std::string& lark) {
  const absl::Status status = EnforceableLark(lark, "g", Spelling::kText).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << lark;
  EXPECT_EQ(ToApiError(status).param.value_or("none"), "g");
  return std::string(status.message());
}

// Of the kind that agents change files with.
constexpr char kPatch[] = R"x(
start: begin hunk+ end
begin: "*** Begin" LF
end: "*** End" LF?     // the last line may lack its end
hunk: add | update
add: "*** Add: " filename LF line+
update: "*** Update: " filename LF change
filename: /(.+)/
line: "+" /(.*)/ LF -> added
change: (context | kept)+ [eof]
context: ("@@" | "@@ " /(.+)/) LF
kept: ("+" | "-" | " ") /(.*)/ LF
eof: "*** End of File" LF
%import common.LF
)x";

TEST(Lark, APatchIsTaken) {
  EXPECT_TRUE(Takes(kPatch, "*** Begin\n*** Add: a.txt\n+one \"two\"\n+\\three\n*** End\n"));
  EXPECT_TRUE(Takes(kPatch, "*** Begin\n*** Update: b.c\n@@ main\n-x = 1;\n+\ty = 2;\n*** End of File\n*** End"));
  EXPECT_FALSE(Takes(kPatch, "*** Begin\n*** End\n"));
  EXPECT_FALSE(Takes(kPatch, "*** Begin\n*** Add: a.txt\none\n*** End\n"));
  EXPECT_FALSE(Takes(kPatch, "*** Add: a.txt\n+one\n"));
}

// Rules that begin with themselves, and white space between terminals alone.
constexpr char kArithmetic[] = R"x(
?start: sum
?sum: product
    | sum "+" product   -> add
    | sum "-" product   -> sub
?product: atom
    | product "*" atom
    | product "/" atom
?atom: NUMBER           -> number
     | "-" atom
     | "(" sum ")"
NUMBER: /[0-9]+/
%ignore " "
%ignore /\t/
)x";

TEST(Lark, LeftRecursionIsWrittenAsARepetitionAndWhatIsIgnoredMayComeBetweenTerminals) {
  for (const char* good : {"1", "1+2*3", "1 + 2\t* ( 3 - -4 )", "  1", "1  ", "1-2-3-4"})
    EXPECT_TRUE(Takes(kArithmetic, good)) << good;
  for (const char* bad : {"", "1+", "+1", "1 2", "(1", "1 +\n2"}) EXPECT_FALSE(Takes(kArithmetic, bad)) << bad;
}

TEST(Lark, StringsRangesAndRepetitions) {
  EXPECT_TRUE(Takes("start: \"Go\"i \"a\"..\"c\"~2", "gOab"));
  EXPECT_FALSE(Takes("start: \"Go\"i \"a\"..\"c\"~2", "goad"));
  EXPECT_FALSE(Takes("start: \"Go\"i \"a\"..\"c\"~2", "goa"));
  for (int n = 0; n < 6; ++n) EXPECT_EQ(Takes("start: \"x\" ~ 2..4", std::string(n, 'x')), n >= 2 && n <= 4) << n;
  EXPECT_TRUE(Takes("start: [\"a\"] (\"b\" | \"c\")* \"d\"?", "bcb"));
  EXPECT_TRUE(Takes("start: [\"a\"]* \"b\"", "aab"));
  EXPECT_TRUE(Takes("start: A B\nA.2: \"a\" | B\nB: \"\\u00e9\\\"\\\\\\n\"\n", "\xc3\xa9\"\\\n\xc3\xa9\"\\\n"));
  EXPECT_TRUE(Takes("start:\n    | \"a\"\n    | \"b\"\n", ""));  // an alternative may be empty
  EXPECT_TRUE(Takes("start: (\"a\"\n  \"b\")\n# end\n", "ab"));
  EXPECT_TRUE(Takes("!start: _x\n_x.-1: \"y\"", "y"));
}

TEST(Lark, RegularExpressions) {
  const std::vector<std::tuple<std::string, std::string, bool>> cases = {
      {R"(/[a-z]+?\d{2,3}/)", "ab12", true},
      {R"(/[a-z]+?\d{2,3}/)", "ab1", false},
      {R"(/(?:ab|c)*(?P<n>d)/)", "abcd", true},
      {R"(/a.c/)", "a\nc", false},
      {R"(/a.c/s)", "a\nc", true},
      {R"(/a.c/)", "a\"c", true},
      {R"(/[^"\\]/)", "\"", false},
      {R"(/[^"]/)", "\\", true},
      {R"(/HeLLo [k-m]/i)", "hEllO L", true},
      {R"(/\w\W\s\S\D/)", "a- bc", true},
      {R"(/\w\W\s\S\D/)", "aa bc", false},
      {R"(/\x41\u00e9\./)", "A\xc3\xa9.", true},
      {R"(/[]a]/)", "]", true},
      {R"(/[a-]+/)", "-a", true},
      {R"(/\/\//)", "//", true},
      {R"(/a{2}b{,2}c{1,}/)", "aabcc", true},
      {R"(/a{,b/)", "a{,b", false},
      {R"(/a|b|/)", "", true},
  };
  for (const auto& [regex, text, takes] : cases) {
    if (regex == R"(/a{,b/)") {
      EXPECT_THAT(Error("start: " + regex), HasSubstr("a repetition is"));
      continue;
    }
    EXPECT_EQ(Takes("start: " + regex, text), takes) << regex << " " << text;
  }
  EXPECT_TRUE(RegexTakes("^[0-9]{4}-[0-9]{2}$", "2026-11"));
  EXPECT_FALSE(RegexTakes("^[0-9]{4}-[0-9]{2}$", "2026-1"));
  EXPECT_TRUE(RegexTakes("a\\$", "a$"));
}

TEST(Lark, TheTerminalsOfCommon) {
  const std::vector<std::tuple<std::string, std::vector<std::string>, std::vector<std::string>>> cases = {
      {"INT", {"0", "12"}, {"", "-1"}},
      {"SIGNED_NUMBER", {"-1.5e3", "2", ".5", "3.", "+1E-2"}, {".", "e3", "--1"}},
      {"FLOAT", {"1.5", "1e5", ".5"}, {"1", "."}},
      {"ESCAPED_STRING", {R"("a\"b")", R"("")", R"("\\")"}, {R"("a"b")", "\"a\nb\"", R"("\")"}},
      {"CNAME", {"_a1", "Z"}, {"1a", ""}},
      {"WS", {" \t\n"}, {"", "x"}},
      {"NEWLINE", {"\n", "\r\n\n"}, {"\r"}},
      {"C_COMMENT", {"/**/", "/* a * / **/"}, {"/*/", "/* */ */"}},
      {"SH_COMMENT", {"# x"}, {"x"}},
  };
  for (const auto& [name, good, bad] : cases) {
    const std::string lark = absl::StrCat("start: X\n%import common.", name, " -> X\n");
    for (const std::string& text : good) EXPECT_TRUE(Takes(lark, text)) << name << " " << text;
    for (const std::string& text : bad) EXPECT_FALSE(Takes(lark, text)) << name << " " << text;
  }
  EXPECT_TRUE(Takes("start: INT WORD\n%import common (INT, WORD)", "1a"));
}

TEST(Lark, WhatIsWrongIsNamedWithItsLine) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "has no rule start"},
      {"a: \"x\"", "has no rule start"},
      {"start: a\n", "line 1: there is no rule a"},
      {"start: \"x\"\n  | A", "line 2: there is no terminal A"},
      {"start: \"x\"\nstart: \"y\"", "line 2: the rule start is defined twice"},
      {"start: \"x\n\"", "line 1: a string does not end"},
      {"start: /x", "line 1: a regular expression does not end"},
      {"start: (\"x\"", "line 1: a ) is missing"},
      {"start: \"x\"\n\ny{a}: \"x\"", "line 3: templates are not supported"},
      {"start: y{\"x\"}", "line 1: templates are not supported"},
      {"start: \"x\"\n%declare A", "line 2: %declare is not supported"},
      {"start: \"x\"\n%import python.NAME", "line 2: %import is supported of common alone"},
      {"start: X\n%import common.X", "line 2: common has no terminal 'X'"},
      {"start: A\nA: b\nb: \"x\"", "line 2: the rule b stands in a terminal"},
      {"start: A\nA: \"x\" A | \"y\"", "line 2: the terminal A is in itself"},
      {"start: /(?=a)b/", "byte 2 of the regular expression: look-around is not supported"},
      {"start: /(?<!a)b/", "look-around is not supported"},
      {"start: /(a)\\1/", "back-references are not supported"},
      {"start: /^a/", "^ is not supported"},
      {"start: /a\\b/", "\\b is not supported"},
      {"start: /a++/", "possessive quantifiers are not supported"},
      {"start: /a/x", "the flag x is not supported"},
      {"start: /[z-a]/", "ends before it begins"},
      {"start: \"a\"..\"bc\"", "a range is from one character to another"},
      {"start: \"a\"~3..2", "at least 3 and at most 2"},
      {"start: \"a\"~99999", "a repetition of more than"},
      {"start: a\na: b \"x\"\nb: a \"y\" | \"z\"", "line 2: the rule a may begin with itself"},
      {"start: start \"x\"", "line 1: the rule start never ends"},
      {"start: \"\\q\"", "in a string, \\ stands before"},
      {"start \"x\"", "a : is missing behind start"},
      {"start: \"x\" -> a \"y\"", "-> stands at the end of an alternative only"},
      {std::string(70000, ' '), "70000 bytes"},
  };
  for (const auto& [lark, message] : cases) EXPECT_THAT(Error(lark), HasSubstr(message)) << lark.substr(0, 100);
  std::string many = "start: \"x\"\n";
  for (int i = 0; i < 1200; ++i) many += absl::StrCat("r", i, ": \"x\"\n");
  EXPECT_THAT(Error(many), HasSubstr("more than 1000 rules"));
  EXPECT_THAT(Error("start: " + std::string(100, '(')), HasSubstr("groups in one another"));
}

}  // namespace
}  // namespace dovetail::server::test
