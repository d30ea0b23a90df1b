// Datasets that hold text: ShareGPT's JSON and JSON lines of prompts.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "loadgen/datasets/dataset.h"
#include "loadgen/datasets/json_line.h"
#include "loadgen/datasets/line_reader.h"

namespace dovetail::loadgen {
namespace {

using nlohmann::json;

// What vLLM leaves out of ShareGPT: very short turns, and what old models could not hold.
constexpr int64_t kFewestTokens = 4, kMostPromptTokens = 1024, kMostTokens = 2048;

absl::StatusOr<int64_t> CountOrGuess(const PromptWriter& writer, const std::string& text) {
  DT_ASSIGN_OR_RETURN(const int64_t counted, writer.Count(text));
  if (counted >= 0) return counted;
  const auto words = 1 + std::count_if(text.begin(), text.end(), [](char c) { return c == ' ' || c == '\n'; });
  return std::max<int64_t>(1, std::llround(static_cast<double>(words) * writer.vocabulary().tokens_per_word));
}

struct Turns {
  int64_t entry = 0;  // its number in the file, from 1
  std::string prompt, answer;
};

// The first two turns of an entry; nullopt where it has fewer.
std::optional<Turns> FirstTurns(const json& entry, int64_t number) {
  const auto turns = entry.find("conversations");
  if (turns == entry.end() || !turns->is_array() || turns->size() < 2) return std::nullopt;
  const auto text = [&](size_t i) -> const std::string* {
    const json& turn = (*turns)[i];
    const auto value = turn.is_object() ? turn.find("value") : turn.end();
    return turn.is_object() && value != turn.end() ? value->get_ptr<const std::string*>() : nullptr;
  };
  if (text(0) == nullptr || text(1) == nullptr) return std::nullopt;
  return Turns{number, *text(0), *text(1)};
}

// Entries are looked at one by one while the file is parsed: the usual one has 670 MB.
absl::StatusOr<std::vector<Turns>> ReadTurns(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return NotFound(path, ": cannot be read");
  std::vector<Turns> all;
  int64_t entries = 0;
  const auto take = [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth != 1 || event != json::parse_event_t::object_end) return true;
    if (auto turns = FirstTurns(parsed, ++entries); turns.has_value()) all.push_back(*std::move(turns));
    return false;
  };
  try {
    if (!json::parse(file, take).is_array()) return InvalidArgument(path, ": is not a JSON array of conversations");
  } catch (const json::exception& error) {
    return InvalidArgument(path, ": entry ", entries + 1, ": ", error.what());
  }
  if (all.empty())
    return InvalidArgument(path, ": none of its ", entries,
                           " entries has conversations with two turns that have a value");
  return all;
}

bool IsUsual(int64_t prompt, int64_t answer, bool answer_given) {
  return prompt >= kFewestTokens && (answer_given || answer >= kFewestTokens) && prompt <= kMostPromptTokens &&
         prompt + answer <= kMostTokens;
}

struct CustomRow {
  std::string prompt;
  int64_t output_len = 0;
  std::string place;
};

absl::StatusOr<CustomRow> ParseCustomRow(const std::string& line, const std::string& place, int64_t output_len) {
  DT_ASSIGN_OR_RETURN(const json row, ParseJsonLine(line, place));
  const auto prompt = row.find("prompt");
  if (prompt == row.end() || !prompt->is_string() || prompt->get_ref<const std::string&>().empty())
    return InvalidArgument(place, ": prompt: has to be a text that is not empty");
  CustomRow out{prompt->get<std::string>(), output_len, place};
  if (output_len != -1) return out;
  const auto tokens = row.find("output_tokens");
  if (tokens == row.end() || !tokens->is_number_integer() || tokens->get<int64_t>() < 1 ||
      tokens->get<int64_t>() > kMaxTokensOfRequest)
    return InvalidArgument(place, ": output_tokens: has to be a whole number in 1..", kMaxTokensOfRequest,
                           ", as --custom-output-len is -1");
  out.output_len = tokens->get<int64_t>();
  return out;
}

absl::StatusOr<std::vector<CustomRow>> ReadCustomRows(const DatasetOptions& options) {
  DT_ASSIGN_OR_RETURN(const auto reader, LineReader::Open(options.path));
  std::vector<CustomRow> rows;
  while (std::ssize(rows) < kMaxRequests) {
    DT_ASSIGN_OR_RETURN(const auto line, reader->Next());
    if (!line.has_value()) break;
    if (line->find_first_not_of(" \t") == std::string::npos) continue;
    DT_ASSIGN_OR_RETURN(CustomRow row, ParseCustomRow(*line, reader->Place(), options.custom_output_len));
    rows.push_back(std::move(row));
  }
  if (rows.empty()) return InvalidArgument(options.path, ": has no request");
  return rows;
}

absl::Status NothingFits(const DatasetOptions& options, int64_t skipped) {
  return InvalidArgument(options.path, ": none of its ", skipped,
                         " requests can be sent: they are too long for the model's ", options.max_model_len,
                         " tokens, or of a length that this dataset leaves out");
}

}  // namespace

