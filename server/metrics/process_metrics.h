#pragma once
#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/registry.h>

#include "base/mutex.h"

namespace dovetail::server {

// What Prometheus' client libraries say of a process, under their names (process_cpu_seconds_total and so on), and the
// lines that its log has lost. Read from /proc; what cannot be read keeps its last value.
// Threads: thread-safe.
class ProcessMetrics {
 public:
  explicit ProcessMetrics(prometheus::Registry& registry);  // outlives this
  void Update();

 private:
  Mutex mutex_;
  prometheus::Counter& cpu_;
  prometheus::Gauge& resident_;
  prometheus::Gauge& virtual_;
  prometheus::Gauge& started_;
  prometheus::Gauge& open_files_;
  prometheus::Gauge& most_files_;
  prometheus::Counter& dropped_lines_;
};

}  // namespace dovetail::server
