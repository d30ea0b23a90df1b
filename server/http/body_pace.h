#pragma once
#include <algorithm>
#include <chrono>
#include <cstddef>

namespace dovetail::server {

// How long a body may still take. It begins with `grace`, each byte adds what it costs at the slowest rate that is
// allowed, and no more than `grace` is ever saved up: a body that begins fast and then stalls ends as soon as one that
// never began. A body of n bytes ends within grace + n / rate.
// Threads: thread-compatible; a value.
class BodyPace {
 public:
  using Time = std::chrono::steady_clock::time_point;

  BodyPace() = default;
  BodyPace(Time now, std::chrono::nanoseconds grace, size_t bytes_per_s)
      : grace_(grace), bytes_per_s_(bytes_per_s), deadline_(now + grace) {}

  void Received(size_t bytes, Time now) {
    const std::chrono::duration<double> earned(static_cast<double>(bytes) / static_cast<double>(bytes_per_s_));
    deadline_ = std::min(deadline_ + std::chrono::duration_cast<std::chrono::nanoseconds>(earned), now + grace_);
  }
  Time deadline() const { return deadline_; }

 private:
  std::chrono::nanoseconds grace_{0};
  size_t bytes_per_s_ = 1;
  Time deadline_;
};

}  // namespace dovetail::server
