#include "server/cli/bench_serve_flags.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "server/cli/command_line.h"
#include "server/cli/report_file.h"

namespace dovetail::cli {
namespace {

using loadgen::DatasetOptions;
using nlohmann::json;

constexpr int64_t kMost = loadgen::kMaxTokensOfRequest;

void AddServerFlags(CLI::App& command, BenchServeFlags& f) {
  const auto add = [&](const char* name, auto& value, const std::string& text, const char* type) {
    return command.add_option(name, value, text)->type_name(type)->group("Server");
  };
  add("--backend", f.backend, "openai: /v1/completions; openai-chat: /v1/chat/completions", "NAME")
      ->check(OneOf({"openai", "openai-chat"}));
  add("--base-url", f.base_url, "Of the server, in place of --host and --port", "URL");
  add("--host", f.host, "Of the server", "NAME");
  add("--port", f.port, "Of the server", "N")->check(WholeNumber(1, 65535));
  add("--endpoint", f.endpoint, "Path of the API; empty: that of --backend", "PATH");
  add("--model", f.model, "Name in requests and results; empty: the first one that the server lists", "NAME");
  add("--served-model-name", f.served_model_name, "Name in requests, where --model is a path", "NAME");
  add("--tokenizer", f.tokenizer,
      "A .gguf file, or a folder with tokenizer.json, to measure prompts out with; empty: --model where it is such a "
      "path, else the server's /tokenize, else the usage of two requests",
      "PATH");
  command.add_flag("--skip-tokenizer-init", f.skip_tokenizer_init, "Use no tokenizer: prompts by usage")
      ->group("Server");
  add("--header", f.headers, "Sent with each request; OPENAI_API_KEY becomes a bearer token without this", "KEY=VALUE")
      ->expected(1, -1);
  command.add_flag("--insecure", f.insecure, "Take any certificate of an https server")->group("Server");
  add("--ready-check-timeout-sec", f.ready_check_timeout_s, "Wait so long for a first answer; 0: do not try one", "S")
      ->check(WholeNumber(0, 86400));
  add("--stall-timeout-sec", f.stall_timeout_s, "A request without a byte for so long has failed", "S")
      ->check(Number(0.001, 86400));
  add("--request-timeout-sec", f.request_timeout_s, "A request that streams for so long has failed", "S")
      ->check(Number(0.001, 86400 * 7));
}

void AddRequestFlags(CLI::App& command, BenchServeFlags& f) {
  const auto add = [&](const char* name, auto& value, const std::string& text, const char* type) {
    return command.add_option(name, value, text)->type_name(type)->group("Requests");
  };
  command.add_flag("--ignore-eos", f.ignore_eos, "Answers of the length asked for; always with random and timed_trace")
      ->group("Requests");
  add("--logprobs", f.logprobs, "Ask for so many log probabilities per token; -1: none", "N")
      ->check(WholeNumber(-1, 20));
  add("--extra-body", f.extra_body, "A JSON object whose fields each request gets", "JSON");
  add("--temperature", f.temperature, "Sent with each request; empty: the server's default", "T");
  add("--top-p", f.top_p, "The same", "P");
  add("--top-k", f.top_k, "The same", "K");
  add("--min-p", f.min_p, "The same", "P");
  add("--frequency-penalty", f.frequency_penalty, "The same", "X");
  add("--presence-penalty", f.presence_penalty, "The same", "X");
  add("--repetition-penalty", f.repetition_penalty, "The same", "X");
  add("--request-id-prefix", f.request_id_prefix, "Of x-request-id", "TEXT");
}

void AddTraceFlags(CLI::App& command, DatasetOptions& d, BenchServeFlags& f) {
  const auto add = [&](const char* name, auto& value, const std::string& text, const char* type) {
    return command.add_option(name, value, text)->type_name(type)->group("Traces");
  };
  const auto flag = [&](const char* name, bool& value, const std::string& text) {
    command.add_flag(name, value, text)->group("Traces");
  };
  flag("--self-timed", f.self_timed, "Send at the times of the trace; so it is where there is a trace");
  flag("--no-self-timed", f.no_self_timed, "Send at --request-rate, not at the times of the trace");
  add("--time-scale", d.time_scale, "Times of the trace are multiplied by this: 0.5 replays twice as fast", "X");
  add("--length-scale", d.length_scale, "Lengths of the trace are multiplied by this", "X");
  add("--timed-trace-sec-multiplier", d.trace_sec_multiplier, "Seconds of one unit of time; 0.001 for Mooncake's files",
      "X");
  add("--timed-trace-chunk-hash-size", d.trace_chunk_tokens,
      "Tokens that one of hash_ids stands for; 0: the power of two that fits all rows", "TOKENS");
  add("--timed-trace-label-timestamp", d.trace_timestamp, "Field of the time; timestamp_ms is known, too", "NAME");
  add("--timed-trace-label-input-length", d.trace_input_length, "Field of the prompt's tokens", "NAME");
  add("--timed-trace-label-output-length", d.trace_output_length, "Field of the answer's tokens", "NAME");
  add("--timed-trace-label-hash-ids", d.trace_hash_ids, "Field of the ids of the prompt's blocks", "NAME");
}

void AddDatasetFlags(CLI::App& command, DatasetOptions& d, BenchServeFlags& f) {
  const auto add = [&](const char* name, auto& value, const std::string& text, const char* type = "TOKENS") {
    return command.add_option(name, value, text)->type_name(type)->group("Dataset");
  };
  add("--dataset-name", d.name, "What to ask for", "NAME")
      ->check(OneOf({"random", "sharegpt", "sonnet", "custom", "prefix_repetition", "timed_trace"}));
  add("--dataset-path", d.path,
      "sharegpt: its JSON; custom: lines of {\"prompt\": ..., \"output_tokens\": ...}; sonnet: lines of text; "
      "timed_trace: JSON lines or Azure's CSV. Lines may be gzip",
      "FILE");
  add("--num-prompts", d.num_prompts, "Requests; of a trace the first ones", "N")
      ->check(WholeNumber(1, loadgen::kMaxRequests, "run the load several times for more"));
  add("--seed", d.seed, "Of prompts and arrivals", "N");
  add("--input-len", f.input_len, "Sets the input length of the dataset; 0: its own")->check(WholeNumber(0, kMost));
  add("--output-len", f.output_len, "Sets the output length of the dataset; 0: its own")->check(WholeNumber(0, kMost));
  add("--too-long", f.too_long, "A request that the model's positions do not hold: error, clip or skip", "HOW")
      ->check(OneOf({"error", "clip", "skip"}));
  command.add_flag("--no-oversample", d.no_oversample, "Do not draw requests of a small file again")->group("Dataset");
  command.add_flag("--disable-shuffle", d.disable_shuffle, "Take requests of a file in its order")->group("Dataset");
  command
      .add_flag("--skip-chat-template", f.skip_chat_template, "For vLLM's scripts: texts are always sent as they are")
      ->group("Dataset");
  add("--random-input-len", d.random_input_len, "random: tokens of a prompt");
  add("--random-output-len", d.random_output_len, "random: tokens of an answer");
  add("--random-range-ratio", f.random_range_ratio,
      "random: lengths lie within (1 - R) and (1 + R) of these; or {\"input\": R, \"output\": R}", "R");
  add("--random-prefix-len", d.random_prefix_len, "random: tokens before, the same for all");
  add("--sharegpt-output-len", d.sharegpt_output_len, "sharegpt: tokens of an answer; 0: as in the file");
  add("--custom-output-len", d.custom_output_len, "custom: tokens of an answer; -1: output_tokens of the file");
  add("--sonnet-input-len", d.sonnet_input_len, "sonnet: tokens of a prompt");
  add("--sonnet-output-len", d.sonnet_output_len, "sonnet: tokens of an answer");
  add("--sonnet-prefix-len", d.sonnet_prefix_len, "sonnet: of the prompt, the same for all");
  add("--prefix-repetition-prefix-len", d.prefix_repetition_prefix_len, "prefix_repetition: tokens of a prefix");
  add("--prefix-repetition-suffix-len", d.prefix_repetition_suffix_len, "prefix_repetition: tokens after it");
  add("--prefix-repetition-num-prefixes", d.prefix_repetition_num_prefixes, "prefix_repetition: prefixes", "N");
  add("--prefix-repetition-output-len", d.prefix_repetition_output_len, "prefix_repetition: tokens of an answer");
  AddTraceFlags(command, d, f);
}

void AddLoadFlags(CLI::App& command, BenchServeFlags& f) {
  const auto add = [&](const char* name, auto& value, const std::string& text, const char* type) {
    return command.add_option(name, value, text)->type_name(type)->group("Load");
  };
  add("--request-rate", f.request_rate, "Requests per second; inf: all at once", "RATE");
  add("--burstiness", f.burstiness, "Shape of the gaps' gamma distribution: 1 is Poisson, less comes in bursts", "B");
  add("--max-concurrency", f.max_concurrency, "Requests under way at once; 0: any number", "N")
      ->check(WholeNumber(0, loadgen::kMaxRequests));
  add("--ramp-up-strategy", f.ramp_up_strategy, "Let the rate rise over the run: linear or exponential", "HOW")
      ->check(OneOf({"linear", "exponential"}));
  add("--ramp-up-start-rps", f.ramp_up_start_rps, "Rate of the first requests", "RATE");
  add("--ramp-up-end-rps", f.ramp_up_end_rps, "Rate of the last requests", "RATE");
  add("--num-warmups", f.num_warmups, "Requests before the run, not measured", "N")->check(WholeNumber(0, 10000));
  add("--probe-request-rate", f.probe_request_rate,
      "Small requests per second next to the load, reported apart: whether long prompts hold up others; 0: none",
      "RATE")
      ->check(Number(0, 1000));
  add("--probe-input-len", f.probe_input_len, "Of a probe", "TOKENS")->check(WholeNumber(1, kMost));
  add("--probe-output-len", f.probe_output_len, "Of a probe", "TOKENS")->check(WholeNumber(1, kMost));
  add("--sweep-rates", f.sweep_rates,
      "Run the load at these rates, 1,2,4 or 1:64 (doubled), until --goodput no longer holds", "RATES");
  add("--slo-attainment", f.slo_attainment, "Sweep: the share of requests that has to meet --goodput", "SHARE");
  add("--sweep-refine", f.sweep_refine, "Sweep: rates tried between the last that held and the first that did not",
      "N");
}

void AddReportFlags(CLI::App& command, BenchServeFlags& f) {
  const auto add = [&](const char* name, auto& value, const std::string& text, const char* type) {
    return command.add_option(name, value, text)->type_name(type)->group("Report");
  };
  const auto flag = [&](const char* name, bool& value, const std::string& text) {
    command.add_flag(name, value, text)->group("Report");
  };
  add("--goodput", f.goodput, "Limits in milliseconds that a good request meets: ttft:200 tpot:50 e2el:5000", "NAME:MS")
      ->expected(1, -1);
  add("--percentile-metrics", f.percentile_metrics, "What to report, of ttft, tpot, itl and e2el", "NAMES");
  add("--metric-percentiles", f.metric_percentiles, "Percentiles of them, as 50,99,99.9", "P,P");
  flag("--steady-state", f.steady_state, "Also report the time between the first end and the last start of a request");
  flag("--save-result", f.save_result, "Write the result as JSON");
  flag("--save-detailed", f.save_detailed, "With the values of each request");
  flag("--append-result", f.append_result, "Write it behind what the file has");
  add("--result-dir", f.result_dir, "Folder of the file", "FOLDER");
  add("--result-filename", f.result_filename, "Empty: LABEL-RATEqps[-concurrencyN]-MODEL-DATE.json", "NAME");
  add("--report", f.report, kReportHelp, "FILE.html");
  add("--label", f.label, "Begins the file's name; empty: --backend", "TEXT");
  add("--metadata", f.metadata, "Fields of the JSON", "KEY=VALUE")->expected(1, -1);
  flag("--disable-tqdm", f.disable_tqdm, "No progress on the terminal");
}

// "inf" or a number; NaN is none.
absl::StatusOr<double> ReadRate(const char* flag, const std::string& text) {
  double value = 0;
  if (!absl::SimpleAtod(text, &value) || std::isnan(value))
    return InvalidArgument(flag, ": '", text, "' is not a number; give one, or inf");
  return value;
}

absl::StatusOr<std::vector<std::pair<std::string, std::string>>> ReadPairs(const char* flag,
                                                                           const std::vector<std::string>& texts) {
  std::vector<std::pair<std::string, std::string>> pairs;
  for (const std::string& text : texts) {
    const size_t equals = text.find('=');
    if (equals == 0 || equals == std::string::npos) return InvalidArgument(flag, ": '", text, "' is not KEY=VALUE");
    pairs.emplace_back(text.substr(0, equals), text.substr(equals + 1));
  }
  return pairs;
}

absl::StatusOr<std::vector<loadgen::Metric>> ReadMetrics(const std::string& text) {
  std::vector<loadgen::Metric> metrics;
  for (const std::string& name : std::vector<std::string>(absl::StrSplit(text, ','))) {
    const auto found = std::find_if(loadgen::kMetrics.begin(), loadgen::kMetrics.end(),
                                    [&](loadgen::Metric metric) { return name == loadgen::NameOf(metric); });
    if (found == loadgen::kMetrics.end())
      return InvalidArgument("--percentile-metrics: '", name, "' is none of ttft, tpot, itl, e2el");
    metrics.push_back(*found);
  }
  return metrics;
}

absl::StatusOr<std::vector<double>> ReadPercentiles(const std::string& text) {
  std::vector<double> percentiles;
  for (const std::string& part : std::vector<std::string>(absl::StrSplit(text, ','))) {
    double p = 0;
    if (!absl::SimpleAtod(part, &p) || !(p >= 0 && p <= 100))
      return InvalidArgument("--metric-percentiles: '", part, "' is not a number in 0..100");
    percentiles.push_back(p);
  }
  return percentiles;
}

absl::Status ReadSampling(const BenchServeFlags& flags, json& body) {
  const std::pair<const char*, const std::string*> all[] = {{"temperature", &flags.temperature},
                                                            {"top_p", &flags.top_p},
                                                            {"top_k", &flags.top_k},
                                                            {"min_p", &flags.min_p},
                                                            {"frequency_penalty", &flags.frequency_penalty},
                                                            {"presence_penalty", &flags.presence_penalty},
                                                            {"repetition_penalty", &flags.repetition_penalty}};
  for (const auto& [field, text] : all) {
    if (text->empty()) continue;
    double value = 0;
    if (!absl::SimpleAtod(*text, &value) || !std::isfinite(value))
      return InvalidArgument("--", absl::StrJoin(absl::StrSplit(field, '_'), "-"), ": '", *text, "' is not a number");
    body[field] = value;
    if (std::string(field) == "top_k") body[field] = static_cast<int64_t>(value);
  }
  if (flags.extra_body.empty()) return absl::OkStatus();
  const json extra = json::parse(flags.extra_body, nullptr, /*allow_exceptions=*/false);
  if (!extra.is_object()) return InvalidArgument("--extra-body: '", flags.extra_body, "' is not a JSON object");
  body.update(extra);
  return absl::OkStatus();
}

absl::Status ReadApi(const BenchServeFlags& flags, BenchServeOptions& out) {
  const std::string base = flags.base_url.empty()
                               ? absl::StrCat("http://", absl::StrContains(flags.host, ":") ? "[" : "", flags.host,
                                              absl::StrContains(flags.host, ":") ? "]" : "", ":", flags.port)
                               : flags.base_url;
  auto url = http_client::ParseUrl(base);
  if (!url.ok()) return Annotate(url.status(), flags.base_url.empty() ? "--host" : "--base-url");
  out.url = *std::move(url);
  out.http.verify_certificates = !flags.insecure;
  out.http.stall_timeout = absl::Seconds(flags.stall_timeout_s);
  const bool chat = flags.backend == "openai-chat";
  out.api.backend = chat ? loadgen::Backend::kOpenaiChat : loadgen::Backend::kOpenai;
  out.api.endpoint = !flags.endpoint.empty() ? flags.endpoint : chat ? "/v1/chat/completions" : "/v1/completions";
  if (out.api.endpoint[0] != '/') return InvalidArgument("--endpoint: '", out.api.endpoint, "' does not begin with /");
  out.api.ignore_eos = flags.ignore_eos || flags.dataset.name == "random" || flags.dataset.name == "timed_trace";
  if (flags.logprobs >= 0) out.api.logprobs = flags.logprobs;
  DT_RETURN_IF_ERROR(ReadSampling(flags, out.api.extra_body));
  DT_ASSIGN_OR_RETURN(out.api.headers, ReadPairs("--header", flags.headers));
  const bool has_key = std::any_of(out.api.headers.begin(), out.api.headers.end(), [](const auto& header) {
    return absl::EqualsIgnoreCase(header.first, "authorization");
  });
  if (const char* key = std::getenv("OPENAI_API_KEY"); key != nullptr && *key != '\0' && !has_key)
    out.api.headers.emplace_back("Authorization", absl::StrCat("Bearer ", key));
  return absl::OkStatus();
}

absl::Status ReadRangeRatio(const std::string& text, DatasetOptions& dataset) {
  double ratio = 0;
  if (absl::SimpleAtod(text, &ratio)) {
    dataset.random_input_range = dataset.random_output_range = ratio;
    return absl::OkStatus();
  }
  const json both = json::parse(text, nullptr, /*allow_exceptions=*/false);
  const auto number = [&](const char* name) { return both.contains(name) && both[name].is_number(); };
  if (!both.is_object() || !number("input") || !number("output"))
    return InvalidArgument("--random-range-ratio: '", text, "' is neither a number nor {\"input\": R, \"output\": R}");
  dataset.random_input_range = both["input"];
  dataset.random_output_range = both["output"];
  return absl::OkStatus();
}

absl::Status ReadDataset(const BenchServeFlags& flags, BenchServeOptions& out) {
  DatasetOptions& d = out.dataset = flags.dataset;
  DT_RETURN_IF_ERROR(ReadRangeRatio(flags.random_range_ratio, d));
  if (flags.input_len > 0) d.random_input_len = d.sonnet_input_len = flags.input_len;
  if (flags.output_len > 0)
    d.random_output_len = d.sonnet_output_len = d.sharegpt_output_len = d.custom_output_len =
        d.prefix_repetition_output_len = flags.output_len;
  d.too_long = flags.too_long == "clip"   ? loadgen::TooLong::kClip
               : flags.too_long == "skip" ? loadgen::TooLong::kSkip
                                          : loadgen::TooLong::kError;
  d.request_id_prefix = flags.request_id_prefix;
  const bool trace = d.name == "timed_trace";
  if (!trace && (flags.self_timed || flags.no_self_timed))
    return InvalidArgument("--self-timed: only --dataset-name timed_trace has times");
  if (flags.self_timed && flags.no_self_timed)
    return InvalidArgument("--self-timed: stands next to --no-self-timed; leave one of them out");
  out.self_timed = trace && !flags.no_self_timed;
  return d.Validate();
}

absl::Status ReadArrivals(const BenchServeFlags& flags, loadgen::ArrivalOptions& arrivals) {
  DT_ASSIGN_OR_RETURN(arrivals.request_rate, ReadRate("--request-rate", flags.request_rate));
  DT_ASSIGN_OR_RETURN(arrivals.burstiness, ReadRate("--burstiness", flags.burstiness));
  if (flags.ramp_up_strategy == "linear") arrivals.ramp_up = loadgen::RampUp::kLinear;
  if (flags.ramp_up_strategy == "exponential") arrivals.ramp_up = loadgen::RampUp::kExponential;
  arrivals.ramp_up_start_rps = flags.ramp_up_start_rps;
  arrivals.ramp_up_end_rps = flags.ramp_up_end_rps;
  return arrivals.Validate();
}

absl::Status ReadSweep(const BenchServeFlags& flags, BenchServeOptions& out) {
  if (flags.sweep_rates.empty()) return absl::OkStatus();
  if (!out.goodput.any()) return InvalidArgument("--sweep-rates: needs --goodput, the objective that ends the sweep");
  if (out.self_timed) return InvalidArgument("--sweep-rates: a trace has its own times; add --no-self-timed");
  if (out.arrivals.ramp_up != loadgen::RampUp::kNone || std::isfinite(out.arrivals.request_rate))
    return InvalidArgument("--sweep-rates: sets the rate; leave --request-rate and --ramp-up-strategy out");
  loadgen::SweepOptions sweep;
  DT_ASSIGN_OR_RETURN(sweep.rates, loadgen::ParseRates(flags.sweep_rates));
  sweep.attainment = flags.slo_attainment;
  sweep.refine = flags.sweep_refine;
  DT_RETURN_IF_ERROR(sweep.Validate());
  out.sweep = std::move(sweep);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<loadgen::Goodput> ReadLimits(const std::string& flag, const std::vector<std::string>& texts) {
  loadgen::Goodput goodput;
  for (const std::string& text : texts) {
    const std::vector<std::string> parts = absl::StrSplit(text, ':');
    double limit = 0;
    if (parts.size() != 2 || !absl::SimpleAtod(parts[1], &limit) || !std::isfinite(limit) || limit < 0)
      return InvalidArgument(flag, ": '", text, "' is not NAME:MILLISECONDS, as ttft:200");
    if (parts[0] == "ttft")
      goodput.ttft_ms = limit;
    else if (parts[0] == "tpot")
      goodput.tpot_ms = limit;
    else if (parts[0] == "e2el")
      goodput.e2el_ms = limit;
    else
      return InvalidArgument(flag, ": there is no limit '", parts[0], "'; there are ttft, tpot and e2el");
  }
  return goodput;
}

void AddBenchServeFlags(CLI::App& command, BenchServeFlags& flags) {
  AddServerFlags(command, flags);
  AddDatasetFlags(command, flags.dataset, flags);
  AddRequestFlags(command, flags);
  AddLoadFlags(command, flags);
  AddReportFlags(command, flags);
}

absl::StatusOr<BenchServeOptions> ReadBenchServeFlags(const BenchServeFlags& flags) {
  BenchServeOptions out;
  DT_RETURN_IF_ERROR(ReadApi(flags, out));
  DT_RETURN_IF_ERROR(ReadDataset(flags, out));
  DT_RETURN_IF_ERROR(ReadArrivals(flags, out.arrivals));
  DT_ASSIGN_OR_RETURN(out.goodput, ReadLimits("--goodput", flags.goodput));
  DT_ASSIGN_OR_RETURN(out.metrics, ReadMetrics(flags.percentile_metrics));
  DT_ASSIGN_OR_RETURN(out.percentiles, ReadPercentiles(flags.metric_percentiles));
  DT_ASSIGN_OR_RETURN(out.metadata, ReadPairs("--metadata", flags.metadata));
  DT_RETURN_IF_ERROR(ReadSweep(flags, out));
  return out;
}

}  // namespace dovetail::cli
