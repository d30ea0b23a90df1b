#include "scheduler/core/rate_estimator.h"

#include <algorithm>
#include <cmath>

namespace dovetail::scheduler {

void RateEstimator::Note(double work, double seconds) {
  if (!(work > 0) || !(seconds > 0) || !std::isfinite(work) || !std::isfinite(seconds)) return;
  kept_[count_ % kKept] = {work, seconds / work};
  ++count_;
}

std::optional<double> RateEstimator::usual() const {
  const size_t count = measurements();
  if (count == 0) return std::nullopt;
  std::array<Measurement, kKept> sorted = kept_;
  const auto end = sorted.begin() + static_cast<std::ptrdiff_t>(count);
  std::sort(sorted.begin(), end,
            [](const Measurement& a, const Measurement& b) { return a.seconds_per_unit < b.seconds_per_unit; });
  double all = 0, below = 0;
  for (auto it = sorted.begin(); it != end; ++it) all += it->work;
  for (auto it = sorted.begin(); it != end; ++it) {
    below += it->work;
    if (2 * below >= all) return it->seconds_per_unit;
  }
  return std::prev(end)->seconds_per_unit;
}

std::optional<double> RateEstimator::now() const {
  const std::optional<double> median = usual();
  if (!median) return median;
  const double last = kept_[(count_ - 1) % kKept].seconds_per_unit;
  return last > *median * kChanged || last * kChanged < *median ? last : median;
}

}  // namespace dovetail::scheduler
