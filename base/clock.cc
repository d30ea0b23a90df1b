#include "base/clock.h"

#include <ctime>

namespace dovetail {
namespace {

class MonotonicClock final : public Clock {
 public:
  absl::Time Now() override {
    timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return absl::TimeFromTimespec(ts);
  }
};

}  // namespace

Clock& SystemClock() {
  static MonotonicClock* const clock = new MonotonicClock();
  return *clock;
}

}  // namespace dovetail
