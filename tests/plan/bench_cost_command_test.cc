#include "server/cli/bench_cost_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/support/test_data.h"

namespace dovetail::cli {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

class BenchCost : public ::testing::Test {
 protected:
  const std::filesystem::path folder = ::dovetail::test::TempFolder();

  std::string Result(const std::string& name, double seconds, int64_t input, int64_t output, json good = nullptr) {
    const auto path = folder / name;
    std::ofstream(path) << "{\"old\": true}\n"
                        << json{{"duration", seconds},
                                {"total_input_tokens", input},
                                {"total_output_tokens", output},
                                {"good_output_tokens", std::move(good)}}
                               .dump();
    return path.string();
  }
  BenchCostFlags Flags() {
    BenchCostFlags flags;
    flags.prices.overrides = {"h100=11.06", "h20=4.63"};
    flags.utilization = 0.5;
    flags.layout = {"whole=" + Result("w.json", 10, 20000, 10000) + "@compute.h100:4",
                    "split=" + Result("s.json", 10, 20000, 12000, 6000) + "@compute.h100:2,attention.h20:4"};
    return flags;
  }
  static std::string ErrorOf(const BenchCostFlags& flags) {
    ::testing::internal::CaptureStdout();
    const absl::Status status = RunBenchCost(flags);
    ::testing::internal::GetCapturedStdout();
    return std::string(status.message());
  }
};

TEST_F(BenchCost, ChargesLayoutsAndComparesThem) {
  BenchCostFlags flags = Flags();
  flags.json = true;
  ::testing::internal::CaptureStdout();
  const absl::Status status = RunBenchCost(flags);
  const std::string text = ::testing::internal::GetCapturedStdout();
  ASSERT_TRUE(status.ok()) << status;
  const json out = json::parse(text);
  EXPECT_NEAR(out["layouts"][0]["low"]["usd_per_hour"].get<double>(), 44.24, 1e-9);
  EXPECT_NEAR(out["layouts"][0]["low"]["usd_per_million_output_tokens"].get<double>(), 44.24 / (1000 * 1800) * 1e6,
              1e-6);
  EXPECT_TRUE(out["layouts"][0]["low"]["usd_per_million_output_tokens_within_slo"].is_null());
  EXPECT_NEAR(out["layouts"][1]["low"]["usd_per_million_output_tokens_within_slo"].get<double>(),
              40.64 / (600 * 1800) * 1e6, 1e-6);
  ASSERT_EQ(out["break_even"].size(), 1u);
  EXPECT_NEAR(out["break_even"][0]["price_ratio_low"].get<double>(), 0.7, 1e-9);
  EXPECT_NEAR(out["break_even"][0]["ratio_of_prices_low"].get<double>(), 0.4186, 1e-4);
}

TEST_F(BenchCost, SaysWhetherTheSplitPaysWithOthersRatiosNextToIt) {
  BenchCostFlags flags = Flags();
  ::testing::internal::CaptureStdout();
  ASSERT_TRUE(RunBenchCost(flags).ok());
  EXPECT_THAT(::testing::internal::GetCapturedStdout(),
              AllOf(HasSubstr("split against whole: pays below P_attention / P_compute = 0.700"),
                    HasSubstr("these prices have 0.419: it pays"), HasSubstr("Lamina's ratio: 0.42"),
                    HasSubstr("Step-3's ratio: 0.40")));
  flags.prices.overrides.push_back("h20=9");
  ::testing::internal::CaptureStdout();
  ASSERT_TRUE(RunBenchCost(flags).ok());
  EXPECT_THAT(::testing::internal::GetCapturedStdout(), HasSubstr("it does not pay"));
}

TEST_F(BenchCost, NamesWhatIsWrong) {
  BenchCostFlags flags = Flags();
  flags.prices.overrides = {};
  EXPECT_THAT(ErrorOf(flags), HasSubstr("--prices: names no table"));
  flags.prices.overrides = {"h100=1"};
  EXPECT_THAT(ErrorOf(flags), HasSubstr("has no device 'h20'; it has h100"));
  flags.prices.overrides = {"h100=nan"};
  EXPECT_THAT(ErrorOf(flags), HasSubstr("--price: 'h100=nan'"));
  flags = Flags();
  flags.prices.file = (folder / "none.json").string();
  EXPECT_THAT(ErrorOf(flags), HasSubstr("none.json: cannot be read"));
  flags = Flags();
  flags.utilization = 0;
  EXPECT_THAT(ErrorOf(flags), HasSubstr("--utilization: 0"));
  flags.layout = {"whole"};
  EXPECT_THAT(ErrorOf(flags), HasSubstr("--layout: 'whole' is not NAME=RESULT.json@"));
  flags = Flags();
  flags.layout = {"whole=" + Result("w.json", 10, 5, 0) + "@compute.h100:4"};
  EXPECT_THAT(ErrorOf(flags), HasSubstr("w.json: total_output_tokens: there are none"));
  flags.layout = {"whole=" + folder.string() + "/nowhere@compute.h100:4"};
  EXPECT_THAT(ErrorOf(flags), HasSubstr("nowhere: cannot be read"));
  std::ofstream(folder / "half.json") << "{\"duration\": 3, ";
  flags.layout = {"whole=" + (folder / "half.json").string() + "@compute.h100:4"};
  EXPECT_THAT(ErrorOf(flags), HasSubstr("half.json: is not the JSON of"));
}

}  // namespace
}  // namespace dovetail::cli
