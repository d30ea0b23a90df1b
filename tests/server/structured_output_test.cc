#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/openai/api_error.h"
#include "server/openai/json_schema.h"
#include "server/openai/regex_check.h"

namespace dovetail::server {
namespace {

absl::Status Check(const std::string& schema) { return EnforceableSchema(*ParseJson(schema), "s").status(); }
std::string ParamOf(const std::string& schema) { return ToApiError(Check(schema)).param.value_or("none"); }
absl::StatusOr<std::string> Regex(const std::string& regex, RegexUse use = RegexUse::kWholeText) {
  return EnforceableRegex(regex, use, "r");
}

TEST(Schemas, WhatIsNotEnforcedIsNamedByItsPath) {
  EXPECT_EQ(ParamOf(R"({"type":"object","properties":{"a":{"type":"string","format":"date"}}})"),
            "s.properties.a.format");
  for (const char* keyword : {"not", "oneOf", "allOf", "if", "patternProperties", "minProperties", "contains",
                              "prefixItems", "dependentRequired", "unevaluatedProperties", "multipleOf", "$id"})
    EXPECT_EQ(ParamOf(absl::StrCat(R"({"type":"object",")", keyword, R"(":1})")), absl::StrCat("s.", keyword));
  EXPECT_EQ(ParamOf(R"({"type":"array","uniqueItems":true})"), "s.uniqueItems");
  EXPECT_EQ(ParamOf(R"({"type":"number","minimum":1})"), "s.minimum");
  EXPECT_EQ(ParamOf(R"({"type":"string","pattern":"a","minLength":2})"), "s.pattern");
  EXPECT_EQ(ParamOf(R"({"anyOf":[{"type":"null"}],"type":"object"})"), "s.type");
  EXPECT_EQ(ParamOf(R"({"properties":{"a":true},"required":["b"]})"), "s.required");
  EXPECT_EQ(ParamOf(R"({"properties":{"a":true},"additionalProperties":true})"), "s.additionalProperties");
  EXPECT_EQ(ParamOf(R"({"enum":[1.5]})"), "s.enum");
  EXPECT_EQ(ParamOf(R"({"type":"string","enum":[1]})"), "s.enum");
  EXPECT_EQ(ParamOf(R"({"type":"integer","minimum":3,"exclusiveMaximum":3})"), "s");
  EXPECT_EQ(ParamOf(R"({"$ref":"https://example.com/a"})"), "s.$ref");
  EXPECT_EQ(ParamOf("false"), "s");
}

TEST(Schemas, ReferencesWithoutAnEndAreRefused) {
  for (const char* schema :
       {R"({"$ref":"#"})", R"({"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"})",
        R"({"$defs":{"a":{"anyOf":[{"$ref":"#/$defs/a"},{"type":"null"}]}},"$ref":"#/$defs/a"})",
        R"({"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]})",
        R"({"type":"array","items":{"$ref":"#"},"minItems":1})"})
    EXPECT_TRUE(absl::IsInvalidArgument(Check(schema))) << schema;
  for (const char* schema :
       {R"({"type":"object","properties":{"a":{"$ref":"#"}}})", R"({"type":"array","items":{"$ref":"#"}})"})
    EXPECT_TRUE(Check(schema).ok()) << schema;
}

TEST(Schemas, TheirSizeIsBounded) {
  std::string values = "0", deep = "true";
  for (int i = 1; i < 10'000; ++i) absl::StrAppend(&values, ",", i);
  for (int i = 0; i <= kMaxSchemaDepth; ++i) deep = absl::StrCat(R"({"anyOf":[)", deep, "]}");
  EXPECT_EQ(ParamOf(absl::StrCat(R"({"enum":[)", values, "]}")), "s.enum");
  EXPECT_TRUE(absl::IsInvalidArgument(EnforceableSchema(Json::parse(deep), "s").status()));
  EXPECT_EQ(ParamOf(R"({"type":"string","maxLength":100000})"), "s.maxLength");
  EXPECT_EQ(ParamOf(R"({"type":"array","minItems":100000})"), "s.minItems");
}

TEST(Regexes, AnOptionalGroupIsCounted) {
  EXPECT_EQ(Regex("a(?:b{2,3}c)?d?").value(), "a(b{2,3}c){0,1}d?");
  EXPECT_EQ(Regex("(a)??").value(), "(a){0,1}");
}

TEST(Regexes, WhatIsNotEnforcedIsRefused) {
  for (const char* regex :
       {"",      "(?=a)b", "(?i)a", "(a)\\1", "\\bfoo", "a^b",    "a$b",    "*a",        "a**",
        "[z-a]", "[",      "(",     ")",      "a||b",   "\\p{L}", "a{3,2}", "a{100000}", "((a{100}){100}){100}",
        "[]",    "(a|)"})
    EXPECT_TRUE(absl::IsInvalidArgument(Regex(regex).status())) << regex;
  EXPECT_TRUE(absl::IsInvalidArgument(Regex(std::string(10'000, '(')).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(Regex("a\"b", RegexUse::kInJson).status()));
  for (const char* regex : {"^a+?$", "(?:a|b){2,3}", "[^a-c\\]]", "\\d\\w\\s\\D\\W\\S", "caf\xc3\xa9", "(a+)+$"})
    EXPECT_TRUE(Regex(regex).ok()) << regex << Regex(regex).status();
}

}  // namespace
}  // namespace dovetail::server
