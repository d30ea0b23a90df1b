#include "transport/doorbell.h"

#include <algorithm>
#include <chrono>

namespace dovetail::transport {

void Doorbell::Ring() {
  if (state_.exchange(kRung, std::memory_order_acq_rel) != kSleeping) return;
  // The waiter holds the mutex from announcing its sleep until it waits, so this cannot fall between the two.
  MutexLock lock(mutex_);
  wake_.notify_one();
}

bool Doorbell::Wait(absl::Duration timeout) {
  if (state_.exchange(kQuiet, std::memory_order_acq_rel) == kRung) return true;
  MutexLock lock(mutex_);
  int expected = kQuiet;
  if (state_.compare_exchange_strong(expected, kSleeping, std::memory_order_acq_rel)) {
    constexpr absl::Duration kLongest = absl::Hours(1);
    wake_.wait_for(lock, absl::ToChronoNanoseconds(std::min(timeout, kLongest)),
                   [this] { return state_.load(std::memory_order_acquire) == kRung; });
  }
  return state_.exchange(kQuiet, std::memory_order_acq_rel) == kRung;
}

}  // namespace dovetail::transport
