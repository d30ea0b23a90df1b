#include "base/log.h"

#include <atomic>
#include <cstdio>
#include <ctime>

namespace dovetail {
namespace {
std::atomic<LogLevel> min_level{LogLevel::kInfo};
}  // namespace

void SetMinLogLevel(LogLevel level) { min_level.store(level, std::memory_order_relaxed); }

void LogLine(LogLevel level, const std::string& text) {
  if (level < min_level.load(std::memory_order_relaxed)) return;
  timespec ts;
  clock_gettime(CLOCK_REALTIME, &ts);
  tm utc;
  gmtime_r(&ts.tv_sec, &utc);
  char stamp[16];
  std::strftime(stamp, sizeof(stamp), "%H:%M:%S", &utc);
  std::fprintf(stderr, "%c %s.%03ld %s\n", "DIWE"[static_cast<int>(level)], stamp, ts.tv_nsec / 1000000, text.c_str());
}

}  // namespace dovetail
