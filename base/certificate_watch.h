#pragma once
#include <atomic>
#include <cstdint>
#include <string>
#include <thread>

#include "absl/time/time.h"
#include "base/mutex.h"

namespace dovetail {

// Seconds since 1970 at which the first certificate of a PEM file expires; 0: the file cannot be read, or holds none.
// Reads the file.
// Threads: thread-safe; blocks on the file.
int64_t CertificateEnd(const std::string& pem_file);

// Knows when a file's certificate expires, also once another has replaced it: a thread of its own looks every kEvery,
// so that no caller waits for a disk.
// Threads: thread-safe.
class CertificateWatch {
 public:
  static constexpr absl::Duration kEvery = absl::Seconds(10);

  explicit CertificateWatch(const std::string& pem_file);  // empty: there is none, and end() stays 0
  ~CertificateWatch();

  int64_t end() const { return end_.load(std::memory_order_relaxed); }

 private:
  const std::string file_;
  std::atomic<int64_t> end_{0};
  Mutex mutex_;
  CondVar wake_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace dovetail
