#include "server/cli/plan_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "plan/device_profile.h"
#include "tests/plan/small_profile.h"
#include "tests/support/test_data.h"

namespace dovetail::cli {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

class PlanCommand : public ::testing::Test {
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
    return flags;
  }
  static std::pair<absl::Status, std::string> Run(const PlanFlags& flags) {
    ::testing::internal::CaptureStdout();
    const absl::Status status = RunPlan(flags);
    return {status, ::testing::internal::GetCapturedStdout()};
  }
  static std::string ErrorOf(const PlanFlags& flags) { return std::string(Run(flags).first.message()); }
};

TEST_F(PlanCommand, PrintsTheCheapestLayoutAndWhatItIsCheaperThan) {
  PlanFlags flags = Flags();
  const auto [status, table] = Run(flags);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_THAT(table, HasSubstr("* compute.small:1 "));
  EXPECT_THAT(table, HasSubstr("  compute.small:1,attention.small:1 "));
  EXPECT_THAT(table, HasSubstr("SLO: 99 % of requests with ttft <= 1000 ms, tpot <= 100 ms"));
  EXPECT_THAT(table, AllOf(HasSubstr("Lamina's ratio: 0.42"), HasSubstr("Step-3's ratio: 0.40")));
  EXPECT_THAT(table, HasSubstr("not in these predictions:"));
  flags.json = true;
  const auto [again, text] = Run(flags);
  ASSERT_TRUE(again.ok()) << again;
  const json out = json::parse(text);
  EXPECT_EQ(out["cheapest"], "compute.small:1");
  EXPECT_EQ(out["cheapest_split"], "compute.small:1,attention.small:1");
  const json& first = out["layouts"][0];
  EXPECT_TRUE(first["meets_slo"].get<bool>());
  // 6.98e9 weights of layers and 0.525e9 of the head at 1 ps.
  EXPECT_NEAR(first["tpot_ms"]["p50"].get<double>(), 7.5, 0.2);
  EXPECT_EQ(first["binds"], "weights");
  EXPECT_GT(first["at_most"]["load"].get<double>(), 1);
  EXPECT_LT(out["break_even"]["price_ratio_low"].get<double>(), 0.42) << "identical devices";
}

TEST_F(PlanCommand, Int8TakesHalfTheRoomOfBfloat16) {
  PlanFlags flags = Flags();
  auto profile = plan::ParseDeviceProfile(::dovetail::test::ReadFile(flags.profiles[0]), "small.json");
  ASSERT_TRUE(profile.ok()) << profile.status();
  profile->attention.push_back({DType::kBF16, 128, 4, 1e12 * 260 / 512, 1e14, KvStorage::kInt8});  // as fast a token
  flags.profiles = {Write("small.json", plan::ToJson(*profile))};
  flags.json = true;
  double usage[2];
  for (const bool int8 : {false, true}) {
    flags.kv_cache_dtype = int8 ? "int8" : "auto";
    const auto [status, text] = Run(flags);
    ASSERT_TRUE(status.ok()) << status;
    const json out = json::parse(text);
    EXPECT_EQ(out["kv_cache_dtype"], int8 ? "int8" : "bfloat16");
    usage[int8] = out["layouts"][0]["most_kv_usage"].get<double>();
  }
  EXPECT_NEAR(usage[1] / usage[0], 16640.0 / 32768, 0.01);
}

TEST_F(PlanCommand, PredictsLayoutsThatAreNamed) {
  PlanFlags flags = Flags();
  flags.devices = "";
  flags.layouts = {"compute.small:1", "compute.small:1,attention.small:2"};
  flags.json = true;
  const auto [status, text] = Run(flags);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(json::parse(text)["layouts"].size(), 2u);
  flags.devices = "small";
  EXPECT_THAT(ErrorOf(flags), HasSubstr("--layout: names the machines"));
}

