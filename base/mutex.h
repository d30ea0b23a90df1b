#pragma once
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "absl/base/thread_annotations.h"

// std::mutex, a lock and a condition variable with the annotations by which clang proves, without running anything,
// that what a mutex guards is touched under that mutex only (scripts/check_warnings). A member that a mutex
// guards says so: `int jobs_ ABSL_GUARDED_BY(mutex_)`. absl::Mutex has the annotations too, but ThreadSanitizer does
// not see into the packaged library (docs/adr/0009-dependencies-from-debian.md).
// Threads: thread-safe, as the types of the standard library that they hold.
// Errors: none.

namespace dovetail {

class ABSL_LOCKABLE Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

 private:
  friend class MutexLock;
  std::mutex mutex_;
};

// Holds a mutex, which outlives it, from its construction to its end. unlock() and lock() release it in between.
class ABSL_SCOPED_LOCKABLE MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ABSL_EXCLUSIVE_LOCK_FUNCTION(mutex) : lock_(mutex.mutex_) {}
  ~MutexLock() ABSL_UNLOCK_FUNCTION() {}
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { lock_.lock(); }
  void unlock() ABSL_UNLOCK_FUNCTION() { lock_.unlock(); }

 private:
  friend class CondVar;
  std::unique_lock<std::mutex> lock_;
};

// std::condition_variable. A predicate reads what the mutex guards, so it says that the mutex is held:
// `wake_.wait(lock, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ready_; })`.
class CondVar {
 public:
  void notify_one() { condition_.notify_one(); }
  void notify_all() { condition_.notify_all(); }

  void wait(MutexLock& lock) { condition_.wait(lock.lock_); }
  template <typename Predicate>
  void wait(MutexLock& lock, Predicate ready) {
    condition_.wait(lock.lock_, ready);
  }
  template <typename Rep, typename Period>
  std::cv_status wait_for(MutexLock& lock, std::chrono::duration<Rep, Period> time) {
    return condition_.wait_for(lock.lock_, time);
  }
  template <typename Rep, typename Period, typename Predicate>
  bool wait_for(MutexLock& lock, std::chrono::duration<Rep, Period> time, Predicate ready) {
    return condition_.wait_for(lock.lock_, time, ready);
  }
  template <typename Clock, typename Duration>
  std::cv_status wait_until(MutexLock& lock, std::chrono::time_point<Clock, Duration> time) {
    return condition_.wait_until(lock.lock_, time);
  }
  template <typename Clock, typename Duration, typename Predicate>
  bool wait_until(MutexLock& lock, std::chrono::time_point<Clock, Duration> time, Predicate ready) {
    return condition_.wait_until(lock.lock_, time, ready);
  }

 private:
  std::condition_variable condition_;
};

}  // namespace dovetail
