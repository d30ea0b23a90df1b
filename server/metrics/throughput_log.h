#pragma once

#include "absl/time/time.h"
#include "base/mutex.h"
#include "scheduler/core/scheduler.h"

namespace dovetail::server {

// A line of what the engine does, every kEvery while it has work, and a last one when it has none any more. It is of
// the whole cluster: servers of one scheduler say the same.
// Threads: thread-safe.
class ThroughputLog {
 public:
  static constexpr absl::Duration kEvery = absl::Seconds(10);

  void Look(const scheduler::SchedulerStats& stats, absl::Time now);  // called more often than that

 private:
  Mutex mutex_;
  bool began_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time last_time_ ABSL_GUARDED_BY(mutex_);
  scheduler::SchedulerStats last_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace dovetail::server
