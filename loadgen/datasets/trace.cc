// Traces replayed: arrival times and lengths as recorded, prompts that share what the recorded ones shared.
#include <algorithm>
#include <cmath>

#include "loadgen/datasets/dataset.h"
#include "loadgen/datasets/trace_rows.h"

namespace dovetail::loadgen {
namespace {

constexpr double kBytesOfToken = 6;

int64_t Scaled(int64_t tokens, double scale) {
  return std::max<int64_t>(1, std::llround(static_cast<double>(tokens) * scale));
}

uint64_t SeedOf(const DatasetOptions& options, int64_t id) {
  return options.seed * 0x9e3779b97f4a7c15ULL + static_cast<uint64_t>(id);
}

// Blocks of equal ids have equal texts; the last one ends where the prompt does.
absl::StatusOr<Prompt> PromptOf(const DatasetOptions& options, const TraceRow& row, int64_t chunk, int64_t input_len,
                                int64_t index, const PromptWriter& writer) {
  if (row.hash_ids.empty()) {
    Random random(SeedOf(options, index));
    return writer.Complete("", input_len, random);
  }
  std::string beginning;
  const int64_t full = std::min<int64_t>(std::ssize(row.hash_ids) - 1, (input_len - 1) / chunk);
  for (int64_t i = 0; i < full; ++i) {
    Random random(SeedOf(options, row.hash_ids[static_cast<size_t>(i)]));
    absl::StrAppend(&beginning, beginning.empty() ? "" : " ", writer.Piece(chunk, random));
  }
  Random random(SeedOf(options, row.hash_ids[static_cast<size_t>(full)]));
  return writer.Complete(std::move(beginning), input_len, random);
}

}  // namespace

absl::StatusOr<Dataset> ReadTrace(const DatasetOptions& options, const PromptWriter& writer) {
  DT_ASSIGN_OR_RETURN(const auto rows, ReadTraceRows(options));
  DT_ASSIGN_OR_RETURN(const int64_t recorded_chunk, ChunkTokens(options, rows));
  const int64_t chunk = Scaled(recorded_chunk, options.length_scale);
  Dataset dataset;
  dataset.timed = true;
  int64_t skipped = 0, clipped = 0;
  double bytes = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    const TraceRow& row = rows[i];
    int64_t input = Scaled(row.input_len, options.length_scale);
    int64_t output = Scaled(row.output_len, options.length_scale);
    const int64_t asked = input + output;
    DT_ASSIGN_OR_RETURN(const Fits fits, FitLengths(options,
                                                    {absl::StrCat(options.path, ": line ", row.line),
                                                     options.trace_input_length, options.trace_output_length},
                                                    input, output));
    if (fits == Fits::kSkip) {
      ++skipped;
      continue;
    }
    if (input + output < asked) ++clipped;
    bytes += kBytesOfToken * static_cast<double>(input);
    if (bytes > static_cast<double>(kMaxPromptBytes))
      return InvalidArgument(options.path, ": line ", row.line, ": the prompts up to here take more than ",
                             kMaxPromptBytes >> 30, " GiB of memory; take fewer with --num-prompts, or --length-scale");
    DT_ASSIGN_OR_RETURN(Prompt prompt, PromptOf(options, row, chunk, input, static_cast<int64_t>(i), writer));
    dataset.requests.push_back({std::move(prompt.text), prompt.tokens, output, row.at_s * options.time_scale, ""});
  }
  if (dataset.requests.empty())
    return InvalidArgument(options.path, ": all ", skipped, " requests are longer than the model's ",
                           options.max_model_len, " tokens; --length-scale makes them shorter");
  if (std::any_of(rows.begin(), rows.end(), [](const TraceRow& row) { return !row.hash_ids.empty(); }))
    dataset.notes.push_back(absl::StrCat("timed_trace: one of ", options.trace_hash_ids, " is ", recorded_chunk,
                                         " tokens, as sent ", chunk));
  if (skipped > 0)
    dataset.notes.push_back(absl::StrCat("timed_trace: ", skipped, " requests are too long for the model: skipped"));
  if (clipped > 0)
    dataset.notes.push_back(absl::StrCat("timed_trace: ", clipped, " requests are too long for the model: shortened"));
  return dataset;
}

}  // namespace dovetail::loadgen
