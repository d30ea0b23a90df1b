#include "report/charts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace dovetail::report {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

int CountOf(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

PointChart Chart() {
  PointChart chart;
  chart.title = "Latency";
  chart.x.name = "rate";
  chart.y.name = "ms";
  chart.series = {{"median", {{0, 0, "a"}, {5, 50, "b"}, {10, 100, "c"}}, true, false, 0}};
  return chart;
}

TEST(PointCharts, PutPointsWhereTheirValuesAre) {
  const std::string svg = SvgOf(Chart(), "f", "It rises.");
  // The chart is 64..456 wide and 264..30 high.
  EXPECT_THAT(svg, HasSubstr("<polyline class=\"line0\" points=\"64,264 260,147 456,30\"/>"));
  EXPECT_EQ(CountOf(svg, "<circle"), 3);
  EXPECT_THAT(svg,
              AllOf(HasSubstr("aria-labelledby=\"f-title f-says\""), HasSubstr("<title id=\"f-title\">Latency</title>"),
                    HasSubstr("<desc id=\"f-says\">It rises.</desc>"), HasSubstr("<title>b</title>")));
}

TEST(PointCharts, LeaveOutWhatIsNoNumberAndStillDrawTheRest) {
  PointChart chart = Chart();
  chart.series[0].points = {{1, NAN, "x"}, {2, INFINITY, "y"}, {4, 8, "z"}};
  std::string svg = SvgOf(chart, "f", "");
  EXPECT_EQ(CountOf(svg, "<circle"), 1);
  EXPECT_THAT(svg, AllOf(Not(HasSubstr("polyline")), Not(HasSubstr("nan")), Not(HasSubstr("inf"))));
  chart.series[0].points = {{1, 0, "x"}, {2, 10, "y"}};
  chart.y.logarithmic = true;
  EXPECT_EQ(CountOf(SvgOf(chart, "f", ""), "<circle"), 1) << "0 has no place on a logarithmic axis";
  chart.series[0].points = {};
  EXPECT_THAT(SvgOf(chart, "f", ""), HasSubstr("</svg>"));
}

TEST(PointCharts, NamesOfMarksThatAreCloseLieInRows) {
  PointChart chart = Chart();
  chart.on_x = {{4.0, "Step-3 0.4"}, {4.2, "Lamina 0.42"}, {9.9, "a mark at the right end"}};
  const std::string svg = SvgOf(chart, "f", "");
  EXPECT_THAT(svg, HasSubstr("y=\"42\" text-anchor=\"start\" class=\"note\">Step-3 0.4<"));
  EXPECT_THAT(svg, HasSubstr("y=\"57\" text-anchor=\"start\" class=\"note\">Lamina 0.42<"));
  EXPECT_THAT(svg, HasSubstr("text-anchor=\"end\" class=\"note\">a mark at the right end<"));
}

TEST(PointCharts, OfPredictionsHaveEqualAxesAndTheirDiagonal) {
  PointChart chart = Chart();
  chart.x.logarithmic = chart.y.logarithmic = true;
  chart.diagonal = true;
  chart.diagonal_band = 0.15;
  chart.series = {{"TTFT", {{10, 20, ""}, {1000, 900, ""}}, false, false, 0}};
  const std::string svg = SvgOf(chart, "f", "");
  EXPECT_THAT(
      svg, AllOf(HasSubstr("class=\"band\""), HasSubstr("x1=\"64\" y1=\"264\" x2=\"456\" y2=\"30\" class=\"mark\"")));
  EXPECT_THAT(svg, Not(HasSubstr("polyline")));
}

TEST(BarCharts, AreAsLongAsTheirParts) {
  BarChart chart{"A step", "ms", {"weights", "link"}, {{"whole", {30, 10}}, {"split", {20, NAN}}}};
  const std::string svg = SvgOf(chart, "b", "");
  // 40 ms are 460 wide.
  EXPECT_THAT(svg, AllOf(HasSubstr("x=\"4\" y=\"16\" width=\"345\""), HasSubstr("x=\"349\" y=\"16\" width=\"115\""),
                         HasSubstr("x=\"4\" y=\"66\" width=\"230\"")));
  EXPECT_THAT(svg, AllOf(HasSubstr("weights: 30 ms"), HasSubstr(">75 %<"), HasSubstr(">40 ms<"), HasSubstr(">20 ms<")));
  EXPECT_EQ(CountOf(svg, "<rect"), 3);
  EXPECT_EQ(CountOf(LegendOf(chart), "<li>"), 2);
}

TEST(Legends, TellSeriesApartByMoreThanColour) {
  PointChart chart = Chart();
  EXPECT_EQ(LegendOf(chart), "") << "one series has the name of its chart";
  chart.series.push_back({"p99 <b>", {}, true, true, 1});
  const std::string legend = LegendOf(chart);
  EXPECT_THAT(legend, AllOf(HasSubstr("<circle"), HasSubstr("<polygon"), HasSubstr("line1 dashed"),
                            HasSubstr("p99 &lt;b&gt;"), Not(HasSubstr("<b>"))));
}

}  // namespace
}  // namespace dovetail::report
