// A factorised spatio-temporal transformer on one or several ranks: docs/sequence_parallelism.md.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>

#include "absl/strings/str_join.h"
#include "examples/spatio_temporal/gpu/gpu_rates.h"
#include "examples/spatio_temporal/gpu/run_gpus.h"
#include "examples/spatio_temporal/run_processes.h"
#include "examples/spatio_temporal/run_threads.h"

namespace dovetail::spatio_temporal {
namespace {

// As the command line gives them; 0: as the preset has it.
struct Flags {
  RunOptions options;
  std::string preset = "small", way = "dsp";
  int64_t frames = 0, positions = 0, channels = 0;
  int heads = 0, pairs = 0, as_rank = -1;
  double stall = 60;
  bool rates = false;
};

void AddFlags(CLI::App& app, Flags& flags) {
  RunOptions& options = flags.options;
  app.add_option("--preset", flags.preset, "Sizes: " + absl::StrJoin(PresetNames(), ", "))->capture_default_str();
  app.add_option("--frames", flags.frames, "T, in place of the preset's");
  app.add_option("--positions", flags.positions, "S, of a frame, in place of the preset's");
  app.add_option("--channels", flags.channels, "C, in place of the preset's");
  app.add_option("--heads", flags.heads, "Of attention, in place of the preset's");
  app.add_option("--pairs", flags.pairs, "Of blocks, in place of the preset's");
  app.add_option("--steps", options.config.steps, "How often all pairs run")->capture_default_str();
  app.add_option("--seed", options.config.seed, "Of weights and input")->capture_default_str();
  app.add_flag("--exchange-only", options.config.exchange_only, "No block computes anything: the switches alone");
  app.add_option("--way", flags.way, "dsp (2 f M / P bytes a rank and pair) or ulysses (8 f M / P)")
      ->capture_default_str();
  app.add_option("--ranks", options.ranks, "1 to 16, no more than frames, positions and heads")->capture_default_str();
  app.add_option("--transport", options.transport,
                 "inproc: ranks are threads; shm, tcp: processes of this host, over UCX")
      ->capture_default_str();
  app.add_option("--devices", options.devices, "GPUs of this host, one a rank, as cuda:0,cuda:1; none: CPUs")
      ->delimiter(',');
  app.add_flag("--rates", flags.rates, "On GPUs: what the parts take, each alone, and what the link carries; no pairs");
  app.add_option("--chunk-rows", options.chunk_rows, "On GPUs: rows of a product, and of what is sent at once")
      ->capture_default_str();
  app.add_option("--threads", options.threads, "Of each rank")->capture_default_str();
  app.add_option("--chunk-bytes", options.chunk_bytes, "The most bytes of a frame")->capture_default_str();
  app.add_option("--stall", flags.stall, "Seconds without a byte from a rank after which the others end")
      ->capture_default_str();
  app.add_option("--output", options.output, "File that gets hidden at the end, [T, S, C] in bf16");
  app.add_option("--as-rank", flags.as_rank, "A rank of another process of this program, which starts it")->group("");
}

absl::StatusOr<RunOptions> OptionsOf(const Flags& flags) {
  RunOptions options = flags.options;
  DT_ASSIGN_OR_RETURN(options.config, Preset(flags.preset));
  DT_ASSIGN_OR_RETURN(options.way, ParseWay(flags.way));
  options.config.steps = flags.options.config.steps;
  options.config.seed = flags.options.config.seed;
  options.config.exchange_only = flags.options.config.exchange_only;
  if (flags.frames != 0) options.config.frames = flags.frames;
  if (flags.positions != 0) options.config.positions = flags.positions;
  if (flags.channels != 0) options.config.channels = flags.channels;
  if (flags.heads != 0) options.config.heads = flags.heads;
  if (flags.pairs != 0) options.config.pairs = flags.pairs;
  if (!options.devices.empty() && options.ranks == 1) options.ranks = static_cast<int>(options.devices.size());
  options.stall = absl::Seconds(flags.stall);
  DT_RETURN_IF_ERROR(options.Validate());
  if (!options.output.empty() && truncate(options.output.c_str(), 0) != 0 && errno != ENOENT)
    return InvalidArgument("--output ", options.output, " cannot be written");
  return options;
}

// What all ranks did, as text.
absl::StatusOr<std::string> RunRanks(const Flags& flags) {
  DT_ASSIGN_OR_RETURN(const RunOptions options, OptionsOf(flags));
  if (flags.rates) {
    DT_ASSIGN_OR_RETURN(const GpuRates rates, MeasureRates(options));
    return DescribeRates(options, rates);
  }
  DT_ASSIGN_OR_RETURN(const auto reports, !options.devices.empty()        ? RunGpus(options)
                                          : options.transport == "inproc" ? RunThreads(options)
                                                                          : RunProcesses(options));
  DT_ASSIGN_OR_RETURN(const auto summary, Summarize(options, reports));
  return Describe(options, summary);
}

int Run(int count, char** arguments) {
  CLI::App app{
      "A factorised spatio-temporal transformer with random weights, on one or several ranks: dynamic sequence "
      "parallelism (one switch of the layout a stage) or Ulysses. Every number of ranks and way gives the "
      "same bits."};
  Flags flags;
  AddFlags(app, flags);
  CLI11_PARSE(app, count, arguments);
  if (flags.as_rank >= 0) return RunAsRank(flags.as_rank);
  const auto told = RunRanks(flags);
  if (!told.ok()) {
    std::fprintf(stderr, "%s\n", std::string(told.status().message()).c_str());
    return 1;
  }
  std::fputs(told->c_str(), stdout);
  return 0;
}

}  // namespace
}  // namespace dovetail::spatio_temporal

int main(int count, char** arguments) { return dovetail::spatio_temporal::Run(count, arguments); }
