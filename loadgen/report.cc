#include "loadgen/report.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace dovetail::loadgen {
namespace {

constexpr double kLateMs = 10;        // p99 of lateness from which the client is said to be late
constexpr int64_t kFewForTail = 100;  // requests that a 99th percentile wants
constexpr size_t kShownErrors = 10;

bool Reported(const RunReport& report, Metric metric) {
  const auto& metrics = report.asked.metrics;
  return std::find(metrics.begin(), metrics.end(), metric) != metrics.end();
}

int64_t CountOf(const RunReport& report, bool (*is)(const RequestRecord&)) {
  return std::count_if(report.result.records.begin(), report.result.records.end(), is);
}

int64_t WithoutUsage(const RunReport& report, RequestRecord::CountedBy by) {
  return std::count_if(report.result.records.begin(), report.result.records.end(),
                       [by](const RequestRecord& record) { return record.success && record.counted_by == by; });
}

void AddWarnings(RunReport& report) {
  auto& warnings = report.warnings;
  const LoadResult& result = report.result;
  if (result.stopped)
    warnings.push_back(absl::StrCat("the run was stopped: ", result.not_sent,
                                    " requests were not sent; what came until then is reported"));
  if (report.measured.completed == 0) warnings.push_back("no request succeeded: there are no latencies to report");
  if (const int64_t n = WithoutUsage(report, RequestRecord::CountedBy::kTokenizer); n > 0)
    warnings.push_back(absl::StrCat(n, " answers had no usage: their tokens were counted by the tokenizer"));
  if (const int64_t n = WithoutUsage(report, RequestRecord::CountedBy::kChunks); n > 0)
    warnings.push_back(absl::StrCat(n, " answers had no usage, and there is no --tokenizer: each of their chunks",
                                    " counts as one token"));
  const auto doubted = [](const RequestRecord& record) { return !record.usage_doubt.empty(); };
  if (const int64_t n = CountOf(report, doubted); n > 0) {
    const auto first = std::find_if(result.records.begin(), result.records.end(), doubted);
    warnings.push_back(absl::StrCat(n, " answers have a usage that cannot be true; the first: ", first->usage_doubt,
                                    "; output tokens and TPOT are to be doubted"));
  }
  if (report.lateness.p99_ms > kLateMs)
    warnings.push_back(absl::StrFormat(
        "this client was late itself: it began requests %.1f ms after their time on average, p99 %.1f ms, most %.1f "
        "ms; the load was less even than asked for",
        report.lateness.mean_ms, report.lateness.p99_ms, report.lateness.max_ms));
  const bool tail =
      std::any_of(report.asked.percentiles.begin(), report.asked.percentiles.end(), [](double p) { return p >= 99; });
  if (tail && report.measured.completed > 0 && report.measured.completed < kFewForTail)
    warnings.push_back(absl::StrCat("a 99th percentile of ", report.measured.completed,
                                    " requests is little more than their maximum"));
  if (report.asked.steady_state && !report.steady_window.has_value())
    warnings.push_back(
        "there is no steady state: every request was sent before the first one ended; --request-rate or "
        "--max-concurrency make one");
}

const char* TitleOf(Metric metric) {
  switch (metric) {
    case Metric::kTtft: return "Time to First Token";
    case Metric::kTpot: return "Time per Output Token (excl. 1st token)";
    case Metric::kItl: return "Inter-token Latency";
    case Metric::kE2el: return "End-to-end Latency";
  }
  return "";
}

std::string Upper(std::string text) {
  for (char& c : text) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return text;
}

std::string Centred(const std::string& text, char fill) {
  const size_t width = 50;
  if (text.size() >= width) return absl::StrCat(text, "\n");
  const size_t left = (width - text.size()) / 2;
  return absl::StrCat(std::string(left, fill), text, std::string(width - text.size() - left, fill), "\n");
}

std::string Line(const std::string& name, int64_t value) { return absl::StrFormat("%-40s %-10d\n", name, value); }
std::string Line(const std::string& name, double value) { return absl::StrFormat("%-40s %-10.2f\n", name, value); }

std::string LatencyLines(const RunReport& report, const Measurement& measured, Metric metric, const std::string& of) {
  const Distribution& d = measured.Of(metric);
  const std::string name = Upper(NameOf(metric));
  if (d.count == 0) return absl::StrFormat("%-40s -\n", absl::StrCat(of, name, " (ms):"));
  std::string out = Line(absl::StrCat(of, "Mean ", name, " (ms):"), d.mean_ms);
  out += Line(absl::StrCat(of, "Median ", name, " (ms):"), d.median_ms);
  for (size_t i = 0; i < d.percentiles_ms.size(); ++i)
    out += Line(absl::StrCat(of, Upper(PercentileWord(report.asked.percentiles[i])), " ", name, " (ms):"),
                d.percentiles_ms[i]);
  return out;
}

std::string SteadyText(const RunReport& report) {
  if (!report.steady_window.has_value()) return "";
  std::string out = Centred(" Steady state ", '-');
  out += Line("Steady state (s):", report.steady_window->seconds());
  out += Line("Requests ended in it:", report.steady.completed);
  out += Line("Request throughput (req/s):", report.steady.request_throughput);
  if (report.asked.goodput.any()) out += Line("Request goodput (req/s):", report.steady.request_goodput);
  out += Line("Output token throughput (tok/s):", report.steady.output_throughput);
  for (const Metric metric : kMetrics)
    if (Reported(report, metric)) out += LatencyLines(report, report.steady, metric, "Steady ");
  return out;
}

std::string ProbesText(const RunReport& report) {
  if (report.result.probes.empty()) return "";
  std::string out = Centred(" Probes ", '-');
  out += Line("Successful probes:", report.probes.completed);
  out += Line("Failed probes:", report.probes.failed);
  for (const Metric metric : kMetrics)
    if (Reported(report, metric)) out += LatencyLines(report, report.probes, metric, "Probe ");
  return out;
}

std::string ErrorsText(const RunReport& report) {
  std::string out;
  size_t shown = 0;
  for (const RequestRecord& record : report.result.records) {
    if (record.success) continue;
    if (++shown <= kShownErrors) absl::StrAppend(&out, "Error ", shown, ": ", record.error, "\n");
  }
  if (shown > kShownErrors) absl::StrAppend(&out, shown - kShownErrors, " more requests failed.\n");
  return out;
}

void AddLatencies(const RunReport& report, const Measurement& measured, const std::string& prefix,
                  nlohmann::ordered_json& json) {
  for (const Metric metric : kMetrics) {
    if (!Reported(report, metric)) continue;
    const Distribution& d = measured.Of(metric);
    const std::string end = absl::StrCat("_", prefix, NameOf(metric), "_ms");
    // Without a value there is nothing to be zero: null.
    const auto put = [&](const std::string& name, double value) {
      json[name + end] = d.count > 0 ? nlohmann::ordered_json(value) : nlohmann::ordered_json(nullptr);
    };
    put("mean", d.mean_ms);
    put("median", d.median_ms);
    put("std", d.std_ms);
    for (size_t i = 0; i < d.percentiles_ms.size(); ++i)
      put(PercentileWord(report.asked.percentiles[i]), d.percentiles_ms[i]);
  }
}

void AddThroughput(const RunReport& report, const Measurement& measured, nlohmann::ordered_json& json) {
  json["duration"] = measured.duration_s;
  json["completed"] = measured.completed;
  json["failed"] = measured.failed;
  json["total_input_tokens"] = measured.total_input_tokens;
  json["total_output_tokens"] = measured.total_output_tokens;
  json["request_throughput"] = measured.request_throughput;
  json["request_goodput"] = nullptr;
  if (report.asked.goodput.any()) json["request_goodput"] = measured.request_goodput;
  json["output_throughput"] = measured.output_throughput;
  json["total_token_throughput"] = measured.total_token_throughput;
}

void AddDetails(const RunReport& report, nlohmann::ordered_json& json) {
  for (const char* name : {"input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors"})
    json[name] = nlohmann::ordered_json::array();
  for (const RequestRecord& record : report.result.records) {
    json["input_lens"].push_back(record.input_len);
    json["output_lens"].push_back(record.success ? record.output_len : 0);
    json["ttfts"].push_back(record.ttft_s);
    json["itls"].push_back(record.itl_s);
    json["start_times"].push_back(record.start_s);
    json["generated_texts"].push_back(record.text);
    json["errors"].push_back(record.error);
  }
}

void AddOurs(const RunReport& report, nlohmann::ordered_json& json) {
  json["stopped"] = report.result.stopped;
  json["not_sent"] = report.result.not_sent;
  json["good_output_tokens"] = nullptr;
  if (report.asked.goodput.any()) json["good_output_tokens"] = report.measured.good_output_tokens;
  json["lengths_by"] = report.asked.lengths_by;
  json["answers_without_usage"] = WithoutUsage(report, RequestRecord::CountedBy::kTokenizer) +
                                  WithoutUsage(report, RequestRecord::CountedBy::kChunks);
  json["answers_with_doubtful_usage"] =
      CountOf(report, [](const RequestRecord& record) { return !record.usage_doubt.empty(); });
  json["client_lateness_ms"] = {
      {"mean", report.lateness.mean_ms}, {"p99", report.lateness.p99_ms}, {"max", report.lateness.max_ms}};
  if (!report.result.probes.empty()) {
    json["probes_completed"] = report.probes.completed;
    json["probes_failed"] = report.probes.failed;
    AddLatencies(report, report.probes, "probe_", json);
  }
  if (report.asked.steady_state) {
    json["steady_state"] = nullptr;
    if (report.steady_window.has_value()) {
      nlohmann::ordered_json steady = {{"begin", report.steady_window->begin_s}, {"end", report.steady_window->end_s}};
      AddThroughput(report, report.steady, steady);
      AddLatencies(report, report.steady, "", steady);
      json["steady_state"] = std::move(steady);
    }
  }
  json["warnings"] = report.warnings;
}

}  // namespace

