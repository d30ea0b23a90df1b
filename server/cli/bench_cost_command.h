#pragma once
#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "base/status.h"

namespace dovetail::cli {

struct BenchCostFlags {
  std::string prices;               // a catalogue; empty: only --price
  std::vector<std::string> price;   // DEVICE=USD
  std::vector<std::string> layout;  // NAME=RESULT.json@ROLE.DEVICE:COUNT,...
  double utilization = 0;
  bool json = false;
};

void AddBenchCostFlags(CLI::App& command, BenchCostFlags& flags);

// `dovetail bench cost`: what tokens cost in layouts that `dovetail bench serve --save-result` (or vLLM's) measured,
// and below which price ratio a split one pays. kInvalidArgument and kNotFound name flag, file and field.
// Prints to standard output; one thread.
absl::Status RunBenchCost(const BenchCostFlags& flags);

}  // namespace dovetail::cli
