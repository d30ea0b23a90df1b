#pragma once
#include <thread>

#include "absl/time/time.h"
#include "base/clock.h"

namespace dovetail::engine {

// How an event loop that hands work to another thread waits for the answer: it looks for it for a millisecond, which is
// longer than a layer of a decode step takes, and yields its core between two looks. Waking a thread costs tens of
// microseconds, twice an op.
// Threads: thread-compatible.
class IdleSpin {
 public:
  explicit IdleSpin(Clock& clock) : clock_(clock), until_(clock.Now()) {}

  void Worked() { until_ = clock_.Now() + kSpin; }
  // The loop found nothing to do: whether it looks again. False: it may sleep.
  bool GoesOn() const {
    if (clock_.Now() >= until_) return false;
    std::this_thread::yield();
    return true;
  }

 private:
  static constexpr absl::Duration kSpin = absl::Milliseconds(1);

  Clock& clock_;
  absl::Time until_;
};

}  // namespace dovetail::engine