std::string PercentileWord(double percentile) {
  if (percentile == std::floor(percentile)) return absl::StrCat("p", static_cast<int64_t>(percentile));
  return absl::StrCat("p", percentile);
}

std::string PythonFloat(double value) {
  if (std::isinf(value)) return "inf";
  const std::string text = absl::StrCat(value);
  return text.find_first_of(".e") == std::string::npos ? text + ".0" : text;
}

RunReport MakeReport(RunDescription asked, LoadResult result) {
  RunReport report;
  report.asked = std::move(asked);
  report.result = std::move(result);
  const auto& records = report.result.records;
  report.measured = Measure(records, report.result.duration_s, report.asked.percentiles, report.asked.goodput);
  report.probes = Measure(report.result.probes, report.result.duration_s, report.asked.percentiles, {});
  report.lateness = LatenessOf(records);
  if (report.asked.steady_state) {
    report.steady_window = FindSteadyWindow(records);
    if (report.steady_window.has_value())
      report.steady = MeasureSteady(records, *report.steady_window, report.asked.percentiles, report.asked.goodput);
  }
  AddWarnings(report);
  return report;
}

std::string TextOf(const RunReport& report) {
  const Measurement& m = report.measured;
  std::string out = ErrorsText(report);
  out += Centred(" Serving Benchmark Result ", '=');
  out += Line("Successful requests:", m.completed);
  out += Line("Failed requests:", m.failed);
  if (report.asked.max_concurrency > 0) out += Line("Maximum request concurrency:", report.asked.max_concurrency);
  if (std::isfinite(report.asked.arrivals.request_rate) && !report.asked.timed)
    out += Line("Request rate configured (RPS):", report.asked.arrivals.request_rate);
  out += Line("Benchmark duration (s):", m.duration_s);
  out += Line("Total input tokens:", m.total_input_tokens);
  out += Line("Total generated tokens:", m.total_output_tokens);
  out += Line("Request throughput (req/s):", m.request_throughput);
  if (report.asked.goodput.any()) out += Line("Request goodput (req/s):", m.request_goodput);
  out += Line("Output token throughput (tok/s):", m.output_throughput);
  out += Line("Peak output token throughput (tok/s):", m.max_output_tokens_per_s);
  out += Line("Peak concurrent requests:", static_cast<double>(m.max_concurrent_requests));
  out += Line("Total token throughput (tok/s):", m.total_token_throughput);
  for (const Metric metric : kMetrics) {
    if (!Reported(report, metric)) continue;
    out += Centred(TitleOf(metric), '-');
    out += LatencyLines(report, m, metric, "");
  }
  out += ProbesText(report);
  out += SteadyText(report);
  out += std::string(50, '=') + "\n";
  for (const std::string& warning : report.warnings) absl::StrAppend(&out, "WARNING: ", warning, "\n");
  return out;
}

