#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <regex>

#include "absl/strings/str_join.h"
#include "server/openai/api_error.h"
#include "server/openai/json_schema.h"
#include "server/openai/regex_check.h"
#include "server/openai/string_formats.h"

namespace dovetail::server {
namespace {

absl::Status Check(const std::string& schema) { return EnforceableSchema(*ParseJson(schema), "s").status(); }
std::string ParamOf(const std::string& schema) { return ToApiError(Check(schema)).param.value_or("none"); }
absl::StatusOr<std::string> Regex(const std::string& regex, RegexUse use = RegexUse::kWholeText) {
  return EnforceableRegex(regex, use, "r");
}

TEST(Schemas, WhatIsNotEnforcedIsNamedByItsPath) {
  EXPECT_EQ(ParamOf(R"({"type":"object","properties":{"a":{"type":"string","format":"iri"}}})"),
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

TEST(Schemas, AlternativesOfOneOfAreEnforcedWhereNoValueCanBeTwoOfThem) {
  const char* const kCat =
      R"({"type":"object","properties":{"kind":{"const":"cat"},"lives":{"type":"integer"}},"required":["kind"]})";
  const char* const kDog = R"({"type":"object","properties":{"kind":{"const":"dog"}},"required":["kind"]})";
  const auto one_of = [](std::vector<std::string> list) {
    return absl::StrCat(R"({"oneOf":[)", absl::StrJoin(list, ","), R"(],"discriminator":{"propertyName":"kind"}})");
  };
  const auto checked = EnforceableSchema(*ParseJson(one_of({kCat, kDog})), "s");
  ASSERT_TRUE(checked.ok()) << checked.status();
  EXPECT_EQ(checked->at("anyOf").size(), 2u);
  for (const auto& [a, b] : std::vector<std::pair<std::string, std::string>>{
           {R"({"type":"string"})", R"({"type":"integer"})"},
           {R"({"type":"string"})", R"({"type":"null"})"},
           {R"({"enum":["a","b"]})", R"({"enum":["c",1]})"},
           {R"({"enum":[1,5]})", R"({"type":"integer","minimum":6})"},
           {R"({"type":"integer","maximum":3})", R"({"type":"integer","minimum":4})"},
           {R"({"type":"string","maxLength":2})", R"({"type":"string","minLength":3})"},
           {R"({"type":"array","maxItems":1})", R"({"type":"array","minItems":2})"},
           {R"({"type":"object","properties":{"a":{"type":"string"}},"required":["a"]})",
            R"({"type":"object","properties":{"b":{"type":"string"}},"required":["b"]})"},
           {kCat, R"({"type":"string"})"}}) {
    EXPECT_TRUE(Check(one_of({a, b})).ok()) << a << b << Check(one_of({a, b}));
    EXPECT_TRUE(Check(one_of({b, a})).ok()) << a << b;
  }
  for (const auto& [a, b] : std::vector<std::pair<std::string, std::string>>{
           {R"({"type":"string"})", R"({"enum":["a"]})"},
           {R"({"type":"integer"})", R"({"type":"number"})"},
           {R"({"type":"string","pattern":"a"})", R"({"type":"string","pattern":"b"})"},
           {R"({"type":"array"})", R"({"type":"array","items":{"type":"string"}})"},
           {R"({"type":"object"})", kCat},
           {R"({"type":"object","properties":{"a":{"type":"string"}}})",
            R"({"type":"object","properties":{"b":{"type":"string"}}})"},
           {R"({"type":"object","properties":{"a":{"type":"string"}},"required":["a"]})",
            R"({"type":"object","properties":{"a":{"type":"string"},"b":{"type":"string"}},"required":["a"]})"},
           {"true", R"({"type":"string"})"}})
    EXPECT_EQ(ParamOf(one_of({a, b})), "s.oneOf") << a << b;
  EXPECT_EQ(ParamOf(one_of({kCat, R"({"type":"string","not":{}})"})), "s.oneOf.1.not");
  EXPECT_TRUE(Check(absl::StrCat(R"({"$defs":{"cat":)", kCat, R"(,"dog":)", kDog,
                                 R"(},"oneOf":[{"$ref":"#/$defs/cat"},{"$ref":"#/$defs/dog"}]})"))
                  .ok());
  EXPECT_EQ(ParamOf(absl::StrCat(R"({"$defs":{"cat":)", kCat,
                                 R"(},"oneOf":[{"$ref":"#/$defs/cat"},{"$ref":"#/$defs/cat"}]})")),
            "s.oneOf");
}

TEST(Schemas, ObjectsOfAllOfAreOneObject) {
  const auto checked = EnforceableSchema(
      *ParseJson(R"({"$defs":{"base":{"type":"object","properties":{"id":{"type":"integer"}},"required":["id"]}},
                     "properties":{"name":{"type":"string"}},"required":["name"],
                     "allOf":[{"$ref":"#/$defs/base"},{"properties":{"tag":{"type":"null"}},"title":"T"}]})"),
      "s");
  ASSERT_TRUE(checked.ok()) << checked.status();
  EXPECT_EQ(Dump(checked->at("required")), R"(["name","id"])");
  EXPECT_EQ(checked->at("properties").size(), 3u);
  EXPECT_EQ(checked->at("additionalProperties"), false);
  EXPECT_EQ(Dump(EnforceableSchema(*ParseJson(R"({"allOf":[{"type":"string","maxLength":3}]})"), "s").value()),
            R"({"type":"string","maxLength":3})");
  const std::pair<const char*, const char*> refused[] = {
      {R"({"allOf":[{"type":"string"},{"type":"object"}]})", "s.allOf.0.type"},
      {R"({"allOf":[{"properties":{"a":{"type":"string"}}},{"properties":{"a":{"type":"null"}}}]})",
       "s.allOf.1.properties.a"},
      {R"({"allOf":[{"properties":{"a":true},"additionalProperties":false},{"properties":{"b":true}}]})",
       "s.allOf.0.additionalProperties"},
      {R"({"allOf":[{"properties":{"a":true}},{"additionalProperties":{"type":"string"}}]})",
       "s.allOf.1.additionalProperties"},
      {R"({"allOf":[{"properties":{"a":{"type":"string","not":{}}}},{"properties":{"b":true}}]})",
       "s.allOf.0.properties.a.not"},
      {R"({"allOf":[{"$ref":"#"},{"properties":{"b":true}}]})", "s.allOf.0"},
      {R"({"allOf":[{"anyOf":[{"type":"null"}]},{"properties":{"b":true}}]})", "s.allOf.0.anyOf"},
      {R"({"allOf":[]})", "s.allOf"}};
  for (const auto& [schema, param] : refused) EXPECT_EQ(ParamOf(schema), param) << schema;
}

TEST(Schemas, FormatsAreEnforcedByTheirPatterns) {
  for (const std::string& format : EnforcedFormats())
    EXPECT_TRUE(Check(absl::StrCat(R"({"type":"string","format":")", format, R"("})")).ok()) << format;
  EXPECT_EQ(ParamOf(R"({"type":"string","format":"uuid","minLength":2})"), "s.format");
  EXPECT_EQ(ParamOf(R"({"type":"string","format":"uuid","pattern":"a"})"), "s.format");
  EXPECT_EQ(ParamOf(R"({"type":"string","format":7})"), "s.format");
  const std::map<std::string, std::pair<std::vector<std::string>, std::vector<std::string>>> texts = {
      {"date",
       {{"2024-02-29", "2000-02-29", "2023-12-31", "1999-04-30"},
        {"2023-02-29", "1900-02-29", "2023-04-31", "2023-13-01", "2023-00-10", "0000-01-01", "2023-1-1"}}},
      {"time",
       {{"00:00:00Z", "23:59:59.123+23:59", "12:30:00-01:00"}, {"24:00:00Z", "12:60:00Z", "12:00:00", "1:00:00Z"}}},
      {"date-time", {{"2024-02-29T12:00:00Z"}, {"2024-02-29 12:00:00Z", "2023-02-29T12:00:00Z", "2024-02-29"}}},
      {"duration", {{"P1D", "P3Y6M4D", "PT5M", "P1DT12H30M5S", "P2W"}, {"P", "PT", "1D", "P1H", "P1DT", "PT1S1M"}}},
      {"uuid", {{"123e4567-e89b-12d3-a456-426614174000"}, {"123e4567e89b12d3a456426614174000"}}},
      {"ipv4", {{"0.0.0.0", "255.249.199.99"}, {"256.0.0.1", "01.2.3.4", "1.2.3"}}},
      {"ipv6", {{"2001:db8:0:0:0:0:0:1"}, {"2001:db8:0:0:0:0:1", "2001:db8:0:0:0:0:0:0:1"}}},
      {"hostname", {{"a", "example.com", "a-b.c"}, {"-a", "a-", "a..b", ""}}},
      {"email", {{"a.b+c@example.com"}, {"a@b", "@b.c", "a..b@c.d", "a@-b.c"}}}};
  for (const auto& [format, both] : texts) {
    const std::regex regex(RegexOfFormat(format), std::regex::ECMAScript);
    for (const std::string& text : both.first) EXPECT_TRUE(std::regex_match(text, regex)) << format << " " << text;
    for (const std::string& text : both.second) EXPECT_FALSE(std::regex_match(text, regex)) << format << " " << text;
  }
  EXPECT_EQ(texts.size(), EnforcedFormats().size());
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
