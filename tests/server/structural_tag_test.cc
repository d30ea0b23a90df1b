// Structural tags: what is taken, what is refused and at which path, and that texts under what the compiler gets are
// those of the tag.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/openai/api_error.h"
#include "server/openai/structural_tag.h"
#include "tests/server/byte_grammars.h"

namespace dovetail::server::test {
namespace {

using ::testing::HasSubstr;

bool Takes(const std::string& tag, const std::string& text) {
  const auto written = EnforceableTag(Json(tag), "tag");
  EXPECT_TRUE(written.ok()) << written.status();
  if (!written.ok()) return false;
  const auto compiled = ByteGrammars()->Compile(grammar::SourceOf(grammar::Kind::kStructuralTag, *written));
  EXPECT_TRUE(compiled.ok()) << compiled.status() << "\n" << *written;
  if (!compiled.ok()) return false;
  grammar::Matcher matcher(*compiled, std::vector<TokenId>{kByteEnd});
  for (const char c : text)
    if (!matcher.Accept(static_cast<uint8_t>(c))) return false;
  return matcher.Accept(kByteEnd);
}

std::string OfFormat(const std::string& format) { return R"({"type":"structural_tag","format":)" + format + "}"; }

TEST(StructuralTags, TheOlderFormHasTextWithObjectsBehindTriggers) {
  const std::string tag = R"({"structures":[
      {"begin":"<f=a>","schema":{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"]},"end":"</f>"},
      {"begin":"<f=b>","schema":{"enum":["x"]},"end":"</f>"}],"triggers":["<f="]})";
  EXPECT_TRUE(Takes(tag, ""));
  EXPECT_TRUE(Takes(tag, "Let me see."));
  EXPECT_TRUE(Takes(tag, R"(So: <f=a>{"n": 7}</f> and <f=b>"x"</f>.)"));
  EXPECT_FALSE(Takes(tag, R"(<f=a>{"n": "7"}</f>)"));
  EXPECT_FALSE(Takes(tag, R"(<f=c>)"));
  EXPECT_FALSE(Takes(tag, R"(<f=b>"x")"));
}

TEST(StructuralTags, FormatsAreEnforced) {
  const std::vector<std::tuple<std::string, std::vector<std::string>, std::vector<std::string>>> cases = {
      {R"({"type":"const_string","value":"a\n\"b"})", {"a\n\"b"}, {"a"}},
      {R"({"type":"regex","pattern":"[0-9]{2}"})", {"42"}, {"4", "421"}},
      {R"({"type":"grammar","grammar":"root ::= \"(\" root? \")\""})", {"(())"}, {"(", ""}},
      {R"({"type":"json_schema","json_schema":{"type":"boolean"}})", {"true"}, {"1"}},
      {R"({"type":"sequence","elements":[{"type":"const_string","value":"a"},{"type":"optional","content":
          {"type":"const_string","value":"b"}}]})",
       {"a", "ab"},
       {"b", "abb"}},
      {R"({"type":"or","elements":[{"type":"const_string","value":"a"},{"type":"const_string","value":"b"}]})",
       {"a", "b"},
       {"", "ab"}},
      {R"({"type":"star","content":{"type":"const_string","value":"ab"}})", {"", "abab"}, {"aba"}},
      {R"({"type":"plus","content":{"type":"const_string","value":"ab"}})", {"ab", "abab"}, {""}},
      {R"({"type":"repeat","min":2,"max":3,"content":{"type":"const_string","value":"a"}})",
       {"aa", "aaa"},
       {"a", "aaaa"}},
      {R"({"type":"tag","begin":"<t>","content":{"type":"any_text"},"end":["</t>","<end>"]})",
       {"<t>x < y</t>", "<t><end>"},
       {"<t>x", "x</t>"}},
      {R"({"type":"any_text","excludes":["secret"]})", {"secre", ""}, {"a secret"}},
      {R"({"type":"triggered_tags","triggers":["<t"],"at_least_one":true,"stop_after_first":true,"tags":[
          {"begin":"<t>","content":{"type":"regex","pattern":"[0-9]"},"end":"</t>"}]})",
       {"<t>1</t>"},
       {"", "x", "<t>1</t>x", "<t>1</t><t>2</t>"}},
      {R"({"type":"tags_with_separator","separator":",","at_least_one":true,"tags":[
          {"type":"tag","begin":"<t>","content":{"type":"regex","pattern":"[0-9]"},"end":"</t>"}]})",
       {"<t>1</t>", "<t>1</t>,<t>2</t>"},
       {"", "<t>1</t><t>2</t>", "<t>1</t>,"}},
  };
  for (const auto& [format, good, bad] : cases) {
    for (const std::string& text : good) EXPECT_TRUE(Takes(OfFormat(format), text)) << format << "\n" << text;
    for (const std::string& text : bad) EXPECT_FALSE(Takes(OfFormat(format), text)) << format << "\n" << text;
  }
}

