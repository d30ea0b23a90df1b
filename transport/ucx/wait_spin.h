#pragma once
#include "absl/time/time.h"

namespace dovetail::transport::ucx {

// How long a wait looks for frames before the thread sleeps. To sleep and be woken costs tens of microseconds, twice
// an op of a decode step, while a layer takes some hundred: so a thread whose waits are short looks longer. One that
// has nothing to do soon sleeps as before.
// Units: durations
// Threads: thread-compatible.
class WaitSpin {
 public:
  // `most` after a wait that ended within it; else `least`.
  WaitSpin(absl::Duration least, absl::Duration most) : least_(least), most_(most), now_(least) {}

  absl::Duration now() const { return now_; }
  // A wait ended so long after it had begun, because a frame came.
  void Came(absl::Duration after) { now_ = after <= most_ ? most_ : least_; }
  // Nothing came for as long as the wait lasted.
  void TimedOut() { now_ = least_; }

 private:
  const absl::Duration least_, most_;
  absl::Duration now_;
};

}  // namespace dovetail::transport::ucx
