#pragma once
#include <CLI/CLI.hpp>
#include <string>

#include "base/status.h"

// `dovetail bench device`: measures this machine's CPU or one of its GPUs and writes the profile that `dovetail plan`
// predicts from.

namespace dovetail::cli {

struct BenchDeviceFlags {
  std::string name;
  std::string out;  // a file; empty: standard output
  std::string device = "cpu";
  int threads = 0;  // 0: one per core
  double point_seconds = 0.08;
};

void AddBenchDeviceFlags(CLI::App& command, BenchDeviceFlags& flags);

// Blocks for about a minute. An error leaves no file behind, and a file that was there as it is.
// Threads: the main thread only.
absl::Status RunBenchDevice(const BenchDeviceFlags& flags);

}  // namespace dovetail::cli