TEST_F(PlanCommand, ReadsATraceAndSaysWhichLineIsWrong) {
  PlanFlags flags = Flags();
  flags.workload = Write("trace.jsonl",
                         "{\"timestamp\": 0, \"input_length\": 100, \"output_length\": 5}\n"
                         "{\"timestamp\": 4, \"input_length\": 50, \"output_length\": 5}\n");
  flags.json = true;
  const auto [status, text] = Run(flags);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(json::parse(text)["requests"], 2);
  flags.workload = Write("negative.jsonl", "{\"timestamp\": -1, \"input_length\": 100, \"output_length\": 5}\n");
  EXPECT_THAT(ErrorOf(flags), AllOf(HasSubstr("negative.jsonl: line 1: timestamp: -1")));
  flags.workload = Write("nan.jsonl", "{\"timestamp\": NaN, \"input_length\": 100, \"output_length\": 5}\n");
  EXPECT_THAT(ErrorOf(flags), HasSubstr("nan.jsonl: line 1"));
  flags.workload = Write("long.jsonl", "\n{\"timestamp\": 0, \"input_length\": 9000, \"output_length\": 5}\n");
  EXPECT_THAT(ErrorOf(flags), HasSubstr("long.jsonl: line 2: 9000 and 5 tokens are more than the model's 8192"));
  flags.workload = (folder / "nowhere").string();
  EXPECT_THAT(ErrorOf(flags), HasSubstr("nowhere"));
  flags.workload = "8190/5";
  EXPECT_THAT(ErrorOf(flags), HasSubstr("--workload: 8190/5: 8190 and 5 tokens"));
  flags.workload = "0/5";
  EXPECT_THAT(ErrorOf(flags), HasSubstr("lengths are in 1.."));
}

TEST_F(PlanCommand, RefusesWhatItKnowsNothingOf) {
  PlanFlags flags = Flags();
  flags.devices = "small:1,h20:2";
  flags.prices.overrides.push_back("h20=0.8");
  EXPECT_THAT(ErrorOf(flags), HasSubstr("--devices: h20 has a price and no profile"));
  flags.devices = "h2o";
  EXPECT_THAT(ErrorOf(flags), HasSubstr("--devices: there is no device h2o; there are profiles of small"));
  flags.devices = "small:x";
  EXPECT_THAT(ErrorOf(flags), HasSubstr("--devices: 'small:x' is not DEVICE:COUNT"));
  flags = Flags();
  flags.prices.overrides = {"other=1"};
  EXPECT_THAT(ErrorOf(flags), HasSubstr("has no device 'small'"));
  flags.prices.overrides = {"small=nan"};
  EXPECT_THAT(ErrorOf(flags), HasSubstr("--price: 'small=nan'"));
  flags = Flags();
  flags.kv_cache_dtype = "float16";
  EXPECT_THAT(ErrorOf(flags), HasSubstr("small: its profile has no attention over float16 K and V"));
  flags.kv_cache_dtype = "int8_per_token_head";
  EXPECT_THAT(ErrorOf(flags), HasSubstr("small: its profile has no attention over int8 K and V"));
  flags = Flags();
  flags.profiles = {Write("bad.json", "{\"dovetail_device_profile\": 1,\n \"name\": 3}")};
  EXPECT_THAT(ErrorOf(flags), HasSubstr("bad.json: name: 3 is no text"));
  flags = Flags();
  flags.link = "carrier-pigeon";
  EXPECT_THAT(ErrorOf(flags), HasSubstr("--link: 'carrier-pigeon'"));
  flags = Flags();
  for (const char* rate : {"nan", "0", "-1", "fast"}) {
    flags.request_rate = rate;
    EXPECT_THAT(ErrorOf(flags), HasSubstr("--request-rate")) << rate;
  }
  flags = Flags();
  flags.slo = {"ttft:nan"};
  EXPECT_THAT(ErrorOf(flags), HasSubstr("--slo: 'ttft:nan'"));
  flags.slo = {"latency:3"};
  EXPECT_THAT(ErrorOf(flags), HasSubstr("--slo: there is no limit 'latency'"));
}

TEST_F(PlanCommand, WhereNothingMeetsTheSloTheTableStaysAndTheNearestIsNamed) {
  PlanFlags flags = Flags();
  flags.slo = {"tpot:1"};
  flags.budget = 10;
  const auto [status, table] = Run(flags);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("--slo: no layout of these devices keeps to it (99 % of requests with tpot <= 1 ms) "
                              "within --budget 10 $/h"),
                    HasSubstr("came nearest")));
  EXPECT_THAT(table, HasSubstr("compute.small:1 "));
  flags.budget = 1;
  EXPECT_THAT(ErrorOf(flags), HasSubstr("every layout costs more"));
}

}  // namespace
}  // namespace dovetail::cli
