#pragma once
#include <array>
#include <map>
#include <mutex>
#include <string>

#include "absl/time/time.h"
#include "base/status.h"
#include "server/engine.h"
#include "server/http/exchange.h"

namespace dovetail::server {

// Who is turned away before anybody read what he wants, and when he may come again. Knows what this server has in the
// engine, by tenant. Who of several tenants must give way in a full queue is the scheduler's to decide; what is certain
// to be refused there (a tenant that alone fills most of the queue) is refused here, where it costs nothing.
// Thread-safe.
class Admission {
 public:
  explicit Admission(int overload_status) : overload_status_(overload_status) {}

  // kResourceExhausted: the queue is full; kAborted: it is, and others have less of it than this tenant.
  absl::Status Check(const std::string& tenant, const EngineStats& stats) const;

  void Began(const std::string& tenant, int requests);
  void Ended(const std::string& tenant, int requests, absl::Time now);

  // Until what waits now will have begun, at the rate at which requests ended lately: 1..60.
  int RetryAfterSeconds(int waiting_requests, absl::Time now) const;

  // The answer to a request that ends with `status`; of an overload it says when to come again.
  HttpResponse ErrorFor(const absl::Status& status, int waiting_requests, absl::Time now) const;

 private:
  static constexpr int kSeconds = 10;  // that the rate is measured over

  const int overload_status_;
  mutable std::mutex mutex_;
  std::map<std::string, int> active_;        // requests in the engine; nobody is here with 0
  std::array<int, kSeconds> ended_{};        // in the seconds of which seconds_ says which
  std::array<int64_t, kSeconds> seconds_{};
  bool any_ended_ = false;
};

}  // namespace dovetail::server
