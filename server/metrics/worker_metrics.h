#pragma once
#include <prometheus/gauge.h>
#include <prometheus/registry.h>

#include <map>
#include <string>
#include <vector>

#include "engine/engine.h"

namespace dovetail::server {

// The members of a cluster: how many serve, and what each does. The series of a member that left go with it. In a
// process that is a whole cluster there are none.
// Threads: thread-compatible.
class WorkerMetrics {
 public:
  explicit WorkerMetrics(prometheus::Registry& registry);  // outlives this
  void Update(const std::vector<engine::WorkerLoad>& workers);
  // Of a role that is no worker: the scheduler, this server's, and of its HTTPS port. 0: it has no certificate.
  void UpdateCertificate(const char* role, int64_t end);

 private:
  using Family = prometheus::Family<prometheus::Gauge>;
  struct Series {
    std::map<Family*, prometheus::Gauge*> gauges;
    bool here = false;
  };
  void Set(Series& series, Family& family, const engine::WorkerLoad& worker, double value);

  Family& serving_;
  Family& steps_;
  Family& blocks_;
  Family& blocks_in_use_;
  Family& host_links_;
  Family& certificates_;
  std::map<std::pair<std::string, std::string>, Series> series_;  // by name and role
  bool any_ = false;                                              // were seen
};

}  // namespace dovetail::server
