#pragma once
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

// Lines of a process's log, on stderr. Never called on the per-layer path; never given generated text, nor a prompt's
// unless an operator asked for it.
//
//   I 2026-11-25 12:03:04.123 text name=value             as text
//   {"time":"2026-11-25T12:03:04.123Z","level":"info","process":"server","message":"text","name":"value"}   as JSON
//
// With a LogWriter a line costs its caller a push into a queue: no thread waits for the reader of the log. Without one
// (tests, commands that end soon) the caller writes it.
// Threads: thread-safe.

namespace dovetail {

enum class LogLevel { kDebug = 0, kInfo = 1, kWarning = 2, kError = 3 };
enum class LogFormat { kText, kJson };

// What a line says in addition to its text, for programs that read it.
struct LogField {
  const char* name;  // a literal; none of time, level, process, message
  std::variant<std::string, int64_t, double> value;
};
using LogFields = std::vector<LogField>;

bool LogsAt(LogLevel level);  // whether such a line is kept: asked where making one costs something
void LogLine(LogLevel level, std::string text, LogFields fields = {});

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

struct LogOptions {
  LogLevel level = LogLevel::kInfo;  // the least that is kept
  LogFormat format = LogFormat::kText;
  std::string process;  // what JSON lines call this process
  int file = 2;         // descriptor; stays the caller's
};

// Writes the process's lines on a thread of its own while it lives; one at a time. At most kMaxQueuedLines lines and
// kMaxQueuedBytes wait: what comes while the file takes no more is dropped and counted, and a line says so once it does
// again. Its end writes what waits, for kFlushLimit at most.
class LogWriter {
 public:
  static constexpr size_t kMaxQueuedLines = 8192;
  static constexpr size_t kMaxQueuedBytes = size_t{8} << 20;
  static constexpr absl::Duration kFlushLimit = absl::Seconds(1);

  explicit LogWriter(LogOptions options);
  ~LogWriter();
  LogWriter(const LogWriter&) = delete;
  LogWriter& operator=(const LogWriter&) = delete;

  void Rename(std::string process);  // of the options: of the lines that are not written yet, and of all later ones
};

bool LogsAsJson();  // as the last LogWriter did

// Waits until what was logged is written, for `limit` at most: before a process ends without its destructors.
void FlushLog(absl::Duration limit);

uint64_t DroppedLogLines();  // since the process began

}  // namespace dovetail
