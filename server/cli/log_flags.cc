#include "server/cli/log_flags.h"

#include <cstdio>
#include <utility>

#include "absl/strings/ascii.h"
#include "server/cli/command_line.h"
#include "server/openai/json.h"

namespace dovetail::cli {

void AddLogFlags(CLI::App& command, LogFlags& flags) {
  command.add_option("--log-level", flags.level, "The least that is logged: debug, info, warning or error")
      ->check(OneOf({"debug", "info", "warning", "error"}))
      ->type_name("LEVEL")
      ->group("Logs");
  command.add_option("--log-format", flags.format, "text, or json: one object a line")
      ->check(OneOf({"text", "json"}))
      ->type_name("FORMAT")
      ->group("Logs");
}

LogOptions LogOptionsOf(const LogFlags& flags, const std::string& process) {
  LogOptions options;
  if (flags.level == "debug") options.level = LogLevel::kDebug;
  if (flags.level == "warning") options.level = LogLevel::kWarning;
  if (flags.level == "error") options.level = LogLevel::kError;
  if (flags.format == "json") options.format = LogFormat::kJson;
  options.process = process;
  return options;
}

void AddRequestLogFlags(CLI::App& command, RequestLogFlags& flags) {
  command
      .add_flag("--enable-log-requests,!--no-enable-log-requests", flags.begins,
                "Also log each request as it begins, with its parameters; with --log-level debug its prompt, too [off]")
      ->default_str("")
      ->group("Logs");
  command.add_option("--max-log-len", flags.max_length, "Characters, or token ids, of a prompt that are logged")
      ->check(WholeNumber(0, 16'000))
      ->type_name("N")
      ->group("Logs");
  command
      .add_flag("--disable-log-stats", flags.no_stats,
                "No line of throughput, queue and KV cache every ten seconds while there is work [off]")
      ->group("Logs");
}

server::RequestLogOptions RequestLogOptionsOf(const RequestLogFlags& flags) {
  return {.begins = flags.begins, .max_prompt_length = static_cast<size_t>(flags.max_length), .stats = !flags.no_stats};
}

std::vector<std::string> ArgumentsOf(const LogFlags& flags) {
  return {"--log-level", flags.level, "--log-format", flags.format};
}

std::vector<std::string> ArgumentsOf(const RequestLogFlags& flags) {
  std::vector<std::string> arguments = {"--max-log-len", std::to_string(flags.max_length)};
  if (flags.begins) arguments.push_back("--enable-log-requests");
  if (flags.no_stats) arguments.push_back("--disable-log-stats");
  return arguments;
}

void Announce(const std::string& line) {
  if (LogsAsJson()) return LogLine(LogLevel::kInfo, line);
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

namespace {

// Of the field, if the line is JSON and has it as a string.
std::optional<std::string> FieldOf(const std::string& line, const char* field) {
  if (line.empty() || line.front() != '{') return std::nullopt;
  const server::Json json = server::Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains(field) || !json[field].is_string()) return std::nullopt;
  return json[field].get<std::string>();
}

}  // namespace

std::string MessageOf(const std::string& line) { return FieldOf(line, "message").value_or(line); }

std::optional<LogLevel> LevelOf(const std::string& line) {
  constexpr std::pair<const char*, LogLevel> kLevels[] = {{"debug", LogLevel::kDebug},
                                                          {"info", LogLevel::kInfo},
                                                          {"warning", LogLevel::kWarning},
                                                          {"error", LogLevel::kError}};
  const std::optional<std::string> said = FieldOf(line, "level");
  for (const auto& [name, level] : kLevels) {
    const bool of_text = line.size() > 2 && line[0] == absl::ascii_toupper(name[0]) && line[1] == ' ' && line[2] == '2';
    if (said ? *said == name : of_text) return level;
  }
  return std::nullopt;
}

}  // namespace dovetail::cli
