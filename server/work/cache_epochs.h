#pragma once
#include <random>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_format.h"
#include "base/mutex.h"

namespace dovetail::server {

// Lets a tenant's later requests find nothing of its earlier ones in the prefix cache: a part of the salt of its block
// names that changes. What is under the old names is dropped as it gets old. One entry a tenant that ever asked, so at
// most as many as there are API keys.
// Threads: thread-safe
class CacheEpochs {
 public:
  void Advance(const std::string& tenant) {
    MutexLock lock(mutex_);
    std::random_device device;  // so that no server of a cluster repeats another's, nor its own after a restart
    epochs_[tenant] = absl::StrFormat("|epoch%08x%08x", device(), device());
  }

  // To be appended to the salts of the tenant's requests. Empty: it never asked.
  std::string Of(const std::string& tenant) const {
    MutexLock lock(mutex_);
    const auto at = epochs_.find(tenant);
    return at == epochs_.end() ? "" : at->second;
  }

 private:
  mutable Mutex mutex_;
  absl::flat_hash_map<std::string, std::string> epochs_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace dovetail::server
