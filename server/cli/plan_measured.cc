#include "server/cli/plan_measured.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "server/cli/text_file.h"

namespace dovetail::cli {
namespace {

using nlohmann::json;
using plan::Outcome;

struct Metric {
  const char* name;
  Outcome::Percentiles Outcome::*of;
};
constexpr Metric kMetrics[] = {{"ttft", &Outcome::ttft}, {"tpot", &Outcome::tpot}, {"e2el", &Outcome::e2el}};

struct Statistic {
  const char *name, *key;  // in a plan, in a result
  double Outcome::Percentiles::*of;
};
constexpr Statistic kStatistics[] = {{"mean", "mean", &Outcome::Percentiles::mean},
                                     {"p50", "median", &Outcome::Percentiles::p50},
                                     {"p90", "p90", &Outcome::Percentiles::p90},
                                     {"p99", "p99", &Outcome::Percentiles::p99}};

absl::StatusOr<const plan::LayoutPlan*> FindLayout(const std::string& name, const plan::Plan& plan) {
  std::vector<std::string> known;
  for (const plan::LayoutPlan& one : plan.tried) {
    const bool whole = one.impossible.empty() && !one.outcome.stopped;
    if (whole) known.push_back(one.layout.name);
    if (one.layout.name != name) continue;
    if (whole) return &one;
    return InvalidArgument("--measured: ", name,
                           ": was not simulated to its end, so there is no prediction of it; --layout ", name,
                           " predicts it whatever the SLO");
  }
  return NotFound("--measured: the plan has no layout '", name, "'; it has ",
                  known.empty() ? "none that was simulated to its end" : absl::StrJoin(known, " and "), "; --layout ",
                  name, " adds it");
}

// The last result of a file: --append-result writes one a line.
absl::StatusOr<json> ReadResult(const std::string& path) {
  auto text = ReadText(path);
  if (!text.ok()) return Annotate(text.status(), "--measured");
  while (!text->empty() && text->back() == '\n') text->pop_back();
  const size_t line = text->rfind("\n{");
  json result = json::parse(line == std::string::npos ? *text : text->substr(line + 1), nullptr, false);
  if (!result.is_object())
    return InvalidArgument("--measured: ", path, ": is not the JSON of `dovetail bench serve --save-result`");
  return result;
}

}  // namespace

absl::StatusOr<MeasuredLoad> ReadMeasured(const std::string& text, const plan::Plan& plan) {
  const size_t equals = text.find('=');
  if (equals == 0 || equals == std::string::npos || equals + 1 == text.size())
    return InvalidArgument("--measured: '", text, "' is not LAYOUT=RESULT.json");
  MeasuredLoad load{text.substr(0, equals), text.substr(equals + 1), {}};
  DT_ASSIGN_OR_RETURN(const plan::LayoutPlan* const layout, FindLayout(load.layout, plan));
  DT_ASSIGN_OR_RETURN(const json result, ReadResult(load.file));
  for (const Metric& metric : kMetrics)
    for (const Statistic& statistic : kStatistics) {
      const auto found = result.find(absl::StrCat(statistic.key, "_", metric.name, "_ms"));
      if (found == result.end() || !found->is_number()) continue;
      const double measured = found->get<double>(), predicted = 1e3 * layout->outcome.*metric.of.*statistic.of;
      if (measured > 0 && std::isfinite(measured) && predicted > 0)
        load.values.push_back({absl::StrCat(metric.name, " ", statistic.name), measured, predicted});
    }
  if (load.values.empty())
    return InvalidArgument("--measured: ", load.file,
                           ": has no latency above 0 (mean_ttft_ms and others of `dovetail "
                           "bench serve`), so there is nothing to compare with");
  return load;
}

double MeanError(const std::vector<MeasuredLoad>& loads, const std::string& metric) {
  double sum = 0, count = 0;
  for (const MeasuredLoad& load : loads)
    for (const MeasuredLoad::Value& value : load.values)
      if (absl::StartsWith(value.name, metric)) {
        sum += std::abs(value.Error());
        ++count;
      }
  return count > 0 ? sum / count : 0;
}

std::string MeasuredText(const std::vector<MeasuredLoad>& loads) {
  std::string text;
  for (const MeasuredLoad& load : loads) {
    absl::StrAppend(&text, load.layout, " as measured in ", load.file, ", and as predicted:\n");
    for (const MeasuredLoad::Value& value : load.values)
      absl::StrAppendFormat(&text, "  %-9s %10.2f %10.2f ms  %+.0f %%\n", value.name, value.measured_ms,
                            value.predicted_ms, 100 * value.Error());
  }
  return text;
}

}  // namespace dovetail::cli
