#pragma once
#include <array>
#include <atomic>
#include <cstdint>

#include "server/metrics/http_stats.h"

namespace dovetail::server {

// What connections count, from the start of the server: before a model is served there are no metrics to count in.
// Threads: thread-safe.
class HttpCounters {
 public:
  void Refused(BodyRefusal why) { bodies_refused_[static_cast<size_t>(why)].fetch_add(1, std::memory_order_relaxed); }

  void Ended(ForRoom why) { ended_for_room_[static_cast<size_t>(why)].fetch_add(1, std::memory_order_relaxed); }

  void Failed(TlsFailure why) { tls_failures_[static_cast<size_t>(why)].fetch_add(1, std::memory_order_relaxed); }

  void AddTo(HttpStats& stats) const {
    for (size_t i = 0; i < bodies_refused_.size(); ++i)
      stats.bodies_refused[i] += bodies_refused_[i].load(std::memory_order_relaxed);
    for (size_t i = 0; i < ended_for_room_.size(); ++i)
      stats.ended_for_room[i] += ended_for_room_[i].load(std::memory_order_relaxed);
    for (size_t i = 0; i < tls_failures_.size(); ++i)
      stats.tls_failures[i] += tls_failures_[i].load(std::memory_order_relaxed);
  }

 private:
  std::array<std::atomic<uint64_t>, kBodyRefusals.size()> bodies_refused_{};
  std::array<std::atomic<uint64_t>, kForRoom.size()> ended_for_room_{};
  std::array<std::atomic<uint64_t>, kTlsFailures.size()> tls_failures_{};
};

}  // namespace dovetail::server
