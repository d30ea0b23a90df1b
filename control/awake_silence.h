#pragma once
#include <algorithm>
#include <utility>

#include "absl/time/time.h"

namespace dovetail::control {

// For how long a peer has said nothing, as a thread counts it that looks now and then. Where that thread had no time,
// because the process was stopped or the machine is busy, the thread that reads had none either: a look counts for at
// most twice the usual time between two.
//
// Threads: thread-compatible.
class AwakeSilence {
 public:
  // `heard`: when something last came from the peer.
  AwakeSilence(absl::Duration between_looks, absl::Time heard, absl::Time now)
      : most_(2 * between_looks), heard_(heard), looked_(now) {}

  absl::Duration Look(absl::Time heard, absl::Time now) {
    if (std::exchange(heard_, heard) != heard) silence_ = absl::ZeroDuration();
    return silence_ += std::min(now - std::exchange(looked_, now), most_);
  }

 private:
  const absl::Duration most_;
  absl::Time heard_, looked_;
  absl::Duration silence_;
};

}  // namespace dovetail::control
