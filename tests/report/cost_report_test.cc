#include "server/cli/cost_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "server/cli/bench_cost_command.h"
#include "tests/support/test_data.h"

namespace dovetail::cli {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// Ten seconds of ten requests of 100 tokens; request i has a TTFT of i + 1 and a TPOT of 10 (i + 1) milliseconds.
json Result(double rate) {
  json result = {{"duration", 10},        {"total_input_tokens", 2000}, {"total_output_tokens", 1000},
                 {"request_rate", rate},  {"median_ttft_ms", 5.5},      {"p99_ttft_ms", 9.9},
                 {"median_tpot_ms", 55},  {"p99_tpot_ms", 99},          {"mean_ttft_ms", 5.5},
                 {"mean_e2el_ms", 5450.5}};
  for (const char* name : {"ttfts", "itls", "output_lens"}) result[name] = json::array();
  for (int i = 1; i <= 10; ++i) {
    result["ttfts"].push_back(0.001 * i);
    result["itls"].push_back(std::vector<double>(99, 0.01 * i));
    result["output_lens"].push_back(100);
  }
  return result;
}

TEST(ResultDetails, AreReadAsFarAsTheyAreThere) {
  json failed = Result(4);
  failed["output_lens"][0] = 0;  // as vLLM writes a request that failed
  failed["itls"][1] = {"x"};
  failed["ttfts"][2] = nullptr;
  const ResultDetails details = ReadDetails(Result(2).dump() + "\n" + failed.dump() + "\n");
  EXPECT_EQ(details.requests.size(), 7u);
  EXPECT_NEAR(details.requests[0].ttft_ms, 4, 1e-9);
  EXPECT_NEAR(details.requests[0].tpot_ms, 40, 1e-9);
  ASSERT_EQ(details.rates.size(), 2u);
  EXPECT_EQ(details.rates[1].rate, 4);
  EXPECT_EQ(details.rates[1].tpot_p99, 99);
  EXPECT_EQ(ReadDetails(Result(2).dump(2)).requests.size(), 10u) << "one result in many lines";
  for (const char* text : {"", "{", "[1]", "{\"duration\": \"x\", \"ttfts\": 3, \"request_rate\": \"inf\"}"}) {
    EXPECT_TRUE(ReadDetails(text).requests.empty()) << text;
    EXPECT_TRUE(ReadDetails(text).rates.empty()) << text;
  }
}

MeasuredLayout Layout(const std::string& name, double usd) {
  MeasuredLayout one;
  one.layout.name = name;
  one.machines = "compute.a:1";
  one.throughput = {200, 100, std::nullopt};
  one.low.usd_per_hour = one.high.usd_per_hour = usd;
  one.low.output_usd = one.high.output_usd = usd / (100 * 3600) * 1e6;
  one.details = ReadDetails(Result(2).dump());
  return one;
}

CostReportInput Input() { return {"prices.json", "2026-11-25", 1, {Layout("a", 0.36), Layout("b", 0.72)}, {}}; }

report::Figure FigureOf(const report::Report& report, const std::string& title) {
  for (const report::Figure& figure : report.figures)
    if (figure.title == title) return figure;
  ADD_FAILURE() << "no figure " << title;
  return {};
}

TEST(CostReports, ATighterLimitMakesTokensDearer) {
  const report::Report report = CostReport(Input());
  const report::Figure figure = FigureOf(report, kCostAgainstSlo);
  ASSERT_EQ(figure.charts.size(), 2u);
  const auto& points = figure.charts[1].series[0].points;  // by TPOT
  EXPECT_NEAR(points.back().x, 100, 1e-9);
  EXPECT_NEAR(points.back().y, 1.0, 1e-9) << "0.36 $/h for 100 tokens/s";
  // The fifth of ten requests has 50 ms; half of the tokens are within.
  const auto half = std::find_if(points.begin(), points.end(), [](const auto& p) { return p.x >= 50 && p.x < 60; });
  ASSERT_NE(half, points.end());
  EXPECT_NEAR(half->y, 2.0, 1e-9);
  EXPECT_NEAR(figure.charts[1].series[1].points.back().y, 2.0, 1e-9);
  EXPECT_THAT(figure.table.rows.back(), ::testing::ElementsAre("TPOT of at most 100 ms", "1", "2"));
}

TEST(CostReports, SayOfEachFigureWithoutDataHowToGetIt) {
  CostReportInput input = Input();
  for (MeasuredLayout& one : input.layouts) one.details = {};
  const report::Report report = CostReport(input);
  EXPECT_THAT(FigureOf(report, kCostAgainstSlo).missing, HasSubstr("--save-detailed"));
  EXPECT_THAT(FigureOf(report, kBreakEven).missing, HasSubstr("split layout"));
  EXPECT_THAT(FigureOf(report, kLatencyAgainstRate).missing, HasSubstr("--sweep-rates"));
  EXPECT_THAT(FigureOf(report, kWhereTimeGoes).missing, HasSubstr("mean_ttft_ms"));
  input.layouts[0] = Layout("a", 1);
  EXPECT_THAT(FigureOf(CostReport(input), kCostAgainstSlo).says, HasSubstr("saved without --save-detailed: b."));
}

TEST(BreakEvenFigures, CrossOneWhereTheSplitBreaksEvenAndMarkTheKnownRatios) {
  const report::Figure figure = BreakEvenFigure({{"split", "whole", {0.65, 0.5}, {0.65, 0.5}, 0.3, 0.9}});
  const report::PointChart& chart = figure.charts.at(0);
  ASSERT_EQ(chart.series.size(), 1u);
  const auto& line = chart.series[0].points;
  EXPECT_NEAR(line[0].y + (0.7 - line[0].x) * (line[1].y - line[0].y) / (line[1].x - line[0].x), 1, 1e-9);
  EXPECT_EQ(chart.on_x[0].name, "Lamina 0.42");
  EXPECT_EQ(chart.on_x[1].name, "Step-3 0.4");
  EXPECT_EQ(chart.on_x[2].name, "these prices 0.3");
  EXPECT_EQ(chart.on_y[0].at, 1);
  EXPECT_THAT(figure.says, HasSubstr("costs less than 0.7 of a compute device"));
  EXPECT_EQ(figure.table.rows[0][3], "depends on the prices");
  EXPECT_THAT(BreakEvenFigure({{"s", "w", {1.2, 0.5}, {1.1, 0.5}, 0.3, 0.9}}).says, HasSubstr("No price of attention"));
}

class CostReportCommand : public ::testing::Test {
 protected:
  const std::filesystem::path folder = ::dovetail::test::TempFolder();

