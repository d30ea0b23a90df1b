#pragma once
#include <optional>
#include <string>
#include <vector>

#include "loadgen/report.h"
#include "loadgen/server_times.h"
#include "loadgen/sweep.h"
#include "report/figure.h"

namespace dovetail::cli {

// What `dovetail bench serve` measured at one rate, without the requests themselves.
struct ServeRun {
  std::optional<double> rate;  // requests/s that were asked for; absent: all at once, or a trace's own times
  loadgen::Measurement measured;
  std::string first_error;            // of the requests that failed; empty: none did
  std::vector<std::string> warnings;  // of loadgen::RunReport
  absl::StatusOr<loadgen::ServerTimes> server = absl::UnavailableError("was not asked");

  // The rate that was asked for, else that of the requests that succeeded.
  double Rate() const { return rate.value_or(measured.request_throughput); }
};
ServeRun RunOf(const loadgen::RunReport& report, absl::StatusOr<loadgen::ServerTimes> server);

struct ServeReportInput {
  std::string model, server;  // as users know them
  std::string load;           // "random, 1000 requests"
  bool swept = false;
  loadgen::Goodput goodput;
  std::vector<double> percentiles;  // that were measured; the last one is shown
  std::optional<loadgen::Knee> knee;
  double attainment = 0.9;
  std::vector<ServeRun> runs;  // in the order of their rates; may be empty
};

// The report of --report. Rates at which no request succeeded are in its tables and notes, not in its pictures.
// Threads: pure.
report::Report ServeReport(const ServeReportInput& input);

}  // namespace dovetail::cli
