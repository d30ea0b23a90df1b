#pragma once
#include <array>
#include <map>
#include <string>

#include "absl/time/time.h"
#include "base/mutex.h"
#include "base/status.h"
#include "engine/engine.h"

namespace dovetail::server {

// Which requests are refused before they are read, and when they may come again. Knows what this server has in the
// engine, by tenant, over all APIs. Which of several tenants must give way in a full queue the scheduler decides; what
// is certain to be refused there (a tenant that alone fills most of the queue) is refused here, where it costs nothing.
// Threads: thread-safe.
class Admission {
 public:
  // kResourceExhausted: the queue is full; kAborted: it is, and others have less of it than this tenant.
  absl::Status Check(const std::string& tenant, const engine::EngineStats& stats) const;

  void Began(const std::string& tenant, int requests);
  void Ended(const std::string& tenant, int requests, absl::Time now);

  // Until what waits now will have begun, at the rate at which requests ended lately: 1..60.
  int RetryAfterSeconds(int waiting_requests, absl::Time now) const;

 private:
  static constexpr int kSeconds = 10;  // that the rate is measured over

  mutable Mutex mutex_;
  std::map<std::string, int> active_ ABSL_GUARDED_BY(mutex_);  // requests in the engine; none is here with 0
  std::array<int, kSeconds> ended_ ABSL_GUARDED_BY(mutex_){};  // in the seconds of which seconds_ says which
  std::array<int64_t, kSeconds> seconds_ ABSL_GUARDED_BY(mutex_){};
  bool any_ended_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace dovetail::server
