#include "server/cli/serve_report.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "report/scale.h"
#include "server/cli/figures.h"

namespace dovetail::cli {
namespace {

using loadgen::Distribution;
using loadgen::Metric;
using report::Figure;
using report::Short;

std::string Percent(double share) { return absl::StrFormat("%.1f %%", 100 * share); }

double AttainedBy(const ServeRun& run) {
  return static_cast<double>(run.measured.good) /
         static_cast<double>(std::max<int64_t>(1, run.measured.completed + run.measured.failed));
}

std::string RateText(const ServeRun& run) {
  return run.rate.has_value() ? Short(*run.rate) : absl::StrCat(Short(run.Rate()), " (not set)");
}

// "p99" of the last percentile that was measured.
std::string TailName(const ServeReportInput& input) { return loadgen::PercentileWord(input.percentiles.back()); }

std::string Milliseconds(const Distribution& d, double value) { return d.count > 0 ? Short(value) : "-"; }

report::PointChart LatencyChart(const ServeReportInput& input, Metric metric, const std::string& title,
                                const std::optional<double>& limit) {
  report::PointChart chart;
  chart.title = title;
  chart.x.name = "requests per second";
  chart.y.name = "ms";
  report::Series median{"median", {}, true, false, 0}, tail{TailName(input), {}, true, true, 1};
  std::vector<double> values;
  for (const ServeRun& run : input.runs) {
    const Distribution& d = run.measured.Of(metric);
    if (d.count == 0 || d.percentiles_ms.empty()) continue;
    const double at = run.Rate(), last = d.percentiles_ms.back();
    median.points.push_back(
        {at, d.median_ms, absl::StrCat("median at ", Short(at), "/s: ", Short(d.median_ms), " ms")});
    tail.points.push_back({at, last, absl::StrCat(tail.name, " at ", Short(at), "/s: ", Short(last), " ms")});
    values.insert(values.end(), {d.median_ms, last});
  }
  FinishLatencies(values, limit, chart);
  chart.series = {std::move(median), std::move(tail)};
  return chart;
}

std::string KneeText(const ServeReportInput& input) {
  if (!input.knee.has_value()) return "";
  if (!input.knee->holds.has_value())
    return absl::StrFormat("No rate that was tried keeps %.0f %% of the requests within the limits.",
                           100 * input.attainment);
  return absl::StrCat(
      absl::StrFormat("%.0f %% of the requests or more keep to the limits up to ", 100 * input.attainment),
      Short(*input.knee->holds), " requests per second",
      input.knee->fails.has_value() ? absl::StrCat(", and fewer at ", Short(*input.knee->fails), ".")
                                    : ", the highest rate that was tried.");
}

Figure LatencyFigure(const ServeReportInput& input) {
  Figure figure;
  figure.title = kLatencyAgainstRate;
  const bool measured =
      std::any_of(input.runs.begin(), input.runs.end(), [](const ServeRun& run) { return run.measured.completed > 0; });
  if (!measured) {
    figure.missing = "no request succeeded, so there is no latency to show; the notes say why the first one failed.";
    return figure;
  }
  figure.says = KneeText(input);
  if (!input.swept)
    figure.says = "One load was measured, so each curve is one point; --sweep-rates 1:64 with --goodput draws them.";
  figure.charts = {LatencyChart(input, Metric::kTtft, "Time to first token", input.goodput.ttft_ms),
                   LatencyChart(input, Metric::kTpot, "Time per output token", input.goodput.tpot_ms)};
  const std::string tail = TailName(input);
  figure.table.head = {"requests/s",      "succeeded",    "failed",         "TTFT median, ms", "TTFT " + tail,
                       "TPOT median, ms", "TPOT " + tail, "E2E median, ms", "output tokens/s"};
  if (input.goodput.any()) figure.table.head.emplace_back("within the limits");
  for (const ServeRun& run : input.runs) {
    const auto& m = run.measured;
    const auto last = [](const Distribution& d) {
      return Milliseconds(d, d.percentiles_ms.empty() ? NAN : d.percentiles_ms.back());
    };
    const Distribution &ttft = m.Of(Metric::kTtft), &tpot = m.Of(Metric::kTpot), &e2el = m.Of(Metric::kE2el);
    figure.table.rows.push_back({RateText(run), absl::StrCat(m.completed), absl::StrCat(m.failed),
                                 Milliseconds(ttft, ttft.median_ms), last(ttft), Milliseconds(tpot, tpot.median_ms),
                                 last(tpot), Milliseconds(e2el, e2el.median_ms), Short(m.output_throughput)});
    if (input.goodput.any()) figure.table.rows.back().push_back(Percent(AttainedBy(run)));
  }
  return figure;
}

// Of an average request, in milliseconds: what the server says of itself, and the rest of what its client saw.
void AddServersParts(const ServeRun& run, report::BarChart& chart, report::Table& table) {
  const double requests = static_cast<double>(run.server->requests);
  const double queue = 1e3 * run.server->queue_s / requests, prefill = 1e3 * run.server->prefill_s / requests,
               decode = 1e3 * run.server->decode_s / requests, all = run.measured.Of(Metric::kE2el).mean_ms;
  const double rest = all - queue - prefill - decode;
  chart.bars.push_back({absl::StrCat(RateText(run), " requests/s"), {queue, prefill, decode, rest}});
  table.rows.push_back({RateText(run), Short(queue), Short(prefill), Short(decode), Short(rest), Short(all),
                        absl::StrCat(run.server->requests)});
}

Figure TimeFigure(const ServeReportInput& input) {
  Figure figure;
  figure.title = kWhereTimeGoes;
  report::BarChart chart;
  chart.title = "An average request, from its start to its last token";
  chart.unit = "ms";
  const auto of_server = [](const ServeRun& run) {
    return run.measured.completed > 0 && run.server.ok() && run.server->requests > 0;
  };
  std::string without;  // why the server does not say
  for (const ServeRun& run : input.runs)
    if (run.measured.completed > 0 && !of_server(run))
      without = run.server.ok() ? "/metrics: it has counted no request" : std::string(run.server.status().message());
  const bool by_server = without.empty();
  if (by_server) {
    chart.parts = {"waiting for a place", "prefill", "decode", "network, HTTP and client"};
    figure.table.head = {"requests/s", "waiting, ms", "prefill", "decode", "rest", "together", "requests counted"};
    figure.says =
        "The first three parts are what the server's /metrics say of the requests that it ended meanwhile, those "
        "of probes and of other clients too; the rest is what the client saw beyond them.";
  } else {
    chart.parts = {"to the first token", "all later tokens"};
    figure.table.head = {"requests/s", "to the first token, ms", "later tokens", "together"};
    figure.says = absl::StrCat(
        "As the client saw it. The server does not say how much of it is waiting, prefill and "
        "decode (",
        without, ").");
  }
  for (const ServeRun& run : input.runs) {
    if (run.measured.completed == 0) continue;
    if (by_server) {
      AddServersParts(run, chart, figure.table);
      continue;
    }
    const double first = run.measured.Of(Metric::kTtft).mean_ms, all = run.measured.Of(Metric::kE2el).mean_ms;
    chart.bars.push_back({absl::StrCat(RateText(run), " requests/s"), {first, all - first}});
    figure.table.rows.push_back({RateText(run), Short(first), Short(all - first), Short(all)});
  }
  if (chart.bars.empty()) return NotShown(figure.title, "no request succeeded, so there is no time to divide.");
  figure.bars = {std::move(chart)};
  return figure;
}

void AddFacts(const ServeReportInput& input, report::Report& out) {
  const ServeRun* best = nullptr;
  for (const ServeRun& run : input.runs)
    if (run.measured.completed > 0 &&
        (best == nullptr || run.measured.output_throughput > best->measured.output_throughput))
      best = &run;
  if (input.knee.has_value())
    out.facts.emplace_back(
        "Rate within the limits",
        input.knee->holds.has_value()
            ? absl::StrCat(input.knee->fails.has_value() ? "" : "at least ", Short(*input.knee->holds), " req/s")
            : "below all tried");
  if (best == nullptr) return;
  out.facts.emplace_back("Most output tokens", absl::StrCat(Short(best->measured.output_throughput), " tok/s"));
  const ServeRun& first = *std::find_if(input.runs.begin(), input.runs.end(),
                                        [](const ServeRun& run) { return run.measured.completed > 0; });
  const std::string at = input.swept ? absl::StrCat(" at ", Short(first.Rate()), " req/s") : "";
  out.facts.emplace_back("Median TTFT" + at, absl::StrCat(Short(first.measured.Of(Metric::kTtft).median_ms), " ms"));
  if (first.measured.Of(Metric::kTpot).count > 0)
    out.facts.emplace_back("Median TPOT" + at, absl::StrCat(Short(first.measured.Of(Metric::kTpot).median_ms), " ms"));
}

void AddNotes(const ServeReportInput& input, report::Report& out) {
  if (input.runs.empty()) out.notes.emplace_back("The run was stopped before anything was measured.");
  std::vector<std::pair<std::string, std::vector<std::string>>> notes;  // and the rates at which each is so
  const auto add = [&](const ServeRun& run, const std::string& note) {
    auto known = std::find_if(notes.begin(), notes.end(), [&](const auto& one) { return one.first == note; });
    if (known == notes.end()) known = notes.insert(notes.end(), {note, {}});
    known->second.push_back(RateText(run));
  };
  for (const ServeRun& run : input.runs) {
    if (run.measured.failed > 0)
      add(run, absl::StrCat(run.measured.failed, " of ", run.measured.completed + run.measured.failed,
                            " requests failed; the first: ", run.first_error));
    for (const std::string& warning : run.warnings) add(run, warning);
  }
  for (const auto& [note, rates] : notes)
    out.notes.push_back(input.swept ? absl::StrCat("At ", absl::StrJoin(rates, ", "), " requests/s: ", note) : note);
}

}  // namespace

ServeRun RunOf(const loadgen::RunReport& report, absl::StatusOr<loadgen::ServerTimes> server) {
  ServeRun run;
  if (!report.asked.timed && std::isfinite(report.asked.arrivals.request_rate) &&
      report.asked.arrivals.ramp_up == loadgen::RampUp::kNone)
    run.rate = report.asked.arrivals.request_rate;
  run.measured = report.measured;
  for (const loadgen::RequestRecord& record : report.result.records)
    if (!record.success && run.first_error.empty()) run.first_error = record.error;
  run.warnings = report.warnings;
  run.server = std::move(server);
  return run;
}

report::Report ServeReport(const ServeReportInput& input) {
  report::Report out;
  out.title = absl::StrCat(input.model, " under load");
  out.subtitle = absl::StrCat(input.server, "; ", input.load);
  if (input.goodput.any()) absl::StrAppend(&out.subtitle, "; limits: ", LimitsText(input.goodput));
  AddFacts(input, out);
  AddNotes(input, out);
  out.figures = {LatencyFigure(input), TimeFigure(input)};
  out.figures.push_back(NotShown(kCostAgainstSlo,
                                 "there are no prices here. Save the result with --save-result --save-detailed, then "
                                 "`dovetail bench cost --report` charges the machines for it."));
  out.figures.push_back(
      NotShown(kBreakEven, "it compares two layouts. `dovetail bench cost --report` takes the results of both."));
  out.figures.push_back(NotShown(kPredictedAgainstMeasured,
                                 "there is no prediction here. Save the result with --save-result, then `dovetail plan "
                                 "--measured LAYOUT=RESULT.json --report` predicts the same load."));
  return out;
}

}  // namespace dovetail::cli
