#pragma once
#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>

#include "base/mutex.h"

namespace dovetail::server {

// Lets a line that clients can cause into the log once in a while.
// Threads: thread-safe.
class LogGate {
 public:
  using Time = std::chrono::steady_clock::time_point;

  explicit LogGate(std::chrono::seconds every) : every_(every) {}

  // How many were held back since the last that passed, if this one may pass.
  std::optional<uint64_t> Pass(Time now) {
    MutexLock lock(mutex_);
    if (last_ && now - *last_ < every_) {
      ++held_back_;
      return std::nullopt;
    }
    last_ = now;
    return std::exchange(held_back_, 0);
  }

 private:
  const std::chrono::seconds every_;
  Mutex mutex_;
  std::optional<Time> last_ ABSL_GUARDED_BY(mutex_);
  uint64_t held_back_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace dovetail::server
