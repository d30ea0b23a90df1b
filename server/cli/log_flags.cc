#include "server/cli/log_flags.h"

#include <cstdio>

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

std::string MessageOf(const std::string& line) {
  if (line.empty() || line.front() != '{') return line;
  const server::Json json = server::Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("message") || !json["message"].is_string()) return line;
  return json["message"].get<std::string>();
}

}  // namespace dovetail::cli
