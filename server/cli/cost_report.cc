#include "server/cli/cost_report.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/statistics.h"
#include "report/scale.h"

namespace dovetail::cli {
namespace {

using report::Figure;
using report::Short;
using Request = ResultDetails::Request;

constexpr int kLimits = 40;        // points of a curve of cost
constexpr double kMostTimes = 10;  // of the price without a limit: what costs more is not shown
constexpr double kTableLimits[] = {25, 50, 75, 90, 95, 99, 100};  // percentiles of the latencies, as limits
constexpr double kMillion = 1e6, kSecondsPerHour = 3600;

std::string Dollars(const std::optional<double>& low, const std::optional<double>& high) {
  if (!low.has_value() || !high.has_value()) return "-";
  return Short(*low) == Short(*high) ? Short(*low) : absl::StrCat(Short(*low), " to ", Short(*high));
}

Figure LatencyFigure(const CostReportInput& input) {
  Figure figure;
  figure.title = kLatencyAgainstRate;
  report::PointChart ttft{"Time to first token", {"requests per second"}, {"ms"}, {}, {}, {}};
  report::PointChart tpot{"Time per output token", {"requests per second"}, {"ms"}, {}, {}, {}};
  figure.table.head = {"layout", "requests/s", "TTFT median, ms", "TTFT p99", "TPOT median, ms", "TPOT p99"};
  std::vector<double> ttfts, tpots;
  for (size_t i = 0; i < input.layouts.size(); ++i) {
    const MeasuredLayout& one = input.layouts[i];
    if (one.details.rates.empty()) continue;
    const int color = static_cast<int>(i);
    const std::string &name = one.layout.name, tail = name + ", p99";
    report::Series of_ttft{name, {}, true, false, color}, last_ttft{tail, {}, true, true, color};
    report::Series of_tpot = of_ttft, last_tpot = last_ttft;
    for (const auto& at : one.details.rates) {
      const auto add = [&](report::Series& series, double value) {
        series.points.push_back(
            {at.rate, value, absl::StrCat(series.name, " at ", Short(at.rate), "/s: ", Short(value), " ms")});
      };
      add(of_ttft, at.ttft_median);
      add(last_ttft, at.ttft_p99);
      add(of_tpot, at.tpot_median);
      add(last_tpot, at.tpot_p99);
      ttfts.insert(ttfts.end(), {at.ttft_median, at.ttft_p99});
      tpots.insert(tpots.end(), {at.tpot_median, at.tpot_p99});
      figure.table.rows.push_back(
          {name, Short(at.rate), Short(at.ttft_median), Short(at.ttft_p99), Short(at.tpot_median), Short(at.tpot_p99)});
    }
    ttft.series.insert(ttft.series.end(), {std::move(of_ttft), std::move(last_ttft)});
    tpot.series.insert(tpot.series.end(), {std::move(of_tpot), std::move(last_tpot)});
  }
  if (ttft.series.empty())
    return NotShown(kLatencyAgainstRate,
                    "no result has a rate of requests with medians and 99th percentiles. `dovetail bench serve "
                    "--sweep-rates 1:64 --goodput ... --save-result --result-filename FILE` writes one a rate.");
  ttft.y.logarithmic = WantsLogarithm(ttfts);
  tpot.y.logarithmic = WantsLogarithm(tpots);
  figure.says = "As the results have them: medians as lines, 99th percentiles dashed.";
  figure.charts = {std::move(ttft), std::move(tpot)};
  return figure;
}

// Dollars for a million output tokens of requests whose latency is at most `limit`.
std::optional<double> CostAt(const MeasuredLayout& one, double usd_per_hour, double utilization,
                             double Request::*latency, double limit) {
  double tokens = 0;
  for (const Request& request : one.details.requests)
    if (request.*latency <= limit) tokens += static_cast<double>(request.output_tokens);
  if (!(tokens > 0) || !(one.details.seconds > 0)) return std::nullopt;
  return usd_per_hour * kMillion / (tokens / one.details.seconds * utilization * kSecondsPerHour);
}

std::vector<double> LatenciesOf(const CostReportInput& input, double Request::*latency) {
  std::vector<double> all;
  for (const MeasuredLayout& one : input.layouts)
    for (const Request& request : one.details.requests) all.push_back(request.*latency);
  return all;
}

report::PointChart CostChart(const CostReportInput& input, const char* name, double Request::*latency) {
  report::PointChart chart;
  chart.title = absl::StrCat("By the limit of ", name);
  chart.x = {absl::StrCat(name, " of at most, ms")};
  chart.y = {"$ per million output tokens within the limit"};
  const std::vector<double> latencies = LatenciesOf(input, latency);
  std::vector<double> costs;
  for (size_t i = 0; i < input.layouts.size(); ++i) {
    const MeasuredLayout& one = input.layouts[i];
    if (one.details.requests.empty()) continue;
    const bool same = one.low.usd_per_hour == one.high.usd_per_hour;
    for (const auto& [cost, dashed] : {std::pair(&one.low, false), std::pair(&one.high, true)}) {
      if (same && dashed) continue;
      report::Series line{one.layout.name + (same     ? ""
                                             : dashed ? ", high prices"
                                                      : ", low prices"),
                          {},
                          true,
                          dashed,
                          static_cast<int>(i)};
      const auto least = CostAt(one, cost->usd_per_hour, input.utilization, latency, INFINITY);
      for (int p = 0; p <= kLimits; ++p) {
        const double limit = Percentile(latencies, 100.0 * p / kLimits);
        const auto usd = CostAt(one, cost->usd_per_hour, input.utilization, latency, limit);
        if (!usd.has_value() || *usd > kMostTimes * *least) continue;
        costs.push_back(*usd);
        line.points.push_back(
            {limit, *usd, absl::StrCat(line.name, ", at most ", Short(limit), " ms: $ ", Short(*usd))});
      }
      chart.series.push_back(std::move(line));
    }
  }
  chart.x.logarithmic = WantsLogarithm(latencies);
  chart.y.logarithmic = WantsLogarithm(costs);
  return chart;
}

void AddCostRows(const CostReportInput& input, const char* name, double Request::*latency, report::Table& table) {
  const std::vector<double> latencies = LatenciesOf(input, latency);
  for (const double p : kTableLimits) {
    const double limit = Percentile(latencies, p);
    table.rows.push_back({absl::StrCat(name, " of at most ", Short(limit), " ms")});
    for (const MeasuredLayout& one : input.layouts) {
      if (one.details.requests.empty()) continue;
      const auto at = [&](const plan::TokenCost& cost) {
        return CostAt(one, cost.usd_per_hour, input.utilization, latency, limit);
      };
      table.rows.back().push_back(Dollars(at(one.low), at(one.high)));
    }
  }
}

Figure CostFigure(const CostReportInput& input) {
  Figure figure;
  figure.title = kCostAgainstSlo;
  figure.table.head = {"limit"};
  std::vector<std::string> without;
  for (const MeasuredLayout& one : input.layouts)
    (one.details.requests.empty() ? without : figure.table.head)
        .push_back(one.layout.name + (one.details.requests.empty() ? "" : ", $ per million"));
  if (figure.table.head.size() == 1)
    return NotShown(kCostAgainstSlo,
                    "no result has the values of its requests. `dovetail bench serve --save-result --save-detailed` "
                    "writes them.");
  figure.says =
      "The tighter the limit, the fewer of the same run's tokens count, and the more each of them costs; the right end "
      "is the price of all tokens. Prices of more than ten times that are left out.";
  if (!without.empty())
    absl::StrAppend(&figure.says, " Not in it, since saved without --save-detailed: ", absl::StrJoin(without, ", "),
                    ".");
  figure.charts = {CostChart(input, "TTFT", &Request::ttft_ms), CostChart(input, "TPOT", &Request::tpot_ms)};
  AddCostRows(input, "TTFT", &Request::ttft_ms, figure.table);
  AddCostRows(input, "TPOT", &Request::tpot_ms, figure.table);
  return figure;
}

Figure PriceFigure(const CostReportInput& input) {
  Figure figure;
  figure.title = "What a million output tokens cost";
  figure.says = absl::StrFormat(
      "All machines of each layout, prices of %s (%s), under the measured load for %.0f %% of the hours paid for.",
      input.prices, input.dated, 100 * input.utilization);
  report::BarChart chart;
  chart.title = "All output tokens";
  chart.unit = "$ per million";
  const bool range = std::any_of(input.layouts.begin(), input.layouts.end(), [](const MeasuredLayout& one) {
    return one.low.usd_per_hour != one.high.usd_per_hour;
  });
  chart.parts = range ? std::vector<std::string>{"low prices", "what high prices add"} : std::vector<std::string>{"$"};
  figure.table.head = {"layout",     "machines",  "$ per hour", "output tokens/s",
                       "$/M output", "$/M input", "$/M both",   "$/M within the SLO"};
  for (const MeasuredLayout& one : input.layouts) {
    const double low = one.low.output_usd.value_or(0), high = one.high.output_usd.value_or(0);
    chart.bars.push_back({one.layout.name, range ? std::vector<double>{low, high - low} : std::vector<double>{low}});
    figure.table.rows.push_back(
        {one.layout.name, one.machines, Dollars(one.low.usd_per_hour, one.high.usd_per_hour),
         Short(one.throughput.output_tokens_s), Dollars(one.low.output_usd, one.high.output_usd),
         Dollars(one.low.input_usd, one.high.input_usd), Dollars(one.low.mixed_usd, one.high.mixed_usd),
         Dollars(one.low.good_output_usd, one.high.good_output_usd)});
  }
  figure.bars = {std::move(chart)};
  return figure;
}

Figure TimeFigure(const CostReportInput& input) {
  Figure figure;
  figure.title = kWhereTimeGoes;
  figure.says =
      "As the clients saw it. A report of `dovetail bench serve` also has what the server says of itself, and "
      "one of `dovetail plan` what a step consists of.";
  report::BarChart chart;
  chart.title = "An average request, from its start to its last token";
  chart.unit = "ms";
  chart.parts = {"to the first token", "all later tokens"};
  figure.table.head = {"layout", "to the first token, ms", "later tokens", "together"};
  for (const MeasuredLayout& one : input.layouts) {
    if (!one.details.mean_ttft_ms.has_value() || !one.details.mean_e2el_ms.has_value()) continue;
    const double first = *one.details.mean_ttft_ms, all = *one.details.mean_e2el_ms;
    chart.bars.push_back({one.layout.name, {first, all - first}});
    figure.table.rows.push_back({one.layout.name, Short(first), Short(all - first), Short(all)});
  }
  if (chart.bars.empty())
    return NotShown(kWhereTimeGoes,
                    "no result has mean_ttft_ms and mean_e2el_ms. `dovetail bench serve "
                    "--percentile-metrics ttft,tpot,itl,e2el --save-result` writes them.");
  figure.bars = {std::move(chart)};
  return figure;
}

}  // namespace

report::Report CostReport(const CostReportInput& input) {
  report::Report out;
  out.title = "What tokens cost";
  out.subtitle =
      absl::StrFormat("%d layouts, prices of %s (%s), at %.0f %% utilisation", static_cast<int>(input.layouts.size()),
                      input.prices, input.dated, 100 * input.utilization);
  for (const MeasuredLayout& one : input.layouts)
    out.facts.emplace_back(one.layout.name + ", $ per million output tokens",
                           Dollars(one.low.output_usd, one.high.output_usd));
  out.figures = {PriceFigure(input), CostFigure(input)};
  out.figures.push_back(input.comparisons.empty()
                            ? NotShown(kBreakEven,
                                       "it compares a split layout with one that is not. Give one of each "
                                       "with --layout: roles compute and attention, and compute alone.")
                            : BreakEvenFigure(input.comparisons));
  out.figures.push_back(LatencyFigure(input));
  out.figures.push_back(TimeFigure(input));
  out.figures.push_back(NotShown(kPredictedAgainstMeasured,
                                 "there is no prediction here. `dovetail plan --measured LAYOUT=RESULT.json --report` "
                                 "predicts the load of a result."));
  return out;
}

}  // namespace dovetail::cli
