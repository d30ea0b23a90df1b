#pragma once
#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/cli/price_flags.h"

namespace dovetail::cli {

struct BenchCostFlags {
  PriceFlags prices;
  std::vector<std::string> layout;  // NAME=RESULT.json@ROLE.DEVICE:COUNT,...
  double utilization = 0;
  bool json = false;
  std::string report;  // a file; empty: none
};

void AddBenchCostFlags(CLI::App& command, BenchCostFlags& flags);

// `dovetail bench cost`: what tokens cost in layouts that `dovetail bench serve --save-result` (or vLLM's) measured,
// and below which price ratio a split one pays. kInvalidArgument and kNotFound name flag, file and field. Prints to
// standard output and writes BenchCostFlags::report.
// Threads: the main thread only.
absl::Status RunBenchCost(const BenchCostFlags& flags);

}  // namespace dovetail::cli
