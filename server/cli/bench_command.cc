#include "server/cli/bench_command.h"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "base/statistics.h"
#include "engine/device_choice.h"
#include "engine/measurements/engine_measurements.h"
#include "engine/measurements/memory_rate.h"
#include "engine/remote_engine.h"
#include "kernels/kv_block.h"
#include "server/cli/command_line.h"
#include "server/cli/host_kv.h"
#include "server/cli/role.h"

namespace dovetail::cli {
namespace {

constexpr int kMaxTokens = 1 << 23;
constexpr int kMaxBatch = 4096;
constexpr int kWarmUpTokens = 8;
constexpr absl::Duration kSamplesArrive = absl::Milliseconds(700);  // a scheduler sends them with its statistics

// Where the time of steps went, in microseconds.
struct Parts {
  int64_t steps = 0, tokens = 0;
  double total = 0, dense = 0, prompts = 0, attention = 0, wire = 0, sample = 0;
  double bubble() const { return std::max(0.0, total - dense - prompts - attention - wire - sample); }

  void Add(const engine::StepSample& step) {
    ++steps;
    tokens += step.new_tokens;
    total += static_cast<double>(step.total_us);
    dense += static_cast<double>(step.dense_us);
    prompts += static_cast<double>(step.prompt_us);
    attention += static_cast<double>(step.AttentionPartUs());
    wire += static_cast<double>(step.WirePartUs());
    sample += static_cast<double>(step.sample_us);
  }
};

// One row of the report.
struct Measurement {
  std::string name;
  int sequences = 1;
  int prompt_tokens = 0, output_tokens = 0, beside_prompt_tokens = 0;
  std::function<absl::StatusOr<engine::Window>()> run;
  std::vector<double> tokens_per_s{};
  std::vector<double> beside_tokens_per_s{};  // of prompts read meanwhile
  Parts parts{};                              // of all rounds
  std::optional<HostKvOfBatch> host_kv{};     // of a batch whose KV lies in host memory

  // Seconds between two tokens of one sequence.
  double SecondsPerToken() const { return sequences / Summarize(tokens_per_s).median; }
};

struct Report {
  std::string model;
  int threads = 0;
  double weight_bytes = 0;
  double read_bytes_per_s = 0;      // of the memory that has them; 0: it is elsewhere
  std::optional<HostKv> host_kv{};  // where a GPU computes and a CPU attends
  std::vector<Measurement> measurements;

