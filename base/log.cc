#include "base/log.h"

#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "base/check.h"
#include "base/log_entry.h"
#include "base/mutex.h"
#include "base/thread_name.h"

namespace dovetail {
namespace {

// The one log of the process. It outlives every thread: one that still logs while main() ends finds it.
struct Log {
  std::atomic<LogLevel> level{LogLevel::kInfo};
  std::atomic<uint64_t> dropped{0};
  Mutex mutex;
  CondVar filled, written;
  LogOptions options ABSL_GUARDED_BY(mutex);
  std::vector<LogEntry> waiting ABSL_GUARDED_BY(mutex);
  size_t waiting_bytes ABSL_GUARDED_BY(mutex) = 0;
  bool has_writer ABSL_GUARDED_BY(mutex) = false, ends ABSL_GUARDED_BY(mutex) = false;
  bool writing ABSL_GUARDED_BY(mutex) = false;  // the writer has lines that are not written yet
};

Log& TheLog() {
  static Log* const log = new Log;
  return *log;
}

size_t BytesOf(const LogEntry& entry) {
  size_t bytes = sizeof(LogEntry) + entry.text.size();
  for (const LogField& field : entry.fields) {
    const auto* text = std::get_if<std::string>(&field.value);
    bytes += sizeof(LogField) + (text != nullptr ? text->size() : 0);
  }
  return bytes;
}

std::string LineOf(const LogEntry& entry, const LogOptions& options) {
  return options.format == LogFormat::kJson ? JsonLine(entry, options.process) : TextLine(entry);
}

// All of it, however long the file takes; what it refuses is lost.
void WriteAll(int file, const std::string& text) {
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t bytes = write(file, text.data() + done, text.size() - done);
    if (bytes >= 0) {
      done += static_cast<size_t>(bytes);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      pollfd room = {file, POLLOUT, 0};
      poll(&room, 1, -1);
    } else if (errno != EINTR) {
      return;
    }
  }
}

// `told`: lines that were dropped before this log began.
void RunWriter(Log& log, uint64_t told) {
  NameThread("dt-log");
  MutexLock lock(log.mutex);
  while (true) {
    log.filled.wait(lock, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(log.mutex) { return log.ends || !log.waiting.empty(); });
    if (log.waiting.empty()) break;
    std::vector<LogEntry> entries;
    entries.swap(log.waiting);
    log.waiting_bytes = 0;
    log.writing = true;
    const LogOptions options = log.options;
    lock.unlock();
    std::string text;
    for (const LogEntry& entry : entries) text += LineOf(entry, options);
    if (const uint64_t dropped = log.dropped.load(); dropped != told) {
      const std::string lost = absl::StrCat(dropped - std::exchange(told, dropped),
                                            " log lines were dropped, as what reads this log is too slow");
      text += LineOf({LogLevel::kWarning, absl::Now(), lost, {}}, options);
    }
    WriteAll(options.file, text);
    lock.lock();
    log.writing = false;
    log.written.notify_all();
  }
  log.has_writer = false;
  log.written.notify_all();
}

}  // namespace

bool LogsAt(LogLevel level) { return level >= TheLog().level.load(std::memory_order_relaxed); }

void LogLine(LogLevel level, std::string text, LogFields fields) {
  if (!LogsAt(level)) return;
  Log& log = TheLog();
  for (LogField& field : fields)
    if (auto* value = std::get_if<std::string>(&field.value)) *value = CutLogText(std::move(*value));
  LogEntry entry{level, absl::Now(), CutLogText(std::move(text)), std::move(fields)};
  const size_t bytes = BytesOf(entry);
  MutexLock lock(log.mutex);
  if (!log.has_writer) {
    const LogOptions options = log.options;
    lock.unlock();
    return WriteAll(options.file, LineOf(entry, options));
  }
  if (log.waiting.size() >= LogWriter::kMaxQueuedLines || log.waiting_bytes + bytes > LogWriter::kMaxQueuedBytes) {
    log.dropped.fetch_add(1);
    return;
  }
  log.waiting_bytes += bytes;
  log.waiting.push_back(std::move(entry));
  if (log.waiting.size() == 1) log.filled.notify_one();
}

LogWriter::LogWriter(LogOptions options) {
  Log& log = TheLog();
  bool is_second = false;
  {
    MutexLock lock(log.mutex);
    is_second = std::exchange(log.has_writer, true);
    log.level = options.level;
    log.options = std::move(options);
    log.ends = false;
  }
  DT_CHECK(!is_second);
  // Signals are for other threads; the end of what reads the log ends no process.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  // Counted here, since lines may be dropped before the thread runs. It may wait in write(2) for ever.
  std::thread([&log, told = log.dropped.load()] { RunWriter(log, told); }).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

LogWriter::~LogWriter() {
  Log& log = TheLog();
  MutexLock lock(log.mutex);
  log.ends = true;
  log.filled.notify_one();
  log.written.wait_for(lock, absl::ToChronoMilliseconds(kFlushLimit),
                       [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(log.mutex) { return !log.has_writer; });
}

void LogWriter::Rename(std::string process) {
  Log& log = TheLog();
  MutexLock lock(log.mutex);
  log.options.process = std::move(process);
}

void FlushLog(absl::Duration limit) {
  Log& log = TheLog();
  MutexLock lock(log.mutex);
  log.written.wait_for(lock, absl::ToChronoMilliseconds(limit), [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(log.mutex) {
    return !log.has_writer || (log.waiting.empty() && !log.writing);
  });
}

bool LogsAsJson() {
  Log& log = TheLog();
  MutexLock lock(log.mutex);
  return log.options.format == LogFormat::kJson;
}

uint64_t DroppedLogLines() { return TheLog().dropped.load(); }

}  // namespace dovetail
