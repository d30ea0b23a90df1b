#include "base/log_entry.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"

namespace dovetail {
namespace {

// A line break or an escape sequence of a client's must not make another line, or reach a terminal.
std::string OnOneLine(const std::string& text) {
  std::string out;
  out.reserve(text.size());
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n')
      out += "\\n";
    else if (byte < 0x20 || byte == 0x7f)
      absl::StrAppendFormat(&out, "\\x%02x", byte);
    else
      out += c;
  }
  return out;
}

// As it is, or in quotes where a space or a quote would make it unclear where it ends.
std::string TextValue(const std::string& value) {
  if (!value.empty() && value.find_first_of(" \"=\\") == std::string::npos) return OnOneLine(value);
  std::string quoted = "\"";
  for (const char c : value) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return OnOneLine(quoted + '"');
}
std::string TextValue(int64_t value) { return absl::StrCat(value); }
std::string TextValue(double value) { return absl::StrCat(value); }

}  // namespace

std::string CutLogText(std::string text) {
  if (text.size() <= kMaxLogText) return text;
  const size_t all = text.size();
  text.resize(kMaxLogText);
  absl::StrAppend(&text, "... (", all, " bytes)");
  return text;
}

std::string TextLine(const LogEntry& entry) {
  std::string line = absl::StrCat(absl::string_view(&"DIWE"[static_cast<int>(entry.level)], 1), " ",
                                  absl::FormatTime("%Y-%m-%d %H:%M:%E3S", entry.time, absl::UTCTimeZone()), " ",
                                  OnOneLine(entry.text));
  for (const LogField& field : entry.fields)
    absl::StrAppend(&line, " ", field.name, "=",
                    std::visit([](const auto& value) { return TextValue(value); }, field.value));
  line += '\n';
  return line;
}

std::string JsonLine(const LogEntry& entry, const std::string& process) {
  constexpr const char* kLevels[] = {"debug", "info", "warning", "error"};
  nlohmann::ordered_json json = {{"time", absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", entry.time, absl::UTCTimeZone())},
                                 {"level", kLevels[static_cast<int>(entry.level)]},
                                 {"process", process},
                                 {"message", entry.text}};
  for (const LogField& field : entry.fields)
    std::visit([&](const auto& value) { json[field.name] = value; }, field.value);
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + '\n';
}

}  // namespace dovetail