TEST(StructuralTags, WhatIsWrongIsNamedByItsPath) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"{}", "tag.format"},
      {"{", "tag"},
      {"[]", "tag"},
      {R"("\"{}\"")", "tag"},
      {R"({"type":"text","format":{}})", "tag.type"},
      {R"({"format":{"type":"any_text"},"triggers":[]})", "tag.triggers"},
      {R"({"structures":[],"triggers":["<"]})", "tag.structures"},
      {R"({"structures":[{"begin":"<a>","schema":{},"end":"<"}],"triggers":["("]})", "tag.triggers"},
      {R"({"structures":[{"begin":"<a>","schema":{"not":{}},"end":"<"}],"triggers":["<"]})",
       "tag.structures.0.schema.not"},
      {R"({"structures":[{"begin":"<a>","schema":{},"end":1}],"triggers":["<"]})", "tag.structures.0.end"},
      {OfFormat("1"), "tag.format"},
      {OfFormat("{}"), "tag.format.type"},
      {OfFormat(R"({"type":"token","token":1})"), "tag.format.type"},
      {OfFormat(R"({"type":"qwen_xml_parameter","json_schema":{}})"), "tag.format.type"},
      {OfFormat(R"({"type":"any_text","max_tokens":3})"), "tag.format.max_tokens"},
      {OfFormat(R"({"type":"any_text","excludes":[""]})"), "tag.format.excludes.0"},
      {OfFormat(R"({"type":"json_schema","json_schema":{},"style":"qwen_xml"})"), "tag.format.style"},
      {OfFormat(R"({"type":"json_schema","json_schema":{"if":{}}})"), "tag.format.json_schema.if"},
      {OfFormat(R"({"type":"regex","pattern":"("})"), "tag.format.pattern"},
      {OfFormat(R"({"type":"regex","pattern":"a","excludes":["b"]})"), "tag.format.excludes"},
      {OfFormat(R"({"type":"grammar","grammar":"root ::= x"})"), "tag.format.grammar"},
      {OfFormat(R"({"type":"sequence","elements":[]})"), "tag.format.elements"},
      {OfFormat(R"({"type":"sequence","elements":[{"type":"any_text"},{"type":"x"}]})"), "tag.format.elements.1.type"},
      {OfFormat(R"({"type":"repeat","min":2,"max":1,"content":{"type":"any_text"}})"), "tag.format.max"},
      {OfFormat(R"({"type":"tag","begin":"a","content":{"type":"any_text"}})"), "tag.format.end"},
      {OfFormat(R"({"type":"tag","begin":{"type":"token","token":1},"content":{"type":"any_text"},"end":"b"})"),
       "tag.format.begin"},
      {OfFormat(R"({"type":"triggered_tags","triggers":["<"],"tags":[{"type":"any_text"}]})"), "tag.format.tags.0"},
      {OfFormat(R"({"type":"const_string","value":"a\u0000"})"), "tag.format.value"},
  };
  for (const auto& [tag, param] : cases) {
    const absl::Status status = EnforceableTag(Json(tag), "tag").status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << tag;
    EXPECT_EQ(ToApiError(status).param.value_or("none"), param) << tag << "\n" << status;
  }
  std::string deep = R"({"type":"any_text"})";
  for (int i = 0; i < kMaxTagDepth + 1; ++i) deep = R"({"type":"optional","content":)" + deep + "}";
  EXPECT_THAT(std::string(EnforceableTag(Json(OfFormat(deep)), "tag").status().message()),
              HasSubstr("formats inside one another"));
  Json many = {{"type", "or"}, {"elements", Json::array()}};
  for (int i = 0; i < kMaxTagParts; ++i) many["elements"].push_back({{"type", "any_text"}});
  EXPECT_THAT(std::string(EnforceableTag(Json{{"format", many}}, "tag").status().message()),
              HasSubstr("formats and strings"));
}

}  // namespace
}  // namespace dovetail::server::test
