#pragma once
#include <atomic>
#include <cstddef>
#include <span>
#include <thread>

#include "base/mutex.h"

namespace dovetail::kernels {

// Takes pages of a large buffer from the system before they are written for the first time, on a thread of its own: the
// first write to a page waits until the system has found and cleared it, and where there are no huge pages that is
// slower than everything else an append does. Memory that is never used is taken too, but never more than `ahead`
// bytes, rounded up to 2 MiB, beyond what was used. Where the kernel cannot do it (Linux before 5.14) or there is no
// memory, it stops, and pages come with their first write as they do without it.
// Units: bytes.
// Ownership: of nothing but the thread; `memory` begins on a page and outlives it.
// Errors: none.
// Threads: thread-compatible.
class PagesAhead {
 public:
  static constexpr size_t kMostAhead = size_t{256} << 20;

  // Begins with the first `ahead` bytes and does not wait for them.
  PagesAhead(std::span<std::byte> memory, size_t ahead);
  ~PagesAhead();  // waits for at most one piece of 2 MiB

  // The first `end` bytes are used from now on. Locks once for each eighth of `ahead`.
  void WillUse(size_t end);

  // Bytes from the beginning that were taken.
  // Threads: thread-safe.
  size_t taken() const { return taken_.load(std::memory_order_relaxed); }

 private:
  void Run();

  const std::span<std::byte> memory_;
  const size_t ahead_;
  size_t told_;  // what the thread was last told to take
  std::atomic<size_t> taken_ = 0;
  std::atomic<bool> stop_ = false;
  Mutex mutex_;
  CondVar wake_;
  size_t target_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace dovetail::kernels
