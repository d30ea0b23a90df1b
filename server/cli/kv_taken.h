#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"

namespace dovetail::cli {

// What an attention worker's log says of the KV that --kv-capacity auto came to.
// Units: bytes.
// Threads: pure.
std::string KvTakenLine(uint64_t bytes);

// How much KV each attention worker of an `up` took when it was first started, if it looked for that itself.
// Units: bytes.
// Threads: thread-safe.
class KvTaken {
 public:
  using Arguments = std::vector<std::string>;

  void OnLine(const std::string& worker, const std::string& line);  // of its log
  std::optional<uint64_t> By(const std::string& worker) const;

  // `arguments` of the worker for another start: it takes as much as before, for the weights that --kv-leave is for,
  // and the KV of others on its GPU, are there by then.
  Arguments Again(const std::string& worker, Arguments arguments) const;

 private:
  mutable Mutex mutex_;
  std::map<std::string, uint64_t> taken_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace dovetail::cli
