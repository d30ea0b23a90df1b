#pragma once
#include <optional>
#include <string>
#include <vector>

#include "loadgen/measurement.h"
#include "plan/cost.h"
#include "report/figure.h"

// What the reports of several commands have in common.
// Threads: pure.

namespace dovetail::cli {

inline constexpr const char* kLatencyAgainstRate = "TTFT and TPOT against the rate of requests";
inline constexpr const char* kCostAgainstSlo = "Cost against the service level objective";
inline constexpr const char* kBreakEven = "The price ratio at which a split breaks even";
inline constexpr const char* kPredictedAgainstMeasured = "Predicted against measured";
inline constexpr const char* kWhereTimeGoes = "Where each millisecond goes";

// `missing` says what is not there and how to get it.
report::Figure NotShown(const std::string& title, const std::string& missing);

// Whether values differ so much that a linear axis would hide the small ones.
bool WantsLogarithm(const std::vector<double>& values);

// Marks a limit, in the unit of the axis, on a chart of latencies that has these `values`, and makes the axis
// logarithmic where they need that. A limit that lies far above them is named at the axis instead, so that it does not
// flatten them.
void FinishLatencies(const std::vector<double>& values, const std::optional<double>& limit_ms,
                     report::PointChart& chart);

// "TTFT 500 ms, TPOT 50 ms"
std::string LimitsText(const loadgen::Goodput& goodput);

// A split layout against a whole one, with low and with high prices.
struct SplitAgainstWhole {
  std::string split, whole;
  plan::RelativeCost low, high;
  double ratio_low = 0, ratio_high = 0;  // that the prices have
};

// Lines of the split's price of a token over the whole's, by the price ratio of their devices; where each crosses 1 is
// its break-even. Known ratios of papers are marked, and those of the prices. Not empty.
report::Figure BreakEvenFigure(const std::vector<SplitAgainstWhole>& all);

}  // namespace dovetail::cli
