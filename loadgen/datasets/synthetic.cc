#include <algorithm>
#include <cmath>

#include "absl/strings/str_join.h"
#include "loadgen/datasets/dataset.h"
#include "loadgen/datasets/line_reader.h"

namespace dovetail::loadgen {
namespace {

constexpr const char* kSonnetTask = "Pick as many lines as you can from these poem lines:\n";
constexpr int kSonnetLines = 512;  // that are written where no file is given
constexpr int kWordsOfLine = 8;
constexpr size_t kMaxSonnetLines = 100'000;

int64_t Uniform(int64_t low, int64_t high, Random& random) {
  return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
}

// A length around `mean`: in [floor(mean (1 - range)), ceil(mean (1 + range))].
int64_t LengthAround(int64_t mean, double range, Random& random) {
  const double m = static_cast<double>(mean);
  return std::max<int64_t>(1, Uniform(static_cast<int64_t>(std::floor(m * (1 - range))),
                                      static_cast<int64_t>(std::ceil(m * (1 + range))), random));
}

absl::StatusOr<std::vector<std::string>> ReadLines(const std::string& path) {
  DT_ASSIGN_OR_RETURN(const auto reader, LineReader::Open(path));
  std::vector<std::string> lines;
  while (lines.size() < kMaxSonnetLines) {
    DT_ASSIGN_OR_RETURN(auto line, reader->Next());
    if (!line.has_value()) break;
    if (!line->empty()) lines.push_back(*std::move(line));
  }
  if (lines.empty()) return InvalidArgument(path, ": has no line of text");
  return lines;
}

std::vector<std::string> WriteLines(const PromptWriter& writer, Random& random) {
  std::vector<std::string> lines;
  const auto tokens = std::llround(kWordsOfLine * writer.vocabulary().tokens_per_word);
  for (int i = 0; i < kSonnetLines; ++i) lines.push_back(writer.Piece(tokens, random));
  return lines;
}

// Tokens of a line on average: counted, or by its words.
absl::StatusOr<double> TokensOfLine(const std::vector<std::string>& lines, const PromptWriter& writer) {
  const std::string text = absl::StrJoin(lines, "\n");
  DT_ASSIGN_OR_RETURN(const int64_t counted, writer.Count(text));
  const auto words = 1 + std::count_if(text.begin(), text.end(), [](char c) { return c == ' ' || c == '\n'; });
  const double tokens =
      counted >= 0 ? static_cast<double>(counted) : static_cast<double>(words) * writer.vocabulary().tokens_per_word;
  return tokens / static_cast<double>(lines.size());
}

}  // namespace

absl::StatusOr<Dataset> MakeRandom(const DatasetOptions& options, const PromptWriter& writer) {
  Random random(options.seed);
  const int64_t special = writer.vocabulary().special_tokens;
  const std::string prefix = writer.Piece(options.random_prefix_len, random);
  Dataset dataset;
  for (int64_t i = 0; i < options.num_prompts; ++i) {
    const int64_t own = std::max<int64_t>(1, options.random_input_len - special);
    int64_t input = options.random_prefix_len + special + LengthAround(own, options.random_input_range, random);
    int64_t output = LengthAround(options.random_output_len, options.random_output_range, random);
    DT_ASSIGN_OR_RETURN(
        const Fits fits,
        FitLengths(options, {absl::StrCat("request ", i), "--random-input-len", "--random-output-len"}, input, output));
    if (fits == Fits::kSkip) continue;
    DT_ASSIGN_OR_RETURN(Prompt prompt, writer.Complete(prefix, input, random));
    dataset.requests.push_back({std::move(prompt.text), prompt.tokens, output, 0, ""});
  }
  return dataset;
}

absl::StatusOr<Dataset> MakePrefixRepetition(const DatasetOptions& options, const PromptWriter& writer) {
  Random random(options.seed);
  const int64_t each = options.num_prompts / options.prefix_repetition_num_prefixes;
  Dataset dataset;
  for (int64_t i = 0; i < options.prefix_repetition_num_prefixes; ++i) {
    const std::string prefix = writer.Piece(options.prefix_repetition_prefix_len, random);
    for (int64_t j = 0; j < each; ++j) {
      int64_t input = options.prefix_repetition_prefix_len + options.prefix_repetition_suffix_len;
      int64_t output = options.prefix_repetition_output_len;
      DT_ASSIGN_OR_RETURN(const Fits fits,
                          FitLengths(options,
                                     {absl::StrCat("request ", dataset.requests.size()),
                                      "--prefix-repetition-prefix-len + --prefix-repetition-suffix-len",
                                      "--prefix-repetition-output-len"},
                                     input, output));
      if (fits == Fits::kSkip) continue;
      DT_ASSIGN_OR_RETURN(Prompt prompt, writer.Complete(prefix, input, random));
      dataset.requests.push_back({std::move(prompt.text), prompt.tokens, output, 0, ""});
    }
  }
  if (const int64_t left = options.num_prompts - each * options.prefix_repetition_num_prefixes; left > 0)
    dataset.notes.push_back(absl::StrCat("prefix_repetition: every prefix has ", each, " prompts; ", left, " of ",
                                         options.num_prompts, " are left out"));
  if (!options.disable_shuffle) std::shuffle(dataset.requests.begin(), dataset.requests.end(), random);
  return dataset;
}

absl::StatusOr<Dataset> MakeSonnet(const DatasetOptions& options, const PromptWriter& writer) {
  Random random(options.seed);
  std::vector<std::string> lines;
  Dataset dataset;
  if (options.path.empty()) {
    lines = WriteLines(writer, random);
    dataset.notes.push_back(
        absl::StrCat("sonnet: no --dataset-path; ", lines.size(), " lines of ", kWordsOfLine, " words were written"));
  } else {
    DT_ASSIGN_OR_RETURN(lines, ReadLines(options.path));
  }
  DT_ASSIGN_OR_RETURN(const double tokens_of_line, TokensOfLine(lines, writer));
  DT_ASSIGN_OR_RETURN(const int64_t counted, writer.Count(kSonnetTask));
  const double task = counted >= 0 ? static_cast<double>(counted) : 11 * writer.vocabulary().tokens_per_word;
  if (static_cast<double>(options.sonnet_input_len) <= task)
    return InvalidArgument("--sonnet-input-len: ", options.sonnet_input_len, " is no more than the ",
                           std::llround(task), " tokens of the task before the lines");
  const auto lines_for = [&](int64_t tokens) {
    return std::max<int64_t>(0, std::llround((static_cast<double>(tokens) - task) / tokens_of_line));
  };
  std::string beginning = kSonnetTask;
  for (int64_t i = 0; i < std::min<int64_t>(lines_for(options.sonnet_prefix_len), std::ssize(lines)); ++i)
    absl::StrAppend(&beginning, lines[static_cast<size_t>(i)], "\n");
  const int64_t more = std::max<int64_t>(0, lines_for(options.sonnet_input_len) - lines_for(options.sonnet_prefix_len));
  for (int64_t i = 0; i < options.num_prompts; ++i) {
    std::string text = beginning;
    for (int64_t j = 0; j < more; ++j) absl::StrAppend(&text, lines[random() % lines.size()], "\n");
    DT_ASSIGN_OR_RETURN(int64_t input, writer.Count(text));
    if (input < 0) input = options.sonnet_input_len;
    int64_t output = options.sonnet_output_len;
    DT_ASSIGN_OR_RETURN(
        const Fits fits,
        FitText(options, {absl::StrCat("request ", i), "--sonnet-input-len", "--sonnet-output-len"}, input, output));
    if (fits == Fits::kYes) dataset.requests.push_back({std::move(text), input, output, 0, ""});
  }
  return dataset;
}

}  // namespace dovetail::loadgen
