#include "server/cli/bench_command.h"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <utility>

#include "bench/engine/engine_measurements.h"
#include "bench/engine/memory_rate.h"
#include "bench/engine/statistics.h"
#include "server/cli/command_line.h"

namespace dovetail::cli {
namespace {

using bench::Summary;

constexpr int kMaxTokens = 1 << 20;
constexpr int kMaxBatch = 4096;
constexpr int kWarmUpTokens = 8;

// One row of the report.
struct Measurement {
  std::string name;
  int sequences = 1;
  int prompt_tokens = 0, output_tokens = 0;
  std::function<absl::StatusOr<bench::Window>()> run;
  std::vector<double> tokens_per_s{};

  // Seconds between two tokens of one sequence.
  double SecondsPerToken() const { return sequences / bench::Summarize(tokens_per_s).median; }
};

struct Report {
  std::string model;
  int threads = 0;
  double weight_bytes = 0, read_bytes_per_s = 0;
  std::vector<Measurement> measurements;

  // The least time of a step: reading all weights once. Prefill does a step's work per --max-num-batched-tokens and has no such figure.
  double WeightReadSeconds() const { return weight_bytes / read_bytes_per_s; }
  double ShareOfMemoryLimit(const Measurement& row) const { return WeightReadSeconds() / row.SecondsPerToken(); }
};

bool IsPrefill(const Measurement& row) { return row.output_tokens == 0; }

void PrintTable(const Report& report) {
  std::printf("%s: %.1f MB of weights, %d threads; memory reads %.1f GB/s: one step takes at least %.2f ms\n\n", report.model.c_str(),
              report.weight_bytes * 1e-6, report.threads, report.read_bytes_per_s * 1e-9, report.WeightReadSeconds() * 1e3);
  std::printf("%-34s %10s %19s %10s %16s\n", "", "tok/s", "min .. max", "ms/token", "of memory limit");
  for (const Measurement& row : report.measurements) {
    const Summary speed = bench::Summarize(row.tokens_per_s);
    std::printf("%-34s %10.1f %8.1f .. %7.1f", row.name.c_str(), speed.median, speed.min, speed.max);
    if (IsPrefill(row))
      std::printf(" %10.3f %16s\n", row.SecondsPerToken() * 1e3, "-");
    else
      std::printf(" %10.2f %15.0f%%\n", row.SecondsPerToken() * 1e3, report.ShareOfMemoryLimit(row) * 100);
  }
}

void PrintJson(const Report& report) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const Measurement& row : report.measurements) {
    const Summary speed = bench::Summarize(row.tokens_per_s);
    nlohmann::ordered_json json = {{"name", row.name},
                                   {"sequences", row.sequences},
                                   {"prompt_tokens", row.prompt_tokens},
                                   {"output_tokens", row.output_tokens},
                                   {"tokens_per_s", {{"median", speed.median}, {"min", speed.min}, {"max", speed.max}, {"all", row.tokens_per_s}}},
                                   {"ms_per_token", row.SecondsPerToken() * 1e3}};
    if (!IsPrefill(row)) json["share_of_memory_limit"] = report.ShareOfMemoryLimit(row);
    rows.push_back(std::move(json));
  }
  const nlohmann::ordered_json json = {{"model", report.model},
                                       {"threads", report.threads},
                                       {"weight_bytes", report.weight_bytes},
                                       {"memory_read_bytes_per_s", report.read_bytes_per_s},
                                       {"measurements", rows}};
  std::printf("%s\n", json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
}

absl::Status CheckFlags(const BenchFlags& flags) {
  for (const int sequences : flags.batch) {
    if (sequences < 0 || sequences > kMaxBatch)
      return InvalidArgument("--batch: ", sequences, " is outside 0..", kMaxBatch);
    if (sequences > flags.engine.max_num_seqs)
      return InvalidArgument("--batch: ", sequences, " sequences exceed --max-num-seqs ", flags.engine.max_num_seqs);
    if (sequences >= flags.engine.max_num_batched_tokens)
      return InvalidArgument("--batch: ", sequences, " sequences leave no room for prompts within --max-num-batched-tokens ",
                             flags.engine.max_num_batched_tokens);
  }
  return absl::OkStatus();
}

bench::BatchShape ShapeOf(const BenchFlags& flags, int sequences) {
  return {sequences, flags.batch_prompt_tokens, flags.batch_output_tokens, flags.engine.max_num_batched_tokens};
}

absl::Status CheckLengths(const BenchFlags& flags, int64_t max_model_len) {
  const auto check = [&](const char* flag, int64_t tokens) {
    return tokens <= max_model_len
               ? absl::OkStatus()
               : InvalidArgument(flag, ": needs sequences of ", tokens, " tokens, but the engine's have at most ", max_model_len);
  };
  DT_RETURN_IF_ERROR(check("--prompt-tokens", flags.prompt_tokens + 1));
  DT_RETURN_IF_ERROR(check("--output-tokens", flags.output_tokens + 1));
  for (const int sequences : flags.batch)
    DT_RETURN_IF_ERROR(check("--batch-prompt-tokens and --batch-output-tokens",
                             flags.batch_prompt_tokens + int64_t{bench::OutputTokensNeeded(ShapeOf(flags, sequences))}));
  return absl::OkStatus();
}

std::vector<Measurement> Plan(const BenchFlags& flags, server::Engine& engine, bench::PromptSource& prompts) {
  std::vector<Measurement> rows;
  if (flags.output_tokens > 0)
    rows.push_back({absl::StrCat("decode ", flags.output_tokens, ", 1 sequence"), 1, 1, flags.output_tokens,
                    [&engine, &prompts, tokens = flags.output_tokens] { return bench::MeasureDecode(engine, prompts, tokens); }});
  if (flags.prompt_tokens > 0)
    rows.push_back({absl::StrCat("prefill ", flags.prompt_tokens), 1, flags.prompt_tokens, 0,
                    [&engine, &prompts, tokens = flags.prompt_tokens] { return bench::MeasurePrefill(engine, prompts, tokens); }});
  for (const int sequences : flags.batch) {
    if (sequences == 0) continue;
    rows.push_back({absl::StrCat("decode ", flags.batch_output_tokens, ", ", sequences, " sequences of ", flags.batch_prompt_tokens),
                    sequences, flags.batch_prompt_tokens, flags.batch_output_tokens,
                    [&engine, &prompts, shape = ShapeOf(flags, sequences)] { return bench::MeasureBatch(engine, prompts, shape); }});
  }
  return rows;
}

}  // namespace