absl::StatusOr<Dataset> ReadShareGpt(const DatasetOptions& options, const PromptWriter& writer) {
  DT_ASSIGN_OR_RETURN(auto all, ReadTurns(options.path));
  Random random(options.seed);
  if (!options.disable_shuffle) std::shuffle(all.begin(), all.end(), random);
  Dataset dataset;
  int64_t skipped = 0;
  for (Turns& turns : all) {
    if (std::ssize(dataset.requests) >= options.num_prompts) break;
    DT_ASSIGN_OR_RETURN(const int64_t input, CountOrGuess(writer, turns.prompt));
    int64_t output = options.sharegpt_output_len;
    const bool given = output > 0;
    if (!given) {
      DT_ASSIGN_OR_RETURN(output, CountOrGuess(writer, turns.answer));
    }
    const LengthPlace place = {absl::StrCat(options.path, ": entry ", turns.entry), "conversations[0]",
                               given ? "--sharegpt-output-len" : "conversations[1]"};
    Fits fits = Fits::kSkip;
    if (IsUsual(input, output, given)) {
      DT_ASSIGN_OR_RETURN(fits, FitText(options, place, input, output));
    }
    if (fits == Fits::kSkip) {
      ++skipped;
      continue;
    }
    dataset.requests.push_back({std::move(turns.prompt), input, output, 0, ""});
  }
  if (dataset.requests.empty()) return NothingFits(options, skipped);
  Oversample(options, random, dataset);
  return dataset;
}

absl::StatusOr<Dataset> ReadCustom(const DatasetOptions& options, const PromptWriter& writer) {
  DT_ASSIGN_OR_RETURN(auto rows, ReadCustomRows(options));
  Random random(options.seed);
  if (!options.disable_shuffle) std::shuffle(rows.begin(), rows.end(), random);
  Dataset dataset;
  int64_t skipped = 0;
  for (CustomRow& row : rows) {
    if (std::ssize(dataset.requests) >= options.num_prompts) break;
    DT_ASSIGN_OR_RETURN(const int64_t input, CountOrGuess(writer, row.prompt));
    const char* const field = options.custom_output_len == -1 ? "output_tokens" : "--custom-output-len";
    DT_ASSIGN_OR_RETURN(const Fits fits, FitText(options, {row.place, "prompt", field}, input, row.output_len));
    if (fits == Fits::kSkip) {
      ++skipped;
      continue;
    }
    dataset.requests.push_back({std::move(row.prompt), input, row.output_len, 0, ""});
  }
  if (dataset.requests.empty()) return NothingFits(options, skipped);
  if (skipped > 0)
    dataset.notes.push_back(absl::StrCat(options.path, ": ", skipped, " requests are too long: skipped"));
  Oversample(options, random, dataset);
  return dataset;
}

}  // namespace dovetail::loadgen
