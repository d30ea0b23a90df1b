#include "loadgen/datasets/trace_rows.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "loadgen/datasets/json_line.h"
#include "loadgen/datasets/line_reader.h"

namespace dovetail::loadgen {
namespace {

using nlohmann::json;

constexpr double kMaxSpanSeconds = 7 * 24 * 3600;  // longer: the times are in another unit
constexpr int64_t kUsualChunkTokens = 16;
constexpr int64_t kMaxChunkTokens = 8192;
constexpr const char* kAzureHead = "TIMESTAMP,ContextTokens,GeneratedTokens";

absl::Status BadNumber(const std::string& place, const std::string& field, const std::string& got,
                       const std::string& wanted) {
  return InvalidArgument(place, ": ", field, ": ", got, " is not ", wanted);
}

absl::StatusOr<double> TimeOf(const json& value, const std::string& place, const std::string& field) {
  const double time = value.is_number() ? value.get<double>() : std::nan("");
  if (!std::isfinite(time) || time < 0) return BadNumber(place, field, value.dump(), "a time of at least 0");
  return time;
}

absl::StatusOr<int64_t> LengthOf(double value, const std::string& place, const std::string& field,
                                 const std::string& shown) {
  if (!(value >= 1) || value > static_cast<double>(kMaxTokensOfRequest) || value != std::floor(value))
    return BadNumber(place, field, shown, absl::StrCat("a whole number of tokens in 1..", kMaxTokensOfRequest));
  return static_cast<int64_t>(value);
}

absl::StatusOr<const json*> FieldOf(const json& row, const std::string& name, const std::string& place,
                                    const std::string& flag) {
  const auto found = row.find(name);
  if (found != row.end()) return &*found;
  std::string there;
  for (const auto& [key, value] : row.items()) absl::StrAppend(&there, there.empty() ? "" : ", ", key);
  return InvalidArgument(place, ": has no field ", name, "; it has ", there, "; ", flag, " names another");
}

absl::StatusOr<int64_t> LengthField(const json& row, const std::string& name, const std::string& place,
                                    const std::string& flag) {
  DT_ASSIGN_OR_RETURN(const json* value, FieldOf(row, name, place, flag));
  return LengthOf(value->is_number() ? value->get<double>() : std::nan(""), place, name, value->dump());
}

absl::StatusOr<TraceRow> ParseJsonRow(const DatasetOptions& options, const std::string& line,
                                      const std::string& place) {
  DT_ASSIGN_OR_RETURN(const json row, ParseJsonLine(line, place));
  TraceRow out;
  std::string name = options.trace_timestamp;
  double seconds = options.trace_sec_multiplier;
  if (name == "timestamp" && !row.contains(name) && row.contains("timestamp_ms")) {
    name = "timestamp_ms";
    seconds = 1e-3;
  }
  DT_ASSIGN_OR_RETURN(const json* time, FieldOf(row, name, place, "--timed-trace-label-timestamp"));
  DT_ASSIGN_OR_RETURN(out.at_s, TimeOf(*time, place, name));
  out.at_s *= seconds;
  DT_ASSIGN_OR_RETURN(out.input_len,
                      LengthField(row, options.trace_input_length, place, "--timed-trace-label-input-length"));
  DT_ASSIGN_OR_RETURN(out.output_len,
                      LengthField(row, options.trace_output_length, place, "--timed-trace-label-output-length"));
  if (const auto ids = row.find(options.trace_hash_ids); ids != row.end()) {
    if (!ids->is_array() ||
        !std::all_of(ids->begin(), ids->end(), [](const json& id) { return id.is_number_integer(); }))
      return InvalidArgument(place, ": ", options.trace_hash_ids, ": has to be a list of whole numbers");
    out.hash_ids = ids->get<std::vector<int64_t>>();
  }
  return out;
}

absl::StatusOr<TraceRow> ParseAzureRow(const std::string& line, const std::string& place) {
  const std::vector<std::string> cells = absl::StrSplit(line, ',');
  if (cells.size() != 3) return InvalidArgument(place, ": has ", cells.size(), " columns; ", kAzureHead, " are 3");
  absl::Time time;
  std::string error;
  if (!absl::ParseTime("%Y-%m-%d %H:%M:%E*S", cells[0], &time, &error))
    return BadNumber(place, "TIMESTAMP", cells[0], "a time like 2023-11-16 18:17:03.9799600");
  TraceRow out;
  out.at_s = absl::ToDoubleSeconds(time - absl::UnixEpoch());
  const auto length = [&](size_t column, const char* field) -> absl::StatusOr<int64_t> {
    double value = 0;
    if (!absl::SimpleAtod(cells[column], &value)) value = std::nan("");
    return LengthOf(value, place, field, absl::StrCat("'", cells[column], "'"));
  };
  DT_ASSIGN_OR_RETURN(out.input_len, length(1, "ContextTokens"));
  DT_ASSIGN_OR_RETURN(out.output_len, length(2, "GeneratedTokens"));
  return out;
}

}  // namespace

absl::StatusOr<std::vector<TraceRow>> ReadTraceRows(const DatasetOptions& options) {
  DT_ASSIGN_OR_RETURN(const auto reader, LineReader::Open(options.path));
  std::vector<TraceRow> rows;
  bool azure = false;
  while (std::ssize(rows) < options.num_prompts) {
    DT_ASSIGN_OR_RETURN(const auto line, reader->Next());
    if (!line.has_value()) break;
    if (line->find_first_not_of(" \t") == std::string::npos) continue;
    if (reader->line() == 1 && *line == kAzureHead) {
      azure = true;
      continue;
    }
    auto row = azure ? ParseAzureRow(*line, reader->Place()) : ParseJsonRow(options, *line, reader->Place());
    if (!row.ok()) return row.status();
    row->line = reader->line();
    rows.push_back(*std::move(row));
  }
  if (rows.empty()) return InvalidArgument(options.path, ": has no request");
  std::stable_sort(rows.begin(), rows.end(), [](const TraceRow& a, const TraceRow& b) { return a.at_s < b.at_s; });
  const double begin = rows.front().at_s;
  for (TraceRow& row : rows) row.at_s -= begin;
  if (const double span = rows.back().at_s; span > kMaxSpanSeconds)
    return InvalidArgument(options.path, ": its requests span ", std::llround(span / 3600), " hours, more than ",
                           kMaxSpanSeconds / 3600, "; times in milliseconds need --timed-trace-sec-multiplier 0.001");
  return rows;
}

absl::StatusOr<int64_t> ChunkTokens(const DatasetOptions& options, const std::vector<TraceRow>& rows) {
  const auto misfit = [&](int64_t chunk) -> const TraceRow* {
    for (const TraceRow& row : rows)
      if (!row.hash_ids.empty() && (row.input_len + chunk - 1) / chunk != std::ssize(row.hash_ids)) return &row;
    return nullptr;
  };
  const bool any = std::any_of(rows.begin(), rows.end(), [](const TraceRow& row) { return !row.hash_ids.empty(); });
  if (!any) return options.trace_chunk_tokens > 0 ? options.trace_chunk_tokens : kUsualChunkTokens;
  const auto refuse = [&](const TraceRow& row, const std::string& what) {
    return InvalidArgument(options.path, ": line ", row.line, ": ", options.trace_hash_ids, ": ", row.hash_ids.size(),
                           " ids for ", row.input_len, " tokens ", what);
  };
  if (options.trace_chunk_tokens > 0) {
    if (const TraceRow* row = misfit(options.trace_chunk_tokens); row != nullptr)
      return refuse(*row, absl::StrCat("do not fit blocks of --timed-trace-chunk-hash-size ",
                                       options.trace_chunk_tokens, " tokens"));
    return options.trace_chunk_tokens;
  }
  const TraceRow* best = nullptr;
  for (int64_t chunk = kUsualChunkTokens; chunk <= kMaxChunkTokens; chunk *= 2) {
    const TraceRow* row = misfit(chunk);
    if (row == nullptr) return chunk;
    if (best == nullptr || row->line > best->line) best = row;
  }
  return refuse(*best, "fit no block size that the rows before have; --timed-trace-chunk-hash-size gives it");
}

}  // namespace dovetail::loadgen
