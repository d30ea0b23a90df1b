#pragma once
#include "absl/time/time.h"
#include "base/status.h"
#include "transport/ucx/lanes.h"

namespace dovetail::transport::ucx {

// What UcxPort reaches between two ports over `lanes`, TCP over the loopback. The time is that of both sides' work, and
// does not depend on when a second thread gets its turn on a busy machine. What it takes to wake a process that sleeps
// is not in it.
struct LinkSpeed {
  double latency_s = 0;    // one way, of a tensor of 4 KiB: the best of half round trips
  double bytes_per_s = 0;  // one way, tensors of 1 MiB, several in flight
};

// Blocks for about twice `each`. kFailedPrecondition: this host lacks the lanes. kDeadlineExceeded: the two did not
// reach each other within ten seconds.
// Threads: thread-safe; the calling thread polls both ports by turns.
absl::StatusOr<LinkSpeed> MeasureLink(Lanes lanes, absl::Duration each);

}  // namespace dovetail::transport::ucx
