#pragma once
#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

#include "base/status.h"

// `dovetail plan-prefill`: what one long prompt would take over several compute workers, by each exchange.

namespace dovetail::cli {

struct PlanPrefillFlags {
  std::string model;
  std::string tokens = "128K", cached_tokens = "0";
  std::string ranks = "4,8,16,32,64,128";
  std::string links = "nvlink,rdma-400g,ethernet-25g";
  std::string kv_cache_dtype = "auto";
  int max_num_batched_tokens = 2048;
  int prefill_rank_tokens = 1024;
  std::string prompt_scratch = "auto";
  std::string rates;  // a file
  bool measure = false;
  int threads = 0;                // with measure; 0: one per core
  double dense_tokens_per_s = 0;  // 0: not given
  double attention_tflops = 0;    // of a compute worker
  double attention_worker_tflops = 0;
  bool json = false;
};

void AddPlanPrefillFlags(CLI::App& command, PlanPrefillFlags& flags);

// Prints a table for each number of ranks and each link. Needs no cluster, and loads no weights unless it measures.
// Errors: kInvalidArgument and kNotFound name the flag.
// Threads: the main thread only.
absl::Status RunPlanPrefill(const PlanPrefillFlags& flags);

}  // namespace dovetail::cli
