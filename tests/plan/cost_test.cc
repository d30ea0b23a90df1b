#include "plan/cost.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "plan/catalogue.h"
#include "tests/support/test_data.h"

namespace dovetail::plan {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Lamina's devices at its own prices.
Catalogue Prices() {
  Catalogue catalogue{"test", "2026-11-25", {}};
  catalogue.Override("h100", 11.06);
  catalogue.Override("h20", 4.63);
  catalogue.Override("host", 1);
  return catalogue;
}
Layout Of(const std::string& name, const std::string& machines) { return {name, *ParseMachines(machines)}; }

TEST(Cost, EveryMachineIsCharged) {
  const auto cost = CostOf(Of("split", "compute.h100:2,attention.h20:4,host.host:3"), {2000, 500, 250.0}, Prices(),
                           PriceOf::kLow, 0.5);
  ASSERT_TRUE(cost.ok()) << cost.status();
  EXPECT_NEAR(cost->usd_per_hour, 43.64, 1e-9);
  EXPECT_NEAR(*cost->output_usd, 43.64 / (500 * 1800) * 1e6, 1e-9);
  EXPECT_NEAR(*cost->input_usd, 43.64 / (2000 * 1800) * 1e6, 1e-9);
  EXPECT_NEAR(*cost->mixed_usd, 43.64 / (2500 * 1800) * 1e6, 1e-9);
  EXPECT_NEAR(*cost->good_output_usd, 2 * *cost->output_usd, 1e-9);
  EXPECT_NEAR(cost->output_tokens_s_per_usd_h, 250 / 43.64, 1e-9);
}

TEST(Cost, AnHourAtFullLoadCostsLessThanOneAtPart) {
  const Layout layout = Of("whole", "compute.h100:1");
  const double full = *CostOf(layout, {0, 100, {}}, Prices(), PriceOf::kLow, 1)->output_usd;
  EXPECT_NEAR(*CostOf(layout, {0, 100, {}}, Prices(), PriceOf::kLow, 0.65)->output_usd, full / 0.65, 1e-9);
  for (const double bad : {0.0, -1.0, 1.01, std::nan("")})
    EXPECT_THAT(std::string(CostOf(layout, {0, 100, {}}, Prices(), PriceOf::kLow, bad).status().message()),
                HasSubstr("--utilization"));
}

TEST(Cost, NothingThatWasNotMadeHasAPrice) {
  const auto cost = CostOf(Of("whole", "compute.h100:1"), {0, 100, {}}, Prices(), PriceOf::kLow, 1);
  EXPECT_FALSE(cost->input_usd.has_value());
  EXPECT_FALSE(cost->good_output_usd.has_value());
  EXPECT_THAT(std::string(CostOf(Of("x", "compute.tpu:1"), {1, 1, {}}, Prices(), PriceOf::kLow, 1).status().message()),
              AllOf(HasSubstr("no device 'tpu'"), HasSubstr("h100, h20, host"), HasSubstr("--price tpu=USD")));
}

TEST(BreakEven, IsWhereBothLayoutsCostTheSame) {
  const Layout whole = Of("whole", "compute.h100:4"), split = Of("split", "compute.h100:2,attention.h20:4,host.host:1");
  const Throughput of_whole{0, 1000, {}}, of_split{0, 900, {}};
  const auto ratio = BreakEvenRatio(whole, of_whole, split, of_split, Prices(), PriceOf::kLow);
  ASSERT_TRUE(ratio.ok()) << ratio.status();
  Catalogue at_break_even = Prices();
  at_break_even.Override("h20", *ratio * 11.06);
  EXPECT_NEAR(*CostOf(whole, of_whole, at_break_even, PriceOf::kLow, 1)->output_usd,
              *CostOf(split, of_split, at_break_even, PriceOf::kLow, 1)->output_usd, 1e-9);
}

TEST(BreakEven, WithoutHostsItDependsOnNoPrice) {
  const Layout whole = Of("whole", "compute.h100:4"), split = Of("split", "compute.h100:2,attention.h20:4");
  Catalogue cheap = Prices();
  cheap.Override("h100", 1.3);
  for (const Catalogue& catalogue : {Prices(), cheap})  // (4 x 1.2 - 2) / 4
    EXPECT_NEAR(*BreakEvenRatio(whole, {0, 1000, {}}, split, {0, 1200, {}}, catalogue, PriceOf::kLow), 0.7, 1e-12);
}

TEST(BreakEven, IsNotPositiveWhereTheSplitMakesTooFewTokens) {
  // One H200 against the same one and a second: 9,079 and 6,696 tokens/s (docs/cost.md).
  EXPECT_NEAR(*BreakEvenRatio(Of("whole", "compute.h100:1"), {0, 9079, {}},
                              Of("split", "compute.h100:1,attention.h100:1"), {0, 6696, {}}, Prices(), PriceOf::kLow),
              -0.2625, 1e-4);
}

TEST(RelativeCosts, AreWhatTheSplitCostsAtEachRatioAndOneAtTheBreakEven) {
  const Layout whole = Of("whole", "compute.h100:4"), split = Of("split", "compute.h100:2,attention.h20:4,host.host:1");
  const Throughput of_whole{0, 1000, {}}, of_split{0, 900, {}};
  const auto line = RelativeCostOf(whole, of_whole, split, of_split, Prices(), PriceOf::kLow);
  ASSERT_TRUE(line.ok()) << line.status();
  for (const double ratio : {0.0, 0.42, 1.5}) {
    Catalogue at = Prices();
    at.Override("h20", ratio * 11.06);
    EXPECT_NEAR(line->At(ratio),
                *CostOf(split, of_split, at, PriceOf::kLow, 1)->output_usd /
                    *CostOf(whole, of_whole, at, PriceOf::kLow, 1)->output_usd,
                1e-9)
        << ratio;
  }
  EXPECT_NEAR(line->BreakEven(), *BreakEvenRatio(whole, of_whole, split, of_split, Prices(), PriceOf::kLow), 1e-12);
  Catalogue free = Prices();
  free.Override("h20", 0);
  EXPECT_THAT(std::string(RelativeCostOf(Of("gift", "compute.h20:1"), of_whole, split, of_split, free, PriceOf::kLow)
                              .status()
                              .message()),
              HasSubstr("gift: its machines cost nothing"));
}

TEST(BreakEven, ComparesAWholeLayoutWithASplitOne) {
  const Layout whole = Of("whole", "compute.h100:1"), split = Of("split", "compute.h100:1,attention.h20:1");
  EXPECT_THAT(
      std::string(BreakEvenRatio(whole, {0, 1, {}}, whole, {0, 1, {}}, Prices(), PriceOf::kLow).status().message()),
      HasSubstr("needs compute and attention devices"));
  EXPECT_THAT(
      std::string(BreakEvenRatio(split, {0, 1, {}}, split, {0, 1, {}}, Prices(), PriceOf::kLow).status().message()),
      HasSubstr("is split itself"));
  EXPECT_THAT(
      std::string(BreakEvenRatio(whole, {0, 0, {}}, split, {0, 1, {}}, Prices(), PriceOf::kLow).status().message()),
      HasSubstr("output tokens of both"));
  EXPECT_NEAR(*PriceRatio(split, Prices(), PriceOf::kLow), 0.4186, 1e-4) << "Lamina's";
}

TEST(Machines, AreReadByRoleDeviceAndCount) {
  const auto machines = ParseMachines("compute.h100:2,attention.h20,host.a.b:3");
  ASSERT_TRUE(machines.ok()) << machines.status();
  EXPECT_EQ((*machines)[1].count, 1);
  EXPECT_EQ((*machines)[2].device, "a.b");
  EXPECT_EQ((*machines)[2].role, Role::kHost);
  for (const char* bad : {"", "h100:2", "gpu.h100:2", "compute.h100:0", "compute.h100:-1", "compute.h100:x",
                          "compute.:1", "compute.h100:2,"})
    EXPECT_FALSE(ParseMachines(bad).ok()) << bad;
}

TEST(Catalogues, BadOnesAreRefusedByDeviceAndField) {
  const auto error = [](const std::string& devices) {
    return std::string(ParseCatalogue("{\"dated\": \"2026-11-25\", \"devices\": {\"h100\": " + devices + "}}", "p.json")
                           .status()
                           .message());
  };
  EXPECT_THAT(error(R"({"high_usd_per_hour": 2, "source": "s"})"),
              HasSubstr("p.json: devices.h100: has no low_usd_per_hour"));
  EXPECT_THAT(error(R"({"low_usd_per_hour": -1, "high_usd_per_hour": 2, "source": "s"})"),
              HasSubstr("devices.h100: low_usd_per_hour: -1"));
  EXPECT_THAT(error(R"({"low_usd_per_hour": "1", "high_usd_per_hour": 2, "source": "s"})"),
              HasSubstr("low_usd_per_hour: \"1\""));
  EXPECT_THAT(error(R"({"low_usd_per_hour": 3, "high_usd_per_hour": 2, "source": "s"})"),
              HasSubstr("is more than high"));
  EXPECT_THAT(error(R"({"low_usd_per_hour": 1, "high_usd_per_hour": 2})"),
              HasSubstr("source: says where the prices are from"));
  EXPECT_THAT(error(R"({"low_usd_per_hour": 1, "high_usd_per_hour": 2, "source": "s", "tflops": 3})"),
              HasSubstr("there is no field tflops"));
  EXPECT_THAT(std::string(ParseCatalogue("{\"devices\": {}}", "p.json").status().message()), HasSubstr("dated"));
  EXPECT_THAT(std::string(ParseCatalogue("{", "p.json").status().message()), HasSubstr("p.json: is not JSON"));
}

TEST(Catalogues, TheOneOfTheProjectCanBeRead) {
  const auto catalogue =
      ParseCatalogue(::dovetail::test::ReadFile(::dovetail::test::ProjectFile("prices/2026-11-25.json")), "prices");
  ASSERT_TRUE(catalogue.ok()) << catalogue.status();
  EXPECT_GE(catalogue->devices.size(), 7u);
  EXPECT_DOUBLE_EQ(catalogue->Find("h20")->high_usd_per_hour, 4.63);
}

}  // namespace
}  // namespace dovetail::plan