  BenchCostFlags Flags() {
    std::ofstream(folder / "w.json") << Result(2).dump();
    json split = Result(2);
    split["total_output_tokens"] = 1200;
    std::ofstream(folder / "s.json") << split.dump();
    BenchCostFlags flags;
    flags.prices.overrides = {"h100=11.06", "h20=4.63"};
    flags.utilization = 0.5;
    flags.layout = {"whole<b>=" + (folder / "w.json").string() + "@compute.h100:4",
                    "split=" + (folder / "s.json").string() + "@compute.h100:2,attention.h20:4"};
    flags.report = (folder / "out.html").string();
    return flags;
  }
  static absl::Status Run(const BenchCostFlags& flags) {
    ::testing::internal::CaptureStdout();
    const absl::Status status = RunBenchCost(flags);
    ::testing::internal::GetCapturedStdout();
    return status;
  }
};

TEST_F(CostReportCommand, WritesAllFiguresThatItHasDataFor) {
  BenchCostFlags flags = Flags();
  const absl::Status status = Run(flags);
  ASSERT_TRUE(status.ok()) << status;
  const std::string html = ::dovetail::test::ReadFile(flags.report);
  for (const char* title : {kLatencyAgainstRate, kCostAgainstSlo, kBreakEven, kWhereTimeGoes})
    EXPECT_THAT(html, HasSubstr(std::string("<h2>") + title)) << title;
  EXPECT_THAT(html, AllOf(HasSubstr("Lamina 0.42"), HasSubstr("whole&lt;b&gt;"), Not(HasSubstr("whole<b>"))));
  EXPECT_THAT(html, HasSubstr("<strong>Predicted against measured</strong>"));
}

TEST_F(CostReportCommand, APathThatCannotBeWrittenIsRefusedFirst) {
  BenchCostFlags flags = Flags();
  flags.report = (folder / "no" / "out.html").string();
  flags.layout = {"nonsense"};
  EXPECT_THAT(std::string(Run(flags).message()), HasSubstr("--report: " + flags.report + ": cannot be written"));
}

}  // namespace
}  // namespace dovetail::cli
