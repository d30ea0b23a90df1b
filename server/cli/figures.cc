#include "server/cli/figures.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "report/scale.h"

namespace dovetail::cli {
namespace {

using report::Short;

constexpr double kManyTimes = 20;    // between the largest and the smallest value of a linear axis
constexpr double kFarAbove = 2;      // of the largest value: a limit beyond it is not drawn
constexpr double kLeastRatio = 0.6;  // that the axis shows, so that the known ratios are not at its edge
constexpr double kMostRatio = 3;     // a break-even beyond it is not shown
constexpr double kBeyond = 1.25;     // how far the lines go on behind the last thing to see

// The right end of the axis: all ratios and break-evens, as far as they can be seen.
double LastRatio(const std::vector<SplitAgainstWhole>& all) {
  double last = kLeastRatio / kBeyond;
  for (const SplitAgainstWhole& one : all)
    for (const double ratio : {one.ratio_low, one.ratio_high, one.low.BreakEven(), one.high.BreakEven()})
      if (std::isfinite(ratio)) last = std::max(last, std::min(ratio, kMostRatio));
  return last * kBeyond;
}

std::string Between(double a, double b) {
  return Short(a) == Short(b) ? Short(a) : absl::StrCat(Short(std::min(a, b)), " to ", Short(std::max(a, b)));
}

std::string Verdict(const SplitAgainstWhole& one) {
  const double low = one.low.At(one.ratio_low), high = one.high.At(one.ratio_high);
  return low < 1 && high < 1 ? "pays" : low >= 1 && high >= 1 ? "does not pay" : "depends on the prices";
}

void AddLines(const SplitAgainstWhole& one, int color, double last, report::PointChart& chart) {
  const bool same = Short(one.low.BreakEven()) == Short(one.high.BreakEven());
  const auto add = [&](const plan::RelativeCost& cost, const std::string& name, bool dashed) {
    report::Series line{name, {}, true, dashed, color};
    for (const double ratio : {0.0, last})
      line.points.push_back({ratio, cost.At(ratio), absl::StrCat("at ", Short(ratio), ": ", Short(cost.At(ratio)))});
    chart.series.push_back(std::move(line));
  };
  const std::string name = absl::StrCat(one.split, " against ", one.whole);
  add(one.low, same ? name : name + ", low prices", false);
  if (!same) add(one.high, name + ", high prices", true);
}

void AddMarks(const std::vector<SplitAgainstWhole>& all, report::PointChart& chart) {
  for (const plan::KnownRatio& known : plan::kKnownRatios)
    chart.on_x.push_back({known.ratio, absl::StrCat(known.whose, " ", Short(known.ratio))});
  std::vector<std::string> names;
  for (const SplitAgainstWhole& one : all)
    for (const double ratio : {one.ratio_low, one.ratio_high}) {
      const std::string name = absl::StrCat("these prices ", Short(ratio));
      if (std::find(names.begin(), names.end(), name) != names.end()) continue;
      names.push_back(name);
      chart.on_x.push_back({ratio, name});
    }
  chart.on_y.push_back({1, "both cost the same"});
}

}  // namespace

report::Figure NotShown(const std::string& title, const std::string& missing) {
  report::Figure figure;
  figure.title = title;
  figure.missing = missing;
  return figure;
}

bool WantsLogarithm(const std::vector<double>& values) {
  double least = INFINITY, most = 0;
  for (const double value : values) {
    if (!std::isfinite(value)) continue;
    least = std::min(least, value);
    most = std::max(most, value);
  }
  return least > 0 && most > kManyTimes * least;
}

void FinishLatencies(const std::vector<double>& values, const std::optional<double>& limit_ms,
                     report::PointChart& chart) {
  chart.y.logarithmic = WantsLogarithm(values);
  if (!limit_ms.has_value()) return;
  const std::string name = absl::StrCat("limit ", Short(*limit_ms), " ms");
  const double most = values.empty() ? 0 : *std::max_element(values.begin(), values.end());
  if (*limit_ms <= kFarAbove * most)
    chart.on_y.push_back({*limit_ms, name});
  else
    absl::StrAppend(&chart.y.name, " (", name, ": above)");
}

std::string LimitsText(const loadgen::Goodput& goodput) {
  std::vector<std::string> limits;
  const auto add = [&](const char* name, const std::optional<double>& limit) {
    if (limit.has_value()) limits.push_back(absl::StrCat(name, " ", Short(*limit), " ms"));
  };
  add("TTFT", goodput.ttft_ms);
  add("TPOT", goodput.tpot_ms);
  add("E2E", goodput.e2el_ms);
  return absl::StrJoin(limits, ", ");
}

report::Figure BreakEvenFigure(const std::vector<SplitAgainstWhole>& all) {
  report::Figure figure;
  figure.title = kBreakEven;
  report::PointChart chart;
  chart.title = "An output token of the split layout, in those of the whole one";
  chart.x.name = "P_attention / P_compute";
  chart.y.name = "price of the split / price of the whole";
  figure.table.head = {"split against whole", "breaks even at", "these prices have", "so the split"};
  for (const plan::KnownRatio& known : plan::kKnownRatios)
    figure.table.head.push_back(absl::StrCat("at ", known.whose, "'s ", Short(known.ratio)));
  const double last = LastRatio(all);
  std::vector<std::string> says;
  for (size_t i = 0; i < all.size(); ++i) {
    const SplitAgainstWhole& one = all[i];
    AddLines(one, static_cast<int>(i), last, chart);
    const std::string even = Between(one.low.BreakEven(), one.high.BreakEven());
    figure.table.rows.push_back(
        {absl::StrCat(one.split, " against ", one.whole), even, Between(one.ratio_low, one.ratio_high), Verdict(one)});
    for (const plan::KnownRatio& known : plan::kKnownRatios)
      figure.table.rows.back().push_back(
          absl::StrCat(Between(one.low.At(known.ratio), one.high.At(known.ratio)), " times"));
    says.push_back(
        one.low.BreakEven() <= 0 && one.high.BreakEven() <= 0
            ? absl::StrCat("No price of attention devices makes ", one.split, " pay against ", one.whole, ".")
            : absl::StrCat(one.split, " is cheaper than ", one.whole, " where an attention device costs less than ",
                           even, " of a compute device."));
  }
  AddMarks(all, chart);
  figure.says = absl::StrJoin(says, " ");
  figure.charts = {std::move(chart)};
  return figure;
}

}  // namespace dovetail::cli
