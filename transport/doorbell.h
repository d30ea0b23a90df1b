#pragma once
#include <atomic>

#include "absl/time/time.h"
#include "base/mutex.h"
#include "transport/waiter.h"

namespace dovetail::transport {

// Wakes the thread of an event loop. Ring() is cheap while the loop does not sleep: one atomic exchange, no lock, no
// syscall.
// Threads: thread-safe; one thread waits.
class Doorbell final : public Waiter {
 public:
  // Everything written before Ring() is seen by the waiter after Wait() returns.
  void Ring() override;

  // Returns once Ring() was called since the last Wait() returned, or after `timeout`. True: it rang.
  bool Wait(absl::Duration timeout) override;

 private:
  enum State : int { kQuiet, kRung, kSleeping };
  std::atomic<int> state_{kQuiet};
  Mutex mutex_;
  CondVar wake_;
};

}  // namespace dovetail::transport
