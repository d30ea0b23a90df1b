#pragma once
#include "absl/time/time.h"

namespace dovetail::transport {

// What an event loop sleeps on: a Doorbell when every frame comes from this process, a UcxPort when frames also come
// from others. The loop is the same for both:
//   while (running) {
//     if (node.Poll() > 0) continue;      // frames and events of other threads
//     waiter.Wait(until_next_deadline);
//   }
// Threads: reactor-owned, except Ring(), which is thread-safe.
class Waiter {
 public:
  virtual ~Waiter() = default;

  // Something was left for the loop. Thread-safe, never blocks; what was written before it is seen after Wait()
  // returns.
  virtual void Ring() = 0;

  // Returns once Ring() was called since the last Wait() returned, or a frame may be there to Poll, or after `timeout`
  // (then false). One thread waits.
  virtual bool Wait(absl::Duration timeout) = 0;
};

}  // namespace dovetail::transport
