#pragma once
#include <cstddef>
#include <functional>
#include <map>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"

namespace dovetail::kernels::cuda {

// Keeps freed pieces of device memory for the next request of their size, because asking the driver synchronises the
// device. Sizes are rounded up: to 512 bytes below 1 MiB, to 2 MiB above. When the driver has no more, all that is kept
// goes back to it and the request is repeated once. Pieces still taken when the pool dies are not freed: their owners
// must die first. Without `free` nothing ever goes back: other processes may have it open.
// Threads: thread-safe.
class MemoryPool {
 public:
  using Allocate = std::function<absl::StatusOr<void*>(size_t bytes)>;
  using Free = std::function<void(void* memory)>;

  MemoryPool(Allocate allocate, Free free) : allocate_(std::move(allocate)), free_(std::move(free)) {}
  ~MemoryPool() { Trim(); }
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  static size_t RoundUp(size_t bytes);

  // kResourceExhausted as `allocate` says it. 0 bytes give null.
  absl::StatusOr<void*> Take(size_t bytes);
  void Return(void* memory, size_t bytes);  // the bytes that were asked for
  void Trim();                              // gives back what is kept

  size_t taken_bytes() const;
  size_t kept_bytes() const;

 private:
  const Allocate allocate_;
  const Free free_;
  mutable Mutex mutex_;
  std::map<size_t, std::vector<void*>> kept_ ABSL_GUARDED_BY(mutex_);
  size_t taken_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t kept_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace dovetail::kernels::cuda
