#pragma once
#include <string>
#include <vector>

#include "base/status.h"
#include "plan/planner.h"

// What was measured on a layout, next to what a plan predicts of it.

namespace dovetail::cli {

struct MeasuredLoad {
  std::string layout, file;
  struct Value {
    std::string name;  // "ttft mean"
    double measured_ms = 0, predicted_ms = 0;

    double Error() const { return (predicted_ms - measured_ms) / measured_ms; }
  };
  std::vector<Value> values;  // at least one
};

// `text`: LAYOUT=RESULT.json, where the result is one of `dovetail bench serve` under the plan's load. kInvalidArgument
// and kNotFound name --measured and what is wrong: a layout that the plan did not simulate to its end, or a file
// without latencies.
absl::StatusOr<MeasuredLoad> ReadMeasured(const std::string& text, const plan::Plan& plan);

// The mean of |Error()|, of the values whose name begins with `metric`, all where that is empty; 0 without one.
// Threads: pure.
double MeanError(const std::vector<MeasuredLoad>& loads, const std::string& metric);

// A line for each value; empty without a load.
// Threads: pure.
std::string MeasuredText(const std::vector<MeasuredLoad>& loads);

}  // namespace dovetail::cli
