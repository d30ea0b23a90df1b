#include "loadgen/measurement.h"

#include <algorithm>
#include <cmath>

#include "base/statistics.h"

namespace dovetail::loadgen {
namespace {

constexpr double kMsPerS = 1e3;

// By Metric, in seconds.
using Values = std::array<std::vector<double>, 4>;

void AddLatencies(const RequestRecord& record, Values& values) {
  const auto of = [&](Metric metric) -> std::vector<double>& { return values[static_cast<size_t>(metric)]; };
  of(Metric::kTtft).push_back(record.ttft_s);
  if (record.output_len > 1) of(Metric::kTpot).push_back(record.tpot_s());
  auto& itl = of(Metric::kItl);
  itl.insert(itl.end(), record.itl_s.begin(), record.itl_s.end());
  of(Metric::kE2el).push_back(record.latency_s);
}

Distribution Describe(const std::vector<double>& values, std::span<const double> percentiles) {
  Distribution out;
  out.count = std::ssize(values);
  out.mean_ms = Mean(values) * kMsPerS;
  out.std_ms = StandardDeviation(values) * kMsPerS;
  std::vector<double> sorted = values;
  std::sort(sorted.begin(), sorted.end());
  out.median_ms = Percentile(sorted, 50) * kMsPerS;
  for (const double p : percentiles) out.percentiles_ms.push_back(Percentile(sorted, p) * kMsPerS);
  return out;
}

void DescribeAll(const Values& values, std::span<const double> percentiles, Measurement& out) {
  for (size_t i = 0; i < values.size(); ++i) out.of[i] = Describe(values[i], percentiles);
}

void CountGood(const RequestRecord& record, const Goodput& goodput, Measurement& out) {
  if (!goodput.any() || !goodput.Holds(record)) return;
  ++out.good;
  out.good_output_tokens += record.output_len;
}

void SetRates(double output_tokens, Measurement& out) {
  if (out.duration_s <= 0) return;
  out.request_throughput = static_cast<double>(out.completed) / out.duration_s;
  out.request_goodput = static_cast<double>(out.good) / out.duration_s;
  out.output_throughput = output_tokens / out.duration_s;
  out.total_token_throughput = (static_cast<double>(out.total_input_tokens) + output_tokens) / out.duration_s;
}

// Seconds are counted from the start of the first request that succeeded.
void FindPeaks(std::span<const RequestRecord> records, Measurement& out) {
  double begin = INFINITY, end = 0;
  for (const RequestRecord& record : records) {
    if (!record.success) continue;
    begin = std::min(begin, record.start_s);
    end = std::max(end, record.end_s());
  }
  if (!std::isfinite(begin)) return;
  const auto seconds = static_cast<size_t>(std::ceil(end - begin)) + 1;
  std::vector<double> tokens(seconds), changes(seconds + 1);
  const auto second_of = [&](double time) { return std::min(seconds - 1, static_cast<size_t>(time - begin)); };
  for (const RequestRecord& record : records) {
    if (!record.success) continue;
    double time = record.start_s + record.ttft_s;
    ++tokens[second_of(time)];
    for (const double gap : record.itl_s) ++tokens[second_of(time += gap)];
    ++changes[second_of(record.start_s)];
    --changes[second_of(record.end_s()) + 1];
  }
  out.max_output_tokens_per_s = *std::max_element(tokens.begin(), tokens.end());
  double running = 0;
  for (const double change : changes)
    out.max_concurrent_requests = std::max(out.max_concurrent_requests, static_cast<int64_t>(running += change));
}

}  // namespace

const char* NameOf(Metric metric) {
  switch (metric) {
    case Metric::kTtft: return "ttft";
    case Metric::kTpot: return "tpot";
    case Metric::kItl: return "itl";
    case Metric::kE2el: return "e2el";
  }
  return "";
}

bool Goodput::Holds(const RequestRecord& record) const {
  const auto holds = [](const std::optional<double>& limit_ms, double seconds) {
    return !limit_ms.has_value() || seconds <= *limit_ms / kMsPerS;
  };
  return holds(ttft_ms, record.ttft_s) && holds(tpot_ms, record.tpot_s()) && holds(e2el_ms, record.latency_s);
}

Measurement Measure(std::span<const RequestRecord> records, double duration_s, std::span<const double> percentiles,
                    const Goodput& goodput) {
  Measurement out;
  out.duration_s = duration_s;
  Values values;
  for (const RequestRecord& record : records) {
    if (!record.success) {
      ++out.failed;
      continue;
    }
    ++out.completed;
    CountGood(record, goodput, out);
    out.total_input_tokens += record.input_len;
    out.total_output_tokens += record.output_len;
    AddLatencies(record, values);
  }
  DescribeAll(values, percentiles, out);
  SetRates(static_cast<double>(out.total_output_tokens), out);
  FindPeaks(records, out);
  return out;
}

std::optional<SteadyWindow> FindSteadyWindow(std::span<const RequestRecord> records) {
  SteadyWindow window{INFINITY, 0};
  for (const RequestRecord& record : records) {
    if (!record.success) continue;
    window.begin_s = std::min(window.begin_s, record.end_s());
    window.end_s = std::max(window.end_s, record.start_s);
  }
  return window.begin_s < window.end_s ? std::optional(window) : std::nullopt;
}

Measurement MeasureSteady(std::span<const RequestRecord> records, const SteadyWindow& window,
                          std::span<const double> percentiles, const Goodput& goodput) {
  Measurement out;
  out.duration_s = window.seconds();
  const auto inside = [&](double time) { return time >= window.begin_s && time <= window.end_s; };
  Values values;
  std::vector<RequestRecord> began;
  double output_tokens = 0;
  for (const RequestRecord& record : records) {
    if (!record.success) {
      if (inside(record.start_s)) ++out.failed;
      continue;
    }
    const double per_chunk = static_cast<double>(record.output_len) / static_cast<double>(record.itl_s.size() + 1);
    double time = record.start_s + record.ttft_s;
    if (inside(time)) {
      out.total_input_tokens += record.input_len;
      output_tokens += per_chunk;
    }
    for (const double gap : record.itl_s)
      if (inside(time += gap)) output_tokens += per_chunk;
    if (inside(record.end_s())) {
      ++out.completed;
      CountGood(record, goodput, out);
    }
    if (!inside(record.start_s)) continue;
    AddLatencies(record, values);
    began.push_back(record);
  }
  out.total_output_tokens = std::llround(output_tokens);
  DescribeAll(values, percentiles, out);
  SetRates(output_tokens, out);
  FindPeaks(began, out);
  return out;
}

Lateness LatenessOf(std::span<const RequestRecord> records) {
  std::vector<double> late;
  for (const RequestRecord& record : records) late.push_back(record.lateness_s() * kMsPerS);
  return {Mean(late), Percentile(late, 99), Percentile(late, 100)};
}

}  // namespace dovetail::loadgen