void AddBenchFlags(CLI::App& command, BenchFlags& flags) {
  AddEngineFlags(command, flags.engine);
  command.add_option("--prompt-tokens", flags.prompt_tokens, "Prefill: tokens of the prompt; 0: do not measure it")
      ->check(WholeNumber(0, kMaxTokens))
      ->type_name("N")
      ->group("Measurement");
  command.add_option("--output-tokens", flags.output_tokens, "Single stream: tokens decoded after one prompt token; 0: do not measure it")
      ->check(WholeNumber(0, kMaxTokens))
      ->type_name("N")
      ->group("Measurement");
  command.add_option("--batch", flags.batch, "Sequences decoded together, as 1,16,64; 0: do not measure it")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("N,N")
      ->group("Measurement");
  command.add_option("--batch-prompt-tokens", flags.batch_prompt_tokens, "Batches: prompt of each sequence")
      ->check(WholeNumber(1, kMaxTokens))
      ->type_name("N")
      ->group("Measurement");
  command.add_option("--batch-output-tokens", flags.batch_output_tokens, "Batches: tokens measured of each sequence")
      ->check(WholeNumber(1, kMaxTokens))
      ->type_name("N")
      ->group("Measurement");
  command.add_option("--repeat", flags.repeat, "Rounds; a round takes every measurement once")
      ->check(WholeNumber(1, 1000))
      ->type_name("N")
      ->group("Measurement");
  command.add_flag("--json", flags.json, "Print JSON with every value")->group("Measurement");
}

absl::Status RunBench(const BenchFlags& flags) {
  DT_RETURN_IF_ERROR(CheckFlags(flags));
  DT_ASSIGN_OR_RETURN(const RunningEngine engine, StartEngine(flags.engine, TerminalProgress("loading")));
  DT_RETURN_IF_ERROR(CheckLengths(flags, engine.max_model_len));
  const auto stream = engine.device->CreateStream();
  Report report;
  report.model = engine.model->checkpoint->name();
  report.threads = stream->pool().threads();
  report.weight_bytes = static_cast<double>(engine.model->weight_bytes);
  DT_ASSIGN_OR_RETURN(report.read_bytes_per_s, bench::MeasureReadRate(stream->pool()));

  bench::PromptSource prompts{static_cast<int>(engine.model->config().vocab_size), flags.engine.seed.value_or(0) + 1};
  DT_RETURN_IF_ERROR(bench::MeasureDecode(*engine.cluster, prompts, kWarmUpTokens).status());
  if (flags.prompt_tokens > 0) DT_RETURN_IF_ERROR(bench::MeasurePrefill(*engine.cluster, prompts, flags.prompt_tokens).status());
  report.measurements = Plan(flags, *engine.cluster, prompts);
  for (int round = 0; round < flags.repeat; ++round)
    for (Measurement& row : report.measurements) {
      auto window = row.run();
      if (!window.ok()) return Annotate(window.status(), row.name);
      row.tokens_per_s.push_back(window->tokens_per_s());
    }
  if (flags.json)
    PrintJson(report);
  else
    PrintTable(report);
  return absl::OkStatus();
}

}  // namespace dovetail::cli
