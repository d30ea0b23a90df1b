#include "model/tokenizer/stop_strings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

namespace dovetail::model::test {
namespace {

using testing::HasSubstr;

StopMatcher Make(std::vector<std::string> stops, bool include = false) {
  auto matcher = StopMatcher::Create(std::move(stops), include);
  EXPECT_TRUE(matcher.ok()) << matcher.status();
  return *std::move(matcher);
}

TEST(StopMatcher, HoldsBackWhatMayBecomeAStopString) {
  StopMatcher matcher = Make({"\nUser:"});
  EXPECT_EQ(matcher.Push("hello\nU"), "hello");
  EXPECT_EQ(matcher.Push("se"), "");
  EXPECT_EQ(matcher.Push("x\n"), "\nUsex");
  EXPECT_EQ(matcher.Push("User: more"), "");
  ASSERT_TRUE(matcher.match().has_value());
  EXPECT_EQ(matcher.match()->begin, 10u);
  EXPECT_EQ(matcher.match()->end, 16u);
  EXPECT_EQ(matcher.Push("still more"), "");
  EXPECT_EQ(matcher.Finish(), "");
}

TEST(StopMatcher, WithoutAMatchTheEndReleasesEverything) {
  StopMatcher matcher = Make({"END"});
  EXPECT_EQ(matcher.Push("the EN"), "the ");
  EXPECT_EQ(matcher.Finish(), "EN");
  EXPECT_FALSE(matcher.match().has_value());
}

TEST(StopMatcher, CanShowTheStopStringItself) {
  StopMatcher matcher = Make({"stop"}, /*include=*/true);
  EXPECT_EQ(matcher.Push("do sto"), "do ");
  EXPECT_EQ(matcher.Push("p it"), "stop");
}

TEST(StopMatcher, TheMatchThatEndsFirstWinsAndTheLongestOfThose) {
  StopMatcher first = Make({"abcd", "bc"});
  EXPECT_EQ(first.Push("xabcd"), "xa");
  EXPECT_EQ(first.match()->index, 1);
  StopMatcher longest = Make({"c", "bc", "abc", "abc"});
  EXPECT_EQ(longest.Push("xabc"), "x");
  EXPECT_EQ(longest.match()->index, 2);
}

TEST(StopMatcher, AnUnwatchedTextNeitherMatchesNorBeginsAMatch) {
  StopMatcher matcher = Make({"ab"});
  EXPECT_EQ(matcher.PushUnwatched("ab a"), "ab a");
  EXPECT_EQ(matcher.Push("b"), "b");
  EXPECT_EQ(matcher.Push("xab"), "x");
  EXPECT_EQ(matcher.match()->begin, 6u);
}

// The definition, by search: of all occurrences the first to end, then the longest, then the first in the list.
std::optional<StopMatch> BySearch(const std::vector<std::string>& stops, const std::string& text) {
  for (size_t end = 1; end <= text.size(); ++end) {
    std::optional<StopMatch> best;
    for (size_t i = 0; i < stops.size(); ++i) {
      if (stops[i].size() > end || text.compare(end - stops[i].size(), stops[i].size(), stops[i]) != 0) continue;
      if (!best || end - stops[i].size() < best->begin) best = {static_cast<int>(i), end - stops[i].size(), end};
    }
    if (best) return best;
  }
  return std::nullopt;
}

TEST(StopMatcher, TheOutcomeDependsOnTheTextAloneNotOnItsPieces) {
  std::mt19937_64 random(5);
  const auto word = [&](size_t most) {
    std::string text(1 + random() % most, 'a');
    for (char& c : text) c = static_cast<char>('a' + random() % 2);
    return text;
  };
  int matches = 0;
  for (int round = 0; round < 3000; ++round) {
    std::vector<std::string> stops;
    for (uint64_t n = 1 + random() % 4; n > 0; --n) stops.push_back(word(8));
    const std::string text = word(40);
    const auto expected = BySearch(stops, text);
    matches += expected.has_value();
    StopMatcher matcher = Make(stops);
    std::string shown;
    for (size_t at = 0; at < text.size();) {
      const size_t size = 1 + random() % 5;
      shown += matcher.Push(std::string_view(text).substr(at, size));
      at += size;
    }
    shown += matcher.Finish();
    ASSERT_EQ(matcher.match().has_value(), expected.has_value()) << text;
    if (expected) {
      EXPECT_EQ(matcher.match()->index, expected->index);
      EXPECT_EQ(matcher.match()->begin, expected->begin);
    }
    EXPECT_EQ(shown, expected ? text.substr(0, expected->begin) : text);
  }
  EXPECT_GT(matches, 1000);
  EXPECT_LT(matches, 3000);
}

TEST(StopMatcher, LimitsAreNamed) {
  EXPECT_TRUE(StopMatcher::Create(std::vector<std::string>(16, std::string(256, 'x'))).ok());
  const auto message = [](std::vector<std::string> stops) {
    return std::string(StopMatcher::Create(std::move(stops)).status().message());
  };
  EXPECT_THAT(message(std::vector<std::string>(17, "x")), HasSubstr("stop: 17 strings exceed the limit of 16"));
  EXPECT_THAT(message({"ok", std::string(257, 'x')}), HasSubstr("stop[1]: 257 bytes"));
  EXPECT_THAT(message({""}), HasSubstr("stop[0]"));
  EXPECT_THAT(message({"\xC3"}), HasSubstr("UTF-8"));
}

}  // namespace
}  // namespace dovetail::model::test
