#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "loadgen/arrivals.h"
#include "loadgen/load_run.h"
#include "loadgen/measurement.h"

// What a run says, for people and as the JSON of `vllm bench serve`: the same keys, and after them ours.

namespace dovetail::loadgen {

// What was asked for, as far as it is reported.
struct RunDescription {
  std::string date;  // "20261125-211500", local time
  std::string backend, label;
  std::string model_id, tokenizer_id;  // tokenizer_id "": null
  int64_t num_prompts = 0;
  std::vector<std::pair<std::string, std::string>> metadata;  // keys of their own
  ArrivalOptions arrivals;
  bool timed = false;           // a trace's own times
  int64_t max_concurrency = 0;  // 0: null
  Goodput goodput;
  std::vector<Metric> metrics;      // that are reported
  std::vector<double> percentiles;  // of them
  bool steady_state = false;
  std::string lengths_by;          // how prompts were measured out
  std::vector<std::string> notes;  // of the dataset
};

struct RunReport {
  RunDescription asked;
  LoadResult result;
  Measurement measured;
  std::optional<SteadyWindow> steady_window;
  Measurement steady;  // of steady_window
  Measurement probes;
  Lateness lateness;
  std::vector<std::string> warnings;  // a line each: what makes the numbers other than they seem
};

// Measures what came back.
// Threads: pure.
RunReport MakeReport(RunDescription asked, LoadResult result);

std::string TextOf(const RunReport& report);
// `detailed`: with the values of every request.
nlohmann::ordered_json JsonOf(const RunReport& report, bool detailed);

// "p99", "p99.9": the key of a percentile before "_ttft_ms".
std::string PercentileWord(double percentile);
// A number as Python prints a float: 4.0, 0.5, inf. File names and JSON of vLLM have it.
std::string PythonFloat(double value);

// "openai-4.0qps-concurrency8-model-DATE.json", as vLLM names its results.
std::string ResultFileName(const RunDescription& asked);

// Writes one result to `path`, whose folder is made where it is missing; `append` keeps what is there and begins a line
// of its own. kUnavailable names the path.
absl::Status SaveResult(const nlohmann::ordered_json& result, const std::string& path, bool append);

}  // namespace dovetail::loadgen
