#include "server/openai/json.h"

#include <gmock/gmock.h>

namespace dovetail::server {
namespace {

using ::testing::HasSubstr;

std::string ErrorOf(std::string_view text) {
  const auto json = ParseJson(text);
  return json.ok() ? "" : std::string(json.status().message());
}

TEST(Json, KeepsTheOrderOfKeys) {
  EXPECT_EQ(Dump(*ParseJson(R"({"b":1,"a":[true,null,"x"]})")), R"({"b":1,"a":[true,null,"x"]})");
}

TEST(Json, NestsToTheLimitAndNoDeeper) {
  EXPECT_TRUE(ParseJson(std::string(32, '[') + std::string(32, ']')).ok());
  EXPECT_THAT(ErrorOf(std::string(33, '[') + std::string(33, ']')), HasSubstr("nested deeper than 32"));
  EXPECT_THAT(ErrorOf(std::string(4'000'000, '[')), HasSubstr("nested deeper than 32"));
}

TEST(Json, HoldsOnlySoManyValues) {
  std::string many = "[0";
  for (int i = 0; i < 500'000; ++i) many += ",0";
  EXPECT_THAT(ErrorOf(many + "]"), HasSubstr("more than 500000 values"));
}

TEST(Json, RefusesAKeyThatComesTwice) {
  EXPECT_THAT(ErrorOf(R"({"n":1,"n":2})"), HasSubstr("\"n\" comes twice"));
  EXPECT_TRUE(ParseJson(R"([{"n":1},{"n":2}])").ok());
}

TEST(Json, RefusesWhatIsNotJson) {
  for (const char* bad : {"", "{", "{]", "nul", "NaN", "[NaN]", "Infinity", "1e999", "{'a':1}", "[1,]", "/**/1", "1 2",
                          "{\"a\":1}x", "01", "+1", "\"\x01\"", "\xEF\xBB\xBF{}"})
    EXPECT_FALSE(ParseJson(bad).ok()) << bad;
}

TEST(Json, RefusesBrokenUtf8AndLoneSurrogates) {
  for (const char* bad : {"\"\xFF\"", "\"\xC0\xAF\"", "\"\xED\xA0\x80\"", "\"\xF5\x80\x80\x80\"", "\"\xE2\x82\"",
                          "\"\\ud800\"", "\"\\udc00\"", "\"\\ud800\\u0041\"", "{\"\xFF\":1}"})
    EXPECT_FALSE(ParseJson(bad).ok()) << bad;
  EXPECT_EQ(*ParseJson("\"\\ud83d\\ude00\""), "\xF0\x9F\x98\x80");
}

TEST(Json, AFailureNamesTheByteAndNoLibrary) {
  EXPECT_EQ(ErrorOf("{\"a\" 1}"), "the request body: not valid JSON at byte 6");
}

}  // namespace
}  // namespace dovetail::server