  // The least time of a step: reading all weights once. Prefill does a step's work per --max-num-batched-tokens and has
  // no such figure.
  double WeightReadSeconds() const { return weight_bytes / read_bytes_per_s; }
  double ShareOfMemoryLimit(const Measurement& row) const { return WeightReadSeconds() / row.SecondsPerToken(); }
};

bool IsPrefill(const Measurement& row) { return row.output_tokens == 0; }

void PrintTable(const Report& report) {
  const bool limited = report.read_bytes_per_s > 0;
  std::printf("%s: %.1f MB of weights", report.model.c_str(), report.weight_bytes * 1e-6);
  if (limited)
    std::printf(", %d threads; memory reads %.1f GB/s: one step takes at least %.2f ms", report.threads,
                report.read_bytes_per_s * 1e-9, report.WeightReadSeconds() * 1e3);
  if (report.host_kv)
    std::printf("\nKV lies in host memory, which %d threads read at %.1f GB/s", report.host_kv->threads,
                report.host_kv->read_bytes_per_s * 1e-9);
  std::printf("\n\n%-34s %10s %19s %10s %16s\n", "", "tok/s", "min .. max", "ms/token",
              limited ? "of memory limit" : "");
  for (const Measurement& row : report.measurements) {
    const Summary speed = Summarize(row.tokens_per_s);
    std::printf("%-34s %10.1f %8.1f .. %7.1f", row.name.c_str(), speed.median, speed.min, speed.max);
    if (IsPrefill(row) || !limited)
      std::printf(" %10.3f %16s\n", row.SecondsPerToken() * 1e3, limited ? "-" : "");
    else
      std::printf(" %10.2f %15.0f%%\n", row.SecondsPerToken() * 1e3, report.ShareOfMemoryLimit(row) * 100);
    if (row.beside_prompt_tokens > 0)
      std::printf("  beside prompts of %-16d %10.1f\n", row.beside_prompt_tokens,
                  Summarize(row.beside_tokens_per_s).median);
    if (row.host_kv) std::printf("  %s\n", TextOf(*row.host_kv).c_str());
  }
  std::printf("\n%-34s %10s %9s %9s %9s %9s %9s %9s\n", "us per step", "step", "dense", "prompts", "attention", "wire",
              "sample", "bubble");
  for (const Measurement& row : report.measurements) {
    const Parts& p = row.parts;
    const double n = static_cast<double>(std::max<int64_t>(1, p.steps));
    std::printf("%-34s %10.0f %9.0f %9.0f %9.0f %9.0f %9.0f %9.0f\n", row.name.c_str(), p.total / n, p.dense / n,
                p.prompts / n, p.attention / n, p.wire / n, p.sample / n, p.bubble() / n);
  }
}

void PrintJson(const Report& report) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const Measurement& row : report.measurements) {
    const Summary speed = Summarize(row.tokens_per_s);
    nlohmann::ordered_json json = {
        {"name", row.name},
        {"sequences", row.sequences},
        {"prompt_tokens", row.prompt_tokens},
        {"output_tokens", row.output_tokens},
        {"tokens_per_s", {{"median", speed.median}, {"min", speed.min}, {"max", speed.max}, {"all", row.tokens_per_s}}},
        {"ms_per_token", row.SecondsPerToken() * 1e3}};
    const Parts& p = row.parts;
    json["steps"] = {{"count", p.steps},    {"new_tokens", p.tokens},  {"total_us", p.total},
                     {"dense_us", p.dense}, {"prompts_us", p.prompts}, {"attention_us", p.attention},
                     {"wire_us", p.wire},   {"sample_us", p.sample},   {"bubble_us", p.bubble()}};
    if (row.beside_prompt_tokens > 0)
      json["beside"] = {{"prompt_tokens", row.beside_prompt_tokens},
                        {"tokens_per_s", Summarize(row.beside_tokens_per_s).median}};
    if (row.host_kv)
      json["host_kv"] = {{"step_bytes", row.host_kv->step_bytes},
                         {"least_ms", row.host_kv->read_seconds * 1e3},
                         {"share_of_read_rate", row.host_kv->share},
                         {"gpu_memory_holds_sequences", row.host_kv->gpu_batch}};
    if (!IsPrefill(row) && report.read_bytes_per_s > 0) json["share_of_memory_limit"] = report.ShareOfMemoryLimit(row);
    rows.push_back(std::move(json));
  }
  nlohmann::ordered_json json = {{"model", report.model}, {"weight_bytes", report.weight_bytes}};
  if (report.read_bytes_per_s > 0) {
    json["threads"] = report.threads;
    json["memory_read_bytes_per_s"] = report.read_bytes_per_s;
  }
  if (report.host_kv)
    json["host_kv"] = {{"threads", report.host_kv->threads},
                       {"read_bytes_per_s", report.host_kv->read_bytes_per_s},
                       {"gpu_bytes_for_kv", report.host_kv->gpu_bytes}};
  json["measurements"] = std::move(rows);
  std::printf("%s\n", json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
}

// As flags say; with auto the least that any device chooses.
int StepTokensOf(const BenchFlags& flags) {
  scheduler::SchedulerOptions options = SchedulerOptionsOf(flags.engine);
  options.ChooseStepTokens(/*on_gpu=*/false);
  return options.max_num_batched_tokens;
}

absl::Status CheckFlags(const BenchFlags& flags) {
  for (const int sequences : flags.batch) {
    if (sequences < 0 || sequences > kMaxBatch)
      return InvalidArgument("--batch: ", sequences, " is outside 0..", kMaxBatch);
    if (sequences > flags.engine.max_num_seqs)
      return InvalidArgument("--batch: ", sequences, " sequences exceed --max-num-seqs ", flags.engine.max_num_seqs);
    const int step_tokens = StepTokensOf(flags);
    if (sequences >= step_tokens)
      return InvalidArgument("--batch: ", sequences,
                             " sequences leave no room for prompts within --max-num-batched-tokens ", step_tokens);
  }
  return absl::OkStatus();
}

engine::BatchShape ShapeOf(const BenchFlags& flags, int sequences) {
  return {sequences, flags.batch_prompt_tokens, flags.batch_output_tokens, StepTokensOf(flags),
          flags.beside_prompt_tokens};
}

absl::Status CheckLengths(const BenchFlags& flags, int64_t max_model_len) {
  const auto check = [&](const char* flag, int64_t tokens) {
    return tokens <= max_model_len ? absl::OkStatus()
                                   : InvalidArgument(flag, ": needs sequences of ", tokens,
                                                     " tokens, but the engine's have at most ", max_model_len);
  };
  DT_RETURN_IF_ERROR(check("--prompt-tokens", flags.prompt_tokens + 1));
  DT_RETURN_IF_ERROR(check("--beside-prompt-tokens", flags.beside_prompt_tokens + 1));
  DT_RETURN_IF_ERROR(check("--output-tokens", flags.output_tokens + 1));
  for (const int sequences : flags.batch)
    DT_RETURN_IF_ERROR(
        check("--batch-prompt-tokens and --batch-output-tokens",
              flags.batch_prompt_tokens + int64_t{engine::OutputTokensNeeded(ShapeOf(flags, sequences))}));
  return absl::OkStatus();
}

std::vector<Measurement> Plan(const BenchFlags& flags, engine::Engine& engine, engine::PromptSource& prompts) {
  std::vector<Measurement> rows;
  if (flags.output_tokens > 0)
    rows.push_back(
        {absl::StrCat("decode ", flags.output_tokens, ", 1 sequence"), 1, 1, flags.output_tokens, 0,
         [&engine, &prompts, tokens = flags.output_tokens] { return engine::MeasureDecode(engine, prompts, tokens); }});
  if (flags.prompt_tokens > 0)
    rows.push_back({absl::StrCat("prefill ", flags.prompt_tokens), 1, flags.prompt_tokens, 0, 0,
                    [&engine, &prompts, tokens = flags.prompt_tokens] {
                      return engine::MeasurePrefill(engine, prompts, tokens);
                    }});
  for (const int sequences : flags.batch) {
    if (sequences == 0) continue;
    rows.push_back({absl::StrCat("decode ", flags.batch_output_tokens, ", ", sequences, " sequences of ",
                                 flags.batch_prompt_tokens),
                    sequences, flags.batch_prompt_tokens, flags.batch_output_tokens, flags.beside_prompt_tokens,
                    [&engine, &prompts, shape = ShapeOf(flags, sequences)] {
                      return engine::MeasureBatch(engine, prompts, shape);
                    }});
  }
  return rows;
}

}  // namespace

