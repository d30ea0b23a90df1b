#pragma once
#include <string>

#include "absl/strings/str_cat.h"

// One line to stderr: "I 12:03:04.123 text". Thread-safe. Never called on the per-layer path; never given prompt or
// generated text.

namespace dovetail {

enum class LogLevel { kDebug = 0, kInfo = 1, kWarning = 2, kError = 3 };

void SetMinLogLevel(LogLevel level);  // kInfo at start
void LogLine(LogLevel level, const std::string& text);

template <typename... Args>
void LogInfo(const Args&... args) {
  LogLine(LogLevel::kInfo, absl::StrCat(args...));
}
template <typename... Args>
void LogWarning(const Args&... args) {
  LogLine(LogLevel::kWarning, absl::StrCat(args...));
}
template <typename... Args>
void LogError(const Args&... args) {
  LogLine(LogLevel::kError, absl::StrCat(args...));
}

}  // namespace dovetail
