#pragma once
#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "base/status.h"
#include "http_client/http_client.h"
#include "loadgen/arrivals.h"
#include "loadgen/datasets/dataset.h"
#include "loadgen/openai.h"
#include "loadgen/report.h"
#include "loadgen/sweep.h"

namespace dovetail::cli {

// The command line of `dovetail bench serve`, as it was given: names and defaults are those of `vllm bench serve`.
// Threads: thread-compatible; a value.
struct BenchServeFlags {
  std::string backend = "openai", base_url, host = "127.0.0.1", endpoint;
  int port = 8000;
  std::string model, served_model_name, tokenizer;
  bool skip_tokenizer_init = false, insecure = false, ignore_eos = false, disable_tqdm = false;
  std::vector<std::string> headers, metadata, goodput;
  std::string extra_body;
  int logprobs = -1;  // -1: not asked for
  std::string temperature, top_p, top_k, min_p, frequency_penalty, presence_penalty, repetition_penalty;  // "": unset

  loadgen::DatasetOptions dataset;
  std::string random_range_ratio = "0.0", too_long = "error";
  int64_t input_len = 0, output_len = 0;           // 0: each dataset's own
  bool skip_chat_template = true;                  // what is done in any case
  bool self_timed = false, no_self_timed = false;  // neither: as the dataset says

  std::string request_rate = "inf", burstiness = "1.0", ramp_up_strategy;
  double ramp_up_start_rps = 0, ramp_up_end_rps = 0;
  int64_t max_concurrency = 0, num_warmups = 0;
  int ready_check_timeout_s = 0;
  double stall_timeout_s = 600, request_timeout_s = 21600;

  double probe_request_rate = 0;
  int64_t probe_input_len = 32, probe_output_len = 16;
  bool steady_state = false;
  std::string sweep_rates;
  double slo_attainment = 0.9;
  int sweep_refine = 0;

  std::string percentile_metrics = "ttft,tpot,itl,e2el", metric_percentiles = "99";
  std::string label, result_dir, result_filename, request_id_prefix;
  bool save_result = false, save_detailed = false, append_result = false;
  std::string report;  // a file; empty: none
};

void AddBenchServeFlags(CLI::App& command, BenchServeFlags& flags);

// The same, read and checked.
struct BenchServeOptions {
  http_client::Url url;
  http_client::HttpClientOptions http{.user_agent = "dovetail-bench"};
  loadgen::ApiOptions api;  // without the model
  loadgen::DatasetOptions dataset;
  bool self_timed = false;
  loadgen::ArrivalOptions arrivals;
  loadgen::Goodput goodput;
  std::vector<loadgen::Metric> metrics;
  std::vector<double> percentiles;
  std::vector<std::pair<std::string, std::string>> metadata;
  std::optional<loadgen::SweepOptions> sweep;
};

// "ttft:200", "tpot:50", "e2el:5000": limits in milliseconds. kInvalidArgument names `flag`.
// Threads: pure.
absl::StatusOr<loadgen::Goodput> ReadLimits(const std::string& flag, const std::vector<std::string>& texts);

// kInvalidArgument names the flag. OPENAI_API_KEY of the environment becomes a bearer token, unless --header has one.
// Threads: thread-safe; reads the environment.
absl::StatusOr<BenchServeOptions> ReadBenchServeFlags(const BenchServeFlags& flags);

}  // namespace dovetail::cli
