#include "server/cli/plan_html_report.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "report/scale.h"
#include "server/cli/plan_report.h"

namespace dovetail::cli {
namespace {

using plan::LayoutPlan;
using plan::Plan;
using plan::PlanInput;
using report::Figure;
using report::Short;

constexpr double kBand = 0.15;  // of the chart of predictions
constexpr const char* kMetrics[] = {"ttft", "tpot", "e2el"};
constexpr const char* kMetricNames[] = {"TTFT", "TPOT", "E2E"};

std::string Dollars(const std::optional<double>& low, const std::optional<double>& high) {
  if (!low.has_value() || !high.has_value()) return "-";
  return Short(*low) == Short(*high) ? Short(*low) : absl::StrCat(Short(*low), " to ", Short(*high));
}

// Requests a second of the load; 0 where all come at once.
double RateOf(const PlanInput& input) {
  const double span = input.requests.back().at_s - input.requests.front().at_s;
  return span > 0 ? static_cast<double>(input.requests.size()) / span : 0;
}

report::PointChart LatencyChart(const PlanInput& input, const PlanCurves& curves, const std::string& title,
                                plan::Outcome::Percentiles plan::Outcome::*metric, const std::optional<double>& limit) {
  report::PointChart chart;
  chart.title = title;
  chart.x = {"requests per second"};
  chart.y = {"ms"};
  std::vector<double> values;
  for (size_t i = 0; i < curves.loads.front().layouts.size(); ++i) {
    const std::string& name = curves.loads.front().layouts[i].layout.name;
    report::Series median{name + ", median", {}, true, false, static_cast<int>(i)};
    report::Series tail{name + ", p99", {}, true, true, static_cast<int>(i)};
    for (const AtLoad& at : curves.loads)
      for (const LayoutPlan& one : at.layouts) {
        if (one.layout.name != name) continue;
        const double rate = at.times * RateOf(input);
        const auto& p = one.outcome.*metric;
        median.points.push_back({rate, 1e3 * p.p50, absl::StrCat("median: ", Short(1e3 * p.p50), " ms")});
        tail.points.push_back({rate, 1e3 * p.p99, absl::StrCat("p99: ", Short(1e3 * p.p99), " ms")});
        values.insert(values.end(), {1e3 * p.p50, 1e3 * p.p99});
      }
    chart.series.insert(chart.series.end(), {std::move(median), std::move(tail)});
  }
  FinishLatencies(values, limit.has_value() ? std::optional(1e3 * *limit) : std::nullopt, chart);
  return chart;
}

Figure LatencyFigure(const PlanInput& input, const PlanCurves& curves) {
  if (curves.loads.empty() || curves.loads.front().layouts.empty())
    return NotShown(kLatencyAgainstRate,
                    RateOf(input) > 0 ? "no layout can serve this load at all; the table of the plan says why."
                                      : "all requests come at once, so there is no rate; --request-rate gives one.");
  Figure figure;
  figure.title = kLatencyAgainstRate;
  figure.says = "Predicted: the load of this plan, slower and faster, on its cheapest layouts.";
  figure.charts = {LatencyChart(input, curves, "Time to first token", &plan::Outcome::ttft, input.slo.ttft_s),
                   LatencyChart(input, curves, "Time per output token", &plan::Outcome::tpot, input.slo.tpot_s)};
  figure.table.head = {"requests/s",      "layout",   "TTFT median, ms", "TTFT p99",
                       "TPOT median, ms", "TPOT p99", "output tokens/s"};
  for (const AtLoad& at : curves.loads)
    for (const LayoutPlan& one : at.layouts) {
      const plan::Outcome& out = one.outcome;
      figure.table.rows.push_back({Short(at.times * RateOf(input)), one.layout.name, Short(1e3 * out.ttft.p50),
                                   Short(1e3 * out.ttft.p99), Short(1e3 * out.tpot.p50), Short(1e3 * out.tpot.p99),
                                   Short(out.throughput.output_tokens_s)});
    }
  return figure;
}

Figure CostFigure(const PlanInput& input, const PlanCurves& curves) {
  const auto any = [](const AtSlo& at) { return at.whole.has_value() || at.split.has_value(); };
  if (SloText(input.slo) == "none")
    return NotShown(kCostAgainstSlo, "this plan has no limit; --slo ttft:500 tpot:50 names some.");
  if (curves.slos.empty())
    return NotShown(kCostAgainstSlo, "no layout can serve this load at all; the table of the plan says why.");
  if (std::none_of(curves.slos.begin(), curves.slos.end(), any))
    return NotShown(kCostAgainstSlo,
                    absl::StrCat("no layout meets the limits, not even ", Short(curves.slos.back().times),
                                 " times of them; allow more --devices, or a lower rate."));
  Figure figure;
  figure.title = kCostAgainstSlo;
  figure.says =
      absl::StrCat("Predicted: the limits of this plan (", SloText(input.slo),
                   ") made tighter and looser, and the same layouts at the largest load within them. Where a point "
                   "is missing, the layout does not meet the limits even at the load of the plan.");
  report::PointChart chart;
  chart.title = "At the largest load within the limits";
  chart.x = {"limits, in those of this plan"};
  chart.y = {"$ per million output tokens"};
  figure.table.head = {"limits, times", "whole, $ per million", "split, $ per million"};
  for (const AtSlo& at : curves.slos) {
    const auto text = [](const std::optional<AtSlo::Cost>& cost) {
      return cost.has_value() ? Dollars(cost->low, cost->high) : std::string("-");
    };
    figure.table.rows.push_back({Short(at.times), text(at.whole), text(at.split)});
  }
  const auto add = [&](const std::string& name, const std::optional<AtSlo::Cost> AtSlo::*kind,
                       double AtSlo::Cost::*price, bool dashed, int color) {
    report::Series line{name, {}, true, dashed, color};
    for (const AtSlo& at : curves.slos)
      if ((at.*kind).has_value())
        line.points.push_back({at.times, *(at.*kind).*price, absl::StrCat("$ ", Short(*(at.*kind).*price))});
    if (!line.points.empty()) chart.series.push_back(std::move(line));
  };
  const bool range = std::any_of(curves.slos.begin(), curves.slos.end(), [](const AtSlo& at) {
    return (at.whole.has_value() && at.whole->low != at.whole->high) ||
           (at.split.has_value() && at.split->low != at.split->high);
  });
  add(range ? "whole, low prices" : "whole", &AtSlo::whole, &AtSlo::Cost::low, false, 0);
  add(range ? "split, low prices" : "split", &AtSlo::split, &AtSlo::Cost::low, false, 1);
  if (range) add("whole, high prices", &AtSlo::whole, &AtSlo::Cost::high, true, 0);
  if (range) add("split, high prices", &AtSlo::split, &AtSlo::Cost::high, true, 1);
  figure.charts = {std::move(chart)};
  return figure;
}

Figure MeasuredFigure(const std::vector<MeasuredLoad>& measured) {
  if (measured.empty())
    return NotShown(
        kPredictedAgainstMeasured,
        "no measurement was given. `dovetail bench serve --save-result` measures this load on a layout, and "
        "--measured LAYOUT=RESULT.json sets it against its prediction.");
  Figure figure;
  figure.title = kPredictedAgainstMeasured;
  figure.says =
      absl::StrFormat("On the line a prediction is right, in the band it is off by %.0f %% or less.", 100 * kBand);
  report::PointChart chart;
  chart.title = "Latencies: mean and percentiles";
  chart.x = {"measured, ms", true};
  chart.y = {"predicted, ms", true};
  chart.diagonal = true;
  chart.diagonal_band = kBand;
  figure.table.head = {"layout", "what", "measured, ms", "predicted, ms", "off by"};
  for (size_t metric = 0; metric < std::size(kMetrics); ++metric) {
    report::Series points{kMetricNames[metric], {}, false, false, static_cast<int>(metric)};
    const std::string name = kMetrics[metric];
    for (const MeasuredLoad& load : measured)
      for (const MeasuredLoad::Value& value : load.values) {
        if (value.name.compare(0, name.size(), name) != 0) continue;
        const std::string what = absl::StrCat(points.name, value.name.substr(name.size()));
        const std::string off = absl::StrFormat("%+.0f %%", 100 * value.Error());
        points.points.push_back({value.measured_ms, value.predicted_ms,
                                 absl::StrCat(load.layout, ": ", what, ": ", Short(value.measured_ms), " ms measured, ",
                                              Short(value.predicted_ms), " ms predicted (", off, ")")});
        figure.table.rows.push_back({load.layout, what, Short(value.measured_ms), Short(value.predicted_ms), off});
      }
    if (points.points.empty()) continue;
    absl::StrAppendFormat(&figure.says, " %s is off by %.0f %% on average.", points.name,
                          100 * MeanError(measured, name));
    chart.series.push_back(std::move(points));
  }
  figure.charts = {std::move(chart)};
  return figure;
}

Figure TimeFigure(const Plan& plan) {
  Figure figure;
  figure.title = kWhereTimeGoes;
  figure.says = "Predicted: what an average step of each layout consists of, one part after the other.";
  report::BarChart chart;
  chart.title = "An average step";
  chart.unit = "ms";
  figure.table.head = {"layout", "binds"};
  for (const size_t i : ShownLayouts(plan)) {
    const LayoutPlan& one = plan.tried[i];
    if (one.outcome.steps == 0) continue;
    chart.bars.push_back({one.layout.name, {}});
    figure.table.rows.push_back({one.layout.name, one.binds});
    for (const auto& [name, seconds] : PartsOf(one.outcome.parts)) {
      const double ms = 1e3 * seconds / static_cast<double>(one.outcome.steps);
      const std::string shown = std::string(name) == "kv_reads" ? "reading K and V" : name;
      if (chart.bars.size() == 1) chart.parts.push_back(shown);
      if (chart.bars.size() == 1) figure.table.head.push_back(shown + ", ms");
      chart.bars.back().values.push_back(ms);
      figure.table.rows.back().push_back(Short(ms));
    }
  }
  if (chart.bars.empty())
    return NotShown(kWhereTimeGoes,
                    "no layout can serve this load, so there is no step; the table of the plan says why.");
  figure.bars = {std::move(chart)};
  return figure;
}

Figure LayoutsFigure(const PlanInput& input, const Plan& plan) {
  Figure figure;
  figure.title = "The layouts that were tried";
  figure.says =
      absl::StrFormat("By price. SLO: %s. Prices of %s (%s), under this load for %g %% of the hours.",
                      SloText(input.slo), input.catalogue.name, input.catalogue.dated, 100 * input.utilization);
  figure.table.head = {"layout",       "$ per hour",      "within the SLO", "TTFT p99, ms",
                       "TPOT p99, ms", "output tokens/s", "$/M output",     "binds"};
  for (const LayoutPlan& one : plan.tried) {
    const plan::Outcome& out = one.outcome;
    figure.table.rows.push_back({one.layout.name, Dollars(one.usd_low, one.usd_high)});
    auto& row = figure.table.rows.back();
    if (!one.impossible.empty())
      row.insert(row.end(), {"impossible", "-", "-", "-", "-", one.impossible});
    else if (out.stopped)
      row.insert(row.end(), {"misses it", "-", "-", "-", "-", one.binds});
    else
      row.insert(row.end(), {absl::StrFormat("%.1f %%", 100 * out.good_share), Short(1e3 * out.ttft.p99),
                             Short(1e3 * out.tpot.p99), Short(out.throughput.output_tokens_s),
                             Dollars(one.low.output_usd, one.high.output_usd), one.binds});
  }
  return figure;
}

void AddFacts(const Plan& plan, report::Report& out) {
  out.facts.emplace_back("Cheapest layout",
                         plan.best.has_value() ? plan.tried[*plan.best].layout.name : "none meets the SLO");
  if (plan.best.has_value()) {
    const LayoutPlan& best = plan.tried[*plan.best];
    out.facts.emplace_back("$ per million output tokens", Dollars(best.low.output_usd, best.high.output_usd));
    out.facts.emplace_back("Within the SLO", absl::StrFormat("%.1f %%", 100 * best.outcome.good_share));
    out.facts.emplace_back("What binds", best.binds);
  }
  if (plan.break_even.has_value())
    out.facts.emplace_back("Split breaks even at",
                           Dollars(std::min(plan.break_even->ratio_low, plan.break_even->ratio_high),
                                   std::max(plan.break_even->ratio_low, plan.break_even->ratio_high)));
}

}  // namespace

absl::StatusOr<std::vector<SplitAgainstWhole>> BreakEvenOf(const PlanInput& input, const Plan& plan) {
  std::vector<SplitAgainstWhole> out;
  if (!plan.break_even.has_value()) return out;
  const LayoutPlan &whole = plan.tried[*plan.best_whole], &split = plan.tried[*plan.best_split];
  const auto made = [](const LayoutPlan& one) { return plan::Throughput{0, one.most_output_tokens_s, std::nullopt}; };
  const auto cost = [&](plan::PriceOf price) {
    return plan::RelativeCostOf(whole.layout, made(whole), split.layout, made(split), input.catalogue, price);
  };
  SplitAgainstWhole line{split.layout.name,           whole.layout.name,           {}, {},
                         plan.break_even->prices_low, plan.break_even->prices_high};
  DT_ASSIGN_OR_RETURN(line.low, cost(plan::PriceOf::kLow));
  DT_ASSIGN_OR_RETURN(line.high, cost(plan::PriceOf::kHigh));
  out.push_back(std::move(line));
  return out;
}

report::Report PlanReport(const PlanInput& input, const Plan& plan, const PlanCurves& curves,
                          const std::vector<MeasuredLoad>& measured, const std::vector<SplitAgainstWhole>& break_even) {
  report::Report out;
  out.title = absl::StrCat("A plan for ", input.work.name);
  out.subtitle = LoadText(input);
  AddFacts(plan, out);
  for (const char* limit : kNotPredicted)
    out.notes.push_back(absl::StrCat("Predictions take for granted that ", limit, "."));
  out.figures = {LayoutsFigure(input, plan), CostFigure(input, curves)};
  out.figures.push_back(break_even.empty()
                            ? NotShown(kBreakEven,
                                       "it needs a split layout and one that is not, both within the SLO; "
                                       "allow more --devices, or looser limits.")
                            : BreakEvenFigure(break_even));
  out.figures.push_back(LatencyFigure(input, curves));
  out.figures.push_back(TimeFigure(plan));
  out.figures.push_back(MeasuredFigure(measured));
  return out;
}

}  // namespace dovetail::cli