void AddBenchFlags(CLI::App& command, BenchFlags& flags) {
  AddEngineFlags(command, flags.engine);
  AddWorkerDeviceFlags(command, flags.engine);
  command.add_option("--prompt-tokens", flags.prompt_tokens, "Prefill: tokens of the prompt; 0: do not measure it")
      ->check(WholeNumber(0, kMaxTokens))
      ->type_name("N")
      ->group("Measurement");
  command
      .add_option("--output-tokens", flags.output_tokens,
                  "Single stream: tokens decoded after one prompt token; 0: do not measure it")
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
  command
      .add_option("--beside-prompt-tokens", flags.beside_prompt_tokens,
                  "Batches: meanwhile read prompts of N tokens, one after the other")
      ->check(WholeNumber(0, kMaxTokens))
      ->type_name("N")
      ->group("Measurement");
  command.add_option("--batch-output-tokens", flags.batch_output_tokens, "Batches: tokens measured of each sequence")
      ->check(WholeNumber(1, kMaxTokens))
      ->type_name("N")
      ->group("Measurement");
  command
      .add_option(
          "--scheduler", flags.scheduler,
          "Measure the cluster of this scheduler, with MODEL's vocabulary, in place of an engine in this process")
      ->type_name("HOST:PORT")
      ->group("Measurement");
  command.add_option("--repeat", flags.repeat, "Rounds; a round takes every measurement once")
      ->check(WholeNumber(1, 1000))
      ->type_name("N")
      ->group("Measurement");
  command.add_flag("--json", flags.json, "Print JSON with every value")->group("Measurement");
}

