#pragma once
#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/log.h"
#include "server/http/options.h"

namespace dovetail::cli {

// What a role says of itself, on stderr.
// Threads: thread-compatible.
struct LogFlags {
  std::string level = "info", format = "text";
};
void AddLogFlags(CLI::App& command, LogFlags& flags);
LogOptions LogOptionsOf(const LogFlags& flags, const std::string& process);

// What a server says of requests.
struct RequestLogFlags {
  bool begins = false, no_stats = false;
  int max_length = 2048;
};
void AddRequestLogFlags(CLI::App& command, RequestLogFlags& flags);
server::RequestLogOptions RequestLogOptionsOf(const RequestLogFlags& flags);

// The flags again, for another process.
std::vector<std::string> ArgumentsOf(const LogFlags& flags);
std::vector<std::string> ArgumentsOf(const RequestLogFlags& flags);

// A line for whatever started this process: on stdout or, where the log has JSON lines, in the log, so that the process
// writes nothing but JSON.
// Threads: thread-safe.
void Announce(const std::string& line);

// The text of a line that another process wrote: of a JSON line its message, else the line.
// Threads: pure.
std::string MessageOf(const std::string& line);

// At which level another process logged the line (base/log.h); nothing: it is no line of a log.
// Threads: pure.
std::optional<LogLevel> LevelOf(const std::string& line);

}  // namespace dovetail::cli
