#pragma once
#include "absl/time/time.h"

namespace dovetail {

// Where shells get the time; cores get it as an argument.
// Threads: thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual absl::Time Now() = 0;
};

// Monotonic time since an arbitrary start, expressed as absl::Time. One object for the process; never destroyed.
// Threads: thread-safe.
Clock& SystemClock();

}  // namespace dovetail
