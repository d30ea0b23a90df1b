#pragma once
#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/cli/engine_flags.h"

namespace dovetail::cli {

struct BenchFlags {
  EngineFlags engine;
  std::string scheduler;    // of a running cluster to be measured; empty: the engine in this process
  int prompt_tokens = 512;  // of the prefill measurement; 0: none
  int output_tokens = 128;  // of the single-stream measurement; 0: none
  std::vector<int> batch = {16, 64};
  int batch_prompt_tokens = 128;
  int batch_output_tokens = 64;
  int beside_prompt_tokens = 0;  // of prompts that are read while batches decode; 0: none
  int repeat = 5;
  bool json = false;
};

// Adds MODEL, the engine's flags and these.
void AddBenchFlags(CLI::App& command, BenchFlags& flags);

// Loads the model and measures it in this process: decoding of one sequence, prefill, decoding of full batches. Prints
// a table or JSON. Errors before anything is loaded where a flag alone shows them.
// Threads: the main thread only.
absl::Status RunBench(const BenchFlags& flags);

}  // namespace dovetail::cli
