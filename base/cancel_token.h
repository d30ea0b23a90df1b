#pragma once
#include <atomic>

namespace dovetail {

// Says that the result of some work is not wanted any more. What does the work looks at it now and then, and ends with
// kCancelled. Once cancelled it stays so.
// Threads: thread-safe.
class CancelToken {
 public:
  void Cancel() { cancelled_.store(true, std::memory_order_relaxed); }
  bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> cancelled_{false};
};

}  // namespace dovetail
