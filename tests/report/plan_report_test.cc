#include "server/cli/plan_html_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "server/cli/plan_command.h"
#include "tests/plan/small_profile.h"
#include "tests/support/test_data.h"

namespace dovetail::cli {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

class PlanReportCommand : public ::testing::Test {
 protected:
  const std::filesystem::path folder = ::dovetail::test::TempFolder();

  std::string Write(const std::string& name, const std::string& text) {
    const auto path = folder / name;
    std::ofstream(path) << text;
    return path.string();
  }
  // Llama-3-8B's shape on devices with room for it: 8 ms of weights a step.
  PlanFlags Flags() {
    plan::DeviceProfile profile = plan::SmallProfile();
    profile.memory_gb = 100;
    profile.products[0].points = {{1, 1e-12}, {101, 2e-12}};
    profile.attention = {{DType::kBF16, 128, 4, 1e12, 1e14}};
    profile.steps = {};
    PlanFlags flags;
    flags.model = ::dovetail::test::ProjectFile("models/shapes/llama-3-8b").string();
    flags.profiles = {Write("small.json", plan::ToJson(profile))};
    flags.devices = "small:2";
    flags.prices.overrides = {"small=2"};
    flags.workload = "100/20";
    flags.request_rate = "2";
    flags.num_prompts = 20;
    flags.slo = {"ttft:1000", "tpot:100"};
    flags.report = (folder / "out.html").string();
    return flags;
  }
  static std::pair<absl::Status, std::string> Run(const PlanFlags& flags) {
    ::testing::internal::CaptureStdout();
    const absl::Status status = RunPlan(flags);
    return {status, ::testing::internal::GetCapturedStdout()};
  }
  static std::string ErrorOf(const PlanFlags& flags) { return std::string(Run(flags).first.message()); }
};

TEST_F(PlanReportCommand, WritesAllFiguresThatItHasDataFor) {
  PlanFlags flags = Flags();
  flags.measured = {"compute.small:1=" + Write("r.json", R"({"mean_ttft_ms": 20, "median_tpot_ms": 7.5, "x": 1})")};
  const auto [status, table] = Run(flags);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_THAT(table, AllOf(HasSubstr("compute.small:1 as measured in "), HasSubstr("  ttft mean      20.00 ")));
  const std::string html = ::dovetail::test::ReadFile(flags.report);
  for (const char* title :
       {kLatencyAgainstRate, kCostAgainstSlo, kBreakEven, kPredictedAgainstMeasured, kWhereTimeGoes})
    EXPECT_THAT(html, HasSubstr(std::string("<h2>") + title)) << title;
  EXPECT_THAT(html, AllOf(HasSubstr("Lamina 0.42"), HasSubstr("Step-3 0.4"), HasSubstr("class=\"band\""),
                          HasSubstr("compute.small:1: TTFT mean: 20 ms measured")));
}

TEST_F(PlanReportCommand, ComparesInJsonAsWell) {
  PlanFlags flags = Flags();
  flags.report = "";
  flags.json = true;
  flags.measured = {"compute.small:1=" + Write("r.json", "{\"old\": 1}\n{\"median_tpot_ms\": 10}\n")};
  const auto [status, text] = Run(flags);
  ASSERT_TRUE(status.ok()) << status;
  const json out = json::parse(text);
  const json& values = out["measured"][0]["values"]["tpot p50"];
  EXPECT_EQ(values["measured_ms"], 10);
  EXPECT_EQ(values["predicted_ms"], out["layouts"][0]["tpot_ms"]["p50"]);
}

TEST_F(PlanReportCommand, WhereNothingMeetsTheSloTheReportSaysSo) {
  PlanFlags flags = Flags();
  flags.slo = {"tpot:0.1"};
  EXPECT_EQ(Run(flags).first.code(), absl::StatusCode::kFailedPrecondition);
  const std::string html = ::dovetail::test::ReadFile(flags.report);
  EXPECT_THAT(html, AllOf(HasSubstr("none meets the SLO"), HasSubstr("not even 4 times of them"),
                          HasSubstr("<strong>The price ratio at which a split breaks even</strong>")));
}

TEST_F(PlanReportCommand, AllAtOnceHasNoRateAndNoLimitHasNoCost) {
  PlanFlags flags = Flags();
  flags.request_rate = "inf";
  flags.slo = {};
  ASSERT_TRUE(Run(flags).first.ok());
  EXPECT_THAT(::dovetail::test::ReadFile(flags.report),
              AllOf(HasSubstr("all requests come at once"), HasSubstr("this plan has no limit; --slo")));
}

TEST_F(PlanReportCommand, NamesWhatIsWrong) {
  PlanFlags flags = Flags();
  flags.report = folder.string();
  EXPECT_THAT(ErrorOf(flags), HasSubstr("--report: " + folder.string() + ": cannot be written: is a folder"));
  flags.report = "";
  flags.measured = {"compute.small:1"};
  EXPECT_THAT(ErrorOf(flags), HasSubstr("--measured: 'compute.small:1' is not LAYOUT=RESULT.json"));
  flags.measured = {"compute.big:1=x.json"};
  EXPECT_THAT(ErrorOf(flags), HasSubstr("--measured: the plan has no layout 'compute.big:1'; it has compute.small:1"));
  flags.measured = {"compute.small:1=" + (folder / "none.json").string()};
  EXPECT_THAT(ErrorOf(flags), AllOf(HasSubstr("--measured: "), HasSubstr("none.json: cannot be read")));
  flags.measured = {"compute.small:1=" + Write("bad.json", "[3]")};
  EXPECT_THAT(ErrorOf(flags), HasSubstr("bad.json: is not the JSON of"));
  flags.measured = {"compute.small:1=" + Write("failed.json", R"({"mean_ttft_ms": null, "mean_tpot_ms": 0})")};
  EXPECT_THAT(ErrorOf(flags), HasSubstr("failed.json: has no latency above 0"));
}

TEST(MeanErrors, AreOfOneMetricOrOfAll) {
  const std::vector<MeasuredLoad> loads = {{"a", "f", {{"ttft mean", 10, 12}, {"tpot mean", 10, 9}}},
                                           {"b", "g", {{"ttft p99", 100, 60}}}};
  EXPECT_NEAR(MeanError(loads, "ttft"), 0.3, 1e-9);
  EXPECT_NEAR(MeanError(loads, ""), 0.7 / 3, 1e-9);
  EXPECT_EQ(MeanError(loads, "e2el"), 0);
}

}  // namespace
}  // namespace dovetail::cli
