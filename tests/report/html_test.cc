#include "report/html.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>

#include "report/escape.h"

namespace dovetail::report {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

Figure WithChart() {
  Figure figure;
  figure.title = "Latency";
  figure.says = "It rises.";
  figure.charts = {{"Chart", {"rate"}, {"ms"}, {{"median", {{1, 2, ""}}}}, {}, {}}};
  figure.table = {{"rate", "ms"}, {{"1", "2"}}};
  return figure;
}

TEST(Escaping, LeavesNothingThatHtmlWouldRead) {
  EXPECT_EQ(Escaped("a<b>&\"c'"), "a&lt;b&gt;&amp;&quot;c&#39;");
  EXPECT_EQ(Escaped("two\nlines\tand a bell\a"), "two lines and a bell\xEF\xBF\xBD");
  EXPECT_EQ(Escaped("\xC3\xA9 \xE2\x89\xA4 \xF0\x9F\x95\x8A"), "\xC3\xA9 \xE2\x89\xA4 \xF0\x9F\x95\x8A");
  for (const char* bad : {"\xC3", "\x80", "\xC0\xAF", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xFF"})
    EXPECT_THAT(Escaped(bad), AllOf(HasSubstr("\xEF\xBF\xBD"), Not(HasSubstr(bad)))) << bad;
  EXPECT_EQ(Escaped(std::string_view("\0", 1)), "\xEF\xBF\xBD");
  EXPECT_EQ(Characters("\xC3\xA9\xE2\x89\xA4"), 2u);
}

// Every text of a report, with what would do harm in it, in every place that a report has.
TEST(Html, EscapesEveryTextOfAReport) {
  const std::string evil = "\"><script>alert('&')</script>";
  Figure figure = WithChart(), missing;
  figure.title = figure.says = evil;
  PointChart& chart = figure.charts[0];
  chart.title = chart.x.name = chart.y.name = evil;
  chart.series = {{evil, {{1, 1, evil}}}, {evil, {{2, 2, evil}}}};
  chart.on_x = {{1, evil}};
  chart.on_y = {{1, evil}};
  figure.bars = {{evil, evil, {evil}, {{evil, {3}}}}};
  figure.table = {{evil}, {{evil, evil}}};
  missing.title = missing.missing = evil;
  const std::string html = HtmlOf({evil, evil, {{evil, evil}}, {evil}, {figure, missing}, evil});
  EXPECT_THAT(html, Not(HasSubstr("<script")));
  EXPECT_THAT(html, Not(HasSubstr(evil)));
  EXPECT_THAT(html, HasSubstr("&quot;&gt;&lt;script&gt;alert(&#39;&amp;&#39;)&lt;/script&gt;"));
}

TEST(Html, NamesNoOtherResourceAndForbidsThem) {
  const std::string html = HtmlOf({"t", "", {}, {}, {WithChart()}, ""});
  EXPECT_THAT(html, HasSubstr("content=\"default-src 'none'; style-src 'unsafe-inline'\""));
  EXPECT_FALSE(std::regex_search(html, std::regex("(src|href|url|@import|https?:)\\s*[=(:/]"))) << html.substr(0, 400);
}

TEST(Html, EachPictureHasItsNumbersBelowIt) {
  const std::string html = HtmlOf({"t", "", {{"Most", "12 tok/s"}}, {"a note"}, {WithChart()}, "the end"});
  const size_t picture = html.find("<svg viewBox=\"0 0 480"), table = html.find("<table>");
  ASSERT_NE(picture, std::string::npos);
  ASSERT_NE(table, std::string::npos);
  EXPECT_LT(picture, table);
  EXPECT_THAT(html,
              AllOf(HasSubstr("<th scope=\"col\">rate</th>"), HasSubstr("<th scope=\"row\">1</th><td>2</td>"),
                    HasSubstr("<desc id=\"figure-0-chart-0-says\">It rises. The table below has the numbers.</desc>"),
                    HasSubstr("<dt>Most</dt><dd>12 tok/s</dd>"), HasSubstr("<li>a note</li>"),
                    HasSubstr("<footer>the end</footer>")));
  EXPECT_THAT(html, Not(HasSubstr("What is not shown")));
}

TEST(Html, SaysOfAFigureWithoutDataWhatIsMissing) {
  Figure none;
  none.title = "Cost";
  none.missing = "give prices with --prices.";
  const std::string html = HtmlOf({"t", "", {}, {}, {none}, ""});
  EXPECT_THAT(html,
              AllOf(HasSubstr("What is not shown"), HasSubstr("<strong>Cost</strong>: give prices with --prices."),
                    Not(HasSubstr("<svg")), Not(HasSubstr("<h2>Cost"))));
}

}  // namespace
}  // namespace dovetail::report
