#pragma once
#include <string>

#include "absl/time/time.h"
#include "base/log.h"

namespace dovetail {

// One line of the log before it is written.
// Threads: thread-compatible; a value.
struct LogEntry {
  LogLevel level = LogLevel::kInfo;
  absl::Time time;
  std::string text;
  LogFields fields;
};

// Both end with '\n' and hold no other line break, whatever the text has in it.
// Threads: pure.
std::string TextLine(const LogEntry& entry);
std::string JsonLine(const LogEntry& entry,
                     const std::string& process);  // valid JSON: bytes that are no UTF-8 become U+FFFD

// What is kept of a text so that a line has at most kMaxLogText bytes of it.
inline constexpr size_t kMaxLogText = size_t{16} << 10;
// Threads: pure.
std::string CutLogText(std::string text);

}  // namespace dovetail