nlohmann::ordered_json JsonOf(const RunReport& report, bool detailed) {
  const RunDescription& asked = report.asked;
  nlohmann::ordered_json json;
  json["date"] = asked.date;
  json["endpoint_type"] = asked.backend;
  json["backend"] = asked.backend;
  json["label"] = nullptr;
  if (!asked.label.empty()) json["label"] = asked.label;
  json["model_id"] = asked.model_id;
  json["tokenizer_id"] = nullptr;
  if (!asked.tokenizer_id.empty()) json["tokenizer_id"] = asked.tokenizer_id;
  json["num_prompts"] = asked.num_prompts;
  for (const auto& [key, value] : asked.metadata) json[key] = value;
  json["request_rate"] = "inf";
  if (std::isfinite(asked.arrivals.request_rate)) json["request_rate"] = asked.arrivals.request_rate;
  json["burstiness"] = asked.arrivals.burstiness;
  if (std::isinf(asked.arrivals.burstiness)) json["burstiness"] = "inf";
  json["max_concurrency"] = nullptr;
  if (asked.max_concurrency > 0) json["max_concurrency"] = asked.max_concurrency;
  if (asked.arrivals.ramp_up != RampUp::kNone) {
    json["ramp_up_strategy"] = asked.arrivals.ramp_up == RampUp::kLinear ? "linear" : "exponential";
    json["ramp_up_start_rps"] = asked.arrivals.ramp_up_start_rps;
    json["ramp_up_end_rps"] = asked.arrivals.ramp_up_end_rps;
  }
  AddThroughput(report, report.measured, json);
  if (detailed) AddDetails(report, json);
  json["max_output_tokens_per_s"] = report.measured.max_output_tokens_per_s;
  json["max_concurrent_requests"] = report.measured.max_concurrent_requests;
  AddLatencies(report, report.measured, "", json);
  AddOurs(report, json);
  return json;
}

std::string ResultFileName(const RunDescription& asked) {
  const std::string label = asked.label.empty() ? asked.backend : asked.label;
  const std::string model = asked.model_id.substr(asked.model_id.rfind('/') + 1);
  const std::string concurrency =
      asked.max_concurrency > 0 ? absl::StrCat("-concurrency", asked.max_concurrency) : std::string();
  std::string rate = absl::StrCat(PythonFloat(asked.arrivals.request_rate), "qps");
  if (asked.arrivals.ramp_up != RampUp::kNone)
    rate = absl::StrCat("ramp-up-", asked.arrivals.ramp_up == RampUp::kLinear ? "linear" : "exponential", "-",
                        asked.arrivals.ramp_up_start_rps, "qps-", asked.arrivals.ramp_up_end_rps, "qps");
  return absl::StrCat(label, "-", rate, concurrency, "-", model, "-", asked.date, ".json");
}

}  // namespace dovetail::loadgen
