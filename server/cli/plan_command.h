#pragma once
#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/cli/price_flags.h"

// `dovetail plan`: which layout of machines serves a load cheapest.

namespace dovetail::cli {

struct PlanFlags {
  std::string model;
  std::string devices;                // NAME:COUNT,...
  std::vector<std::string> profiles;  // files of `bench device`
  std::vector<std::string> layouts;   // ROLE.DEVICE:COUNT,...: these and no others
  std::string hosts;                  // NAME:COUNT,...
  std::string link = "shm";

  std::string workload;  // INPUT/OUTPUT tokens, or a trace
  std::string request_rate = "inf";
  std::string burstiness = "1.0";
  double range_ratio = 0;
  double time_scale = 1, length_scale = 1, trace_sec_multiplier = 1;
  int64_t num_prompts = 200;
  uint64_t seed = 0;

  std::vector<std::string> slo;  // ttft:500 tpot:50 e2el:5000
  double slo_share = 0.99;
  double budget = 0;  // $/h; 0: any
  PriceFlags prices;
  std::string price_by = "low";
  double utilization = 1;

  std::string kv_cache_dtype = "auto";
  int64_t max_model_len = 0;  // 0: the model's
  int max_num_seqs = 256;
  int max_num_batched_tokens = 0;  // 0: as a server chooses
  std::string prefill_itl_budget = "auto";
  double memory_share = 0.9;
  bool json = false;
  std::vector<std::string> measured;  // LAYOUT=RESULT.json
  std::string report;                 // a file; empty: none
};

void AddPlanFlags(CLI::App& command, PlanFlags& flags);

// Prints the layouts that were tried and the cheapest. kFailedPrecondition, after they are printed: none meets the SLO.
// Other errors name the flag, or the file with its line or field. Loads no weights; needs no cluster.
// Threads: the main thread only.
absl::Status RunPlan(const PlanFlags& flags);

}  // namespace dovetail::cli
