#include "loadgen/datasets/dataset.h"

#include <algorithm>
#include <cmath>

namespace dovetail::loadgen {
namespace {

constexpr double kBytesOfToken = 6;  // a word and its space

absl::Status CheckLength(const char* flag, int64_t tokens, int64_t least) {
  if (tokens >= least && tokens <= kMaxTokensOfRequest) return absl::OkStatus();
  return InvalidArgument(flag, ": ", tokens, " is outside ", least, "..", kMaxTokensOfRequest);
}

absl::Status CheckFactor(const char* flag, double value) {
  if (value > 0 && std::isfinite(value)) return absl::OkStatus();
  return InvalidArgument(flag, ": ", value, " is not a positive number");
}

bool NeedsFile(const std::string& name) { return name == "sharegpt" || name == "custom" || name == "timed_trace"; }

// Tokens of all prompts that are written here; those of files are counted while they are read.
int64_t WrittenTokens(const DatasetOptions& o) {
  if (o.name == "random") return o.num_prompts * (o.random_prefix_len + o.random_input_len);
  if (o.name == "sonnet") return o.num_prompts * o.sonnet_input_len;
  if (o.name == "prefix_repetition")
    return o.num_prompts * (o.prefix_repetition_prefix_len + o.prefix_repetition_suffix_len);
  return 0;
}

}  // namespace

absl::Status DatasetOptions::Validate() const {
  if (num_prompts < 1 || num_prompts > kMaxRequests)
    return InvalidArgument("--num-prompts: ", num_prompts, " is outside 1..", kMaxRequests,
                           "; run the load several times for more");
  if (NeedsFile(name) && path.empty())
    return InvalidArgument("--dataset-path: --dataset-name ", name, " reads a file; name it");
  if ((name == "random" || name == "prefix_repetition") && !path.empty())
    return InvalidArgument("--dataset-path: --dataset-name ", name,
                           " reads no file; sharegpt, sonnet, custom and timed_trace do");
  DT_RETURN_IF_ERROR(CheckLength("--random-input-len", random_input_len, 1));
  DT_RETURN_IF_ERROR(CheckLength("--random-output-len", random_output_len, 1));
  DT_RETURN_IF_ERROR(CheckLength("--random-prefix-len", random_prefix_len, 0));
  for (const double range : {random_input_range, random_output_range})
    if (!(range >= 0 && range < 1)) return InvalidArgument("--random-range-ratio: ", range, " is outside [0, 1)");
  DT_RETURN_IF_ERROR(CheckLength("--sharegpt-output-len", sharegpt_output_len, 0));
  if (custom_output_len != -1) DT_RETURN_IF_ERROR(CheckLength("--custom-output-len", custom_output_len, 1));
  DT_RETURN_IF_ERROR(CheckLength("--sonnet-input-len", sonnet_input_len, 1));
  DT_RETURN_IF_ERROR(CheckLength("--sonnet-output-len", sonnet_output_len, 1));
  DT_RETURN_IF_ERROR(CheckLength("--sonnet-prefix-len", sonnet_prefix_len, 0));
  DT_RETURN_IF_ERROR(CheckLength("--prefix-repetition-prefix-len", prefix_repetition_prefix_len, 1));
  DT_RETURN_IF_ERROR(CheckLength("--prefix-repetition-suffix-len", prefix_repetition_suffix_len, 1));
  DT_RETURN_IF_ERROR(CheckLength("--prefix-repetition-output-len", prefix_repetition_output_len, 1));
  if (prefix_repetition_num_prefixes < 1)
    return InvalidArgument("--prefix-repetition-num-prefixes: ", prefix_repetition_num_prefixes, " is less than 1");
  if (name == "prefix_repetition" && num_prompts < prefix_repetition_num_prefixes)
    return InvalidArgument("--num-prompts: ", num_prompts, " is less than --prefix-repetition-num-prefixes ",
                           prefix_repetition_num_prefixes);
  DT_RETURN_IF_ERROR(CheckFactor("--timed-trace-sec-multiplier", trace_sec_multiplier));
  DT_RETURN_IF_ERROR(CheckFactor("--time-scale", time_scale));
  DT_RETURN_IF_ERROR(CheckFactor("--length-scale", length_scale));
  if (trace_chunk_tokens < 0 || trace_chunk_tokens > kMaxTokensOfRequest)
    return InvalidArgument("--timed-trace-chunk-hash-size: ", trace_chunk_tokens, " is outside 0..",
                           kMaxTokensOfRequest);
  if (const double bytes = kBytesOfToken * static_cast<double>(WrittenTokens(*this)); bytes > kMaxPromptBytes)
    return InvalidArgument("--num-prompts: ", num_prompts, " prompts would take ", std::llround(bytes / 1e9),
                           " GB of memory, more than ", kMaxPromptBytes >> 30, " GiB; take fewer or shorter ones");
  return absl::OkStatus();
}

absl::StatusOr<Fits> FitLengths(const DatasetOptions& options, const LengthPlace& place, int64_t& input_len,
                                int64_t& output_len) {
  if (options.max_model_len == 0 || input_len + output_len <= options.max_model_len) return Fits::kYes;
  switch (options.too_long) {
    case TooLong::kSkip: return Fits::kSkip;
    case TooLong::kClip:
      input_len = std::max<int64_t>(1, std::min(input_len, options.max_model_len - output_len));
      output_len = std::max<int64_t>(1, std::min(output_len, options.max_model_len - input_len));
      return Fits::kYes;
    case TooLong::kError: break;
  }
  return InvalidArgument(place.where, ": ", place.input_field, " ", input_len, " and ", place.output_field, " ",
                         output_len, " are more than the ", options.max_model_len,
                         " tokens of the model (max_model_len); --too-long clip or skip takes them, and --length-scale",
                         " scales a trace");
}

absl::StatusOr<Fits> FitText(const DatasetOptions& options, const LengthPlace& place, int64_t input_len,
                             int64_t& output_len) {
  int64_t allowed = input_len;
  DT_ASSIGN_OR_RETURN(const Fits fits, FitLengths(options, place, allowed, output_len));
  return allowed < input_len ? Fits::kSkip : fits;
}

void Oversample(const DatasetOptions& options, Random& random, Dataset& dataset) {
  const auto there = std::ssize(dataset.requests);
  if (there == 0 || there >= options.num_prompts) return;
  if (options.no_oversample) {
    dataset.notes.push_back(absl::StrCat(options.path, ": ", there, " usable requests; --num-prompts ",
                                         options.num_prompts, " is not reached (--no-oversample)"));
    return;
  }
  while (std::ssize(dataset.requests) < options.num_prompts)
    dataset.requests.push_back(dataset.requests[random() % static_cast<uint64_t>(there)]);
  dataset.notes.push_back(
      absl::StrCat(options.path, ": ", there, " usable requests; drawn again up to ", options.num_prompts));
}

absl::StatusOr<Dataset> MakeDataset(const DatasetOptions& options, const PromptWriter& writer) {
  DT_RETURN_IF_ERROR(options.Validate());
  using Maker = absl::StatusOr<Dataset> (*)(const DatasetOptions&, const PromptWriter&);
  constexpr struct {
    const char* name;
    Maker make;
  } kMakers[] = {{"random", MakeRandom}, {"prefix_repetition", MakePrefixRepetition},
                 {"sonnet", MakeSonnet}, {"sharegpt", ReadShareGpt},
                 {"custom", ReadCustom}, {"timed_trace", ReadTrace}};
  for (const auto& maker : kMakers) {
    if (options.name != maker.name) continue;
    DT_ASSIGN_OR_RETURN(Dataset dataset, maker.make(options, writer));
    for (size_t i = 0; i < dataset.requests.size(); ++i)
      dataset.requests[i].id = absl::StrCat(options.request_id_prefix, i);
    return dataset;
  }
  return InvalidArgument("--dataset-name: there is no dataset '", options.name,
                         "'; there are random, sharegpt, sonnet, custom, prefix_repetition and timed_trace");
}

}  // namespace dovetail::loadgen