namespace {

absl::Status Measure(const BenchFlags& flags, engine::Engine& engine, int vocab_size, Report& report) {
  engine::PromptSource prompts{vocab_size, flags.engine.seed.value_or(0) + 1};
  DT_RETURN_IF_ERROR(engine::MeasureDecode(engine, prompts, kWarmUpTokens).status());
  if (flags.prompt_tokens > 0)
    DT_RETURN_IF_ERROR(engine::MeasurePrefill(engine, prompts, flags.prompt_tokens).status());
  report.measurements = Plan(flags, engine, prompts);
  for (int round = 0; round < flags.repeat; ++round)
    for (Measurement& row : report.measurements) {
      engine.TakeStepSamples();
      auto window = row.run();
      if (!window.ok()) return Annotate(window.status(), row.name);
      row.tokens_per_s.push_back(window->tokens_per_s());
      row.beside_tokens_per_s.push_back(window->beside_tokens_per_s());
      if (!flags.scheduler.empty()) absl::SleepFor(kSamplesArrive);
      for (const engine::StepSample& step : engine.TakeStepSamples()) row.parts.Add(step);
    }
  return absl::OkStatus();
}

void Print(const BenchFlags& flags, const Report& report) {
  if (flags.json)
    PrintJson(report);
  else
    PrintTable(report);
}

// Where a GPU computes and a CPU attends: how near the batches came to what host memory allows.
absl::Status AddHostKv(const BenchFlags& flags, const RunningEngine& engine, Report& report) {
  kernels::cuda::CudaDevice* const gpu = engine::AsGpu(*engine.device);
  if (gpu == nullptr || engine.attention_device == nullptr || engine::AsGpu(*engine.attention_device) != nullptr)
    return absl::OkStatus();
  const auto stream = engine.attention_device->CreateStream();
  HostKv memory{.threads = stream->pool().threads()};
  DT_ASSIGN_OR_RETURN(memory.read_bytes_per_s, engine::MeasureReadRate(stream->pool(), engine::kHostReadRateBytes));
  memory.gpu_bytes = static_cast<double>(KvRoomOf(*gpu));
  const model::ModelConfig& config = engine.model->config();
  kernels::KvBlockLayout block{static_cast<int>(config.key_dim), static_cast<int>(config.value_dim), engine.kv_dtype};
  const auto as_sent = static_cast<double>(block.bytes());
  block.storage = engine.kv_storage;
  const double stored = static_cast<double>(block.bytes()) / as_sent;
  for (Measurement& row : report.measurements) {
    if (IsPrefill(row) || row.prompt_tokens <= 1) continue;  // a single stream from one token has hardly any KV
    const int64_t tokens = row.prompt_tokens + engine::OutputTokensNeeded(ShapeOf(flags, row.sequences)) / 2;
    row.host_kv = HostKvOf(memory, config, engine.kv_dtype, tokens, row.sequences, row.SecondsPerToken(), stored);
  }
  report.host_kv = memory;
  return absl::OkStatus();
}

absl::Status MeasureCluster(const BenchFlags& flags) {
  DT_ASSIGN_OR_RETURN(const auto engine, engine::RemoteEngine::Connect({flags.scheduler, {}, absl::Seconds(60), {}}));
  DT_RETURN_IF_ERROR(CheckLengths(flags, engine->max_model_len()));
  Report report;
  report.model = engine->model().name;
  report.weight_bytes = static_cast<double>(engine->model().weight_bytes);
  DT_RETURN_IF_ERROR(Measure(flags, *engine, static_cast<int>(engine->model().vocab_size), report));
  Print(flags, report);
  return absl::OkStatus();
}

}  // namespace

absl::Status RunBench(const BenchFlags& flags) {
  BeginRole("bench");
  DT_RETURN_IF_ERROR(CheckFlags(flags));
  if (!flags.scheduler.empty()) return MeasureCluster(flags);
  DT_ASSIGN_OR_RETURN(const RunningEngine engine, StartEngine(flags.engine, TerminalProgress("loading")));
  DT_RETURN_IF_ERROR(CheckLengths(flags, engine.max_model_len));
  const auto stream = engine.device->CreateStream();
  Report report;
  report.model = engine.model->checkpoint->name();
  report.threads = stream->pool().threads();
  report.weight_bytes = static_cast<double>(engine.model->weight_bytes);
  if (kernels::cuda::CudaDevice* const gpu = engine::AsGpu(*engine.device); gpu != nullptr) {
    DT_ASSIGN_OR_RETURN(report.read_bytes_per_s, engine::MeasureGpuReadRate(*gpu));
  } else {
    DT_ASSIGN_OR_RETURN(report.read_bytes_per_s, engine::MeasureReadRate(stream->pool()));
  }
  BenchFlags chosen = flags;
  chosen.engine.max_num_batched_tokens = absl::StrCat(engine.max_step_tokens);
  DT_RETURN_IF_ERROR(Measure(chosen, *engine.cluster, static_cast<int>(engine.model->config().vocab_size), report));
  DT_RETURN_IF_ERROR(AddHostKv(chosen, engine, report));
  Print(chosen, report);
  return absl::OkStatus();
}

}  // namespace dovetail::cli
