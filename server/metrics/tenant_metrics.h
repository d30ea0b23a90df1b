#pragma once
#include <map>
#include <string>

#include "base/mutex.h"
#include "server/metrics/paired_metrics.h"
#include "server/metrics/server_metrics.h"

namespace dovetail::server {

// Requests and tokens of each tenant: those of API keys. There are at most kMostTenants series; the last one is of all
// further tenants.
// Threads: thread-safe.
class TenantMetrics {
 public:
  static constexpr size_t kMostTenants = 256;

  explicit TenantMetrics(PairMaker& make) : make_(make) {}  // `make` outlives this
  void Finished(const RequestRecord& record);

 private:
  struct Series {
    CounterPair requests, prompt_tokens, generation_tokens;
  };
  const Series& SeriesOf(const std::string& tenant);

  PairMaker& make_;
  Mutex mutex_;
  std::map<std::string, Series> series_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace dovetail::server
