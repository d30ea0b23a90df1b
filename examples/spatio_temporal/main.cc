// A factorised spatio-temporal transformer on one or several ranks: docs/sequence_parallelism.md.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>

#include "absl/strings/str_join.h"
#include "examples/spatio_temporal/run_processes.h"
#include "examples/spatio_temporal/run_threads.h"

namespace dovetail::spatio_temporal {
namespace {

int Run(int count, char** arguments) {
  RunOptions options;
  std::string preset = "small", way = "dsp";
  int64_t frames = 0, positions = 0, channels = 0;
  int heads = 0, pairs = 0, as_rank = -1;
  double stall = 60;
  CLI::App app{
      "A factorised spatio-temporal transformer with random weights, on one or several ranks: dynamic sequence "
      "parallelism (one switch of the layout a stage) or Ulysses. Every number of ranks and way gives the "
      "same bits."};
  app.add_option("--preset", preset, "Sizes: " + absl::StrJoin(PresetNames(), ", "))->capture_default_str();
  app.add_option("--frames", frames, "T, in place of the preset's");
  app.add_option("--positions", positions, "S, of a frame, in place of the preset's");
  app.add_option("--channels", channels, "C, in place of the preset's");
  app.add_option("--heads", heads, "Of attention, in place of the preset's");
  app.add_option("--pairs", pairs, "Of blocks, in place of the preset's");
  app.add_option("--steps", options.config.steps, "How often all pairs run")->capture_default_str();
  app.add_option("--seed", options.config.seed, "Of weights and input")->capture_default_str();
  app.add_flag("--exchange-only", options.config.exchange_only, "No block computes anything: the switches alone");
  app.add_option("--way", way, "dsp (2 f M / P bytes a rank and pair) or ulysses (8 f M / P)")->capture_default_str();
  app.add_option("--ranks", options.ranks, "1 to 16, no more than frames, positions and heads")->capture_default_str();
  app.add_option("--transport", options.transport,
                 "inproc: ranks are threads; shm, tcp: processes of this host, over UCX")
      ->capture_default_str();
  app.add_option("--threads", options.threads, "Of each rank")->capture_default_str();
  app.add_option("--chunk-bytes", options.chunk_bytes, "The most bytes of a frame")->capture_default_str();
  app.add_option("--stall", stall, "Seconds without a byte from a rank after which the others end")
      ->capture_default_str();
  app.add_option("--output", options.output, "File that gets hidden at the end, [T, S, C] in bf16");
  app.add_option("--as-rank", as_rank, "A rank of another process of this program, which starts it")->group("");
  CLI11_PARSE(app, count, arguments);
  if (as_rank >= 0) return RunAsRank(as_rank);
  const auto fail = [](const absl::Status& why) {
    std::fprintf(stderr, "%s\n", std::string(why.message()).c_str());
    return 1;
  };
  const auto sizes = Preset(preset);
  if (!sizes.ok()) return fail(sizes.status());
  const auto parsed = ParseWay(way);
  if (!parsed.ok()) return fail(parsed.status());
  const Config given = options.config;
  options.config = *sizes;
  options.config.steps = given.steps;
  options.config.seed = given.seed;
  options.config.exchange_only = given.exchange_only;
  if (frames != 0) options.config.frames = frames;
  if (positions != 0) options.config.positions = positions;
  if (channels != 0) options.config.channels = channels;
  if (heads != 0) options.config.heads = heads;
  if (pairs != 0) options.config.pairs = pairs;
  options.way = *parsed;
  options.stall = absl::Seconds(stall);
  if (const absl::Status valid = options.Validate(); !valid.ok()) return fail(valid);
  if (!options.output.empty() && truncate(options.output.c_str(), 0) != 0 && errno != ENOENT)
    return fail(InvalidArgument("--output ", options.output, " cannot be written"));
  const auto reports = options.transport == "inproc" ? RunThreads(options) : RunProcesses(options);
  if (!reports.ok()) return fail(reports.status());
  const auto summary = Summarize(options, *reports);
  if (!summary.ok()) return fail(summary.status());
  std::fputs(Describe(options, *summary).c_str(), stdout);
  return 0;
}

}  // namespace
}  // namespace dovetail::spatio_temporal

int main(int count, char** arguments) { return dovetail::spatio_temporal::Run(count, arguments); }
