#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "plan/catalogue.h"
#include "plan/cost.h"
#include "report/figure.h"
#include "server/cli/figures.h"

namespace dovetail::cli {

// What a result of `dovetail bench serve` (or vLLM's) says beyond its throughput, as far as it has it.
struct ResultDetails {
  struct Request {  // that succeeded
    double ttft_ms = 0, tpot_ms = 0;
    int64_t output_tokens = 0;
  };
  // One result of the file; milliseconds.
  struct AtRate {
    double rate = 0;  // requests/s
    double ttft_median = 0, ttft_p99 = 0, tpot_median = 0, tpot_p99 = 0;
  };
  double seconds = 0;             // of the last result, as all below but `rates`
  std::vector<Request> requests;  // empty without --save-detailed
  std::optional<double> mean_ttft_ms, mean_e2el_ms;
  std::vector<AtRate> rates;  // of all results of the file that have a rate and these percentiles, by rate
};

// Reads what there is; what is missing or not as it should be is left out. `text`: a result a line.
// Threads: pure.
ResultDetails ReadDetails(const std::string& text);

// A layout, what was measured on it and what its tokens cost.
struct MeasuredLayout {
  plan::Layout layout;
  plan::Throughput throughput;
  std::string file, machines;
  plan::TokenCost low, high;
  ResultDetails details;
};

struct CostReportInput {
  std::string prices, dated;
  double utilization = 1;
  std::vector<MeasuredLayout> layouts;
  std::vector<SplitAgainstWhole> comparisons;
};

// The report of `dovetail bench cost --report`.
// Threads: pure.
report::Report CostReport(const CostReportInput& input);

}  // namespace dovetail::cli
